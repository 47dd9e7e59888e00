"""Trackers of services without a Leyden logger: Aim, ClearML, DVCLive, SwanLab and Trackio, under Accelerate's names.

Each needs the service's own package, which is imported when the run starts.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from leyden.accelerator.records.tracking import GeneralTracker
from leyden.callbacks.loggers.plain import json_value
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.rank_zero import warn

SPLITS = ("eval", "test", "train")
"""Prefixes of names that ClearML draws as lines of one plot: "eval_loss" and "train_loss" in the plot "loss"."""


class ServiceTracker(GeneralTracker):
    """Base class of trackers that use a service's own package.

    Args:
        run_name: the `project_name` of `init_trackers`.
        **kwargs: arguments for the call that starts the run.
    """

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None
        self._dropped: set[str] = set()

    @property
    def tracker(self) -> Any:
        """The service's own run object."""
        return self.run

    def _drop(self, key: str, value: Any, takes: str) -> None:
        """Warns, once per name, about a value that the service does not accept."""
        if key not in self._dropped:
            self._dropped.add(key)
            warn(f"the tracker {self.name!r} records only {takes}, and drops {key}, which is {kind_of(value)}.")


class AimTracker(ServiceTracker):
    """Aim, in a repository on disk that `aim up` shows.

    Args:
        run_name: name of the run.
        logging_dir: folder that contains the repository `.aim`.
        **kwargs: arguments of `aim.Run`: `experiment`, `log_system_params`, ….
    """

    name = "aim"
    requires_logging_directory: ClassVar[bool] = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = logging_dir

    @property
    def writer(self) -> Any:
        """The same as `tracker`, under the name of Accelerate's tracker."""
        return self.run

    def start(self) -> None:
        import aim

        place = None if self.aim_repo_path is None else os.fspath(self.aim_repo_path)
        self.run = aim.Run(**{"repo": place, **self.init_kwargs})
        self.run.name = self.run_name

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run["hparams"] = json_value(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records numbers, texts, and Aim objects such as `aim.Distribution`; `kwargs` are passed to `Run.track`."""
        import aim

        for key, value in values.items():
            value = _item(value)
            self.run.track(aim.Text(value) if isinstance(value, str) else value, name=key, step=step, **kwargs)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Records images.

        Args:
            values: arrays, PIL images, pairs of (image, caption), or lists of these, by name.
            step: step of the run.
            kwargs: `{"aim_image": …, "track": …}`, the arguments of `aim.Image` and `Run.track`.
        """
        import aim

        options = kwargs or {}
        for key, value in values.items():
            images = [
                aim.Image(image, **{"caption": caption, **options.get("aim_image", {})})
                for image, caption in map(_captioned, value if isinstance(value, list) else [value])
            ]
            found = images if isinstance(value, list) else images[0]
            self.run.track(found, name=key, step=step, **options.get("track", {}))

    def finish(self) -> None:
        self.run.close()


class ClearMLTracker(ServiceTracker):
    """ClearML. If the script has already called `Task.init`, the tracker uses that task and leaves it open.

    Args:
        run_name: name of project and task; the variables CLEARML_PROJECT and CLEARML_TASK take precedence.
        **kwargs: arguments of `Task.init`.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._is_own = True

    @property
    def task(self) -> Any:
        """The same as `tracker`, under the name of Accelerate's tracker."""
        return self.run

    def start(self) -> None:
        from clearml import Task

        self.run = Task.current_task()
        self._is_own = self.run is None
        if self._is_own:
            names = {
                "project_name": os.environ.get("CLEARML_PROJECT", self.run_name),
                "task_name": os.environ.get("CLEARML_TASK", self.run_name),
            }
            self.run = Task.init(**{**names, **self.init_kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.connect_configuration(json_value(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records numbers, as single values if there is no step. Texts go to the console.

        Args:
            values: values by name; "eval_loss" is the line "eval" of the plot "loss", and "loss" its line "train".
            step: step of the run.
            **kwargs: arguments of `report_scalar` or `report_single_value`.
        """
        writer = self.run.get_logger()
        for key, value in values.items():
            value = _item(value)
            if isinstance(value, str):
                writer.report_text(f"{key}: {value}" if step is None else f"step {step}, {key}: {value}")
            elif not isinstance(value, (int, float)):
                self._drop(key, value, "numbers and texts")
            elif step is None:
                writer.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title_and_series(key)
                writer.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records images: arrays, PIL images, or lists of them; `kwargs` are passed to `report_image`."""
        for key, value in values.items():
            title, series = _title_and_series(key)
            several = isinstance(value, (list, tuple))
            for number, image in enumerate(value if several else [value]):
                own = f"{series}/{number}" if several and len(value) > 1 else series
                self.run.get_logger().report_image(title=title, series=own, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Records a table.

        Args:
            table_name: name of the table, split into plot and line as in `log`.
            columns: column names; None if the first row of `data` has them.
            data: rows.
            dataframe: a pandas DataFrame, in place of columns and data.
            step: step of the run.
            **kwargs: arguments of `report_table`.
        """
        if dataframe is None and data is None:
            raise ConfigurationError("log_table of the tracker 'clearml' got no table. Pass data or a dataframe.")
        rows = None if data is None else [list(row) for row in data]
        table = dataframe if rows is None else ([list(columns), *rows] if columns else rows)
        title, series = _title_and_series(table_name)
        self.run.get_logger().report_table(title=title, series=series, table_plot=table, iteration=step, **kwargs)

    def finish(self) -> None:
        if self._is_own:
            self.run.close()


class DVCLiveTracker(ServiceTracker):
    """DVCLive, in the working directory's folder `dvclive`, or in that of `init_kwargs={"dvclive": {"dir": …}}`.

    Args:
        run_name: ignored: `exp_name` names a DVC experiment.
        live: your own `dvclive.Live`.
        **kwargs: arguments of `dvclive.Live`.
    """

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.run = live

    @property
    def live(self) -> Any:
        """The same as `tracker`, under the name of Accelerate's tracker."""
        return self.run

    def start(self) -> None:
        if self.run is None:
            from dvclive import Live

            self.run = Live(**self.init_kwargs)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.log_params(json_value(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records numbers and texts, and ends DVCLive's step; `kwargs` are passed to `Live.log_metric`."""
        from dvclive.plots import Metric

        if step is not None:
            self.run.step = step
        for key, value in values.items():
            value = _item(value)
            if Metric.could_log(value):
                self.run.log_metric(key, value, **kwargs)
            else:
                self._drop(key, value, "numbers and texts")
        self.run.next_step()

    def finish(self) -> None:
        self.run.end()


class ProjectTracker(ServiceTracker):
    """Base class for packages like W&B's: `init(project=…)` returns a run with `config` and `finish`."""

    package: ClassVar[str]

    def start(self) -> None:
        self.run = importlib.import_module(self.package).init(**{"project": self.run_name, **self.init_kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(json_value(values))

    def finish(self) -> None:
        self.run.finish()


class SwanLabTracker(ProjectTracker):
    """SwanLab.

    Args:
        run_name: name of the project.
        **kwargs: arguments of `swanlab.init`; `mode="local"` or `"offline"` needs no account.
    """

    name = package = "swanlab"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records numbers, texts, and SwanLab objects; `kwargs` are passed to `Run.log`."""
        import swanlab

        found = {key: _item(value) for key, value in values.items()}
        texts = {key: swanlab.Text(value) for key, value in found.items() if isinstance(value, str)}
        self.run.log({**found, **texts}, step=step, **kwargs)

    def log_images(self, values: Mapping[str, Sequence[Any]], step: int | None = None, **kwargs: Any) -> None:
        """Records lists of images, each an array or a PIL image; `kwargs` are passed to `Run.log`."""
        import swanlab

        for key, images in values.items():
            self.run.log({key: [swanlab.Image(image) for image in images]}, step=step, **kwargs)


class TrackioTracker(ProjectTracker):
    """Trackio, in a folder on disk (variable TRACKIO_DIR) that `trackio show` displays, or on a Space.

    Args:
        run_name: name of the project.
        **kwargs: arguments of `trackio.init`: `name`, `group`, `space_id`, ….
    """

    name = package = "trackio"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records numbers, texts, dicts of numbers, and Trackio objects."""
        self.run.log({key: _item(value) for key, value in values.items()}, step=step, **kwargs)


def _item(value: Any) -> Any:
    """Returns the number in a tensor or NumPy array of one element; anything else unchanged."""
    is_one = hasattr(value, "dtype") and (value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)) == 1
    return value.item() if is_one else value


def _captioned(value: Any) -> tuple[Any, str]:
    return value if isinstance(value, tuple) else (value, "")


def _title_and_series(name: str) -> tuple[str, str]:
    split, _, rest = name.partition("_")
    return (rest, split) if split in SPLITS and rest else (name, "train")
