"""The Trainer's properties, in one place: all that callbacks and modules may read from it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.core.errors import LeydenError
from leyden.core.text import html_table
from leyden.strategies.base import Strategy
from leyden.strategies.window import Window
from leyden.trainer.logging.values import read_back
from leyden.trainer.saved.checkpoint_folders import are_on_each_node, checkpoint_callbacks, folder_of_last
from leyden.trainer.starting.build import loggers_of, with_loggers

if TYPE_CHECKING:
    from leyden.callbacks.bars.progress_bar import ProgressBar
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.callbacks.early_stopping import EarlyStopping
    from leyden.callbacks.loggers.logger import Logger
    from leyden.checkpoint.background import PendingSave
    from leyden.checkpoint.checkpoint_io import CheckpointIO
    from leyden.strategies.precision.base import Precision
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.datamodule import DataModule
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.engine.schedulers import SchedulerConfig
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.events.signals import Signals
    from leyden.trainer.events.state import RunState
    from leyden.trainer.logging.logs import Logs
    from leyden.trainer.loops.fit import FitLoop
    from leyden.trainer.module import TrainModule
    from leyden.trainer.profilers import Profiler
    from leyden.trainer.run import Run
    from leyden.trainer.starting.fit_limits import FitLimits


class TrainerView:
    """The properties of a Trainer: its run, its parts and its arguments, for callbacks and modules.

    The Trainer inherits from it, since Lightning's users read these properties on the Trainer. They are separate from
    the Trainer's methods because they only report state.
    """

    accelerator: Engine
    arguments: Arguments
    last_checkpoint: Path | None
    _fit: FitLoop | None
    _run: Run

    # one run ----------------------------------------------------------------------------------------------------------
    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks. The list may be changed or replaced before a run or in a `setup` hook."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self._run.callback_list.replace(callbacks)

    @property
    def module(self) -> TrainModule:
        """The module that is running, or ran last."""
        return self._run.module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule passed to the run."""
        return self._run.datamodule

    @property
    def progress(self) -> Progress:
        """All counters of the run."""
        return self._run.progress

    @property
    def logs(self) -> Logs:
        """The logged values."""
        return self._run.logs

    @property
    def pending_save(self) -> PendingSave | None:
        """The asynchronous save in flight, or completed but not yet waited for; otherwise None."""
        return self._run.saves.pending

    @property
    def state(self) -> RunState:
        """The current stage of the run."""
        return self._run.state

    @property
    def signals(self) -> Signals:
        """The signals that the run catches, such as Ctrl-C and SIGTERM."""
        return self._run.signals

    @property
    def profiler(self) -> Profiler:
        """The profiler. Without one, a PassThroughProfiler, so that `profiler.profile(…)` always works."""
        from leyden.trainer.profilers import PassThroughProfiler

        return self._run.profiler if self._run.profiler is not None else PassThroughProfiler()

    @property
    def fit_loop(self) -> FitLimits:
        """The limits of a fit."""
        return self._run.limits

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedulers with their intervals."""
        return self._run.schedulers

    @property
    def should_stop(self) -> bool:
        """Whether to stop the fit. Setting it to True ends the fit when the open window closes."""
        return self._run.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._run.ask_to_stop(stop)

    def _repr_html_(self) -> str:
        """Returns the table that a notebook shows for a Trainer: its settings, where it is, and what it logged last."""
        limits = self.fit_loop
        progress, ranks = self.progress, self.strategy.ranks
        rows: list[tuple[str, object]] = [
            ("Trainer", self.state.stage or "not running"),
            ("devices", f"{ranks.world_size} × {ranks.device.type}"),
            ("strategy", f"{self.strategy.name}, precision {self.precision}"),
            ("limits", f"max_epochs={limits.max_epochs}, max_steps={limits.max_steps}"),
            ("callbacks", ", ".join(type(callback).__name__ for callback in self.callbacks) or "none"),
            ("done", f"{progress.epochs_done} epochs, {progress.global_step} steps"),
            *((name, f"{value:.4g}") for name, value in read_back(self.callback_metrics).items()),
        ]
        if self.last_checkpoint is not None:
            rows.append(("last checkpoint", self.last_checkpoint))
        return html_table(rows)

    # ranks and devices ------------------------------------------------------------------------------------------------
    @property
    def strategy(self) -> Strategy:
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """The full name of the precision."""
        return self.strategy.precision.name

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's name for `strategy.precision`."""
        return self.strategy.precision

    @property
    def scaler(self) -> Any:
        """The gradient scaler; None unless the precision has one."""
        return getattr(self.strategy.precision, "scaler", None)

    @property
    def world_size(self) -> int:
        return self.strategy.ranks.world_size

    @property
    def global_rank(self) -> int:
        return self.strategy.ranks.global_rank

    @property
    def local_rank(self) -> int:
        return self.strategy.ranks.local_rank

    @property
    def node_rank(self) -> int:
        return self.strategy.ranks.node_rank

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.ranks.is_global_zero

    @property
    def num_devices(self) -> int:
        """The number of devices used on this machine."""
        return self.strategy.ranks.local_size

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self.strategy.ranks.num_nodes

    @property
    def device_ids(self) -> list[int]:
        return [device.index or 0 for device in self.strategy.ranks.devices]

    @property
    def model(self) -> TrainModule:
        """The module that is running, or ran last."""
        return self.module

    @property
    def lightning_module(self) -> TrainModule:
        """Same as `module`, for callbacks written for Lightning."""
        return self.module

    # progress and state -----------------------------------------------------------------------------------------------
    @property
    def global_step(self) -> int:
        """The number of completed accumulation windows."""
        return self.progress.global_step

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0; after the last epoch the number of completed epochs.

        An epoch is not complete if a limit or `should_stop` ended the run inside it: a resume continues it.
        """
        is_closing = self._fit is not None and self._fit.closes_epoch
        return self.progress.epoch + (self.progress.phase == "epoch_end" and not is_closing)

    @property
    def window(self) -> Window:
        """The accumulation window: `index`, `length`, `closes`."""
        return self.accelerator.window

    @property
    def window_is_over(self) -> bool:
        """True between accumulation windows, when a checkpoint can be saved."""
        return not self.accelerator.window.is_open

    @property
    def is_last_batch(self) -> bool:
        """True during the last batch of an epoch; always False if the epoch's length is unknown."""
        total = self._fit.num_batches if self._fit is not None else None
        return total is not None and self.progress.batch + int(self.window.is_open) >= total

    @property
    def training(self) -> bool:
        return self.state.stage == "fit" and self.state.pass_of is None

    @property
    def validating(self) -> bool:
        return self.state.pass_of == "validation" and not self.state.sanity_checking

    @property
    def testing(self) -> bool:
        return self.state.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.state.stage == "predict"

    @property
    def sanity_checking(self) -> bool:
        return self.state.sanity_checking

    @property
    def evaluating(self) -> bool:
        """True in validation, including the sanity check, and in test."""
        return self.state.pass_of in ("validation", "test")

    @property
    def received_sigterm(self) -> bool:
        return self.signals.received == signal.SIGTERM

    @property
    def preempted(self) -> bool:
        """True if the run ends because of a preemption; see `Preemption`."""
        return self.signals.preempted

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C, SIGTERM or a preemption asked the run to stop."""
        return self.signals.received is not None

    # logged values ----------------------------------------------------------------------------------------------------
    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All logged values, under all of their names, on their devices."""
        return self.logs.callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values passed to the loggers."""
        return self.logs.logged_metrics()

    def read_metrics(self, values: dict[str, Any]) -> dict[str, float]:
        """Converts logged values to Python numbers, with a single read-back from the device."""
        return self.logs.nans.note(read_back(values), self.progress.global_step)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the progress bar shows, read back from the device in one transfer at each access."""
        return self.read_metrics(self.logs.progress_bar_metrics())

    # parts ------------------------------------------------------------------------------------------------------------
    @property
    def optimizers(self) -> list[Optimizer]:
        return self.accelerator.optimizers

    @property
    def lr_schedulers(self) -> list[Any]:
        """The schedulers; `lr_scheduler_configs` has their intervals."""
        return [config.scheduler for config in self.lr_scheduler_configs]

    @property
    def loggers(self) -> list[Logger]:
        """The loggers among the callbacks. They may be replaced before a run or in a `setup` hook."""
        return loggers_of(self.callbacks)

    @loggers.setter
    def loggers(self, loggers: Sequence[Logger] | None) -> None:
        if self.state.is_set_up:
            raise LeydenError("trainer.logger was assigned during a run: assign it before the run or in a setup hook.")
        self.callbacks = with_loggers(self.callbacks, loggers or (), silent=bool(self.fast_dev_run))

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None. Assigning a logger, or None, replaces all loggers; see `loggers`."""
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [logger] if logger else []

    @property
    def run_folder(self) -> str | None:
        """The run's folder, `<default_root_dir>/<name of its logger>/version_N`: checkpoints, logs, records.

        The same on all ranks, and in all fits of this Trainer. None before the first fit, and if it writes nothing.
        """
        return self._run.folder

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger that has one; without loggers `run_folder`, or `default_root_dir` before fit.

        Ranks that do not write return the first rank's folder. None until a logger such as W&B has created its folder.
        """
        return self._run.log_dir

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the current or last run started from; None without one."""
        return self._run.ckpt_path

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return checkpoint_callbacks(self.callbacks)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_io(self) -> CheckpointIO | None:
        """The plugin that stores checkpoints; None if Leyden writes them as folders."""
        return self._run.checkpoint_io

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of the first ModelCheckpoint, or else `checkpoints` in the run's folder."""
        return folder_of_last(self.callbacks, self.run_folder or self.default_root_dir)

    @property
    def saves_on_each_node(self) -> bool:
        """True if each machine keeps its own checkpoints because the machines share no folder."""
        return are_on_each_node(self.callbacks)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        from leyden.callbacks.early_stopping import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        from leyden.callbacks.bars.progress_bar import ProgressBar

        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    def step_function(self, name: str) -> Callable[..., Any]:
        """Returns a step of the module as the loop calls it: plain, compiled, profiled or checked for nan."""
        return self._run.step_function(name)

    # data -------------------------------------------------------------------------------------------------------------
    @property
    def train_dataloader(self) -> Any:
        """The training loaders of the last run or search, as given by the user; None without any."""
        return self._run.loaders.fetched.get("train")

    @property
    def given_loaders(self) -> Mapping[str, Any]:
        """The loaders passed to `fit` and the other methods, by kind: "train", "val", "test", "predict"."""
        return self._run.loaders.given

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders of the last run as given by the user; None without any."""
        return self._run.loaders.fetched.get("val")

    @property
    def test_dataloaders(self) -> Any:
        return self._run.loaders.fetched.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._run.loaders.fetched.get("predict")

    def sample_indices(
        self, window: bool = False, all_ranks: bool = False, *, batch_idx: int | None = None
    ) -> list[Any] | None:
        """Returns the data set indices of the samples in the current or last training batch. Leyden's own method.

        Indices are computed on demand by drawing the epoch's order again, so steps pay nothing for them.

        Args:
            window: include all batches of the accumulation window so far.
            all_ranks: include the samples of all ranks, in the epoch's order. It needs no communication.
            batch_idx: use this earlier batch of the epoch instead of the current one.

        Returns:
            Numbers, or whatever the sampler yields. None if the order cannot be known: for an `IterableDataset`, a
            loader that is not torch's, or several loaders; for a sampler that changes while it is read and has no
            `state_dict`, or that draws global random numbers during the epoch; and, with `all_ranks`, for a loader that
            you have sharded yourself.
        """
        from leyden.trainer.reporting.samples import sample_indices

        if self._fit is None:
            return None
        return sample_indices(self._run, self._fit.window_start if window else None, all_ranks, batch_idx)

    @property
    def num_training_batches(self) -> float:
        """The number of batches in a training epoch; inf if the loader has no length."""
        return 0 if self.limit_train_batches == 0 else _batches(self._run.loaders.sizes.get("train"))

    @property
    def num_val_batches(self) -> list[float]:
        """The number of batches of each validation loader."""
        return self._evaluation_batches("val")

    @property
    def num_sanity_val_batches(self) -> list[float]:
        limit = self.num_sanity_val_steps
        return [count if limit == -1 else min(limit, count) for count in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[float]:
        return self._evaluation_batches("test")

    @property
    def num_predict_batches(self) -> list[float]:
        return self._evaluation_batches("predict")

    def _evaluation_batches(self, kind: str) -> list[float]:
        sizes = self._run.loaders.sizes.get(kind) or []
        return [_batches(size) for size in sizes] if isinstance(sizes, list) else []

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer steps in the fit, for schedulers; inf without a limit. Loads the training data."""
        if self._fit is None:
            return float("inf")
        self._fit.load_training_data()
        return self.fit_loop.estimated_steps(
            self._fit.num_batches, self._fit.accumulation, self._run.loaders.samples_per_batch
        )

    # settings ---------------------------------------------------------------------------------------------------------
    @property
    def default_root_dir(self) -> str:
        return self.arguments.default_root_dir

    @property
    def fast_dev_run(self) -> bool | int:
        """The Trainer's argument: True, False, or the number of batches."""
        return self.arguments.fast_dev_run

    @property
    def barebones(self) -> bool:
        return self.arguments.barebones

    @property
    def enable_progress_bar(self) -> bool:
        return self.arguments.enable_progress_bar

    @property
    def enable_validation(self) -> bool:
        """True if fit validates."""
        return self._run.loaders.has("val") and self.arguments.limit_val_batches != 0

    @property
    def limit_train_batches(self) -> float | int:
        return self.arguments.limit_train_batches

    @property
    def limit_val_batches(self) -> float | int:
        return self.arguments.limit_val_batches

    @property
    def limit_test_batches(self) -> float | int:
        return self.arguments.limit_test_batches

    @property
    def limit_predict_batches(self) -> float | int:
        return self.arguments.limit_predict_batches

    @property
    def overfit_batches(self) -> float | int:
        return self.arguments.overfit_batches

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        return self.arguments.reload_dataloaders_every_n_epochs

    @property
    def num_sanity_val_steps(self) -> int:
        return self.arguments.num_sanity_val_steps

    @property
    def log_every_n_steps(self) -> int:
        return self.arguments.log_every_n_steps

    @property
    def val_check_interval(self) -> Any:
        return self.arguments.val_check_interval

    @property
    def check_val_every_n_epoch(self) -> int | None:
        return self.arguments.check_val_every_n_epoch

    @property
    def max_epochs(self) -> int:
        """The number of epochs after which a fit ends. May be assigned, here or as `fit_loop.max_epochs`."""
        return self.fit_loop.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.fit_loop.max_epochs = value

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps after which a fit ends; -1 for no limit."""
        return self.fit_loop.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self.fit_loop.max_steps = value

    @property
    def min_epochs(self) -> int | None:
        return self.fit_loop.min_epochs

    @property
    def min_steps(self) -> int | None:
        return self.fit_loop.min_steps

    @property
    def gradient_clip_val(self) -> float | None:
        return self.arguments.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> str:
        return self.arguments.gradient_clip_algorithm

    @property
    def accumulate_grad_batches(self) -> int:
        """The length of a window that starts now. Loads the training data if a BatchSizeScheduler counts samples."""
        accumulation = self._run.accumulation
        if self._fit is not None and accumulation is not None and accumulation.counts_samples:
            self._fit.load_training_data()
        return self._run.batches_per_step


def _batches(count: int | list[int | None] | None) -> float:
    return count if isinstance(count, int) else float("inf")
