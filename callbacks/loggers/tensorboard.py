"""TensorBoardLogger, a logger that writes TensorBoard event files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.callbacks.loggers.logger import FolderLogger
from leyden.callbacks.loggers.media import as_markdown, as_pixels, for_each, listed, rows_of
from leyden.callbacks.loggers.plain import HParams, flatten_hparams, plain_numbers
from leyden.callbacks.loggers.silent import Silent
from leyden.callbacks.model_summary import undisturbed
from leyden.strategies.errors import ConfigurationError, StateError, needs
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.format import staging

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class TensorBoardLogger(FolderLogger):
    """Writes to `<save_dir>/<name>/version_N`; view it with `tensorboard --logdir <save_dir>`.

    TensorBoard is imported at the first write. A resumed run continues in the same folder, and cuts what was logged
    after the checkpoint from the event files, so that they hold each value once. (TensorBoard's own `purge_step` goes
    by step numbers, which validation steps count separately, and knows no order within a step.) The original of a cut
    file is kept under a name `replaced.…`, which TensorBoard ignores; a TensorBoard that is running shows the cut part
    until it reloads. A validation that a signal interrupted is repeated by the resume, and its steps are logged again.

    Args:
        save_dir: None for the Trainer's `default_root_dir`.
        name: the folder between `save_dir` and the version; "" for none.
        version: a number or a folder's name; None for the first free number.
        log_graph: log the module's graph at the start of a fit, which needs `module.example_input_array`.
        default_hp_metric: give runs without metrics a placeholder `hp_metric` of -1, without which TensorBoard's
            hyperparameter page stays empty.
        prefix: put in front of the names of metrics.
        sub_dir: a folder inside the run folder for the event files.
        **kwargs: passed to `torch.utils.tensorboard.SummaryWriter`: `max_queue`, `flush_secs`, `filename_suffix`, ….

    Example:
        >>> import tempfile
        >>> logger = TensorBoardLogger(tempfile.mkdtemp())
        >>> logger.log_metrics({"loss": 0.5}, step=1)
        >>> logger.log_text("note", "a text")
        >>> logger.experiment.add_scalars("both", {"a": 1, "b": 2})  # the SummaryWriter itself
        >>> logger.finalize("success")
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if "log_dir" in kwargs:
            raise ConfigurationError("TensorBoardLogger makes its log_dir from save_dir, name and version: give those.")
        self._sub_dir = None if sub_dir is None else os.path.expanduser(os.fspath(sub_dir))
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None
        self._hparams_logged: list[str] = []
        """Digests of the settings and metrics that this run has already logged."""
        self._mark = uuid.uuid4().hex[:8]

    @property
    def log_dir(self) -> str | None:
        folder = super().log_dir
        return folder if folder is None or self._sub_dir is None else os.path.join(folder, self._sub_dir)

    @property
    def experiment(self) -> SummaryWriter:
        """The SummaryWriter, for images, texts and so on; on ranks that do not write, a stand-in that does nothing."""
        if not self.is_writer:
            return Silent()  # type: ignore[return-value]
        if self._writer is None:
            with needs("tensorboard", None, "TensorBoardLogger"):
                from torch.utils.tensorboard import SummaryWriter
            folder = self._needed_folder()
            _wait_out_the_second(folder)
            kwargs = self._kwargs | {"filename_suffix": self._suffix}
            self._writer = SummaryWriter(log_dir=folder, **kwargs)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.is_writer:
            return
        number = self._next_step(step)
        writer = self.experiment
        for name, value in plain_numbers(metrics, self._prefix).items():
            writer.add_scalar(name, value, number)

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Logs settings to TensorBoard's HPARAMS page, nested ones as "outer/inner", and to the run folder's
        `hparams.json` and `hparams.yaml`.
        """
        super().log_hyperparams(params)
        if not self.is_writer:
            return
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        if not metrics or not self.hparams:
            return
        from torch.utils.tensorboard.summary import hparams

        flat, values = flatten_hparams(self.hparams), plain_numbers(metrics, self._prefix)
        digest = hashlib.sha256(repr((sorted(flat.items()), sorted(values.items()))).encode()).hexdigest()[:16]
        if digest in self._hparams_logged:
            # The event files of a resumed run have them already.
            return
        self._hparams_logged.append(digest)
        self.log_metrics(metrics, max(self._last_step, 0))
        file_writer = self.experiment._get_file_writer()  # type: ignore[no-untyped-call]
        named = dict.fromkeys(values, 0)
        for summary in hparams(flat, named):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images under `<key>/0`, `<key>/1` and so on.

        Args:
            key: their name.
            images: tensors (C, H, W) or (H, W), arrays (H, W, C) or (H, W), images of PIL, or paths.
            step: optimizer steps done; None for the last step logged.
            **kwargs: `caption`, a list of texts, which are logged as the text `<key>/caption`; `dataformats`, such as
                "CHW" for arrays of that shape.
        """
        listing = listed(images, "image")
        order = kwargs.pop("dataformats", None)
        if isinstance(order, list | tuple):
            kwargs["dataformats"] = order
        each = for_each(kwargs, len(listing), "image")
        if other := [name for name in kwargs if name not in ("caption", "dataformats")]:
            raise ConfigurationError(f"TensorBoard's images have no {', '.join(other)}: leave it out.")
        if not self.is_writer:
            return
        for index, (image, own) in enumerate(zip(listing, each, strict=True)):
            pixels, found = as_pixels(image)
            chosen = own.get("dataformats") or order or found
            self.experiment.add_image(f"{self._named(key)}/{index}", pixels, self._step_of(step), dataformats=chosen)
        if "caption" in kwargs:
            self.log_text(f"{key}/caption", ["image", "caption"], list(enumerate(kwargs["caption"])), step=step)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Logs a figure of Matplotlib, and closes it unless `close` is False; None is the last step logged."""
        if self.is_writer:
            self.experiment.add_figure(self._named(key), figure, self._step_of(step), close=close)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table of rows, or a pandas DataFrame, which TensorBoard shows among the texts."""
        self.log_text(key, columns, data, dataframe, step)

    def log_text(
        self,
        key: str,
        columns: Sequence[str] | str | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a text, in Markdown, or a table of texts.

        Args:
            key: its name.
            columns: the text; or the columns of a table.
            data: the rows of a table.
            dataframe: a pandas DataFrame in place of both.
            step: optimizer steps done; None for the last step logged.
        """
        is_text = isinstance(columns, str) and data is None and dataframe is None
        text = str(columns) if is_text else as_markdown(*rows_of(columns, data, dataframe))
        if self.is_writer:
            self.experiment.add_text(self._named(key), text, self._step_of(step))

    def log_graph(self, module: nn.Module, input_array: Any = None) -> None:
        """Traces the module on `input_array` or its `example_input_array`, in eval mode, and logs the graph.

        The run's random numbers stay as they are. Does nothing unless the logger was made with `log_graph=True`.
        """
        if not self._log_graph or not self.is_writer:
            return
        example = getattr(module, "example_input_array", None) if input_array is None else input_array
        if example is None:
            warnings.warn("log_graph=True needs module.example_input_array: no graph was logged.", stacklevel=2)
            return
        with undisturbed(module, example) as inputs:
            self.experiment.add_graph(module, inputs)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        if trainer.strategy.replicates:
            self.log_graph(module)
        elif self._log_graph and self.is_writer:
            warnings.warn(
                "log_graph=True: no rank has the whole of a sharded module, so no graph was logged.", stacklevel=2
            )

    def save(self) -> None:
        """Writes queued events to disk."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Closes the event file; logging again opens a new one in the same folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        # A writer holds a thread and a file: a copy opens its own, in the same folder.
        return {**vars(self), "_writer": None}

    @property
    def _suffix(self) -> str:
        """The suffix of this run's event files; other runs and users may write to the folder too."""
        return f".{self._mark}{self._kwargs.get('filename_suffix', '')}"

    def _event_files(self) -> list[Path]:
        """Returns the event files of this run, oldest first."""
        assert self.log_dir is not None
        return sorted(path for path in Path(self.log_dir).glob("events.out.*") if path.name.endswith(self._suffix))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state and self.is_writer:
            self.save()
            state["mark"] = self._mark
            state["hparams"] = list(self._hparams_logged)
            state["event_files"] = {path.name: path.stat().st_size for path in self._event_files()}
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        # Checkpoints of earlier versions do not have this entry.
        if "event_files" not in state:
            return
        saved = SavedState(state)
        if re.fullmatch("[0-9a-f]{8}", saved.text("mark")) is None:
            raise StateError("mark", f"is {brief(state['mark'])}, and must be eight hexadecimal digits")
        sizes = saved.nested("event_files")
        for name in sizes.entries:
            sizes.integer(name, least=0)
        if not all(isinstance(digest, str) for digest in saved.items("hparams", ())):
            raise StateError("hparams", "must be a list of strings")

    def _resume(self, state: dict[str, Any]) -> None:
        self.finalize("interrupted")
        if "event_files" not in state:
            # Files of earlier versions have no mark, and stay as they are.
            return
        self._mark = state["mark"]
        self._hparams_logged = list(state.get("hparams", ()))
        assert self.log_dir is not None
        staging.sweep(Path(self.log_dir), staging.clock_of(Path(self.log_dir)))
        for path in self._event_files():
            size = state["event_files"].get(path.name, 0)
            # A resume from an earlier checkpoint may have cut the file shorter already.
            if path.stat().st_size > size:
                _cut(path, size)


def _cut(path: Path, size: int) -> None:
    """Cuts an event file to a size, and keeps the original beside it.

    The head is written to a new file first, and one rename puts it in place: a kill at any moment leaves a file that
    the next resume can cut again.
    """
    aside = path.with_name(f"replaced.{time.time_ns()}.{path.name.removeprefix('events.out.tfevents.')}")
    if not size:
        os.replace(path, aside)
        return
    # TensorBoard reads any file with "tfevents" in its name, so this one is named after the copy.
    head = staging.sibling(aside, "tmp")
    shutil.copyfile(path, head)
    with head.open("rb+") as target:
        target.truncate(size)
        os.fsync(target.fileno())
    try:
        os.link(path, aside)
    except OSError:
        # The file system has no hard links.
        shutil.copyfile(path, aside)
    os.replace(head, path)


def _wait_out_the_second(folder: str) -> None:
    """Waits for the next second if a file of this second exists: readers sort event files by name, which has only
    seconds.
    """
    parts = [path.name.split(".") for path in Path(folder).glob("events.out.tfevents.*")]
    now = time.time()
    if any(len(part) > 3 and part[3] == f"{int(now):010d}" for part in parts):
        time.sleep(int(now) + 1 - now)
