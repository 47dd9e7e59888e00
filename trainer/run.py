"""Run: one call of fit, validate, test or predict, with all of its parts. RunState: the stage that it is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.checkpoint.saves import Saves
from leyden.checkpoint.status import ENDINGS, RunStatus
from leyden.checkpoint.trained import Trained
from leyden.core.rank_zero import inform, warn
from leyden.launch.heartbeat import Heartbeat, Phase
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.ending import call_teardown
from leyden.trainer.engine.schedulers import SchedulerConfig, parse
from leyden.trainer.events.progress import Progress
from leyden.trainer.hparams import hparams_to_log
from leyden.trainer.logging.history import EpochRows
from leyden.trainer.logging.logs import Logs
from leyden.trainer.logging.values import Value, are_finite, read_back, readable_losses
from leyden.trainer.plugins import end_plugins, wait_for
from leyden.trainer.reporting.rows import send_rows
from leyden.trainer.reporting.summary import five_lines, settings_of
from leyden.trainer.saved.checkpoint_folders import are_on_each_node, places_of
from leyden.trainer.starting.build import (
    accumulation_of,
    check_steps,
    checkpoint_io,
    cluster_of,
    loggers_of,
    prepare_data,
    warn_if_untrained,
    warn_of_parts_in_eval_mode,
)
from leyden.trainer.starting.loaders import Loaders

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.callbacks.gradient_accumulation import GradientAccumulation
    from leyden.callbacks.loggers.logger import Logger
    from leyden.checkpoint.checkpoint_io import CheckpointIO
    from leyden.checkpoint.format.bucket import Place
    from leyden.checkpoint.owners import Unclaimed
    from leyden.strategies.base import Strategy
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.datamodule import DataModule
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.events.departure import Departure
    from leyden.trainer.events.hooks import Hooks
    from leyden.trainer.events.signals import Signals
    from leyden.trainer.logging.logs import TracedLogs
    from leyden.trainer.module import TrainModule
    from leyden.trainer.profilers import Profiler
    from leyden.trainer.saved.goal import Goal
    from leyden.trainer.saved.identity import Identity
    from leyden.trainer.saved.restoring import Restorer
    from leyden.trainer.saved.resuming import Reader
    from leyden.trainer.starting.callback_list import CallbackList
    from leyden.trainer.starting.fit_limits import FitLimits


@dataclass(slots=True)
class RunState:
    """The stage of a run.

    Attributes:
        stage: the Trainer method that is running: "fit", "validate", "test" or "predict"; None outside of a run.
        pass_of: the evaluation that is running, also within fit: "validation", "test" or "predict"; None without one.
        sanity_checking: True while the evaluation is the sanity check before training.
        is_set_up: True once every `setup` has been called. From then on, the participants of the run are fixed.
    """

    stage: str | None = None
    pass_of: str | None = None
    sanity_checking: bool = False
    is_set_up: bool = False

    @property
    def fn(self) -> str | None:
        """Lightning's name for `stage`."""
        return self.stage

    def settle(self) -> None:
        """Records that every `setup` has been called. No callback joins or leaves the run after this."""
        self.is_set_up = True

    @contextmanager
    def evaluating(self, pass_of: str) -> Iterator[None]:
        """Records that an evaluation runs within the block."""
        self.pass_of = pass_of
        yield
        # Not in a `finally`: an error is reported with the stage it came from. The next run has a new state.
        self.pass_of = None

    @contextmanager
    def checking_sanity(self) -> Iterator[None]:
        """Records that the block is the sanity check. As in `evaluating`, an error leaves the record in place."""
        self.sanity_checking = True
        yield
        self.sanity_checking = False


@dataclass(eq=False, kw_only=True)
class Run:
    """One call of `fit`, `validate`, `test` or `predict`. The Trainer starts the run and a loop drives it.

    Its parts have three lifetimes. The Trainer lends some to all of its runs. Some are created for this run only. The
    rest carry over from the previous run (see `next`), so a `validate` after a `fit` still knows the current step.

    Attributes:
        engine: the strategy, the accumulation window and the optimizers. Lent by the Trainer, like all before `hooks`.
        arguments: the Trainer's arguments, checked.
        limits: the limits that end a fit.
        signals: the handlers of Ctrl-C and SIGTERM.
        profiler: the profiler of hooks and steps; None without one.
        callback_list: the Trainer's callbacks, from run to run.
        heartbeat: this rank's liveness reports to the launcher.
        hooks: the dispatcher of hooks. Created for this run, like all before `progress`.
        module: the module that this run trains or evaluates.
        datamodule: the DataModule that provides the loaders; None without one.
        compiled: the `torch.compile` wrapper around the module; None without one.
        loaders: the data loaders.
        logs: the values logged so far.
        state: the current stage.
        should_stop: True once a callback, a signal or the user has asked the run to end.
        resting: True once the schedulers have been stopped from stepping.
        origin: a description of the starting point, for the user.
        ckpt_path: the checkpoint that the run starts from; None without one.
        is_profiled: True while the profiler measures the run.
        saves: writes the checkpoints, holds the lock on their folder.
        status: the record in the run's folder that this fit is running; None before it, and on other ranks.
        continued: checkpoints saved by this same training before the fit, the newest last. A rollback may use them.
        progress: the progress of training. Carried over, like the rest; a fit from scratch starts a new one.
        saved: resumable checkpoints that the fit has saved, the newest last.
        schedulers: the learning-rate schedulers, each with its stepping schedule.
        trained: the parameters that the fit has frozen or unfrozen.
        identity: the identity of this training, compared by `ckpt_path="auto"`; None before a fit.
        history: the rows of `trainer.history`.
        writer_folder: the first rank's log folder; None until a fit on several ranks has announced itself.
        folder: the run's folder, with its checkpoints; None before the first fit, and if it writes nothing.
    """

    engine: Engine
    arguments: Arguments
    limits: FitLimits
    signals: Signals
    profiler: Profiler | None
    callback_list: CallbackList
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    hooks: Hooks
    module: TrainModule
    datamodule: DataModule | None = None
    compiled: Any = None
    loaders: Loaders
    logs: Logs
    state: RunState
    should_stop: bool = field(default=False, init=False)
    resting: bool = field(default=False, init=False)
    origin: str = field(default="from scratch", init=False)
    ckpt_path: str | None = field(default=None, init=False)
    is_profiled: bool = field(default=False, init=False)
    saves: Saves = field(default_factory=Saves)
    status: RunStatus | None = field(default=None, init=False)
    continued: list[Place] = field(default_factory=list, init=False)

    progress: Progress
    saved: dict[Place, None] = field(default_factory=dict)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    trained: Trained = field(default_factory=Trained)
    identity: Identity | None = None
    history: EpochRows = field(default_factory=EpochRows)
    writer_folder: str | None = None
    folder: str | None = None

    def next(
        self,
        stage: str,
        module: TrainModule,
        datamodule: DataModule | None,
        compiled: Any,
        given: Mapping[str, Any],
        hooks: Hooks,
        starts_anew: bool,
    ) -> Run:
        """Returns the next run. Everything that is not passed here carries over.

        Args:
            stage: the Trainer method that was called.
            module: the module to train or evaluate.
            datamodule: the DataModule that provides the loaders; None without one.
            compiled: the `torch.compile` wrapper around the module; None without one.
            given: the loaders passed to that method, by kind.
            hooks: the dispatcher of hooks.
            starts_anew: True if progress counts from zero.
        """
        from leyden.trainer.logging.epoch_values import over_ranks

        return dataclasses.replace(
            self,
            hooks=hooks,
            module=module,
            datamodule=datamodule,
            compiled=compiled,
            loaders=Loaders(module, datamodule, self.strategy, self.arguments, stage == "fit", given),
            logs=Logs(hooks, module, over_ranks(self.strategy)),
            state=RunState(stage),
            saves=Saves(before=self.saves),
            progress=Progress() if starts_anew else self.progress,
            saved={} if starts_anew else self.saved,
            history=EpochRows() if starts_anew else self.history,
        )

    def take_over(self, module: TrainModule, found: Mapping[str, Any]) -> None:
        """Adopts the final state of a run whose ranks were forked or spawned from this process.

        Args:
            module: the module that ran.
            found: the value that `start_ranks.final_state` returned on rank 0.
        """
        self.module, self.progress = module, Progress.from_dict(found["progress"])
        self.logs = Logs(self.hooks, module)
        self.logs.load_state_dict(found["logs"])
        self.history.load_state_dict(found["history"])
        self.should_stop = found["should_stop"]
        self.folder = found["folder"]

    # parts of the run -------------------------------------------------------------------------------------------------
    @property
    def strategy(self) -> Strategy:
        return self.engine.strategy

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks. Users may change this list until setup has finished."""
        return self.callback_list.now

    @property
    def loggers(self) -> list[Logger]:
        return loggers_of(self.callbacks)

    @property
    def checkpoint_io(self) -> CheckpointIO | None:
        """The plugin that stores checkpoints; None for checkpoint folders."""
        return checkpoint_io(self.arguments)

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger that has one; without loggers the run's folder, or `default_root_dir`.

        Ranks that write no logs return the first rank's folder. None until a logger such as W&B has made its folder.
        """
        own = (folder for logger in self.loggers if (folder := logger.log_dir) is not None)
        return next(own, self.writer_folder if self.loggers else self.folder or self.arguments.local_root)

    @property
    def accumulation(self) -> GradientAccumulation | None:
        """The callback that sets the length of accumulation windows; None if every batch is a window."""
        return accumulation_of(self.callbacks)

    @property
    def batches_per_step(self) -> int:
        """Number of batches in an accumulation window that starts now."""
        accumulation = self.accumulation
        if accumulation is None:
            return 1
        return accumulation.batches(accumulation.at(self.progress), self.loaders.samples_per_batch)

    @cached_property
    def traced(self) -> TracedLogs | None:
        """The log that compiled steps record into; None without torch.compile."""
        if self.compiled is None and self.arguments.compile is None:
            return None
        from leyden.trainer.logging.logs import TracedLogs

        return TracedLogs(self.logs)

    def step_function(self, name: str) -> Callable[..., Any]:
        """Returns a step of the module as the loop calls it: compiled, checked for NaN and profiled as configured."""
        function: Callable[..., Any] = getattr(self.module, name)
        if self.compiled is not None and self.traced is not None:
            function = self.traced.around(self.compiled.dynamo_ctx(function))
        function = self.strategy.setup_step(function, self.module)
        if self.arguments.detect_anomaly and name == "training_step":
            from leyden.trainer.reporting.advice import checked_for_nan

            function = checked_for_nan(function, self.progress, self.strategy)
        return function if self.profiler is None else self.profiler.wrap(name, function)

    # setup and teardown ----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Configures the callbacks, subscribes them to the hooks, and starts the profiler."""
        from leyden.trainer.engine import debugging

        self.callback_list.begin(self.module.configure_callbacks(), replay_of(self.arguments))
        self.callback_list.join(self.module)
        self.hooks.listen(self.callbacks)
        if self.profiler is not None:
            ranks = self.strategy.ranks
            rank = ranks.global_rank if ranks.world_size > 1 else None
            self.is_profiled = True
            self.profiler.setup(self.state.stage or "", rank, self.arguments.local_root)
        if debugging.is_debugging():
            debugging.begin(self.engine, 1 if self.accumulation is None else self.accumulation.longest)

    def find(self, goal: Goal) -> tuple[Reader | None, str]:
        """Finds the run's folder and opens the checkpoint that the run resumes; see `open_reader`.

        A run that resumes automatically then holds its folder alone: a second one would resume the same checkpoint.
        """
        from leyden.trainer.saved.resuming import detect_shared_folders, open_reader
        from leyden.trainer.saved.run_folder import find_folder

        detect_shared_folders(self)
        searched, folder = find_folder(self, goal)
        if self.state.stage == "fit":
            self.folder = folder
        if goal.path in ("auto", "last"):
            self._hold(alone=goal.path == "auto")
        return open_reader(self, goal, searched)

    def _enter(self, reader: Reader | None, goal: Goal) -> None:
        """Enters the run's folder: that of the checkpoint's run, or the next version."""
        from leyden.trainer.saved.run_folder import enter_folder

        self.folder = enter_folder(self, reader, goal)
        if goal.path != "auto":
            self._hold(alone=False)
        if self.folder is None:
            return
        self.heartbeat.report_to(self.folder)
        if self.state.stage == "fit" and self.strategy.ranks.is_global_zero:
            with self._warning_of_status():
                self.status = RunStatus.begin(Path(self.folder), places_of(self.callbacks, self.checkpoint_root))

    def _hold(self, alone: bool) -> None:
        """Locks the checkpoint folder for this run, or only checks that no other run has locked it.

        Raises:
            LeydenError: on all ranks, if another run holds the folder; names its process.
        """
        from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
        from leyden.trainer.saved.resuming import lock_of

        lock = lock_of(self)
        if lock is not None:
            ranks = CheckpointRanks(self.strategy, lock.folder, are_on_each_node(self.callbacks))
            if alone:
                self.saves.hold(lock, ranks)
            else:
                ranks.keep(lock.check_free)

    @property
    def checkpoint_root(self) -> str | None:
        """Where callbacks that name no folder save: `default_root_dir` if it is in a bucket, else the run's folder."""
        bucket = self.arguments.bucket
        return self.folder if bucket is None else str(bucket)

    def release(self) -> None:
        """Releases the lock on the checkpoint folder, if this run holds it."""
        if self.saves.lock is not None:
            self.saves.lock.release()

    def departure(self) -> Departure:
        """Returns the object that ends this run when it is preempted."""
        from leyden.trainer.events.departure import Departure

        def where() -> str:
            return f"step {self.progress.global_step}, epoch {self.progress.epoch}"

        return Departure(self.arguments.preemption, self.signals, self.strategy.ranks, where, self.release)

    def setup(self, reader: Reader | None, origin: str, goal: Goal) -> Restorer:
        """Sets up the module, the DataModule and the callbacks, then loads the weights.

        Args:
            reader: the reader of the checkpoint that the run resumes; None without one.
            origin: a description of the starting point, for the user.
            goal: the checkpoint to resume, and the parts to restore.

        Returns:
            The restorer of the rest of the checkpoint.
        """
        from leyden.trainer.logging.metrics import gather_readers
        from leyden.trainer.saved.identity import Identity
        from leyden.trainer.saved.restoring import Restorer
        from leyden.trainer.saved.resuming import check_same_run
        from leyden.trainer.starting.differences import check_module
        from leyden.trainer.starting.uncalled_hooks import warn_of_uncalled_hooks

        stage, module, strategy = self.state.stage, self.module, self.strategy
        assert stage is not None
        place = goal.path if self.checkpoint_io is not None else getattr(reader, "path", None)
        self.origin, self.ckpt_path = origin, None if reader is None else str(place)
        if stage == "fit" and not goal.continues:
            self.identity = Identity.of(module, self.datamodule)
            check_same_run(self.identity, reader, goal, strategy.ranks.is_global_zero)
        check_steps(module, stage)
        warn_of_uncalled_hooks(module, self.datamodule, *self.callbacks)
        self._enter(reader, goal)
        with self.heartbeat.during(Phase.PREPARING):
            self._prepare(stage)
        # After _prepare, so that submodules created there are included.
        module._join(module.trainer, self.traced or self.logs)
        self.engine.prepare_module(module)
        gather_readers(module, strategy)
        self.loaders.prepare_transfer(self.profiler, self.callbacks)
        if self.profiler is not None and self.traced is None:
            self.profiler.watch(module)
        if self.profiler is not None and stage != "fit":
            # In a fit the log folder is not final yet: loggers may continue in that of the resumed checkpoint.
            self.profiler.write_to(self.folder or self.log_dir)
        check_module(strategy.ranks, stage, self.arguments, self.callbacks, module)
        restorer = Restorer(self, reader, goal)
        restorer.restore_weights()
        strategy.synchronize(module)
        return restorer

    def _prepare(self, stage: str) -> None:
        """Runs the user's setup code, which may take arbitrarily long: downloads, indices, weights."""
        prepare_data(self.datamodule, self.module, self.strategy.ranks)
        if self.datamodule is not None:
            self.datamodule.setup(stage)
        self.hooks.fire_all("setup", stage)
        self._setup_added(stage)
        with self.strategy.model_context():
            self.module.configure_model()

    def _setup_added(self, stage: str) -> None:
        """Sets up callbacks that a `setup` hook added. From here on the list of callbacks is final for this run."""
        while added := self.callback_list.take_added():
            self.callback_list.join(self.module)
            self.hooks.setup(added, stage)
        self.callback_list.join(self.module)
        self.hooks.listen(self.callbacks)
        self.state.settle()

    def prepare_fit(self, restorer: Restorer, goal: Goal, kept: dict[str, Any] | None) -> Unclaimed | None:
        """Creates the optimizers and schedulers, and restores their states if the run resumes.

        Args:
            restorer: the restorer of the checkpoint that the run resumes.
            goal: the checkpoint to resume, and the parts to restore.
            kept: the final state of the last fit if this one continues it from memory. Its optimizers still exist.

        Returns:
            The states that the loop restores itself; None if there are none.
        """
        from leyden.trainer.reporting.record import record_start
        from leyden.trainer.saved.restoring import kept_state

        module, engine = self.module, self.engine
        if kept is None:
            self._make_optimizers(restorer, goal)
        else:
            engine.prepare_optimizers([module], engine.optimizers)
        if self.profiler is not None and self.arguments.compile is None:
            self.profiler.watch_optimizers(engine.optimizers)
        self.hooks.fire_all("on_fit_start")
        if kept is None:
            self.trained.begin(module)
        restored = restorer.restore_run() if kept is None else kept_state(self, kept)
        if restored is None and not self.arguments.barebones:
            self.callback_list.note_states()
        hparams = hparams_to_log(self.datamodule, module) if self.loggers else {}
        if hparams and self.strategy.ranks.is_global_zero:
            for logger in self.loggers:
                logger.log_hyperparams(hparams)
        record_start(self)
        return restored

    def _make_optimizers(self, restorer: Restorer, goal: Goal) -> None:
        from leyden.trainer.saved.resuming import check_same_run, continued_path, rollback_paths_after
        from leyden.trainer.starting.differences import check_optimizers

        module, engine, strategy = self.module, self.engine, self.strategy
        optimizers, self.schedulers = parse(module.configure_optimizers(), module.automatic_optimization)
        if self.identity is not None:
            self.identity = self.identity.with_optimizers(optimizers)
            check_same_run(self.identity, restorer.reader, goal, strategy.ranks.is_global_zero)
            # A CheckpointIO plugin reads from a temporary folder, which no rollback could return to.
            path = continued_path(self.identity, restorer.reader, goal) if self.checkpoint_io is None else None
            self.continued = [] if path is None else rollback_paths_after(path, restorer.reader)
        strategy.check_settings(settings_of(self, len(optimizers)))
        strategy.precision.reset()
        engine.prepare_optimizers([module], optimizers)
        self.schedulers += [SchedulerConfig(scheduler, "step") for scheduler in strategy.make_schedulers()]
        warn_if_untrained(module, engine.optimizers)
        warn_of_parts_in_eval_mode(module, engine.optimizers)
        engine.check_parameters([module])
        check_optimizers(engine, module, self.schedulers)

    def teardown(self, error: BaseException | None) -> None:
        """Tears down the run and all of its parts.

        Args:
            error: the error that ended the run; None if it succeeded.
        """
        assert self.state.stage is not None
        try:
            call_teardown(self, error)
        finally:
            self.saves.close()
            self.engine.teardown()
            end_plugins((self.checkpoint_io, cluster_of(self.arguments)), error is not None)
            self.state = RunState()
            self.logs.end_batch()
            self.module._leave()
            self.callback_list.leave()
            self.release()

    # while it runs ----------------------------------------------------------------------------------------------------
    def ask_to_stop(self, asked: bool = True) -> None:
        """Ends the fit when the open accumulation window closes; `asked=False` withdraws the request."""
        self.should_stop = asked

    def rest_schedulers(self) -> None:
        """Stops the run's schedulers from stepping, because a callback sets the learning rates."""
        self.resting = True

    def schedulers_rest(self) -> bool:
        """Returns True if the schedulers have stopped stepping."""
        return self.resting

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on rank 0, above the progress bar if one is on screen."""
        if not self.strategy.ranks.is_global_zero:
            return
        from leyden.callbacks.bars.progress_bar import ProgressBar

        bar = next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)
        # Flushed, because a pipe would otherwise hold the text back until its buffer is full.
        (bar.print if bar is not None else partial(print, flush=True))(*args, **kwargs)

    def report(self, text: str) -> None:
        """Logs a text of Leyden's own, unless the Trainer was told to be silent."""
        if self.arguments.verbose:
            inform(text, self.print)

    def note_save(self, path: Place) -> None:
        """Records a committed checkpoint that the run can be resumed from."""
        self.saved.pop(path, None)
        self.saved[path] = None

    def note_weights(self, path: Place) -> None:
        """Records a committed checkpoint of weights only, which may have replaced a resumable one at the same path."""
        self.saved.pop(path, None)

    def finish_saves(self) -> None:
        """Waits for the checkpoint that is being written in the background, and raises its error if it failed."""
        with self.heartbeat.during(Phase.SAVING):
            self.saves.wait()
            wait_for(self.checkpoint_io)

    def end_saves(self) -> None:
        """Waits like `finish_saves`, and makes all later saves synchronous."""
        self.finish_saves()
        self.saves.end()

    def send(self, values: Mapping[str, Value], step: int | None = None) -> None:
        """Sends values to the loggers, with a single read-back from the device.

        Args:
            values: the values, by name.
            step: the step to log them under; defaults to `global_step`.
        """
        loggers = self.loggers
        if values and loggers and self.strategy.ranks.is_global_zero:
            row = (self.progress.global_step if step is None else step, values)
            send_rows(loggers, [row], self.progress.epoch, self.logs.nans)

    def send_epoch(self, values: Mapping[str, Value], logged: Mapping[str, Value]) -> None:
        """Sends the values of an epoch to the loggers, and in a fit to `trainer.history`.

        Losses that no logger gets are checked for nan, too.

        Args:
            values: all values of the epoch.
            logged: those for loggers.
        """
        self.send(logged)
        if self.state.stage == "fit":
            self.history.add(self.progress.epoch, self.progress.global_step, values)
        if self.strategy.ranks.is_global_zero and not self.arguments.barebones:
            sent = logged if self.loggers else {}
            losses = readable_losses((name, value) for name, value in values.items() if name not in sent)
            self.logs.nans.note(read_back(losses), self.progress.global_step)

    def warn_of_nan(self) -> None:
        """Warns, at the end of a fit, about losses and weights that are nan."""
        if self.strategy.ranks.is_global_zero and not self.arguments.barebones:
            # Of weights in 8 bits, kernels for norms are missing.
            held = self.strategy.held(self.module.parameters())
            weights = (p for p in held if p.is_floating_point() and p.element_size() > 1)
            *losses, finite = read_back({**self.logs.losses(), "": are_finite(weights)}).items()
            self.logs.nans.note(dict(losses), self.progress.global_step)
            self.logs.nans.warn(weights_are_finite=finite[1] != 0)

    def announce(self) -> None:
        """Prints the five start-up lines, once the training loader exists.

        Rank 0 broadcasts the folder that its loggers write to.
        """
        from leyden.trainer.engine import debugging

        ranks, silent = self.strategy.ranks, self.arguments.barebones
        if ranks.world_size > 1 and not silent:
            if self.log_dir is None and ranks.is_global_zero:
                for logger in self.loggers:
                    # W&B chooses its folder only when its run begins.
                    _ = logger.experiment
            self.writer_folder = ranks.broadcast(self.log_dir)
        if self.profiler is not None:
            self.profiler.write_to(self.folder or self.log_dir)
        if not silent:
            folder = self.folder or self.log_dir or self.arguments.local_root
            self.report(
                five_lines(self.strategy, self.loaders.train_loader, self.batches_per_step, folder, self.origin)
            )
        if debugging.is_debugging():
            debugging.report(debugging.loader_facts(ranks.global_rank, self.loaders.train_loader))

    def finalize(self, status: str) -> None:
        """Closes all loggers, even if one of them fails, prints the profiler's measurements, and records the ending.

        Args:
            status: "success", "interrupted" or "failed".
        """
        with ExitStack() as stack:
            stack.callback(self._record_ending, ENDINGS[status])
            stack.callback(self._end_profiler)
            for logger in reversed(self.loggers) if self.strategy.ranks.is_global_zero else ():
                stack.callback(logger.finalize, status)

    def _record_ending(self, ending: str) -> None:
        """Records in the run's folder how the fit ended. An error of a logger that closes ends it again."""
        if self.status is not None and self.folder is not None:
            with self._warning_of_status():
                self.status.end(Path(self.folder), ending, self.progress.global_step)

    @contextmanager
    def _warning_of_status(self) -> Iterator[None]:
        """Turns an error of the block into a warning, such as that of a full disk: no run fails for its status."""
        try:
            yield
        except OSError as error:
            warn(f"the status of the run could not be written to {self.folder}: {error.strerror or error}.")

    def _end_profiler(self) -> None:
        """Ends the profiler exactly once, whatever else fails at the end. Errors of the profiler are only warned of."""
        profiler, stage = self.profiler, self.state.stage
        if profiler is None or not self.is_profiled or stage is None:
            return
        self.is_profiled = False
        for end in (profiler.release, profiler.describe, partial(profiler.teardown, stage)):
            try:
                end()
            except Exception as error:
                warn(
                    f"{type(profiler).__name__} failed at the end of the run: {type(error).__name__}: {error}",
                    every_rank=True,
                )
