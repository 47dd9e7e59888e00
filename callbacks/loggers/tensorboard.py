"""TensorBoardLogger, a logger that writes TensorBoard event files."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.callbacks.loggers.logger import FolderLogger
from leyden.callbacks.loggers.media import as_grid, as_markdown, as_pixels, for_each, listed, rows_of
from leyden.callbacks.loggers.plain import HParams, flatten_hparams, plain_numbers
from leyden.callbacks.loggers.silent import Silent
from leyden.callbacks.model_summary import undisturbed
from leyden.checkpoint.format import staging
from leyden.core.errors import ConfigurationError, StateError, needs
from leyden.core.paths import check_plain, local_path
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState, brief

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


LATEST = 1e10
"""The latest time of an event that a checkpoint may record, in seconds since 1970."""


class TensorBoardLogger(FolderLogger):
    """Writes event files to `<save_dir>/<name>/version_N`. View them with `tensorboard --logdir <save_dir>`.

    TensorBoard is imported at the first write. A resumed run continues in the same folder, and truncates the event
    files to the checkpoint, so that each value appears once. (TensorBoard's own `purge_step` only compares step
    numbers. Validation steps have their own count, and within a step it cannot tell earlier events from later ones.)
    The original of a truncated file is kept as `replaced.…`, which TensorBoard ignores. A running TensorBoard shows the
    removed values until it reloads. If a signal interrupts a validation, the resume repeats it and logs its steps
    again.

    Args:
        save_dir: the root folder; None for the Trainer's `default_root_dir`.
        name: the folder between `save_dir` and the version; "" for none.
        version: a number or a folder name; None for the first free number.
        log_graph: log the module's graph at the start of a fit. Needs `module.example_input_array`.
        default_hp_metric: log a placeholder `hp_metric` of -1 for runs without metrics. Without any metric,
            TensorBoard's hyperparameter page stays empty.
        prefix: a prefix for metric names, joined with "-".
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
            raise ConfigurationError(
                "TensorBoardLogger builds its log_dir from save_dir, name and version. Pass those instead of log_dir."
            )
        self._sub_dir = None if sub_dir is None else local_path(sub_dir, "TensorBoardLogger: sub_dir")
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None
        self._hparams_logged: list[str] = []
        """Digests of the hyperparameters and metrics that this run has already logged."""
        self._mark = uuid.uuid4().hex[:8]
        self._ahead = 0.0
        """Seconds by which the times of new events are ahead of the clock; see `_resume`."""

    @property
    def log_dir(self) -> str | None:
        folder = super().log_dir
        return folder if folder is None or self._sub_dir is None else os.path.join(folder, self._sub_dir)

    @property
    def experiment(self) -> SummaryWriter:
        """The SummaryWriter, for images, text and so on; on ranks that do not write, a no-op stand-in."""
        if not self.is_writer:
            return Silent()  # type: ignore[return-value]
        if self._writer is None:
            with needs("tensorboard", None, "TensorBoardLogger"):
                from torch.utils.tensorboard import SummaryWriter
            folder = self._ensure_folder()
            _wait_for_unique_timestamp(folder, self._ahead)
            kwargs = self._kwargs | {"filename_suffix": self._suffix}
            self._writer = (
                _late_writer(folder, self._ahead, **kwargs) if self._ahead else SummaryWriter(log_dir=folder, **kwargs)
            )
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if not self.is_writer:
            return
        number = self._next_step(step)
        writer = self.experiment
        for name, value in plain_numbers(metrics, self._prefix).items():
            writer.add_scalar(name, value, number)

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        """Logs hyperparameters to TensorBoard's HPARAMS page, and to `hparams.json` and `hparams.yaml`.

        Nested hyperparameters become "outer/inner" on the page.
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
            # A resumed run: the event files have these hyperparameters already.
            return
        self._hparams_logged.append(digest)
        self.log_metrics(metrics, max(self._last_step, 0))
        file_writer = self.experiment._get_file_writer()  # type: ignore[no-untyped-call]
        named = dict.fromkeys(values, 0)
        for summary in hparams(flat, named):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images. Several images are drawn as one grid, row by row.

        Args:
            key: the name of the images.
            images: tensors (C, H, W) or (H, W), arrays (H, W, C) or (H, W), PIL images, or paths.
            step: number of optimizer steps done; None for the last step logged.
            **kwargs: `caption`, a list of captions, logged as the text `<key>/caption`; `dataformats`, such as "CHW"
                for arrays in that layout.
        """
        listing = listed(images, "image")
        layout = kwargs.pop("dataformats", None)
        if isinstance(layout, list | tuple):
            # One layout per image.
            kwargs["dataformats"] = layout
        each = for_each(kwargs, len(listing), "image")
        if other := [name for name in kwargs if name not in ("caption", "dataformats")]:
            raise ConfigurationError(f"TensorBoard images do not support {', '.join(other)}. Leave it out.")
        if not self.is_writer:
            return
        drawn = []
        for image, own in zip(listing, each, strict=True):
            pixels, default_layout = as_pixels(image)
            drawn.append((pixels, own.get("dataformats") or layout or default_layout))
        if drawn:
            pixels, chosen = drawn[0] if len(drawn) == 1 else (as_grid(drawn), "HWC")
            self.experiment.add_image(self._named(key), pixels, self._step_of(step), dataformats=chosen)
        if "caption" in kwargs:
            self.log_text(f"{key}/caption", ["image", "caption"], list(enumerate(kwargs["caption"])), step=step)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Logs a Matplotlib figure, and closes it unless `close` is False. A `step` of None is the last step logged."""
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
        """Logs a table of rows, or a pandas DataFrame. TensorBoard shows it on the text page."""
        self.log_text(key, columns, data, dataframe, step)

    def log_text(
        self,
        key: str,
        columns: Sequence[str] | str | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs Markdown text, or a table of text.

        Args:
            key: the name of the text.
            columns: the text, or the column names of a table.
            data: the rows of a table.
            dataframe: a pandas DataFrame, in place of `columns` and `data`.
            step: number of optimizer steps done; None for the last step logged.
        """
        is_text = isinstance(columns, str) and data is None and dataframe is None
        text = str(columns) if is_text else as_markdown(*rows_of(columns, data, dataframe))
        if self.is_writer:
            self.experiment.add_text(self._named(key), text, self._step_of(step))

    def log_graph(self, module: nn.Module, input_array: Any = None) -> None:
        """Traces the module in eval mode on `input_array` or its `example_input_array`, and logs the graph.

        The run's random state is unchanged. A no-op unless the logger was created with `log_graph=True`.
        """
        if not self._log_graph or not self.is_writer:
            return
        example = getattr(module, "example_input_array", None) if input_array is None else input_array
        if example is None:
            warn("log_graph=True needs module.example_input_array. No graph was logged.")
            return
        with undisturbed(module, example) as inputs:
            self.experiment.add_graph(module, inputs)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        super().on_fit_start(trainer, module)
        if trainer.strategy.replicates:
            self.log_graph(module)
        elif self._log_graph and self.is_writer:
            warn("log_graph=True needs an unsharded module, but no rank holds all of this one. No graph was logged.")

    def save(self) -> None:
        """Flushes queued events to disk."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Closes the event file. Later logging opens a new one in the same folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        # A writer holds a thread and a file. A copy opens its own writer in the same folder.
        return {**vars(self), "_writer": None}

    @property
    def _suffix(self) -> str:
        """The suffix of this run's event files. Other runs and users may write to the same folder."""
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
            state["time"] = time.time() + self._ahead
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
        saved.number("time", 0.0, least=0.0, most=LATEST)
        if not all(isinstance(digest, str) for digest in saved.items("hparams", ())):
            raise StateError("hparams", "must be a list of strings")

    def _forget(self) -> None:
        super()._forget()
        self._hparams_logged = []

    def _resume(self, state: dict[str, Any]) -> None:
        self.finalize("interrupted")
        if "event_files" not in state:
            # A checkpoint of an earlier version: its event files have no mark and are left alone.
            return
        self._mark = state["mark"]
        self._hparams_logged = list(state.get("hparams", ()))
        assert self.log_dir is not None
        staging.sweep(Path(self.log_dir), staging.clock_of(Path(self.log_dir)))
        for path in self._event_files():
            check_plain(path)
            size = state["event_files"].get(path.name, 0)
            # A resume from an earlier checkpoint may already have truncated the file further.
            if path.stat().st_size > size:
                _truncate(path, size)
        # If the clock was set back, or is another machine's, TensorBoard would show new events before earlier ones.
        self._ahead = max(0.0, state.get("time", 0.0) - time.time())


def _truncate(path: Path, size: int) -> None:
    """Truncates an event file to `size` bytes, and keeps the original next to it.

    The head is first written to a new file, then renamed into place. A kill at any moment leaves a file that the next
    resume can truncate again.
    """
    backup = path.with_name(f"replaced.{time.time_ns()}.{path.name.removeprefix('events.out.tfevents.')}")
    if not size:
        os.replace(path, backup)
        return
    # The temporary file is named after the backup, since TensorBoard reads every file with "tfevents" in its name.
    head = staging.sibling(backup, "tmp")
    shutil.copyfile(path, head)
    with head.open("rb+") as target:
        target.truncate(size)
        os.fsync(target.fileno())
    try:
        os.link(path, backup)
    except OSError:
        # The file system does not support hard links.
        shutil.copyfile(path, backup)
    os.replace(head, path)


def _wait_for_unique_timestamp(folder: str, ahead: float) -> None:
    """Waits for the next second if the folder has an event file from the current second, by a clock that is ahead.

    Readers sort event files by name, and names have a resolution of one second.
    """
    parts = [path.name.split(".") for path in Path(folder).glob("events.out.tfevents.*")]
    now = time.time() + ahead
    if any(len(part) > 3 and part[3] == f"{int(now):010d}" for part in parts):
        time.sleep(int(now) + 1 - now)


def _late_writer(folder: str, ahead: float, **kwargs: Any) -> SummaryWriter:
    """Returns a SummaryWriter whose event file and events carry a time ahead of the clock; see `_resume`.

    tensorboard names event files and stamps events by the clock, without an argument for the time. So this repeats what
    its constructors of the file and of the writer do. `ahead` is in seconds; the other arguments are SummaryWriter's.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter, _AsyncWriter
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.writer import FileWriter

    class LateFile(EventFileWriter):  # type: ignore[misc]
        """An event file that is named after a time ahead of the clock."""

        def __init__(self, queue: int, seconds: float, suffix: str) -> None:
            now = time.time() + ahead
            self._logdir = folder
            path = Path(folder, f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.late{suffix}")
            self._async_writer = _AsyncWriter(RecordWriter(path.open("xb")), queue, seconds)
            self.add_event(Event(wall_time=now, file_version="brain.Event:2"))
            self.flush()

    class LateEvents(FileWriter):
        """Writes events with a time ahead of the clock."""

        def __init__(self, queue: int, seconds: float, suffix: str) -> None:
            self.event_writer = LateFile(queue, seconds, suffix)

        def add_event(self, event: Any, step: int | None = None, walltime: float | None = None) -> None:
            walltime = time.time() + ahead if walltime is None else walltime
            super().add_event(event, step, walltime)  # type: ignore[no-untyped-call]

    class LateWriter(SummaryWriter):
        """A SummaryWriter of late events."""

        file_writer: Any
        all_writers: Any

        def _get_file_writer(self) -> Any:
            if self.all_writers is None or self.file_writer is None:
                self.file_writer = LateEvents(self.max_queue, self.flush_secs, self.filename_suffix)
                self.all_writers = {folder: self.file_writer}
            return self.file_writer

    return LateWriter(log_dir=folder, **kwargs)
