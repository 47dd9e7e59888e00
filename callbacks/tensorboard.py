"""TensorBoardLogger: metrics as TensorBoard event files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import uuid
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.callbacks.logger import FolderLogger
from leyden.callbacks.model_summary import undisturbed
from leyden.callbacks.plain import flatten_hparams, plain_numbers
from leyden.callbacks.silent import Silent
from leyden.strategies.errors import ConfigurationError, MissingExtraError, StateError
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.format import staging

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class TensorBoardLogger(FolderLogger):
    """Writes to `<save_dir>/<name>/version_N`; look at it with `tensorboard --logdir <save_dir>`.

    TensorBoard is imported at the first write. A resumed run continues in the same folder, and what was logged after the
    checkpoint is cut off the event files: they hold each value once. (TensorBoard's own `purge_step` would go by the number of
    the step, which validation steps count anew, and knows no order within a step.) A file that is cut is kept whole under a
    name `replaced.…`, which TensorBoard passes over; one that was open at that moment shows the cut part until it is reloaded.
    A validation that a signal broke off is done again by the resume, and its steps are logged again.

    Args:
        save_dir: None for the Trainer's `default_root_dir`.
        name: the folder between `save_dir` and the version; "" for none.
        version: a number or a folder's name; None for the first free number.
        log_graph: records the module's graph at the start of a fit; it needs `module.example_input_array`.
        default_hp_metric: gives runs logged without metrics a stand-in `hp_metric` of -1, without which TensorBoard's
            page of hyper-parameters stays empty.
        prefix: put before the names of metrics.
        sub_dir: a folder inside the run folder for the event files.
        **kwargs: handed to `torch.utils.tensorboard.SummaryWriter`: `max_queue`, `flush_secs`, `filename_suffix`, ….

    Example:
        >>> import tempfile
        >>> logger = TensorBoardLogger(tempfile.mkdtemp())
        >>> logger.log_metrics({"loss": 0.5}, step=1)
        >>> logger.experiment.add_text("note", "the SummaryWriter itself")
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
            raise ConfigurationError("TensorBoardLogger makes its log_dir of save_dir, name and version: give those.")
        self._sub_dir = None if sub_dir is None else os.path.expanduser(os.fspath(sub_dir))
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._kwargs = kwargs
        self._writer: SummaryWriter | None = None
        self._hparams_logged: list[str] = []
        """Digests of the settings and metrics that this run has logged."""
        self._mark = uuid.uuid4().hex[:8]

    @property
    def log_dir(self) -> str | None:
        folder = super().log_dir
        return folder if folder is None or self._sub_dir is None else os.path.join(folder, self._sub_dir)

    @property
    def experiment(self) -> SummaryWriter:
        """The SummaryWriter, for images, texts, histograms, …; on ranks that do not write, calls do nothing."""
        if not self.is_writer:
            return Silent()  # type: ignore[return-value]
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("tensorboard", None, "TensorBoardLogger") from error
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

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Records settings for TensorBoard's HPARAMS page, nested ones as "outer/inner", and in `hparams.json`."""
        super().log_hyperparams(params)
        if not self.is_writer:
            return
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        if not metrics or not self.hparams:
            return
        from torch.utils.tensorboard.summary import hparams

        flat, values = flatten_hparams(self.hparams), plain_numbers(metrics, self._prefix)
        told = hashlib.sha256(repr((sorted(flat.items()), sorted(values.items()))).encode()).hexdigest()[:16]
        if told in self._hparams_logged:
            # A resumed run has them in its event files.
            return
        self._hparams_logged.append(told)
        self.log_metrics(metrics, max(self._last_step, 0))
        file_writer = self.experiment._get_file_writer()  # type: ignore[no-untyped-call]
        named = dict.fromkeys(values, 0)
        for summary in hparams(flat, named):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log_graph(self, module: nn.Module, input_array: Any = None) -> None:
        """Traces the module on `input_array`, or on its `example_input_array`, in eval mode and without drawing from
        the run's random numbers. Does nothing unless the logger was made with `log_graph=True`."""
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
                "log_graph=True: a sharded module is not on one rank as a whole, so no graph was logged.", stacklevel=2
            )

    def save(self) -> None:
        """Writes out the events that are queued."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Closes the event file; logging more opens another one in the same folder."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        # A writer holds a thread and a file: a copy opens its own, in the same folder.
        return {**vars(self), "_writer": None}

    @property
    def _suffix(self) -> str:
        """What the names of this run's event files end with: other runs and users may write to the folder too."""
        return f".{self._mark}{self._kwargs.get('filename_suffix', '')}"

    def _event_files(self) -> list[Path]:
        """The event files that this run's loggers of this kind have written, by their order in time."""
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
        # A checkpoint from before there was this entry has none.
        if "event_files" not in state:
            return
        saved = SavedState(state)
        if re.fullmatch("[0-9a-f]{8}", saved.text("mark")) is None:
            raise StateError("mark", f"is {brief(state['mark'])}, and must be eight hexadecimal digits")
        sizes = saved.nested("event_files")
        for name in sizes.entries:
            sizes.integer(name, least=0)
        if not all(isinstance(told, str) for told in saved.items("hparams", ())):
            raise StateError("hparams", "must be a list of strings")

    def _resume(self, state: dict[str, Any]) -> None:
        self.finalize("interrupted")
        if "event_files" not in state:
            # Of a checkpoint from before there was this entry: the files have no mark, and stay.
            return
        self._mark = state["mark"]
        self._hparams_logged = list(state.get("hparams", ()))
        assert self.log_dir is not None
        staging.sweep(Path(self.log_dir), staging.clock_of(Path(self.log_dir)))
        for path in self._event_files():
            size = state["event_files"].get(path.name, 0)
            # A shorter one was cut by a resume from an earlier checkpoint.
            if path.stat().st_size > size:
                _cut(path, size)


def _cut(path: Path, size: int) -> None:
    """Cuts an event file and keeps it aside as it was.

    Its head is written to a new file first, and one rename puts that in its place: a kill at any moment leaves what the checkpoint
    knows of, for the next resume to cut again.
    """
    aside = path.with_name(f"replaced.{time.time_ns()}.{path.name.removeprefix('events.out.tfevents.')}")
    if not size:
        os.replace(path, aside)
        return
    # Named after the one aside: TensorBoard reads whatever has "tfevents" in its name.
    head = staging.sibling(aside, "tmp")
    with path.open("rb") as source, head.open("xb") as target:
        while left := size - target.tell():
            piece = source.read(min(left, 2**20))
            if not piece:
                break
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    try:
        os.link(path, aside)
    except OSError:
        # A file system without hard links.
        shutil.copyfile(path, aside)
    os.replace(head, path)


def _wait_out_the_second(folder: str) -> None:
    """Waits for the next second if a file of this one exists: readers sort event files by name, and the name has only seconds."""
    parts = [path.name.split(".") for path in Path(folder).glob("events.out.tfevents.*")]
    now = time.time()
    if any(len(part) > 3 and part[3] == f"{int(now):010d}" for part in parts):
        time.sleep(int(now) + 1 - now)
