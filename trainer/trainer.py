"""Trainer: builds a run from its arguments, then fits, validates, tests or predicts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback, in_order
from leyden.callbacks.gradient_accumulation import GradientAccumulation
from leyden.callbacks.loggers.logger import Logger
from leyden.checkpoint.format.bucket import Place, place_of
from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.core.given import leaves_open, refuse
from leyden.core.text import html_table
from leyden.launch.heartbeat import Phase
from leyden.strategies.base import Strategy
from leyden.strategies.window import Window
from leyden.trainer import ending
from leyden.trainer.arguments.arguments import for_trial, resolve
from leyden.trainer.datamodule import DataModule
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.events.progress import Progress
from leyden.trainer.events.signals import LEAVE, Signals
from leyden.trainer.logging.logs import Logs
from leyden.trainer.logging.values import Value, read_back
from leyden.trainer.module import TrainModule
from leyden.trainer.reporting import summary
from leyden.trainer.run import Run, RunState
from leyden.trainer.saved.checkpoint_folders import are_on_each_node, checkpoint_callbacks, folder_of_last
from leyden.trainer.saved.goal import Goal, goal_of_fit, goal_of_weights, with_best_path
from leyden.trainer.starting import build
from leyden.trainer.starting.build import loggers_of, with_loggers
from leyden.trainer.starting.callback_list import CallbackList
from leyden.trainer.starting.fit_limits import FitLimits
from leyden.trainer.starting.loaders import Loaders as RunLoaders

if TYPE_CHECKING:
    from datetime import timedelta

    from typing_extensions import Never

    from leyden.callbacks.bars.progress_bar import ProgressBar
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.callbacks.early_stopping import EarlyStopping
    from leyden.checkpoint.checkpoint_io import CheckpointIO
    from leyden.checkpoint.saves import PendingSave
    from leyden.strategies.precision.base import Precision
    from leyden.trainer.engine.schedulers import SchedulerConfig
    from leyden.trainer.events.preemption import Preemption
    from leyden.trainer.logging.history import History
    from leyden.trainer.loops.fit import FitLoop
    from leyden.trainer.plugins import Plugin
    from leyden.trainer.profilers import Profiler
    from leyden.trainer.saved.restoring import Restorer

Loaders = Any


class Trainer:
    """Trains a `TrainModule`: devices, precision, accumulation, validation, logging, checkpoints and resume.

    Names and defaults are those of PyTorch Lightning unless noted. None means the default unless noted.

    Args:
        accelerator: "auto", "cpu", "gpu", "xla", "tpu", or a type of device that torch knows: "cuda", "mps", "xpu", ….
        strategy: a name from `leyden.strategies.NAMES`, a `Strategy`, or "auto" (default): "ddp" on several devices.
        devices: devices per machine, one rank each: a number, indices such as [0, 1] or "0,1", or "auto" (all GPUs, or
            one CPU). Ranks start at the first fit, validate, test or predict. Default "auto".
        num_nodes: number of machines. Default 1.
        precision: "32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8", "transformer-engine",
            a short name (`no fp32 fp16 bf16 16 32 64`) or a `Precision`. Default "32-true", or the given strategy's.
        logger: True (TensorBoard), False, a logger or a list of loggers. Default True.
        callbacks: a callback or a list of callbacks.
        plugins: a `Precision` (instead of `precision`); `AsyncCheckpointIO` to write checkpoints in the background; a
            custom `CheckpointIO` to store them; or a `ClusterEnvironment`, which defines this process's rank.
        fast_dev_run: True or a number of batches: runs every hook once and writes nothing.
        max_epochs: maximum number of epochs; -1 for no limit. Default 1000 if no other limit is set.
        min_epochs: epochs before an early stop may take effect.
        max_steps: maximum number of optimizer steps; -1 for no limit.
        min_steps: optimizer steps before an early stop may take effect.
        max_time: maximum training time: "DD:HH:MM:SS", a timedelta, or a dict of timedelta arguments.
        limit_train_batches: a fraction of an epoch (float) or a number of batches (int).
        limit_val_batches: see limit_train_batches.
        limit_test_batches: see limit_train_batches.
        limit_predict_batches: see limit_train_batches.
        overfit_batches: a fraction or number of training batches to train and validate on, the same in each epoch.
        val_check_interval: a fraction of an epoch, a number of batches, or a time as in max_time. Default 1.0.
        check_val_every_n_epoch: validate every n epochs; None counts batches across epochs. Default 1.
        num_sanity_val_steps: validation batches to run before training; -1 for all. Default 2.
        log_every_n_steps: steps between two rows of step values for the loggers. Default 50.
        enable_checkpointing: add a `ModelCheckpoint` if there is none. Default True.
        enable_progress_bar: add a `TQDMProgressBar` if there is none. Default True.
        enable_model_summary: add a `ModelSummary`. Default False, unlike in Lightning: fit prints only five lines.
        accumulate_grad_batches: batches per optimizer step; "auto" splits each batch to fit into memory. Default 1.
        gradient_clip_val: the maximum norm or value of gradients; None for no clipping.
        gradient_clip_algorithm: "norm" or "value". Default "norm".
        deterministic: True, False or "warn": use only deterministic algorithms during the run.
        benchmark: let cuDNN search for the fastest algorithms during the run.
        inference_mode: evaluate under `torch.inference_mode`; False for `no_grad`. Default True.
        use_distributed_sampler: shard loaders over ranks. Default True.
        profiler: "simple", "advanced", "pytorch", or a `Profiler`.
        detect_anomaly: find the operation that produced a nan (slow).
        barebones: run only the loop, to measure its overhead.
        sync_batchnorm: compute batch norm statistics over all ranks.
        reload_dataloaders_every_n_epochs: create the loaders again every n epochs; 0 for never.
        default_root_dir: the folder of all runs. A run's own folder is `<default_root_dir>/<logger's name>/version_N`
            (see `run_folder`); without a logger it is `<default_root_dir>/version_N`. Default: the current folder.
            With a URL (s3://…), checkpoints go to `<URL>/checkpoints`, and all other files to the current folder.
        even_batches: pad the last training batch with repeated samples so that all ranks have the same number. This and
            all following arguments are Leyden's own.
        global_batch_size: samples per training batch over all ranks, instead of batch_size × ranks.
        sample_rng: seed each sample by (seed, epoch, index), so that random transforms in workers resume exactly.
        allow_replay: let a resume load and drop batches if the loader cannot seek.
        resume: "auto" continues the newest run of this training from its newest complete checkpoint, or starts a run
            if there is none, whenever the command runs again; it is the default of `fit(ckpt_path=…)`. None starts from
            scratch.
        preemption: True or a `Preemption`: on SIGTERM, SIGUSR1 or a preemption notice, save a checkpoint, exit with
            code 75 and requeue a SLURM job. None means True with resume="auto".
        hang_timeout: seconds, or a timedelta, that a training batch may take before the watchdog ends the job and names
            the hanging rank. An evaluation batch may take five times as long, setup or a save thirty times. "auto"
            allows ten times the slowest recent batch, at least 60 s. None or False disables it. Default "auto".
        digest_every_n_steps: steps between two digests of the weights, for `leyden bisect`; see `WeightDigests`.
        record_run: let loggers record how a fit was started, and the uncommitted code changes unless "no_diff". True
            omits the changes if a file of secrets is among the changed files; "diff" omits only that file.
        validate_at_start: run a full validation instead of the sanity check, and log it at step 0. It does not change
            training: callbacks and schedulers do not monitor its values, and random numbers are as without it.
        verbose: print what the run does. False prints nothing that was not asked for, and adds no progress bar;
            warnings and errors remain.
        on_bad_sample: "skip" drops and counts training samples that raise an error. Default "raise".
        report: draw `report.html` in the run's folder when a fit ends, after an error too; see `ReportLogger`.
        compile: "step" compiles forward, backward, clipping and optimizers to one graph, on a single device; a dict of
            torch.compile's arguments `backend`, `dynamic`, `mode` and `options` does, too. See "Compile" in the docs.

    Raises:
        ConfigurationError: if a value is invalid; the message names the fix.

    Example:
        >>> trainer = Trainer(max_epochs=3, precision="bf16", logger=False)
        >>> trainer.precision
        'bf16-mixed'
    """

    @leaves_open
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: Strategy | str = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: Precision | str | int | None = None,
        logger: bool | Logger | Sequence[Logger] | None = True,
        callbacks: Callback | Sequence[Callback] | None = None,
        plugins: Plugin | Sequence[Plugin] | None = None,
        fast_dev_run: bool | int = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | Mapping[str, float] | None = None,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        limit_predict_batches: int | float | None = 1.0,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | Mapping[str, float] | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | None = 50,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = False,
        accumulate_grad_batches: int | Literal["auto"] = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = ".",
        even_batches: bool = False,
        global_batch_size: int | None = None,
        sample_rng: bool = False,
        allow_replay: bool = False,
        resume: str | None = None,
        preemption: bool | Preemption | None = None,
        hang_timeout: bool | float | timedelta | str | None = "auto",
        on_bad_sample: str = "raise",
        digest_every_n_steps: int | None = None,
        record_run: bool | Literal["diff", "no_diff"] = True,
        validate_at_start: bool = False,
        verbose: bool = True,
        report: bool = False,
        compile: Literal["step"] | dict[str, Any] | None = None,
    ) -> None:
        self.arguments, self.given = resolve({name: value for name, value in locals().items() if name != "self"})
        arguments = self.arguments
        build.enter_cluster(arguments)
        self.accelerator = build.engine_of(arguments)
        self.last_checkpoint: Place | None = None
        self.seconds_saving = 0.0
        """Seconds that this rank has waited for its checkpoints in the last fit."""
        self._fit: FitLoop | None = None
        self._fit_end_state: dict[str, Any] | None = None
        module = TrainModule()
        notices: Preemption | None = arguments.preemption
        profiler = build.profiler_of(arguments)
        hooks = self._hooks_of(module, profiler)
        self._run = Run(
            engine=self.accelerator,
            arguments=arguments,
            limits=FitLimits(arguments),
            signals=Signals() if notices is None else Signals(notices.numbers, notices.exit_code),
            profiler=profiler,
            callback_list=CallbackList(build.build_callbacks(arguments), arguments.bucket, arguments.local_root),
            hooks=hooks,
            module=module,
            loaders=RunLoaders(module, None, self.strategy, arguments, False, {}),
            logs=Logs(hooks, module),
            state=RunState(),
            progress=Progress(),
        )
        self.strategy.check_settings(summary.settings_of(self._run))

    # public API -------------------------------------------------------------------------------------------------------
    def fit(
        self,
        model: nn.Module | None = None,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        restore: str | Sequence[str] = "all",
        same_run: bool = False,
        trust: bool = False,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        **unknown: Never,
    ) -> None:
        """Trains a module. Each call starts a new run from the current weights unless it resumes a checkpoint.

        Args:
            model: the module to train.
            train_dataloaders: a loader, a dict or list of loaders, or a DataModule.
            val_dataloaders: a loader or a list of loaders.
            datamodule: provides the loaders instead of the two arguments above.
            ckpt_path: a checkpoint's path; "last", the newest complete checkpoint of the newest run; "best"; "auto",
                the newest that this same training saved (see `TrainModule.run_identity`), or a new run if there is
                none; or "current", the end of this Trainer's last fit. None means the Trainer's `resume`.
            weights_only: only for pickle files of other trainers. True uses torch's safe loader, which runs no code;
                False allows full unpickling, like `trust=True`. Leyden's own checkpoints contain no pickle.
            restore: "all", "weights", or a set of `weights, optimizers, progress, rng, callbacks, loaders`.
            same_run: treat the checkpoint found by "auto" as this run's own despite differences (for unattended jobs).
            trust: allow a pickle file as `ckpt_path`: a Lightning run resumes, from others only weights are loaded.
            max_epochs: overrides the Trainer's value.
            max_steps: overrides the Trainer's value.
            **unknown: not accepted; an unknown name raises an error that suggests the nearest one.

        Raises:
            ConfigurationError: if an argument is missing or invalid, or "auto" found another run's checkpoint; the
                message names the fix.
            CheckpointError: if the checkpoint is missing or damaged.
            KeyboardInterrupt: after Ctrl-C, once the run has ended in order.
        """
        refuse(Trainer.fit, unknown)
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        build.check_datamodule(datamodule, "fit", train_dataloaders, val_dataloaders)
        if model is None:
            raise ConfigurationError(
                "fit needs a TrainModule and training data: trainer.fit(module, train_loader), or "
                "trainer.fit(module, datamodule=…)."
            )
        self.fit_loop.begin(max_epochs, max_steps)
        self.seconds_saving = 0.0
        goal = goal_of_fit(self.arguments, ckpt_path, restore, trust, same_run, weights_only)
        self._carry_out("fit", model, datamodule, goal, train=train_dataloaders, val=val_dataloaders)

    def validate(
        self,
        model: nn.Module | None = None,
        dataloaders: Loaders = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        trust: bool = False,
    ) -> list[dict[str, float]]:
        """Runs one pass over the validation data.

        Args:
            model: the module; by default the last one that ran.
            dataloaders: a loader or a list of loaders; by default those of the module or datamodule.
            ckpt_path: weights to load first: a path, "best" or "last". By default the current weights.
            verbose: print the values.
            datamodule: provides the loaders.
            weights_only: see `fit`; only for pickle files of other trainers.
            trust: see `fit`.

        Returns:
            The logged values of each loader.
        """
        goal = goal_of_weights(ckpt_path, weights_only, trust)
        return self._evaluate("validate", model, dataloaders, datamodule, verbose, goal)

    def test(
        self,
        model: nn.Module | None = None,
        dataloaders: Loaders = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        trust: bool = False,
    ) -> list[dict[str, float]]:
        """Runs one pass over the test data; see `validate`. Tests the current weights, never silently the best ones."""
        goal = goal_of_weights(ckpt_path, weights_only, trust)
        return self._evaluate("test", model, dataloaders, datamodule, verbose, goal)

    def predict(
        self,
        model: nn.Module | None = None,
        dataloaders: Loaders = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        gather: str = "all",
        weights_only: bool | None = None,
        *,
        trust: bool = False,
    ) -> list[Any] | None:
        """Runs `predict_step` on every batch.

        Args:
            model: the module; by default the last one that ran.
            dataloaders: a loader or a list of loaders.
            datamodule: provides the loaders.
            return_predictions: False to return nothing, for a callback that writes the predictions.
            ckpt_path: weights to load first.
            gather: the ranks that receive the outputs of all ranks: "all", or only "main". Leyden's own argument.
            weights_only: see `fit`; only for pickle files of other trainers.
            trust: see `fit`.

        Returns:
            The outputs of all batches on the CPU, in the order of the data; with several loaders a list of such lists.
        """
        from leyden.trainer.loops.evaluate import keeping

        keeps = keeping(return_predictions, gather)
        module, loaders, datamodule = build.to_evaluate(self._run, "predict", model, dataloaders, datamodule)
        goal = goal_of_weights(ckpt_path, weights_only, trust)
        result: list[Any] | None = self._carry_out("predict", module, datamodule, goal, keeps=keeps, predict=loaders)
        return result

    def save_checkpoint(
        self,
        filepath: str | Place,
        weights_only: bool = False,
        *,
        exact: bool = True,
        overwrite: bool = True,
        asynchronous: bool | None = None,
        storage_options: Any = None,
        trainable_only: bool = False,
    ) -> Place:
        """Writes a checkpoint folder atomically: it appears complete or not at all.

        Args:
            filepath: the checkpoint's path or URL. An existing checkpoint is replaced once the new one is complete.
            weights_only: omit optimizers, progress and random states.
            exact: False allows a save inside an accumulation window; a resume then repeats the window.
            overwrite: False keeps an existing checkpoint and appends `-v1` and so on to the name.
            asynchronous: write in a background thread, with the state of exactly this step; see `docs/checkpoints.md`.
                Errors are raised at the next step, and the end of fit waits for the thread. Outside of fit the write
                completes before this method returns. None means False, or True with the `AsyncCheckpointIO` plugin.
            storage_options: passed to a custom `CheckpointIO`.
            trainable_only: leave out frozen weights; see `ModelCheckpoint`, one of which must have it, too.

        Returns:
            The path of the checkpoint; an asynchronous save may still be writing it.

        Raises:
            LeydenError: inside an accumulation window, unless `exact=False`.
            CheckpointError: if the checkpoint cannot be written, or the path holds something other than a checkpoint; a
                previous checkpoint stays intact.
        """
        from leyden.trainer.saved import saving

        options = {"weights_only": weights_only, "exact": exact, "overwrite": overwrite}
        options["trainable_only"] = trainable_only
        options["asynchronous"] = saving.saves_in_background(self._run, asynchronous)
        path = place_of(filepath, "filepath")
        began = time.perf_counter()
        with self._run.heartbeat.during(Phase.SAVING):
            self.last_checkpoint = saving.store(self._run, self._fit, path, storage_options, **options)
        self.seconds_saving += time.perf_counter() - began
        return self.last_checkpoint

    def trial(self, callbacks: Sequence[Callback] = (), **arguments: Any) -> Trainer:
        """Returns a Trainer for short silent runs on the same devices and in the same precision.

        Args:
            callbacks: additional callbacks of the trial. Of this Trainer's callbacks it keeps `GradientAccumulation`
                and `ActivationCheckpointing`, of the module's `GradientAccumulation`. Loggers become silent ones.
            **arguments: override this Trainer's arguments.
        """
        own = for_trial(self.arguments, self.callbacks, self.state.stage is not None, given=arguments)
        trial = Trainer(**{**own, **arguments, "callbacks": [*own["callbacks"], *callbacks]})
        trial._run.callback_list.take_only(GradientAccumulation)
        return trial

    def note_trial(self, trial: Trainer) -> None:
        """Makes the loaders of a trial visible on this Trainer (`train_dataloader`, …), as those of a run."""
        self._run.loaders.fetched.update(trial._run.loaders.fetched)

    def rest_schedulers(self) -> None:
        """Stops this run's schedulers from stepping, for callbacks that set the learning rates themselves."""
        self._run.rest_schedulers()

    def update_batch_norm(self) -> bool:
        """Recomputes batch norm statistics for the current weights, inside fit, like torch's `update_bn`.

        All ranks must call it, between two steps. `training_step` runs on every training batch without gradients.
        Values that it logs are dropped, and random states are restored. Returns False if a signal interrupted the pass;
        the previous statistics are then restored.
        """
        from leyden.trainer.loops.batch_norm import update_batch_norm

        if self.state.stage != "fit":
            raise LeydenError("update_batch_norm reads the training data of a fit: call it in a hook during fit.")
        return update_batch_norm(self._run)

    def roll_back(self, further_batches: int = 0) -> Place:
        """Returns the run, except its position in the data, to its last checkpoint; returns the checkpoint's path.

        All ranks must call it in `on_train_batch_end`. It also skips `further_batches` batches. See "Bad steps" in the
        docs. Leyden's own method.
        """
        from leyden.trainer.saved.rolling_back import roll_back

        return roll_back(self._run, self._fit, further_batches)

    def finish_copies(self) -> None:
        """Waits until an asynchronous save has copied its state. Call it in a step before you modify weights directly.

        Leyden calls it before optimizer steps, evaluations and all hooks except the steps, but cannot do so inside a
        hook that saves and then modifies weights.

        Raises:
            CheckpointError: if a weight was modified before its copy was complete.
        """
        self._run.saves.finish_copies()

    def finish_saving(self) -> None:
        """Waits until an asynchronous save is committed, as the end of fit does. All ranks must call it.

        Raises:
            CheckpointError: if the save failed, with the original error as its cause.
        """
        self._run.finish_saves()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints like Python's `print`, but only on the main process, and above a progress bar."""
        self._run.print(*args, **kwargs)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds modules inside the block on the run's device (the meta device if sharded) and in its precision.

        Args:
            empty_init: skip random initialization, for weights that a checkpoint will fill.
        """
        with self.strategy.init_module(empty_init):
            yield

    # one run ----------------------------------------------------------------------------------------------------------
    def _carry_out(
        self, stage: str, model: Any, datamodule: Any, goal: Goal, keeps: str = "all", **loaders: Any
    ) -> Any:
        """Runs a stage from setup to tear-down. An error is reported to all parts that have a hook for it."""
        from leyden.launch.watchdog import watched

        if self.state.stage is not None:
            raise LeydenError(
                f"Trainer.{stage} was called while this Trainer's {self.state.stage} is running: call it "
                "afterwards, or use another Trainer."
            )
        if self.strategy.ranks.are_planned:
            return self._launch(stage, model, datamodule, goal, keeps, **loaders)
        # Before signals are caught, so that the first signal ends a rank that waits here for a failed one.
        self.strategy.setup_environment()
        goal = with_best_path(self.callbacks, goal)
        self._run = run = self._next_run(stage, model, datamodule, goal, loaders)
        with ExitStack() as stack:
            watch = self.arguments.hang_timeout, self.arguments.local_root
            stack.enter_context(watched(run.heartbeat, self.strategy.ranks, *watch))
            stack.push(lambda kind, error, trace: run.teardown(error))
            stack.enter_context(run.signals.caught_on(self.world_size))
            departure = stack.enter_context(run.departure())
            stack.enter_context(build.runtime_settings(self.arguments))
            result = None
            try:
                with ending.dead_workers_named():
                    restorer = self._setup(run, goal)
                    if stage == "fit":
                        from leyden.trainer.loops.fit import FitLoop
                        from leyden.trainer.saved.saving import rank_state

                        self._fit = loop = FitLoop(run)
                        restored, self._fit_end_state = run.prepare_fit(restorer, goal, self._fit_end_state), None
                        loop.run(restored)
                        # The state that ckpt_path="current" resumes from.
                        self._fit_end_state = rank_state(run, loop)
                        run.hooks.fire_all("on_fit_end")
                    elif stage == "predict":
                        from leyden.trainer.loops.evaluate import PredictionLoop

                        cursors = run.loaders.evaluation("predict")
                        result = PredictionLoop(run, cursors, keeps).predict() if cursors else []
                    else:
                        from leyden.trainer.loops.evaluate import EvaluationLoop

                        kind, name = ("val", "validation") if stage == "validate" else ("test", "test")
                        cursors = run.loaders.evaluation(kind)
                        result = EvaluationLoop(run, name, cursors).run() if cursors else []  # type: ignore[arg-type]
                    run.heartbeat.mark(Phase.ENDING)
                    ending.end_normally(run, partial(self._closing_lines, run), departure.leave)
                    if stage == "fit":
                        run.warn_of_nan()
            except BaseException as error:
                run.heartbeat.mark(Phase.ENDING)
                owners = run.module, self, *run.callbacks
                ending.end_with_error(run, error, owners, partial(self._closing_lines, run, True))
                raise
        return result

    def _launch(self, stage: str, model: nn.Module, datamodule: Any, goal: Goal, keeps: str, **loaders: Any) -> Any:
        """Runs a stage on ranks started for it, and takes over their result and state."""
        from leyden.trainer.starting.start_ranks import start_ranks, take_over

        if goal.continues and self.strategy.ranks.start_method != "script":
            raise ConfigurationError(
                "ckpt_path='current' needs the optimizers, which forked or spawned ranks do not send back: save a "
                "checkpoint and pass its path."
            )
        module, _ = build.unwrapped(model)
        run = stage, model, datamodule, goal, keeps
        outcome = start_ranks(self.strategy.ranks, self.arguments.preemption, self._on_rank, run, loaders)
        take_over(module, self.callbacks, outcome)
        module._join(self)
        self._run.take_over(module, outcome)
        self.last_checkpoint = outcome["last_checkpoint"]
        return outcome["result"]

    def _on_rank(self, run: tuple[Any, ...], loaders: dict[str, Any]) -> dict[str, Any] | None:
        """Carries out the run on a forked or spawned rank; rank 0 returns the result and state for the launcher."""
        from leyden.trainer.starting.start_ranks import final_state

        self.strategy.ranks.become_rank(rank_environment())
        # Copied before the run: the launching process knows only these, and a `setup` may add others.
        callbacks = list(self.callbacks)
        result = self._carry_out(*run, **loaders)
        outcome = final_state(self._run, callbacks, result, self.last_checkpoint)
        return outcome if self.is_global_zero else None

    def _next_run(
        self, stage: str, model: nn.Module, datamodule: DataModule | None, goal: Goal, loaders: dict[str, Any]
    ) -> Run:
        module, compiled = build.unwrapped(model)
        if compiled is not None:
            self.accelerator.check_compiled()
        if stage == "fit" and goal.continues and (self._fit_end_state is None or self.module is not module):
            raise ConfigurationError(
                "ckpt_path='current' continues this Trainer's last fit and needs its module: fit the module first."
            )
        is_new_fit = stage == "fit" and not goal.continues
        if is_new_fit:
            self._fit_end_state = None
            self._run.callback_list.start_over()
        hooks = self._hooks_of(module, self._run.profiler)
        return self._run.next(stage, module, datamodule, compiled, loaders, hooks, is_new_fit)

    def _hooks_of(self, module: TrainModule, profiler: Profiler | None) -> Hooks:
        """Returns the hooks of a run before its callbacks are known."""
        return Hooks((), self, module, TrainModule, profiler)

    def _setup(self, run: Run, goal: Goal) -> Restorer:
        """Sets up the run up to its weights; returns a Restorer for the remaining state of a resumed checkpoint."""
        # First, so that configure_callbacks has self.trainer.
        run.module._join(self, run.traced or run.logs)
        if run.datamodule is not None:
            run.datamodule._join(self)
        run.begin()
        return run.setup(*run.find(goal), goal)

    def _closing_lines(self, run: Run, is_stopped: bool = False) -> str | None:
        """Returns the closing lines of a fit: where it ended, and why; None for other stages."""
        if run.state.stage != "fit" or run.signals.received == LEAVE:
            return None
        if is_stopped or run.signals.received is not None:
            at = f"the last checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "no checkpoint was saved"
            how = f"preempted by {run.signals.name}" if run.signals.preempted else "stopped"
            return f"\n{how} at step {self.global_step}, epoch {self.current_epoch}: {at}"
        if self._fit is None or self.arguments.barebones:
            return None
        reason, seconds = run.limits.reason(run.progress, run.should_stop), self._fit.seconds()
        return summary.closing_lines(run.progress, self.checkpoint_callbacks, self.last_checkpoint, reason, seconds)

    def _evaluate(
        self, stage: str, model: Any, dataloaders: Loaders, datamodule: Any, verbose: bool, goal: Goal
    ) -> list[dict[str, float]]:
        module, loaders, datamodule = build.to_evaluate(self._run, stage, model, dataloaders, datamodule)
        kind = "val" if stage == "validate" else "test"
        results: list[dict[str, float]] = self._carry_out(stage, module, datamodule, goal, **{kind: loaders}) or []
        if verbose and (lines := summary.result_lines(results)):
            self._run.report(lines)
        return results

    def announce(self) -> None:
        """Prints the run's opening lines; see `Run.announce`."""
        self._run.announce()

    def send(self, values: dict[str, Value], step: int | None = None) -> None:
        """Sends values to the loggers, with a single read-back from the device."""
        self._run.send(values, step)

    # what callbacks and modules read: the run -------------------------------------------------------------------------
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
    def share_of_waiting(self) -> float:
        """The share of its training time that this rank has waited for data, in the batches that the fit timed."""
        return 0.0 if self._fit is None else self._fit.loader_timer.share

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
    def history(self) -> History:
        """The table of the last fit's epoch values: a row for each epoch, and for each further validation within one.

        The same on all ranks. A resume continues it, a rollback drops its later rows, `validate` and `test` add none.
        """
        return self._run.history.table()

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
    def checkpoint_folder(self) -> Place:
        """The folder of the first ModelCheckpoint, or else `checkpoints` in the run's folder."""
        return folder_of_last(self.callbacks, self._run.checkpoint_root or self.default_root_dir)

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
        from leyden.trainer.reporting.advice import sample_indices

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
        return self.arguments.local_root

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

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        if self.state.is_set_up:
            raise LeydenError(
                "trainer.accumulate_grad_batches was assigned during a run: assign it before the run, or use "
                "GradientAccumulation({epoch: batches})."
            )
        others = [callback for callback in self.callbacks if not isinstance(callback, GradientAccumulation)]
        self.callbacks = list(in_order([*others, GradientAccumulation(batches)]))


def _batches(count: int | list[int | None] | None) -> float:
    return count if isinstance(count, int) else float("inf")
