"""The fit loop: epochs, accumulation windows, and the work between them.

Start with `FitLoop.run`, a whole fit, and `FitLoop._epoch`, an epoch batch by batch; the rest of the file serves them.
The optimization step is in `step.py`, validation in `validation.py`; `trainer/events/hooks.py` lists all hooks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.data.cursor import LoaderCursor, lookahead
from leyden.data.sharding import NO_SAMPLES, Share
from leyden.trainer.events.hooks import overrides
from leyden.trainer.logging.values import Value
from leyden.trainer.loops.agreement import Agreement
from leyden.trainer.loops.batches import BatchCounter, DataloaderIter, check_iterator, takes_iterator, warn_of_length
from leyden.trainer.loops.clock import Clock
from leyden.trainer.loops.loader_timer import LoaderTimer
from leyden.trainer.loops.schedulers import Schedulers
from leyden.trainer.loops.step import Step, detached, make_step
from leyden.trainer.loops.validation import Validation
from leyden.trainer.module import TrainModule
from leyden.trainer.reporting.summary import settings_of
from leyden.trainer.saved.saving import check_composable, finish_saves
from leyden.trainer.starting.build import seconds_of
from leyden.trainer.starting.differences import check_batches

if TYPE_CHECKING:
    from leyden.checkpoint.owners import Unclaimed
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run import Run


class FitLoop:
    """One call of `Trainer.fit`.

    Every checkpoint stores `progress.phase`, the phase that the run completed last (see the table in `Progress`). A
    resume derives from it what is pending: `_resume` finishes the step, validation or epoch that the saved run began,
    and `run` continues from there.

    Args:
        run: the run that this loop drives.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.module = run.module
        self.strategy = run.strategy
        self.engine = run.engine
        self.hooks = run.hooks
        self.logs = run.logs
        self.progress = run.progress
        self.limits = run.limits
        self.arguments = run.arguments
        self.accumulation = run.accumulation
        self._restored: Unclaimed | None = None
        self.cursor: LoaderCursor | None = None
        self.num_batches: int | None = 0 if run.arguments.limit_train_batches == 0 else None
        """Batches per epoch after `limit_train_batches`; None if the loader has no length."""
        self.closes_epoch = False
        """True while the closing callbacks of `on_train_epoch_end` run; they still see the epoch as current."""
        self.step: Step
        self.schedulers: Schedulers
        self._iterator: Iterator[Any] | None = None
        self._has_follow_up = False
        """Work may follow each step: validation, schedulers, an exchange between ranks, or a profiler to advance."""
        self._logs_every: int | None = None
        """Steps between two rows for the loggers; 0 or None for no rows."""
        self._fires_batch_start = self._fires_batch_end = False
        """Whether `_epoch` calls `_start_hook_ends_epoch` and `_end_batch`: only for listeners or logger rows."""
        self._remaining: Iterator[tuple[Any, bool]] = iter(())
        """The remaining batches of this epoch, as `_batches` yields them."""
        self._empty_epoch = -2
        """The last epoch without data."""
        self._epoch_cut_short = False
        """A request to end the epoch early: a hook returned -1, or a `dataloader_iter` step exhausted its batches."""
        self.window_start = 0
        """Index within the epoch of the first batch of the open window, or of the last window if none is open."""
        self._previous_epoch_exhausted = True
        """True if the previous epoch exhausted the loader."""
        self.counter = BatchCounter(run.progress, run.engine, run.heartbeat)
        self.loader_timer = LoaderTimer(run)
        self.clock = Clock(run.progress, run.limits.max_seconds, seconds_of(run.arguments.val_check_interval))
        self._last_row: tuple[int, Mapping[str, Value]] = (-1, {})
        """The global step and the values of the last row sent to the loggers."""
        self._began = time.perf_counter()
        self._agreement = Agreement(run, self.clock) if run.strategy.ranks.world_size > 1 else None
        self.validation = Validation(run, self.clock, self._agreement)

    # a fit and its epochs ---------------------------------------------------------------------------------------------
    def run(self, restored: Unclaimed | None = None) -> None:
        """Trains until a limit or a stop request ends the fit. With `limit_train_batches=0` only the sanity check runs.

        Args:
            restored: states of a resumed run that the loop restores once its loaders exist.
        """
        self._restored, run = restored, self._run
        self.schedulers = Schedulers(run.schedulers, run.module, run.hooks, run.strategy.ranks, run.schedulers_rest)
        # Before the sanity check, so that random numbers that the loaders' methods draw do not depend on it.
        self.load_training_data()
        self.step = make_step(run, self.schedulers)
        is_iterator_step = takes_iterator(self.module.training_step)
        if is_iterator_step:
            check_iterator(run)
        self.validation.load()
        for optimizer in self.engine.prepared_optimizers:
            optimizer.train()
        if restored is None:
            self.validation.sanity_check()
        if self.arguments.limit_train_batches == 0:
            run.announce()
            return
        self.validation.set_interval(self.num_batches)
        follow_ups = (self.validation.loop, run.profiler, self._agreement)
        self._has_follow_up = bool(run.schedulers) or any(part is not None for part in follow_ups)
        run.announce()
        self.hooks.fire_all("on_train_start")
        self.clock.start()
        if self._agreement is not None:
            self._agreement.exchange()
        if not self.arguments.barebones:
            check_composable(run)
        self.step.begin()
        self._resume()
        self._report_if_done()
        if not self._is_done():
            self.validation.run_at_start()
        while not self._is_done():
            self._look_up_listeners()
            run.history.resume()
            if self.progress.phase == "epoch_start":
                self._begin_epoch()
            elif self.progress.phase == "paused":
                self.progress.settle()
            self.counter.begin_epoch()
            complete = self._iterator_epoch() if is_iterator_step else self._epoch()
            if not complete:
                run.history.pause()
                self._validate_at_stop()
            self._end_epoch(complete)
        self.clock.update()
        run.end_saves()
        self.hooks.fire_all("on_train_end")
        for optimizer in self.engine.prepared_optimizers:
            optimizer.eval()

    def _epoch(self) -> bool:
        """Trains the remaining batches of this epoch.

        A rank that has no sample of a global batch draws `NO_SAMPLES` instead of a batch. It joins the collectives of
        the other ranks; of its batch hooks only closing callbacks run. Values that are constant within an epoch are
        looked up before the loop, because the loop body is the hot path.

        Returns:
            True if the epoch is complete: the loader is exhausted, or a hook cut the epoch short. False if a limit or
            a signal stops the run inside the epoch; a resume continues there.
        """
        progress, window, logs, step = self.progress, self.engine.window, self.logs, self.step
        transfer, count_batch = self._run.loaders.train_transfer, self.counter.count
        accumulates, is_sharded = self.accumulation is not None, self.counter.shares
        has_follow_up = self._has_follow_up
        fires_batch_start, fires_batch_end = self._fires_batch_start, self._fires_batch_end
        self._remaining = self._batches()
        for batch, is_last in self._remaining:
            batch_idx = progress.batch
            if window.is_open:
                window.advance(is_last)
            else:
                window.open(self._window_length() if accumulates else 1, is_last)
                self.window_start = batch_idx
            if is_sharded:
                batch = self._begin_share(*batch)
            elif transfer is not None:
                batch = transfer(batch, 0)
            logs.begin_batch(batch, progress.batches, batch_idx)
            if fires_batch_start and self._start_hook_ends_epoch(batch, batch_idx):
                return True
            outputs = self._run_without_samples(batch_idx) if batch is NO_SAMPLES else step.run(batch, batch_idx)
            window.end_batch()
            count_batch(batch)
            if window.closes and (has_follow_up or is_last or self._epoch_cut_short):
                is_last = self._close_window(is_last)
            if fires_batch_end:
                outputs = detached(outputs)
                self._end_batch(outputs, batch, batch_idx)
            # Freed here so that they do not add to the next step's peak memory.
            outputs = batch = None
            logs.end_batch()
            if is_sharded:
                self._end_share()
            if window.closes:
                if progress.phase == "stepped":
                    self._after_window(progress.ended)
                if self._epoch_cut_short or self._must_stop():
                    return progress.ended
        return True

    def _iterator_epoch(self) -> bool:
        """Trains an epoch with `training_step(dataloader_iter)`, which draws its own batches: one call, one window."""
        progress, window = self.progress, self.engine.window
        self._remaining = self._batches()
        dataloader_iter = DataloaderIter(self._remaining, progress, self.counter, self._prepare_drawn)
        while not dataloader_iter.is_last:
            self.window_start = batch_idx = progress.batch
            window.open(length=1)
            self.logs.begin_batch(dataloader_iter, progress.batches, batch_idx)
            if self._fires_batch_start and self._start_hook_ends_epoch(dataloader_iter, batch_idx):
                return True
            try:
                outputs = self.step.run(dataloader_iter, batch_idx)
            except StopIteration:
                # The step drew past the end of the loader. Batches that it drew in this call are dropped.
                window.abandon()
                self._end_share()
                self._epoch_cut_short = True
                return True
            window.end_batch()
            self._close_window(dataloader_iter.is_last)
            outputs = detached(outputs)
            self._end_batch(outputs, dataloader_iter, batch_idx)
            outputs = None
            self.logs.end_batch()
            self._end_share()
            self._after_window(progress.ended)
            if progress.ended or self._must_stop():
                return progress.ended
        return True

    # a batch's start and end ------------------------------------------------------------------------------------------
    def _begin_share(self, batch: Any, share: Share) -> Any:
        """Records this rank's share of the global batch; returns its batch on the device."""
        self.engine.begin_batch(share)
        self.engine.window.weigh(share.weight(self.strategy.data_size), share.idle)
        return self._to_device(batch)

    def _prepare_drawn(self, drawn: Any) -> Any:
        return self._begin_share(*drawn) if self.counter.shares else self._to_device(drawn)

    def _to_device(self, batch: Any) -> Any:
        transfer = self._run.loaders.train_transfer
        return batch if transfer is None or batch is None or batch is NO_SAMPLES else transfer(batch, 0)

    def _end_share(self) -> None:
        self.engine.end_batch()
        self.engine.window.weigh(1.0, idle=False)

    def _start_hook_ends_epoch(self, batch: Any, batch_idx: int) -> bool:
        """Fires `on_train_batch_start`; True if it ends the epoch before this batch, not when the window closes."""
        if batch is NO_SAMPLES or self.hooks.fire_all("on_train_batch_start", batch, batch_idx) != -1:
            return False
        self._epoch_cut_short = True
        window = self.engine.window
        if window.index > 0 or self._agreement is not None:
            # An open window must still step, and ranks must end the epoch together: `_close_window` ends it.
            return False
        window.abandon()
        return True

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fires `on_train_batch_end`. Closing callbacks run after the row is sent to the loggers."""
        if batch is not NO_SAMPLES:
            self.hooks.fire("on_train_batch_end", outputs, batch, batch_idx)
        if self.engine.window.closes:
            self._log_step()
        self.hooks.close("on_train_batch_end", outputs, batch, batch_idx)

    # an epoch's start and end -----------------------------------------------------------------------------------------
    def _look_up_listeners(self) -> None:
        self._logs_every = self.arguments.log_every_n_steps if self._run.loggers else 0
        self._fires_batch_start = self.hooks.listens("on_train_batch_start")
        self._fires_batch_end = self.hooks.listens("on_train_batch_end") or bool(self._logs_every)

    def _begin_epoch(self) -> None:
        progress = self.progress
        every = self.arguments.reload_dataloaders_every_n_epochs
        if every and progress.epoch > 0 and progress.epoch % every == 0:
            self.load_training_data(reload=True)
        self.validation.reload_if_due()
        assert self.cursor is not None
        self.window_start, self._epoch_cut_short = 0, False
        self.hooks.fire_all("on_train_epoch_start")
        # After the hook, as in a plain loop: workers copy the data set as the hook left it, and a shuffle draws its
        # order after any random numbers that the hook draws.
        self._iterator = self.cursor.start(progress.epoch)
        self._limit_batches()
        progress.begin_epoch()
        self.strategy.check_trained()

    def _run_without_samples(self, batch_idx: int) -> Any:
        """Joins the collectives of a step for which this rank has no sample. Fires no hook and logs nothing."""
        assert self.cursor is not None
        cursor = self.cursor
        self.logs.end_batch()
        if batch_idx == 0:
            self.logs.note_idle("train")
        with self.logs.discarding():
            self.step.run_without_samples(lambda: self._to_device(cursor.filler()), batch_idx)
        return None

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """Yields (batch, is_last) for the remaining batches; a sharded loader's batch is a pair with its `Share`."""
        if self.progress.cut:
            return
        assert self._iterator is not None and self.cursor is not None
        iterator, total = self.loader_timer.timed(self._iterator), self.num_batches
        if self.progress.ended:
            # Resumed after the epoch's last window: no batch remains, but the loader has yet to reach its end.
            total = self.progress.batch
        elif total is None:
            limit = self._limit_without_length()
            # The lookahead must not draw past the limit.
            yield from lookahead(itertools.islice(iterator, None if limit is None else limit - self.progress.batch))
            return
        for number in range(self.progress.batch + 1, total + 1):
            try:
                # Yielded without a local name, which would keep the last batch in memory during a validation.
                yield next(iterator), number == total
            except StopIteration:
                warn_of_length(total, number - 1)
                return
        if self.progress.batch == self.cursor.length:
            # The last next() of a plain loop: a generator runs to its end, and workers shut down.
            next(iterator, None)

    def pass_over(self, batches: int) -> None:
        """Skips up to this many of the epoch's remaining batches: draws and counts them without training on them."""
        if self.counter.skip(self._remaining, batches) and not self.progress.ended:
            # The window was the epoch's last. Check again whether validation is due, now with the skipped batches.
            self.progress.cut_short()
            self._record_step(True)

    def _limit_without_length(self) -> int | None:
        """Returns `limit_train_batches` for a loader without a length; None for no limit, or if the length is known."""
        limit = self.arguments.limit_train_batches
        return limit if self.num_batches is None and isinstance(limit, int) else None

    def _end_epoch(self, complete: bool) -> None:
        """Ends an epoch.

        Args:
            complete: False if the run stops inside the epoch; its metric sums are then kept for a resume.
        """
        progress = self.progress
        if not complete:
            self._run.history.pause()
        self._remaining = iter(())  # Drops the loader's iterator, whose workers then shut down, in a cut epoch too.
        self.counter.end_epoch()
        fell_short = self.num_batches is not None and 0 < progress.batch < self.num_batches
        if self.engine.window.is_open:
            self._close_short_window()
        elif complete and not progress.ended and (self._epoch_cut_short or fell_short or progress.cut):
            self._finish_cut_epoch()
        if self._run.signals.received is not None and (not complete or progress.phase == "stepped"):
            return
        if complete and progress.batch == 0 and not progress.cut:
            self._note_empty_epoch()
        self.strategy.check_trained()
        self.hooks.fire("on_train_epoch_end")
        self._run.send_epoch(*self.logs.reduce_epoch("train", keep=not complete))
        if complete and self.module.automatic_optimization:
            self._step_on_plateau("epoch", progress.epoch + 1)
        self.clock.update()
        progress.end_epoch(complete)
        self.closes_epoch = True
        self.hooks.close("on_train_epoch_end")
        self.closes_epoch = False
        if self._agreement is not None:
            self._agreement.exchange(epoch_ends=True)
        if complete:
            self._iterator = None
            if not self._is_done():
                self._next_epoch()

    def _note_empty_epoch(self) -> None:
        """Warns of an epoch without data. Raises if the run has trained on none yet, or after two of them in a row."""
        epoch = self.progress.epoch
        if self.progress.batches == 0 or self._empty_epoch == epoch - 1:
            raise ConfigurationError("the training loader yielded no batch: an epoch needs at least one.")
        self._empty_epoch = epoch
        warn(f"the training loader yielded no batch in epoch {epoch}.")

    def _close_short_window(self) -> None:
        """Steps the open window after a loader ended early; gradients are averaged over the batches it has."""
        window = self.engine.window
        window.close_early()
        self.strategy.sync_gradients()
        self.step.close(self.progress.batch - 1)
        window.end_batch()
        self._record_step(True)
        self._log_step()
        self._validate_and_schedule()

    def _finish_cut_epoch(self) -> None:
        """Ends an epoch whose last window was not known to be the last: a hook cut it, or the length was wrong."""
        self.progress.cut_short()
        # No batches since the last window, which has already checked its own validation interval.
        self.window_start = self.progress.batch
        self._record_step(True)
        self._validate_and_schedule()

    def _next_epoch(self) -> None:
        self._previous_epoch_exhausted = self._is_exhausted()
        self.progress.next_epoch()

    # windows ----------------------------------------------------------------------------------------------------------
    def _window_length(self) -> int:
        """Returns the number of batches in the window that begins now. An epoch's last window may be shorter."""
        assert self.accumulation is not None
        self.counter.begin_window()
        length = self.accumulation.batches(self.accumulation.at(self.progress), self._run.loaders.samples_per_batch)
        return length if self.num_batches is None else min(length, self.num_batches - self.progress.batch)

    def _close_window(self, is_last: bool) -> bool:
        """Closes a window after its step; returns True if the epoch ends here, possibly at another rank's request."""
        if self._agreement is not None:
            self._epoch_cut_short = self._agreement.read(self._epoch_cut_short)
        is_last = is_last or self._epoch_cut_short
        self._record_step(is_last)
        return is_last

    def _after_window(self, is_last: bool) -> None:
        """Does the work between two windows, after the hooks of the batch."""
        self._validate_and_schedule()
        if self._agreement is not None:
            self._agreement.send(wait=is_last)

    def _record_step(self, is_last: bool) -> None:
        """Records in the progress, for checkpoints saved from now on, that the window stepped and what is due next."""
        progress = self.progress
        is_due = self.validation.is_due(is_last, self.window_start)
        progress.end_window(is_last, is_due, progress.skipped if progress.cut else self.step.was_skipped)
        if is_last and self._run.schedulers and self.module.automatic_optimization:
            self.schedulers.step("epoch", progress.epoch + 1)
        if self._run.profiler is not None and not progress.cut:
            self._run.profiler.step()

    def _log_step(self) -> None:
        """Sends the step's values to the loggers if a row is due."""
        step, every = self.progress.global_step, self._logs_every
        if every and step % every == 0 and self.step.is_counted:
            values = self.logs.step_values("train")
            if self._last_row[0] == step:
                # A row of this step was sent before a checkpoint: send only the values logged since.
                values = {name: value for name, value in values.items() if self._last_row[1].get(name) is not value}
            self._run.send(values)
            self._last_row = step, values

    def _log_before_checkpoint(self) -> None:
        """Sends the row of the current step before a save in `on_train_batch_end`, which runs before `_log_step`."""
        ends_window = self.hooks.current == "on_train_batch_end" and self.engine.window.closes
        if ends_window and self._last_row[0] != self.progress.global_step:
            self._log_step()

    def _validate_and_schedule(self) -> None:
        """Runs the validation due after a step, then the schedulers that use its result. A resume calls it too."""
        progress = self.progress
        if progress.phase == "stepped" and progress.validation_due and not self.validation.run():
            return
        if progress.phase in ("stepped", "validated"):
            progress.end_validation()
            schedulers_follow = bool(self._run.schedulers) and not (progress.cut or progress.skipped)
            if schedulers_follow and self.module.automatic_optimization:
                self._step_on_plateau("step", progress.stepped)
            progress.settle()

    def _step_on_plateau(self, interval: str, count: int) -> None:
        """Steps the schedulers that depend on a monitored value, and sends the values they log to the loggers."""
        due = self.schedulers.due_on_plateau(interval, count)
        if not due:
            return
        self.logs.begin_apart()
        self.schedulers.step_on_plateau(due, self.logs.callback_metrics)
        every = 1 if interval == "epoch" else self.arguments.log_every_n_steps
        if every and self.progress.global_step % every == 0:
            self._run.send(self.logs.step_values("train"))
        if interval == "epoch" and overrides(self.module, "lr_scheduler_step", TrainModule):
            # The epoch's values are already reduced, so values logged by `lr_scheduler_step` are reduced separately.
            self._run.send_epoch(*self.logs.reduce_epoch("train"))

    def _validate_at_stop(self) -> None:
        """Validates the final weights if `should_stop` ended the run inside an epoch."""
        is_requested = self._run.should_stop if self._agreement is None else self._agreement.stops
        if is_requested and self._has_reached_minimum() and self._run.signals.received is None:
            self.validation.run_at_stop()

    # data -------------------------------------------------------------------------------------------------------------
    def load_training_data(self, reload: bool = False) -> None:
        """Creates the training loader if there is none yet.

        Args:
            reload: create it again (`reload_dataloaders_every_n_epochs`).
        """
        if (self.cursor is None or reload) and self.arguments.limit_train_batches != 0:
            self.cursor, self.num_batches = self._run.loaders.training()
            self.counter.begin_loader(self.cursor.shares)
            check_batches(self.strategy.ranks, self.num_batches)
            self.strategy.check_settings(settings_of(self._run, loader=self._run.loaders.train_loader))

    def _limit_batches(self) -> None:
        """Sets `num_batches` for this epoch. It changes if the epoch began with a different global batch size."""
        assert self.cursor is not None
        if self.cursor.length is not None:
            self.num_batches = self._run.loaders.limited(self.cursor.length)

    def _is_exhausted(self) -> bool:
        """True if the last epoch exhausted the loader: no limit and no hook ended it early."""
        assert self.cursor is not None
        is_limited = self.num_batches != self.cursor.length or self.progress.batch == self._limit_without_length()
        return not is_limited and not self.progress.cut

    def progress_to_save(self) -> Progress:
        """Returns the progress for a checkpoint. Inside a fit, first updates loggers and clock to the same point."""
        if self._run.state.stage == "fit":
            self._log_before_checkpoint()
            self.clock.update()
        return self._resumable_progress()

    def _resumable_progress(self) -> Progress:
        """Returns the current progress; inside a window the progress at its start, since a resume repeats it."""
        if not self.engine.window.is_open:
            return self.progress
        return self.counter.at_window_start(self.window_start, self.accumulation is not None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the positions of the training and validation loaders.

        During a validation that a resume repeats, it includes the metrics and random states from before the pass.
        """
        if self.cursor is None:
            return {"loader": None, **self.validation.before_pass()}
        progress, validation = self._resumable_progress(), self.validation.loader_states()
        if progress.is_inside:
            loader = {"place": self.cursor.state_dict(progress.batch), "rest": None, "validation": validation}
        else:
            exhausted = self._previous_epoch_exhausted if progress.phase == "epoch_start" else self._is_exhausted()
            loader = {"place": None, "rest": self.cursor.rest_state(exhausted), "validation": validation}
        return {"loader": loader, **self.validation.before_pass()}

    # stopping ---------------------------------------------------------------------------------------------------------
    def _is_done(self) -> bool:
        """True if no further epoch begins."""
        return self.limits.epochs_reached(self.progress.epochs_done) or self._must_stop()

    def _report_if_done(self) -> None:
        """Reports that a resumed run has nothing to train because its checkpoint has already reached the limits."""
        reached = self.limits.reached(self.progress)
        if self._restored is not None and reached and not self.arguments.barebones:
            self._run.report(
                f"nothing is left to do: the run is at epoch {self.progress.epoch}, step {self.progress.global_step}, "
                f"and has reached {' and '.join(reached)}. Set a higher limit to continue training."
            )

    def _must_stop(self) -> bool:
        """True if a limit, a signal or `should_stop` ends the run between this window and the next."""
        run = self._run
        if run.signals.received is not None:
            return True
        if self.limits.max_steps != -1 and self.progress.global_step >= self.limits.max_steps:
            return True
        agreement = self._agreement
        if agreement is None:
            time_is_up = run.limits.max_seconds is not None and self.clock.time_is_up()
            return time_is_up or (run.should_stop and self._has_reached_minimum())
        if agreement.stops and self._has_reached_minimum():
            # Sets `should_stop` also on ranks that did not request the stop.
            run.ask_to_stop()
            return True
        return agreement.time_is_up

    def seconds(self) -> float:
        """Returns the seconds since this fit began, including the sanity check but not the runs it resumed from."""
        return time.perf_counter() - self._began

    def _has_reached_minimum(self) -> bool:
        """True once `min_epochs` and `min_steps` are reached; until then `should_stop` has no effect."""
        return self.limits.past_minimum(self.progress.epochs_done, self.progress.global_step)

    # resume -----------------------------------------------------------------------------------------------------------
    def _resume(self) -> None:
        """Restores a resumed run's position in the data, and finishes the step or epoch that the saved run began."""
        if self._restored is None:
            return
        if self.progress.phase != "paused":
            # Otherwise the limit may still hold, and the rows of its epoch's end are the last ones.
            self._run.history.resume()
        with self._restored.blame("loader"):
            inside = self._restore_loaders(self._restored.get("loader"))
        # Random states last, because everything before may draw random numbers.
        self._restored.load("logs", "metrics", "rng")
        self.validation.decide(self._restored.get("window_start") if inside else None)
        finish_saves(self._run)
        progress = self.progress
        if self._restored.get("owes_plateau"):
            self._step_on_plateau("epoch", progress.epoch + 1)
        if progress.phase == "epoch_end" and not self._is_done():
            self._next_epoch()
        elif inside and progress.phase != "paused":
            self._validate_and_schedule()
            if self._must_stop():
                self._end_epoch(complete=progress.ended)

    def _restore_loaders(self, loader: dict[str, Any] | None) -> bool:
        """Restores the loaders' positions, unless `restore=` excludes them; returns True inside an epoch."""
        progress, inside = self.progress, self.progress.is_inside
        assert self.cursor is not None
        if inside and loader is not None:
            self._iterator = self.cursor.resume(progress.epoch, loader["place"])
            self._limit_batches()
        elif inside and (progress.ended or progress.cut):
            # This epoch has no batches left.
            self._iterator = iter(())
        elif inside:
            # Without its loader state, the epoch restarts from its first batch.
            progress.repeat_epoch()
            inside = False
        elif loader is not None:
            self.cursor.load_rest_state(loader["rest"])
        if loader is not None:
            self.validation.load_loader_states(loader["validation"])
        return inside
