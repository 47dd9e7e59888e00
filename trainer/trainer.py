"""Trainer: turns arguments into parts, then fits, validates, tests and predicts with them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from leyden.callbacks.base import Callback
from leyden.callbacks.gradient_accumulation import GradientAccumulation
from leyden.callbacks.loggers.logger import Logger
from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.strategies.launch.environment import rank_environment
from leyden.strategies.launch.heartbeat import Phase
from leyden.strategies.launch.watchdog import watched
from leyden.trainer.arguments.arguments import for_trial, resolve
from leyden.trainer.arguments.given import leaves_open, refuse
from leyden.trainer.datamodule import DataModule
from leyden.trainer.engine.engine import Engine
from leyden.trainer.events.hooks import Hooks
from leyden.trainer.events.progress import Progress
from leyden.trainer.events.signals import LEAVE, Signals
from leyden.trainer.events.state import RunState
from leyden.trainer.logging.logs import Logs
from leyden.trainer.logging.values import Value
from leyden.trainer.loops.batch_norm import update_batch_norm
from leyden.trainer.loops.evaluate import EvaluationLoop, PredictionLoop, keeping
from leyden.trainer.loops.fit import FitLoop
from leyden.trainer.module import TrainModule
from leyden.trainer.profilers import find_profiler
from leyden.trainer.run import ending
from leyden.trainer.run.reporting import summary
from leyden.trainer.run.saved import resuming, saving
from leyden.trainer.run.saved.restoring import Restorer
from leyden.trainer.run.saved.rolling_back import roll_back
from leyden.trainer.run.starting import build
from leyden.trainer.run.starting.callback_list import CallbackList
from leyden.trainer.run.starting.fit_limits import FitLimits
from leyden.trainer.run.starting.loaders import Loaders as RunLoaders
from leyden.trainer.run.starting.start_ranks import sent_back, start_ranks, take_over
from leyden.trainer.run.state import Run
from leyden.trainer.view import TrainerView

if TYPE_CHECKING:
    from datetime import timedelta

    from typing_extensions import Never

    from leyden.strategies.precision import Precision
    from leyden.trainer.events.preemption import Preemption
    from leyden.trainer.plugins import Plugin
    from leyden.trainer.profilers import Profiler

Loaders = Any


class Trainer(TrainerView):
    """Trains a `TrainModule`: devices, precision, accumulation, validation, logging, checkpoints and resume.

    Names and defaults are PyTorch Lightning's, except where it says so. None means the default, but where it says
    otherwise.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda", "mps", "xla" or "tpu". Default "auto".
        strategy: a name of `leyden.strategies.NAMES`, a `Strategy`, or "auto", the default: "ddp" on several devices.
        devices: ranks of each machine: a number, indices as [0, 1] or "0,1", or "auto" (all GPUs, or one CPU). Ranks
            are started at the first fit, validate, test or predict. Default "auto".
        num_nodes: number of machines. Default 1.
        precision: "32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8", "transformer-engine",
            a short name (`no fp32 fp16 bf16 16 32 64`) or a `Precision`. Default: "32-true", or a given strategy's own.
        logger: True (TensorBoard), False, a logger or several. Default True.
        callbacks: one or a list.
        plugins: a `Precision`, as another way to give it; `AsyncCheckpointIO` to write checkpoints beside the training;
            a `CheckpointIO` of your own, which stores them; a `ClusterEnvironment`, which says which rank this is.
        fast_dev_run: True or a number of batches: runs every hook once and writes nothing.
        max_epochs: default 1000 if nothing else ends the run; -1 for no end.
        min_epochs: no early stop before.
        max_steps: optimizer steps; -1 for no end.
        min_steps: no early stop before.
        max_time: "DD:HH:MM:SS", a timedelta, or a dict of its arguments.
        limit_train_batches: a fraction of an epoch (float) or a number of batches (int); so for val, test and predict.
        limit_val_batches: see limit_train_batches.
        limit_test_batches: see limit_train_batches.
        limit_predict_batches: see limit_train_batches.
        overfit_batches: train and validate on so many batches, the same ones each epoch.
        val_check_interval: a fraction of an epoch, a number of batches, or a time as max_time. Default 1.0.
        check_val_every_n_epoch: validate in every n-th epoch; None counts batches over epochs. Default 1.
        num_sanity_val_steps: validation batches before training; -1 for all. Default 2.
        log_every_n_steps: loggers are given step values this often. Default 50.
        enable_checkpointing: add a `ModelCheckpoint` if there is none. Default True.
        enable_progress_bar: add a `TQDMProgressBar` if there is none. Default True.
        enable_model_summary: add a `ModelSummary`. Default False, unlike Lightning: fit prints five lines and no more.
        accumulate_grad_batches: batches of one optimizer step; "auto" cuts each into parts that fit. Default 1.
        gradient_clip_val: clip to this; None for no clipping.
        gradient_clip_algorithm: "norm" or "value". Default "norm".
        deterministic: True, False or "warn": only deterministic algorithms, during the run.
        benchmark: cuDNN's search for the fastest algorithm, during the run.
        inference_mode: evaluate under `torch.inference_mode`, else `no_grad`. Default True.
        use_distributed_sampler: shard loaders over ranks. Default True.
        profiler: "simple", "advanced", "pytorch", or a `Profiler`.
        detect_anomaly: find the operation that made a nan; slow.
        barebones: nothing but the loop, to measure it.
        sync_batchnorm: statistics of batch norm over all ranks.
        reload_dataloaders_every_n_epochs: fetch loaders anew every n epochs; 0 for never.
        default_root_dir: where runs and checkpoints go. Default: the current folder.
        even_batches: repeat samples until each rank has as many in the last training batch. Ours, as are the following.
        global_batch_size: samples of a training batch on all ranks together, in place of batch_size × ranks.
        sample_rng: seed each sample by (seed, epoch, index), so that random transforms in workers resume exactly.
        allow_replay: let a resume load and drop what cannot be sought.
        resume: "auto" continues the same run from its newest whole checkpoint, or begins it, whenever the command is
            started again: what `fit(ckpt_path=…)` is where it is left out. None begins anew.
        preemption: True or a `Preemption`: SIGTERM, SIGUSR1 or a notice save a checkpoint and end the run with exit
            code 75, and a job of SLURM is requeued. None: True where resume="auto".
        hang_timeout: seconds, or a timedelta, that a training batch may take before the watchdog ends the job and names
            the rank that hangs; an evaluation's batch may take five times as long, set-up or a save thirty times.
            "auto", the default: ten times the slowest of late, and 60 s at least. None or False turns it off.
        digest_every_n_steps: record digests of the weights, which `leyden bisect` compares; see `WeightDigests`.
        record_run: loggers record how a fit was started, with the changes to its code unless this is "no_diff".
        on_bad_sample: "skip" leaves training samples that raise out of their batches, and counts them. Default "raise".

    Raises:
        ConfigurationError: for a value that cannot be; names the fix.

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
        record_run: bool | Literal["no_diff"] = True,
    ) -> None:
        self.arguments, self.given = resolve({name: value for name, value in locals().items() if name != "self"})
        arguments = self.arguments
        build.enter_cluster(arguments)
        self.accelerator = Engine(
            arguments.strategy,
            arguments.accelerator,
            build.precision_of(arguments),
            arguments.devices,
            arguments.num_nodes,
        )
        self.last_checkpoint: Path | None = None
        self._fit: FitLoop | None = None
        self._kept: dict[str, Any] | None = None
        profiler, module = find_profiler(arguments.profiler), TrainModule()
        notices: Preemption | None = arguments.preemption
        hooks = self._hooks_of(module, profiler)
        self._run = Run(
            engine=self.accelerator,
            arguments=arguments,
            limits=FitLimits(arguments),
            signals=Signals() if notices is None else Signals(notices.numbers, notices.exit_code),
            profiler=profiler,
            callback_list=CallbackList(build.build_callbacks(arguments)),
            hooks=hooks,
            module=module,
            loaders=RunLoaders(module, None, self.strategy, arguments, False, {}),
            logs=Logs(hooks, module),
            state=RunState(),
            progress=Progress(),
        )
        self.strategy.check_settings(summary.settings_of(self._run))

    # what users call --------------------------------------------------------------------------------------------------
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
        """Trains. Begins anew each time, with the weights as they are, unless `ckpt_path` or `Trainer(resume=…)` says
        otherwise.

        Args:
            model: what to train.
            train_dataloaders: a loader, or a dict or list of loaders; or a DataModule.
            val_dataloaders: one or several.
            datamodule: gives loaders in place of the two.
            ckpt_path: a checkpoint's path; "last", the newest whole one in the run's folder; "best"; "auto", the last
                if there is one and this run saved it (see `TrainModule.run_identity`), else anew; "current", where this
                Trainer's own last fit ended. None means the Trainer's `resume`.
            weights_only: for pickle files of other trainers alone: True reads them by torch's safe loader, which runs
                no code; False in full if need be, as `trust=True`. Leyden's own checkpoints hold no pickle.
            restore: "all", "weights", or a set of `weights, optimizers, progress, rng, callbacks, loaders`.
            same_run: what "auto" finds is this run's own, whatever differs (for a job that is requeued unattended).
            trust: `ckpt_path` may be a pickle file: a run of Lightning's goes on, of any other the weights are taken.
            max_epochs: in place of the Trainer's.
            max_steps: in place of the Trainer's.
            **unknown: nothing; an argument by any other name is an error that suggests the nearest.

        Raises:
            ConfigurationError: if something is missing or cannot work, or "auto" found another run's checkpoint; names
                the fix.
            CheckpointError: if the checkpoint is missing or damaged.
            KeyboardInterrupt: after Ctrl-C, when the run has ended in order.
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
        goal = resuming.goal_of_fit(self.arguments, ckpt_path, restore, trust, same_run, weights_only)
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
        """One pass over the validation data.

        Args:
            model: the module; the last one that ran if left out.
            dataloaders: one or several; the module's or datamodule's own if left out.
            ckpt_path: weights to load first: a path, "best" or "last". The weights as they are if left out.
            verbose: print the values.
            datamodule: gives the loaders.
            weights_only: see `fit`: for pickle files of other trainers alone.
            trust: see `fit`.

        Returns:
            For each loader the values that were logged.
        """
        goal = resuming.goal_of_weights(ckpt_path, weights_only, trust)
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
        """One pass over the test data; see `validate`. Tests the weights as they are, never silently the best."""
        goal = resuming.goal_of_weights(ckpt_path, weights_only, trust)
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
            model: the module; the last one that ran if left out.
            dataloaders: one or several.
            datamodule: gives the loaders.
            return_predictions: False if a callback writes them.
            ckpt_path: weights to load first.
            gather: who gets the outputs of all ranks: "all" of them, or the "main" one alone. Ours.
            weights_only: see `fit`: for pickle files of other trainers alone.
            trust: see `fit`.

        Returns:
            Each batch's outputs on the CPU, in the data's order; a list of such lists for several loaders.
        """
        keeps = keeping(return_predictions, gather)
        module, loaders, datamodule = build.to_evaluate(self._run, "predict", model, dataloaders, datamodule)
        goal = resuming.goal_of_weights(ckpt_path, weights_only, trust)
        result: list[Any] | None = self._carry_out("predict", module, datamodule, goal, keeps=keeps, predict=loaders)
        return result

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        exact: bool = True,
        overwrite: bool = True,
        asynchronous: bool | None = None,
        storage_options: Any = None,
    ) -> Path:
        """Writes a checkpoint: a folder, complete or absent.

        Args:
            filepath: its path. A checkpoint that is there is replaced, once the new one is whole.
            weights_only: leave out optimizers, progress and random numbers.
            exact: False lets it be written inside an accumulation window: a resume from it repeats that window.
            overwrite: False keeps what is there; `-v1` and so on is appended to a name that is taken.
            asynchronous: a thread writes it beside the training, of which it holds this very step; see
                `docs/checkpoints.md`. An error is raised at the next step, and the end of fit waits. Outside of fit it
                is written before this returns. None means False, or True with the plugin `AsyncCheckpointIO`.
            storage_options: for a `CheckpointIO`, which is handed it.

        Returns:
            The path that was written, or will be.

        Raises:
            LeydenError: inside an accumulation window.
            CheckpointError: if it cannot be written, or something other than a checkpoint is there; the previous one
                stays whole.
        """
        what = {"weights_only": weights_only, "exact": exact, "overwrite": overwrite}
        what["asynchronous"] = saving.beside(self._run, asynchronous)
        path = Path(os.path.expanduser(filepath))
        with self._run.heartbeat.during(Phase.SAVING):
            self.last_checkpoint = saving.store(self._run, self._fit, path, storage_options, **what)
        return self.last_checkpoint

    def trial(self, callbacks: Sequence[Callback] = (), **arguments: Any) -> Trainer:
        """Returns a Trainer for short runs on the same devices, in the same precision, that write and print nothing.

        Args:
            callbacks: of the trial. Of this Trainer's own it has `GradientAccumulation`, `ActivationCheckpointing`,
                and silent loggers in place of loggers; of the module's own a `GradientAccumulation`.
            **arguments: in place of this Trainer's.
        """
        own = for_trial(self.arguments, self.callbacks, self.state.stage is not None, given=arguments)
        trial = Trainer(**{**own, **arguments, "callbacks": [*own["callbacks"], *callbacks]})
        trial._run.callback_list.take_only(GradientAccumulation)
        return trial

    def rest_schedulers(self) -> None:
        """From here on this run's schedulers do not step: for callbacks that set the learning rates themselves."""
        self._run.rest_schedulers()

    def update_batch_norm(self) -> bool:
        """Computes batch norm's statistics anew for the weights as they are, within fit: torch's `update_bn`.

        All ranks call it, between two steps. `training_step` runs on each batch of the training data, without
        gradients; what it logs is dropped, and random numbers are as before. Returns False, with the statistics as they
        were, if a signal interrupted it.
        """
        if self.state.stage != "fit":
            raise LeydenError("update_batch_norm reads the training data of a fit: call it in a hook of one.")
        return update_batch_norm(self._run)

    def roll_back(self, further_batches: int = 0) -> Path:
        """Goes back to this run's last checkpoint, but not in the data, and returns its path. Ours.

        All ranks call it in `on_train_batch_end`. `further_batches` are passed over, too. See "Bad steps" in the docs.
        """
        return roll_back(self._run, self._fit, further_batches)

    def finish_copies(self) -> None:
        """Waits until an asynchronous save has copied its state: call it in a step before you write weights yourself.

        Leyden does so before a step of an optimizer, before an evaluation, and before hooks other than the steps, but
        not within a hook of yours that saves and then writes.

        Raises:
            CheckpointError: if a weight was written before.
        """
        self._run.saves.finish_copies()

    def finish_saving(self) -> None:
        """Waits until an asynchronous save is committed; the end of fit does so. On several ranks, all call it.

        Raises:
            CheckpointError: if it failed; its cause is the error.
        """
        self._run.finish_saves()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints as Python's `print` does, on the main process alone, and above a progress bar."""
        self._run.print(*args, **kwargs)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """A module built in this context is built on the run's device (none, where it is sharded) and in its precision.

        Args:
            empty_init: leave out what is drawn at random, for weights that a checkpoint will bring.
        """
        with self.strategy.init_module(empty_init):
            yield

    # one run ----------------------------------------------------------------------------------------------------------
    def _carry_out(
        self, stage: str, model: Any, datamodule: Any, goal: resuming.Goal, keeps: str = "all", **loaders: Any
    ) -> Any:
        """The life of a run: set-up, loop, tear-down. Whoever has a hook for it hears of an error."""
        if self.state.stage is not None:
            raise LeydenError(
                f"Trainer.{stage} was called while this Trainer's {self.state.stage} runs: call it afterwards, or with "
                "a Trainer of its own."
            )
        if self.strategy.ranks.are_planned:
            return self._launch(stage, model, datamodule, goal, keeps, **loaders)
        # Before signals are caught: a rank that waits here for one that failed must end by the first.
        self.strategy.setup_environment()
        goal = resuming.settled(self.callbacks, goal)
        self._run = run = self._next_run(stage, model, datamodule, goal, loaders)
        with ExitStack() as stack:
            watch = self.arguments.hang_timeout, self.arguments.default_root_dir
            stack.enter_context(watched(run.heartbeat, self.strategy.ranks, *watch))
            stack.push(lambda kind, error, trace: run.teardown(error))
            stack.enter_context(run.signals.caught_on(self.world_size))
            departure = stack.enter_context(run.departure())
            stack.enter_context(build.runtime_settings(self.arguments))
            result = None
            try:
                restorer = self._setup(run, goal)
                if stage == "fit":
                    self._fit = loop = FitLoop(run)
                    restored, self._kept = run.prepare_fit(restorer, goal, self._kept), None
                    loop.run(restored)
                    # What ckpt_path="current" resumes.
                    self._kept = saving.rank_state(run, loop)
                    run.hooks.fire_all("on_fit_end")
                elif stage == "predict":
                    found = run.loaders.evaluation("predict")
                    result = PredictionLoop(run, found, keeps).predict() if found else []
                else:
                    kind, name = ("val", "validation") if stage == "validate" else ("test", "test")
                    found = run.loaders.evaluation(kind)
                    result = EvaluationLoop(run, name, found).run() if found else []  # type: ignore[arg-type]
                run.heartbeat.mark(Phase.ENDING)
                ending.in_order(run, partial(self._last_words, run), departure.leave)
                if stage == "fit":
                    run.logs.nans.warn()
            except BaseException as error:
                run.heartbeat.mark(Phase.ENDING)
                ending.by_error(run, error, (run.module, self, *run.callbacks))
                raise
        return result

    def _launch(
        self, stage: str, model: nn.Module, datamodule: Any, goal: resuming.Goal, keeps: str, **loaders: Any
    ) -> Any:
        """Starts the ranks, which carry out the run; takes over what it came to."""
        if goal.continues and self.strategy.ranks.start_method != "script":
            raise ConfigurationError(
                "ckpt_path='current' needs optimizers, which do not come back from ranks that are forked or spawned: "
                "save a checkpoint and give its path."
            )
        module, _ = build.unwrapped(model)
        run = stage, model, datamodule, goal, keeps
        found = start_ranks(self.strategy.ranks, self.arguments.preemption, self._on_rank, run, loaders)
        take_over(module, self.callbacks, found)
        module._join(self)
        self._run.take_over(module, found)
        self.last_checkpoint = found["last_checkpoint"]
        return found["result"]

    def _on_rank(self, run: tuple[Any, ...], loaders: dict[str, Any]) -> dict[str, Any] | None:
        """Carries out the run on a rank that was forked or spawned; rank 0 sends back what came of it."""
        self.strategy.ranks.become_rank(rank_environment())
        # Those that the other process knows; a `setup` may add others.
        callbacks = list(self.callbacks)
        result = self._carry_out(*run, **loaders)
        found = sent_back(self._run, callbacks, result, self.last_checkpoint)
        return found if self.is_global_zero else None

    def _next_run(
        self, stage: str, model: nn.Module, datamodule: DataModule | None, goal: resuming.Goal, loaders: dict[str, Any]
    ) -> Run:
        module, compiled = build.unwrapped(model)
        if compiled is not None:
            self.accelerator.check_compiled()
        if stage == "fit" and goal.continues and (self._kept is None or self.module is not module):
            raise ConfigurationError(
                "ckpt_path='current' continues with the module of this Trainer's last fit: fit it first."
            )
        starts_anew = stage == "fit" and not goal.continues
        if starts_anew:
            self._kept = None
            self._run.callback_list.start_over()
        hooks = self._hooks_of(module, self._run.profiler)
        return self._run.next(stage, module, datamodule, compiled, loaders, hooks, starts_anew)

    def _hooks_of(self, module: TrainModule, profiler: Profiler | None) -> Hooks:
        """The hooks of a run whose callbacks are not known yet."""
        return Hooks((), self, module, TrainModule, profiler)

    def _setup(self, run: Run, goal: resuming.Goal) -> Restorer:
        """Everything up to the weights; returns what restores the rest of the checkpoint that the run resumes."""
        run.begin()
        run.module._join(self, run.traced or run.logs)
        if run.datamodule is not None:
            run.datamodule._join(self)
        lock = resuming.lock_of(run)
        if lock is not None:
            run.hold(lock, alone=goal.path == "auto", each_node=self.saves_on_each_node)
        return run.setup(*resuming.open_reader(run, goal), goal)

    def _last_words(self, run: Run) -> str | None:
        """Why and where the fit ended; None after anything else."""
        if run.state.stage != "fit" or run.signals.received == LEAVE:
            return None
        if run.signals.received is not None:
            at = f"the last checkpoint is {self.last_checkpoint}" if self.last_checkpoint else "no checkpoint was saved"
            how = f"preempted by {run.signals.name}" if run.signals.preempted else "stopped"
            return f"\n{how} at step {self.global_step}, epoch {self.current_epoch}: {at}"
        if self._fit is None or self.arguments.barebones:
            return None
        reason, seconds = run.limits.reason(run.progress, run.should_stop), self._fit.seconds()
        return summary.closing_lines(run.progress, self.checkpoint_callbacks, self.last_checkpoint, reason, seconds)

    def _evaluate(
        self, stage: str, model: Any, dataloaders: Loaders, datamodule: Any, verbose: bool, goal: resuming.Goal
    ) -> list[dict[str, float]]:
        module, loaders, datamodule = build.to_evaluate(self._run, stage, model, dataloaders, datamodule)
        kind = "val" if stage == "validate" else "test"
        results: list[dict[str, float]] = self._carry_out(stage, module, datamodule, goal, **{kind: loaders}) or []
        if verbose and (lines := summary.result_lines(results)):
            self.print(lines)
        return results

    def announce(self) -> None:
        """Prints what runs where; see `Run.announce`."""
        self._run.announce()

    def send(self, values: dict[str, Value], step: int | None = None) -> None:
        """Sends values to the loggers, read back from the device all at once."""
        self._run.send(values, step)
