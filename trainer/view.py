"""What callbacks and modules may read of a Trainer: its properties, in one place. Reading changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.strategies.base import Strategy
from leyden.strategies.errors import LeydenError
from leyden.strategies.window import Window
from leyden.trainer.logging.values import read_back
from leyden.trainer.profilers import PassThroughProfiler, Profiler
from leyden.trainer.run.reporting.samples import sample_indices
from leyden.trainer.run.saved.checkpoint_folders import are_on_each_node, checkpoint_callbacks, folder_of_last
from leyden.trainer.run.starting.build import loggers_of, with_loggers

if TYPE_CHECKING:
    from leyden.callbacks.bars.progress_bar import ProgressBar
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.callbacks.early_stopping import EarlyStopping
    from leyden.callbacks.loggers.logger import Logger
    from leyden.strategies.precision.base import Precision
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.checkpoint.background import PendingSave
    from leyden.trainer.checkpoint.checkpoint_io import CheckpointIO
    from leyden.trainer.datamodule import DataModule
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.engine.schedulers import SchedulerConfig
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.events.signals import Signals
    from leyden.trainer.events.state import RunState
    from leyden.trainer.logging.logs import Logs
    from leyden.trainer.loops.fit import FitLoop
    from leyden.trainer.module import TrainModule
    from leyden.trainer.run.starting.fit_limits import FitLimits
    from leyden.trainer.run.state import Run


class TrainerView:
    """The properties of a Trainer: what callbacks and modules may know of its run, of its parts and of its arguments.

    They belong to the Trainer itself, as Lightning's users read them there; they stand apart because none of them does
    anything, and what the Trainer does is another subject.
    """

    accelerator: Engine
    arguments: Arguments
    _fit: FitLoop | None
    _run: Run

    # one run ----------------------------------------------------------------------------------------------------------
    @property
    def callbacks(self) -> list[Callback]:
        """Who takes part. The list may be changed, or another assigned, before a run or in a `setup` of it."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self._run.callback_list.replace(callbacks)

    @property
    def module(self) -> TrainModule:
        """The module that runs, or ran last."""
        return self._run.module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule that the run was given."""
        return self._run.datamodule

    @property
    def progress(self) -> Progress:
        """Every counter of the run."""
        return self._run.progress

    @property
    def logs(self) -> Logs:
        """What has been logged."""
        return self._run.logs

    @property
    def pending_save(self) -> PendingSave | None:
        """The asynchronous save that is under way, or that nothing has waited for yet; None without one."""
        return self._run.saves.pending

    @property
    def state(self) -> RunState:
        """What is going on."""
        return self._run.state

    @property
    def signals(self) -> Signals:
        """Ctrl-C and SIGTERM."""
        return self._run.signals

    @property
    def profiler(self) -> Profiler:
        """The profiler; without one a PassThroughProfiler, so that `profiler.profile(…)` always works."""
        return self._run.profiler if self._run.profiler is not None else PassThroughProfiler()

    @property
    def fit_loop(self) -> FitLimits:
        """Where a fit ends."""
        return self._run.limits

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers of learning rates, each with the times at which it steps."""
        return self._run.schedulers

    @property
    def should_stop(self) -> bool:
        """Set to True, it ends the fit where the open window closes."""
        return self._run.should_stop

    @should_stop.setter
    def should_stop(self, asked: bool) -> None:
        self._run.ask_to_stop(asked)

    # where it runs ----------------------------------------------------------------------------------------------------
    @property
    def strategy(self) -> Strategy:
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """The full name of the precision."""
        return self.strategy.precision.name

    @property
    def precision_plugin(self) -> Precision:
        """Lightning's name of `strategy.precision`."""
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
        """Devices of this machine that take part."""
        return self.strategy.ranks.local_size

    @property
    def num_nodes(self) -> int:
        """Machines that take part."""
        return self.strategy.ranks.num_nodes

    @property
    def device_ids(self) -> list[int]:
        return [device.index or 0 for device in self.strategy.ranks.devices]

    @property
    def model(self) -> TrainModule:
        """The module that runs, or ran last."""
        return self.module

    @property
    def lightning_module(self) -> TrainModule:
        """The same, for callbacks written for Lightning."""
        return self.module

    # what it is doing -------------------------------------------------------------------------------------------------
    @property
    def global_step(self) -> int:
        """Accumulation windows done."""
        return self.progress.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, from 0; the number of epochs done once the last one is over.

        An epoch that a limit or `should_stop` ended within is not over: a resume continues in it.
        """
        closes = self._fit is not None and self._fit.closes_epoch
        return self.progress.epoch + (self.progress.phase == "epoch_end" and not closes)

    @property
    def window(self) -> Window:
        """The accumulation window: index, length, closes."""
        return self.accelerator.window

    @property
    def window_is_over(self) -> bool:
        """True between accumulation windows, where a checkpoint can be saved."""
        return not self.accelerator.window.is_open

    @property
    def is_last_batch(self) -> bool:
        """True while the last batch of an epoch is worked on, as far as its length is known."""
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
        """True in validation (the sanity check too) and test."""
        return self.state.pass_of in ("validation", "test")

    @property
    def received_sigterm(self) -> bool:
        return self.signals.received == signal.SIGTERM

    @property
    def preempted(self) -> bool:
        """True if the run ends to make room; see `Preemption`."""
        return self.signals.preempted

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C, SIGTERM or a preemption asked the run to stop."""
        return self.signals.received is not None

    # what was logged --------------------------------------------------------------------------------------------------
    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything that was logged, under every name, on its device."""
        return self.logs.callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What the loggers are given."""
        return self.logs.logged_metrics()

    def read_metrics(self, values: dict[str, Any]) -> dict[str, float]:
        """Python numbers of logged values, with one read-back for all of them."""
        return self.logs.nans.note(read_back(values), self.progress.global_step)

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """What the bar shows; read back only by the bar."""
        return self.logs.progress_bar_metrics()

    # its parts --------------------------------------------------------------------------------------------------------
    @property
    def optimizers(self) -> list[Optimizer]:
        return self.accelerator.optimizers

    @property
    def lr_schedulers(self) -> list[Any]:
        """The schedulers; `lr_scheduler_configs` says when each steps."""
        return [config.scheduler for config in self.lr_scheduler_configs]

    @property
    def loggers(self) -> list[Logger]:
        """The loggers among the callbacks. Others may be assigned before a run, or in a `setup` of it."""
        return loggers_of(self.callbacks)

    @loggers.setter
    def loggers(self, loggers: Sequence[Logger] | None) -> None:
        if self.state.is_set_up:
            raise LeydenError("trainer.logger was assigned within a run: assign it before, or in a setup hook.")
        self.callbacks = with_loggers(self.callbacks, loggers or (), silent=self.fast_dev_run)

    @property
    def logger(self) -> Logger | None:
        """The first logger. Another may be assigned in place of all there are, or None; see `loggers`."""
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """Folder of the first logger that has one; without loggers `default_root_dir`.

        On a rank that does not write it is the first rank's. None until a logger such as W&B has made its folder.
        """
        return self._run.log_dir

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint from which the run, or after its end the last one, has started; None without one."""
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
        """The plugin that stores checkpoints; None where they are folders."""
        return self._run.checkpoint_io

    @property
    def checkpoint_folder(self) -> Path:
        """Where "last" is looked for: the folder of the first ModelCheckpoint."""
        return folder_of_last(self.callbacks, self.default_root_dir)

    @property
    def saves_on_each_node(self) -> bool:
        """True if every machine keeps checkpoints of its own, since they share no folder."""
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
        """A step of the module as the loop calls it: bare, compiled, profiled or checked for nan."""
        return self._run.step_function(name)

    # its data ---------------------------------------------------------------------------------------------------------
    @property
    def train_dataloader(self) -> Any:
        return self._run.loaders.train_loader

    @property
    def given_loaders(self) -> Mapping[str, Any]:
        """What `fit` and the other methods were given for loaders: "train", "val", "test", "predict"."""
        return self._run.loaders.given

    @property
    def val_dataloaders(self) -> Any:
        """What the last run had validation loaders from, as it was given; so for test and predict. None without any."""
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
        """The indices in the data set of the samples of the training batch that runs, or ran last, in its order.

        They are found when you ask, by drawing the epoch's order again, and cost the steps nothing. Ours.

        Args:
            window: of all batches of the accumulation window so far.
            all_ranks: of all ranks' samples, in the epoch's order. No message is sent.
            batch_idx: of that batch of this epoch, which has run already.

        Returns:
            Numbers, or what the sampler yields. None where the order cannot be known: an `IterableDataset` or another
            loader than torch's, several loaders, a sampler that changes as it is read and has no `state_dict` or that
            draws global random numbers during the epoch, and for `all_ranks` a loader that you have sharded yourself.
        """
        if self._fit is None:
            return None
        return sample_indices(self._run, self._fit.window_start if window else None, all_ranks, batch_idx)

    @property
    def num_training_batches(self) -> float:
        """Batches of a training epoch; inf where the loader has no length."""
        return 0 if self.limit_train_batches == 0 else _batches(self._run.loaders.sizes.get("train"))

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader, so for test and predict."""
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
        """Optimizer steps of the whole fit, for schedulers; inf where it has no end. Loads the training data."""
        if self._fit is None:
            return float("inf")
        self._fit.load_training_data()
        return self.fit_loop.estimated_steps(
            self._fit.num_batches, self._fit.accumulation, self._run.loaders.samples_per_batch
        )

    # its settings -----------------------------------------------------------------------------------------------------
    @property
    def default_root_dir(self) -> str:
        return self.arguments.default_root_dir

    @property
    def fast_dev_run(self) -> bool:
        return bool(self.arguments.fast_dev_run)

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
    def max_epochs(self) -> int | None:
        """Epochs after which a fit ends; also what is assigned here or to `fit_loop.max_epochs`."""
        return self.fit_loop.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self.fit_loop.max_epochs = value

    @property
    def max_steps(self) -> int:
        """Optimizer steps after which a fit ends; -1 for no end."""
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
        """Batches of a window that starts now. Loads the training data where a BatchSizeScheduler counts samples."""
        accumulation = self._run.accumulation
        if self._fit is not None and accumulation is not None and accumulation.counts_samples:
            self._fit.load_training_data()
        return self._run.batches_per_step


def _batches(count: int | list[int | None] | None) -> float:
    return count if isinstance(count, int) else float("inf")
