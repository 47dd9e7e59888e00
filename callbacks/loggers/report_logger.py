"""ReportLogger, which records what only the running process knows, and draws the run's report at its end."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import re
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.callbacks.loggers.logger import Logger, folder_of, read_run_id, write_hparams, write_start
from leyden.callbacks.loggers.media import as_grid, as_pixels, for_each, listed, rows_of
from leyden.callbacks.loggers.plain import HParams, as_dict, json_value, plain_numbers
from leyden.callbacks.loggers.tensorboard import TensorBoardLogger
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import place_of
from leyden.checkpoint.format.secrets import masked_text
from leyden.core.devices import peak_memory
from leyden.core.errors import needs
from leyden.core.paths import check_plain, opener
from leyden.core.rank_zero import inform, warn
from leyden.core.saved_state import SavedState
from leyden.data.rng import isolated_rng
from leyden.report.recorded import FILE, IMAGES, PAGE

if TYPE_CHECKING:
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

BUFFERED = 100
"""Lines that may wait in memory."""
MAX_WARNINGS = 100
"""Different warnings that are recorded. A script may issue one for each batch."""
MAX_ERROR = 8_000
"""Characters of a traceback that are kept, from its end."""


class ReportLogger(Logger):
    """Records a fit for `leyden report`, and draws `report.html` at its end. `Trainer(report=True)` adds one.

    It appends to `report.jsonl` in the run's folder: the ranks and their layout, the times of rows, how long each phase
    took, peak memory, warnings, checkpoints, rollbacks, tables, images, and how the fit ended. A resume cuts the file
    to its checkpoint. The values themselves are read from the files of a CSVLogger or TensorBoardLogger; without
    either, they are recorded here. Confusion matrices and curves of torchmetrics that are attributes of the module are
    drawn at the end as the last validation left them, from the samples of rank 0, if matplotlib is installed.

    Nothing runs per step: lines are written with the rows of the other loggers and at the ends of phases. If drawing
    fails, it only warns. A preempted run exits without drawing: call `leyden report`.

    Args:
        draw: draw `report.html` at the end of a fit; False only records.

    Example:
        >>> from leyden import Trainer
        >>> trainer = Trainer(logger=ReportLogger(), max_epochs=1)
    """

    def __init__(self, draw: bool = True) -> None:
        self.draw = draw
        self._keeps_values = False
        self._places: list[tuple[str, str]] = []
        """The host and device of each rank."""
        self._show: Any = None
        self._trainer: Trainer | None = None
        self._begin()

    def _begin(self) -> None:
        """Resets the state for a new fit."""
        self._folder: Path | None = None
        self._buffer: list[bytes] = []
        self._size = 0
        """Bytes of the file on disk."""
        self._keep: tuple[str | None, int] | None = None
        """The run and the size of the file that a resume keeps."""
        self._row = -1
        self._seconds: dict[str, float] = {}
        self._since = self._phase_since = time.perf_counter()
        self._warned: set[tuple[str, str]] = set()
        self._metrics: dict[str, tuple[int, Any]] = {}
        """The step and a copy of each metric to plot, from the last validation."""
        self._ending: dict[str, Any] = {}
        self._is_broken = False
        """True once the file could not be written: the rest of the run is not recorded."""

    @property
    def log_dir(self) -> str | None:
        return None if self._folder is None else str(self._folder)

    # a fit ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._trainer = trainer
        if stage != "fit":
            return
        self._begin()
        self._keeps_values = not any(isinstance(logger, CSVLogger | TensorBoardLogger) for logger in trainer.loggers)
        if self.is_writer and warnings.showwarning != self._note_warning:
            self._show = warnings.showwarning
            warnings.showwarning = self._note_warning  # type: ignore[assignment]

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        ranks = trainer.strategy.ranks
        self._places = ranks.gather_object((platform.node(), str(trainer.strategy.root_device))) or []
        if self.is_writer:
            self._open(folder_of(trainer))

    def _open(self, folder: Path) -> None:
        """Enters the run's folder, and cuts a file of the run that is resumed to what the checkpoint knows."""
        self._folder = folder
        path = folder / FILE
        check_plain(path)
        self._size = path.stat().st_size if path.exists() else 0
        if self._keep is not None and self._keep[0] == read_run_id(folder):
            self._size = min(self._size, self._keep[1])
            if path.exists():
                os.truncate(path, self._size)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        mesh: Any = getattr(trainer.strategy, "mesh", None)
        names = getattr(mesh, "mesh_dim_names", None)
        # Only now is the position of a resumed run restored.
        self._write(
            "start",
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            resumed=trainer.global_step > 0,
            strategy=trainer.strategy.name,
            precision=trainer.strategy.precision.name,
            places=self._places,
            mesh=dict(zip(names, mesh.shape, strict=True)) if names else {"dp": len(self._places)},
        )
        self._seconds["setup"] = self._clock() - self._since - self._seconds.get("sanity check", 0.0)

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._phase_since = self._clock()

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._add("sanity check")

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._phase_since = self._clock()

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking and trainer.state.stage == "fit":
            self._keep_metrics(module)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking and trainer.state.stage == "fit":
            self._add("validation")
            self._write("times", step=trainer.global_step, seconds=self._times(trainer))

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._write("times", step=trainer.global_step, epoch=trainer.current_epoch + 1, seconds=self._times(trainer))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        peaks = trainer.strategy.ranks.gather_object(peak_memory(trainer.strategy.root_device))
        if peaks is not None:
            self._ending["memory"] = peaks

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        text = "".join(traceback.format_exception(exception))
        self._ending["error"] = masked_text(text)[-MAX_ERROR:]
        self._ending["what"] = masked_text("".join(traceback.format_exception_only(exception)).strip())[-MAX_ERROR:]

    def finalize(self, status: str) -> None:
        trainer, self._trainer = self._trainer, None
        self._release_warnings()
        if trainer is None or self._folder is None:
            return
        if self._stage == "fit":
            self._write(
                "end",
                status=status,
                reason=trainer.fit_loop.reason(trainer.progress, trainer.should_stop) if status == "success" else "",
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                seconds=self._times(trainer),
                **self._ending,
            )
            self._plot()
        self.save()
        if self.draw and not trainer.received_sigterm:
            self._draw(self._folder, announces=trainer.arguments.verbose and self._stage == "fit")

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._release_warnings()

    def _draw(self, folder: Path, announces: bool) -> None:
        from leyden.report import write_report

        try:
            path = write_report([folder], folder / PAGE)
            if announces:
                inform(f"report      {path}")
        except Exception as error:
            warn(
                f"the report could not be drawn: {type(error).__name__}: {error}. `leyden report {folder}` tries again."
            )

    # what a report shows ----------------------------------------------------------------------------------------------
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        number = self._next_step(step)
        if not self._keeps_values and number == self._row:
            return
        self._row = number
        line: dict[str, Any] = {"step": number}
        if "epoch" in metrics:
            line["epoch"] = metrics["epoch"]
        if self._trainer is not None:
            line["samples"] = self._trainer.progress.samples
            line["memory"] = peak_memory(self._trainer.strategy.root_device)
        if self._keeps_values:
            line["values"] = json_value(plain_numbers(metrics))
        self._write("row", **line)

    def log_hyperparams(self, params: HParams, metrics: Mapping[str, float] | None = None) -> None:
        if self._folder is not None and (found := as_dict(params)):
            write_hparams(self._folder, found)

    def log_run(self, record: Mapping[str, Any], diff: str = "") -> None:
        if self._folder is not None:
            write_start(self._folder, record, diff)

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Shows a table in the report: the last one of each key. Cells become text.

        Args:
            key: the name of the table.
            columns: the names of the columns.
            data: the rows, a value per column.
            dataframe: a pandas DataFrame, instead of `columns` and `data`.
            step: number of optimizer steps done; None for the last one logged.
        """
        names, rows = rows_of(columns, data, dataframe)
        cells = [[str(cell) for cell in row] for row in rows]
        self._write("table", key=key, step=self._step_of(step), columns=names, rows=cells)

    def log_text(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None
    ) -> None:
        """Shows a text, or a table as `log_table` does."""
        self.log_table(key, *rows_of(columns, data, dataframe), step=step)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Shows images as one picture in the report: the last of each key.

        Args:
            key: the name of the images.
            images: tensors (C, H, W) or (H, W), arrays (H, W, C) or (H, W), PIL images, or paths.
            step: number of optimizer steps done; None for the last one logged.
            **kwargs: `caption`, one text per image.
        """
        if not self.is_writer or self._folder is None:
            return
        with needs("pillow", None, "ReportLogger.log_image"):
            from PIL import Image
        items = listed(images, "image")
        captions = [str(options.get("caption", "")) for options in for_each(kwargs, len(items), "image")]
        with self._picture(key) as path:
            Image.fromarray(as_grid([as_pixels(item) for item in items])).save(path, format="PNG")
        self._write("image", key=key, step=self._step_of(step), file=self._name_of(key), captions=captions)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        path = checkpoint_callback.last_model_path
        if path and self._folder is not None:
            is_local = isinstance(place_of(path, "path"), Path)
            self._write("checkpoint", path=os.path.relpath(path, self._folder) if is_local else path)

    def go_back(self, state: dict[str, Any], step: int) -> None:
        self._write("rollback", step=self._last_step, to=step)
        self._row = -1

    def _keep_metrics(self, module: nn.Module) -> None:
        """Keeps copies of the metrics of torchmetrics whose value is no single number, to be plotted at the end."""
        package: Any = sys.modules.get("torchmetrics")
        if package is None or not self.is_writer:
            return
        for name, metric in module.named_modules():
            # Where higher or lower is better, the value is a number, which is logged.
            is_number = not isinstance(metric, package.Metric) or metric.higher_is_better is not None
            if not is_number and not isinstance(metric, package.aggregation.BaseAggregator) and metric.update_called:
                # A user's own metric may refuse to be copied.
                with suppress(Exception):
                    self._metrics[name] = self._last_step, copy.deepcopy(metric)

    def _plot(self) -> None:
        """Draws the metrics of the last validation, from the samples of this rank.

        Nothing is exchanged: the run's own metrics, its ranks and its random numbers are as without a report.
        """
        metrics, self._metrics = self._metrics, {}
        for name, (step, metric) in metrics.items():
            try:
                with isolated_rng():
                    metric.sync_on_compute = False
                    value = metric.compute()
                    if not isinstance(value, Tensor) or value.numel() > 1:
                        self._plot_one(name, step, metric, value)
            except Exception as error:
                # Some have no plot, and matplotlib is optional.
                if not isinstance(error, ImportError | NotImplementedError):
                    warn(f"the report shows no plot of {name}: {type(error).__name__}: {error}")

    def _plot_one(self, name: str, step: int, metric: Any, value: Any) -> None:
        figure, _ = metric.plot(value)
        try:
            with self._picture(name) as path:
                figure.savefig(path, format="png", dpi=80, bbox_inches="tight")
        finally:
            import matplotlib.pyplot

            matplotlib.pyplot.close(figure)
        self._write("image", key=name, step=step, file=self._name_of(name), captions=[])

    def _picture(self, key: str) -> Any:
        """Returns a context that yields the path to write the picture of a key to."""
        assert self._folder is not None
        (self._folder / IMAGES).mkdir(parents=True, exist_ok=True)
        return staging.replacing(self._folder / IMAGES / self._name_of(key))

    def _name_of(self, key: str) -> str:
        plain = re.sub(r"[^\w.-]", "_", key)[:60]
        digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=4).hexdigest()
        return f"{plain}-{digest}.png"

    def _note_warning(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        """Runs in place of `warnings.showwarning`."""
        seen = (str(message), category.__name__)
        if self._trainer is not None and seen not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(seen)
            text = masked_text(str(message))
            self._write("warning", text=text, category=category.__name__, file=os.path.basename(filename), line=lineno)
        self._show(message, category, filename, lineno, *rest)

    def _release_warnings(self) -> None:
        # Others may have replaced the function since, and may still call this one.
        if warnings.showwarning == self._note_warning:
            warnings.showwarning = self._show

    # time -------------------------------------------------------------------------------------------------------------
    def _clock(self) -> float:
        """Returns the time in seconds, without that of saves, which may fall into any phase."""
        return time.perf_counter() - (0.0 if self._trainer is None else self._trainer.seconds_saving)

    def _add(self, phase: str) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - self._phase_since

    def _times(self, trainer: Trainer) -> dict[str, float]:
        """Returns the seconds of each phase since this process began the fit."""
        times = {**self._seconds, "saving": trainer.seconds_saving}
        if "setup" in times:
            training = time.perf_counter() - self._since - sum(times.values())
            waiting = training * trainer.share_of_waiting
            times |= {"waiting for data": waiting, "training": training - waiting}
        return {name: round(seconds, 4) for name, seconds in times.items()}

    # the file ---------------------------------------------------------------------------------------------------------
    def _write(self, kind: str, **facts: Any) -> None:
        if not self.is_writer or self._is_broken or (self._folder is None and self._stage != "fit"):
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **facts}, separators=(",", ":"))
        self._buffer.append(line.encode() + b"\n")
        if len(self._buffer) >= BUFFERED:
            self.save()

    def save(self) -> None:
        """Writes all lines to disk."""
        if self._folder is None or not self._buffer:
            return
        text = b"".join(self._buffer)
        self._buffer.clear()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / FILE, "ab", opener=opener) as file:
                file.write(text)
            self._size += len(text)
        except OSError as error:
            self._is_broken = True
            warn(f"{self._folder / FILE} could not be written, and the report lacks the rest of the run: {error}")

    def state_dict(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        size = self._size + sum(map(len, self._buffer))
        return {"run": read_run_id(self._folder), "size": size, "last_step": self._last_step}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            saved = SavedState(state)
            saved.integer("size", least=0)
            saved.integer("last_step", least=-1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._keep = (state["run"], state["size"]) if state else None
        self._last_step = int(state["last_step"]) if state else -1
