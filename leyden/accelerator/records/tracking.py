"""Trackers of a custom training loop: the Trainer's loggers behind Accelerate's interface, and users' own classes."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from leyden.callbacks.loggers.silent import Silent
from leyden.checkpoint.format.secrets import masked_values
from leyden.core.errors import ConfigurationError, MissingExtraError, kind_of, nearest
from leyden.core.rank_zero import rank_zero_only, warn

if TYPE_CHECKING:
    from typing_extensions import Self

    from leyden.callbacks.loggers.logger import Logger
    from leyden.strategies.ranks import Ranks

F = TypeVar("F", bound=Callable[..., Any])

# Name -> module, class, required package, argument for the project name. As "name" it is a subfolder of the run's.
LOGGERS = {
    "tensorboard": ("leyden.callbacks.loggers.tensorboard", "TensorBoardLogger", "tensorboard", "name"),
    "wandb": ("leyden.callbacks.loggers.wandb_logger", "WandbLogger", "wandb", "project"),
    "csv": ("leyden.callbacks.loggers.csv_logger", "CSVLogger", None, "name"),
    "comet_ml": ("leyden.callbacks.loggers.comet_logger", "CometLogger", "comet_ml", "project"),
    "mlflow": ("leyden.callbacks.loggers.mlflow_logger", "MLFlowLogger", "mlflow", "experiment_name"),
}

# Trackers of services without a Leyden logger, in service_trackers.py: name -> class, required package.
SERVICES = {
    "aim": ("AimTracker", "aim"),
    "clearml": ("ClearMLTracker", "clearml"),
    "dvclive": ("DVCLiveTracker", "dvclive"),
    "swanlab": ("SwanLabTracker", "swanlab"),
    "trackio": ("TrackioTracker", "trackio"),
}


def on_main_process(function: F) -> F:
    """Decorator for a tracker's method: only the main rank runs it, unless the tracker has `main_process_only = False`.

    The Accelerator follows this rule anyway; scripts that call a tracker's methods directly need the decorator.

    Example:
        >>> class Noted(GeneralTracker):
        ...     name = "noted"
        ...     @on_main_process
        ...     def log(self, values, step=None, **kwargs):
        ...         self.last = values
    """

    @functools.wraps(function)
    def by_rank(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and rank_zero_only.rank != 0:
            return None
        return function(self, *args, **kwargs)

    return cast(F, by_rank)


class GeneralTracker(ABC):
    """Base class of custom trackers: pass an instance or the class to `Accelerator(log_with=...)`.

    A subclass needs a `name` and a method `log`; without them the Accelerator refuses it before training starts.

    Attributes:
        name: name for `get_tracker`.
        requires_logging_directory: True if the constructor takes a `logging_dir`.
        main_process_only: True if only the main rank writes.

    Example:
        >>> class Printed(GeneralTracker):
        ...     name = "printed"
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> Printed().log({"loss": 0.5}, step=1)
        1 {'loss': 0.5}
    """

    name: str = ""
    requires_logging_directory: ClassVar[bool] = False
    main_process_only: bool = True

    @property
    def tracker(self) -> Any:
        """The underlying writer: a SummaryWriter, a W&B run, …."""
        return self

    def start(self) -> None:
        """Starts the tracker; `init_trackers` calls it before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Records the settings of the run."""

    @abstractmethod
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records values; `kwargs` are this tracker's entry of `Accelerator.log(log_kwargs={name: …})`."""

    def finish(self) -> None:
        """Closes the tracker."""


class LoggerTracker(GeneralTracker):
    """A Leyden logger as a tracker, whose name is the logger's class name by default."""

    def __init__(self, logger: Logger, name: str | None = None) -> None:
        self.logger = logger
        self._status = "success"
        self.name = name or type(logger).__name__
        self._warned_of_texts = False

    @classmethod
    def around(cls, logger: Logger, name: str) -> Self:
        """Returns a tracker of this class around an existing logger."""
        tracker = cls.__new__(cls)
        LoggerTracker.__init__(tracker, logger, name)
        return tracker

    @property
    def tracker(self) -> Any:
        return self.logger.experiment

    @property
    def writer(self) -> Any:
        """The same as `tracker`, under the name of Accelerate's TensorBoard tracker."""
        return self.logger.experiment

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logger.log_hyperparams(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        if texts:
            self._log_texts(texts, step)
            values = {key: value for key, value in values.items() if key not in texts}
        if values:
            self.logger.log_metrics(values, step)

    def _log_texts(self, texts: dict[str, str], step: int | None) -> None:
        writer: Any = self.logger.experiment
        if hasattr(writer, "add_text"):
            for key, value in texts.items():
                writer.add_text(key, value, global_step=step)
        elif self.name == "wandb":
            writer.log(texts)
        elif not self._warned_of_texts:
            self._warned_of_texts = True
            warn(f"the tracker {self.name!r} records only numbers and drops the text of {', '.join(texts)}.")

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records images.

        Args:
            values: arrays by name, of shape (N, C, H, W) with 1 or 3 channels, or (N, H, W, C).
            step: step of the run.
            **kwargs: `dataformats="NHWC"` resolves shapes that fit both layouts.
        """
        writer = self.logger.experiment
        if hasattr(writer, "add_images"):
            for key, images in values.items():
                order = "NCHW" if images.shape[1] in (1, 3) else "NHWC"
                writer.add_images(key, images, global_step=step, **{"dataformats": order, **kwargs})
        elif hasattr(self.logger, "log_image"):
            for key, images in values.items():
                self.logger.log_image(key, list(images), step, **kwargs)
        else:
            raise ConfigurationError(f"the tracker {self.name!r} cannot record images. Use another tracker for them.")

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Records a table of `columns` and rows of `data`, or a pandas DataFrame; for TensorBoard and W&B."""
        if not hasattr(self.logger, "log_table"):
            raise ConfigurationError(f"the tracker {self.name!r} cannot record tables. Use another tracker for them.")
        self.logger.log_table(table_name, columns, data, dataframe, step, **kwargs)

    def interrupt(self) -> None:
        """Makes `finish` report the run as interrupted instead of successful; the loop is preempted."""
        self._status = "interrupted"

    def finish(self) -> None:
        self.logger.finalize(self._status)
        if hasattr(self.logger, "finish"):
            self.logger.finish()


class TensorBoardTracker(LoggerTracker):
    """TensorBoard's event files in `logging_dir/run_name`.

    Args:
        run_name: name of the run.
        logging_dir: folder of the runs.
        **kwargs: arguments of `TensorBoardLogger` and of its SummaryWriter.
    """

    name = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(make_logger("tensorboard", run_name, os.fspath(logging_dir), kwargs), "tensorboard")


class WandBTracker(LoggerTracker):
    """Weights & Biases.

    Args:
        run_name: name of the project.
        **kwargs: arguments of `WandbLogger` and of `wandb.init`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(make_logger("wandb", run_name, os.getcwd(), kwargs), "wandb")


class CometMLTracker(LoggerTracker):
    """Comet.

    Args:
        run_name: name of the project.
        **kwargs: arguments of `CometLogger`.
    """

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(make_logger("comet_ml", run_name, os.getcwd(), kwargs), "comet_ml")


class MLflowTracker(LoggerTracker):
    """MLflow.

    Args:
        experiment_name: name of the experiment.
        logging_dir: folder of its files.
        **kwargs: arguments of `MLFlowLogger`.
    """

    name = "mlflow"

    def __init__(self, experiment_name: str, logging_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        folder = os.getcwd() if logging_dir is None else os.fspath(logging_dir)
        super().__init__(make_logger("mlflow", experiment_name, folder, kwargs), "mlflow")

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Stores a Matplotlib or Plotly figure as an artifact; `save_kwargs` are passed to MLflow's `log_figure`."""
        self.tracker.log_figure(self.logger.version, figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Stores a file as an artifact, in the run's artifact folder `artifact_path`."""
        self.tracker.log_artifact(self.logger.version, os.fspath(local_path), artifact_path)

    def log_artifacts(self, local_dir: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Stores the files of a folder as artifacts, in the run's artifact folder `artifact_path`."""
        self.tracker.log_artifacts(self.logger.version, os.fspath(local_dir), artifact_path)


_KINDS: dict[str, type[LoggerTracker]] = {
    kind.name: kind for kind in (TensorBoardTracker, WandBTracker, CometMLTracker, MLflowTracker)
}


class SilentTracker(Silent, GeneralTracker):
    """The tracker of a rank that does not write: every call is a no-op."""

    name = "silent"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        return None


def resolve(log_with: Any) -> tuple[list[Any], list[str]]:
    """Returns the usable entries of `log_with`, and the names whose service package is not installed."""
    from leyden.callbacks.loggers.logger import Logger

    if log_with is None:
        return [], []
    entries = list(log_with) if isinstance(log_with, (list, tuple, set)) else [log_with]
    found: list[Any] = []
    absent: list[str] = []
    for entry in entries:
        entry = getattr(entry, "value", entry) if not isinstance(entry, (str, type)) else entry
        if entry == "all":
            found += [name for name in (*LOGGERS, *SERVICES) if _is_installed(name)]
        elif isinstance(entry, str):
            (found if _is_usable(entry) else absent).append(entry)
        elif isinstance(entry, (GeneralTracker, Logger)) or _is_tracker_class(entry):
            _check_complete(entry)
            found.append(entry)
        else:
            raise ConfigurationError(
                f"log_with holds {entry!r}. Pass names ({', '.join((*LOGGERS, *SERVICES))}, 'all'), loggers such as "
                "CSVLogger(), or instances of a subclass of GeneralTracker."
            )
    return list(dict.fromkeys(found)), absent


def _is_usable(name: str) -> bool:
    """Returns True if a tracker's package is installed. If a service's is not, warns and returns False."""
    if name not in LOGGERS and name not in SERVICES:
        raise ConfigurationError(f"log_with={name!r} is unknown. {nearest(name, ('all', *LOGGERS, *SERVICES))}")
    if _is_installed(name):
        return True
    if name in LOGGERS:
        raise MissingExtraError(str(LOGGERS[name][2]), name, f"log_with={name!r}")
    warn(f"log_with={name!r} records nothing: its package is not installed. Run pip install {SERVICES[name][1]}.")
    return False


def _check_complete(entry: Any) -> None:
    """Refuses a tracker without a `log` or a `name`."""
    if isinstance(entry, type) and inspect.isabstract(entry):
        missing = " and ".join(sorted(entry.__abstractmethods__))  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"log_with holds the class {entry.__name__}, which has no {missing}. Define def log(self, values, "
            "step=None, **kwargs)."
        )
    if isinstance(entry, GeneralTracker) and not entry.name:
        raise ConfigurationError(
            f'log_with holds {kind_of(entry)} without a name. Set name = "mine" in the class, so that get_tracker '
            "finds it."
        )


def make_logger(name: str, project_name: str, folder: str, options: Mapping[str, Any]) -> Logger:
    """Creates a logger by name, with its files below a folder."""
    module, kind, _, project = LOGGERS[name]
    arguments: dict[str, Any] = {project: project_name}
    if name == "tensorboard":
        # Accelerate writes directly to the folder of the project, with no subfolder per run.
        arguments["version"] = ""
    logger: Logger = getattr(importlib.import_module(module), kind)(**{"save_dir": folder, **arguments, **options})
    return logger


def _is_installed(name: str) -> bool:
    package = SERVICES[name][1] if name in SERVICES else LOGGERS[name][2]
    return package is None or importlib.util.find_spec(package) is not None


def _is_tracker_class(entry: Any) -> bool:
    return isinstance(entry, type) and issubclass(entry, GeneralTracker)


def _built(entry: Any, project_name: str, folder: str, options: Mapping[str, Mapping[str, Any]]) -> GeneralTracker:
    """Builds the tracker of one entry of `log_with`, with its arguments among `options`."""
    if isinstance(entry, GeneralTracker):
        return entry
    if isinstance(entry, str) and entry in SERVICES:
        services = importlib.import_module("leyden.compat.accelerate.trackers")
        entry = getattr(services, SERVICES[entry][0])
    if _is_tracker_class(entry):
        place = {"logging_dir": folder} if entry.requires_logging_directory else {}
        tracker: GeneralTracker = entry(project_name, **place, **options.get(str(entry.name), {}))
        return tracker
    if not isinstance(entry, str):
        return LoggerTracker(entry)
    logger = make_logger(entry, project_name, folder, options.get(entry, {}))
    return _KINDS.get(entry, LoggerTracker).around(logger, entry)


class Trackers:
    """The trackers of an Accelerator.

    Attributes:
        log_with: the names, classes, loggers and trackers passed to the Accelerator.
        absent: requested names whose packages are not installed.
        running: the trackers; empty before `begin`.
    """

    def __init__(self, log_with: Any, ranks: Ranks) -> None:
        self.log_with, self.absent = resolve(log_with)
        self.running: list[GeneralTracker] = []
        self._ranks = ranks

    def begin(
        self,
        project_name: str,
        logging_dir: str | os.PathLike[str] | None,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Any],
    ) -> None:
        """Starts the run in every tracker; see `Accelerator.init_trackers`."""
        folder = os.getcwd() if logging_dir is None else os.fspath(logging_dir)
        built = [_built(entry, project_name, folder, init_kwargs) for entry in self.log_with]
        for tracker in built:
            # A class may set the name only in its constructor.
            _check_complete(tracker)
            if isinstance(tracker, LoggerTracker):
                tracker.logger.is_writer = self._ranks.is_global_zero
        names = [tracker.name for tracker in built]
        for name in init_kwargs:
            if name not in (*names, *self.absent):
                raise ConfigurationError(f"init_kwargs has an unknown tracker {name!r}. {nearest(name, names)}")
        self.running = built
        for tracker in self._writing():
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(masked_values(dict(config)))

    def _writing(self) -> list[GeneralTracker]:
        return [tracker for tracker in self.running if self._ranks.is_global_zero or not tracker.main_process_only]

    def find(self, name: str, unwrap: bool) -> Any:
        """Returns a tracker by name; see `Accelerator.get_tracker`."""
        for tracker in self.running:
            if tracker.name == name:
                if tracker not in self._writing():
                    return SilentTracker()
                return tracker.tracker if unwrap else tracker
        if name in self.absent:
            return SilentTracker()
        known = ", ".join(tracker.name for tracker in self.running) or "none; call init_trackers first"
        raise ConfigurationError(f"there is no tracker {name!r}. Known: {known}.")

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Any]) -> None:
        """Records values in every tracker."""
        for tracker in self._writing():
            tracker.log(dict(values), step=step, **log_kwargs.get(tracker.name, {}))

    def interrupt(self) -> None:
        """Makes loggers report the run as interrupted; the loop is preempted."""
        for tracker in self._writing():
            if isinstance(tracker, LoggerTracker):
                tracker.interrupt()

    def finish(self) -> None:
        """Closes every tracker."""
        for tracker in self._writing():
            tracker.finish()
