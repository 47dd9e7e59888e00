"""The fit loop: epochs, accumulation windows, and what happens between them. trainer/events/hooks.py has all hooks.

`run` is the way through a fit, `_epoch` the way through an epoch, batch by batch; everything below them is called from
there. What a batch does to the weights is in `step.py`, validation in `validation.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.data.cursor import LoaderCursor, lookahead
from leyden.trainer.data.sharding import NOTHING, Share
from leyden.trainer.events.hooks import overrides
from leyden.trainer.logging.values import Value
from leyden.trainer.loops.agreement import Agreement
from leyden.trainer.loops.batches import Count, DrawnBatches, check_drawing, draws_itself, pass_over, warn_of_length
from leyden.trainer.loops.clock import Clock
from leyden.trainer.loops.schedulers import Schedulers
from leyden.trainer.loops.step import Step, detached, make_step
from leyden.trainer.loops.validation import Validation
from leyden.trainer.loops.waits import Waits
from leyden.trainer.module import TrainModule
from leyden.trainer.run.reporting.summary import settings_of
from leyden.trainer.run.saved.saving import check_composable
from leyden.trainer.run.starting.build import seconds_of
from leyden.trainer.run.starting.differences import check_batches

if TYPE_CHECKING:
    from leyden.trainer.checkpoint.owners import Unclaimed
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.run.state import Run


class FitLoop:
    """One call of `Trainer.fit`.

    `progress.phase` says what was done last, and every checkpoint holds it (see the table in `Progress`). So a resume
    knows what is left: `_resume` finishes the step, validation or epoch that the saved run had begun, and `run`
    continues from there.

    Args:
        run: of which it is the loop.
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
        """Batches in an epoch, as limited; None where the loader does not know."""
        self.closes_epoch = False
        """True while the closing callbacks of an epoch's end run; for them it is still the current epoch."""
        self.step: Step
        self.schedulers: Schedulers
        self._iterator: Iterator[Any] | None = None
        self._settles = False
        """Something may follow a step: a validation, schedulers, other ranks, or a profiler that counts it."""
        self._logs_every: int | None = None
        """Steps from one of the loggers' rows to the next; 0 or None where they get none."""
        self._listens_start = self._is_watched = False
        """Some hook listens for the start of a batch, for its end."""
        self._left: Iterator[tuple[Any, bool]] = iter(())
        """The batches left of this epoch, as `_batches` yields them."""
        self._cut = False
        """The epoch should end here: a hook returned -1, or a step that draws its own batches ran out."""
        self.window_start = 0
        """Index in the epoch of the first batch of the open window, or of the last one."""
        self._former_ended = True
        """The epoch before this one was read to its end."""
        self.count = Count(run.progress, run.engine, run.heartbeat)
        self._waits = Waits(run)
        self.clock = Clock(run.progress, run.limits.max_seconds, seconds_of(run.arguments.val_check_interval))
        self._row: tuple[int, Mapping[str, Value]] = (-1, {})
        """The step of the loggers' last row, and its values."""
        self._began = time.perf_counter()
        self._agreement = Agreement(run, self.clock) if run.strategy.ranks.world_size > 1 else None
        self.validation = Validation(run, self.clock, self._agreement)

    # the way through a fit --------------------------------------------------------------------------------------------
    def run(self, restored: Unclaimed | None = None) -> None:
        """Trains until a limit or a request ends it. With `limit_train_batches=0` it only runs the sanity check.

        Args:
            restored: the states of a resumed run, which the loop takes back when its loaders are there.
        """
        self._restored, run = restored, self._run
        self.schedulers = Schedulers(run.schedulers, run.module, run.hooks, run.strategy.ranks, run.schedulers_rest)
        if self.accumulation is not None and self.accumulation.counts_samples:
            self.load_training_data()
        self.step = make_step(run, self.schedulers)
        draws = draws_itself(self.module.training_step)
        if draws:
            check_drawing(run)
        if restored is None:
            self.validation.sanity_check()
        if self.arguments.limit_train_batches == 0:
            run.announce()
            return
        self.load_training_data()
        self.validation.load()
        self.validation.set_interval(self.num_batches)
        followers = (self.validation.loop, run.profiler, self._agreement)
        self._settles = bool(run.schedulers) or any(part is not None for part in followers)
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
        while not self._is_done():
            self._note_listeners()
            if self.progress.phase == "epoch_start":
                self._begin_epoch()
            elif self.progress.phase == "paused":
                self.progress.settle()
            self.count.begin_epoch()
            complete = self._drawn_epoch() if draws else self._epoch()
            if not complete:
                self._validate_at_stop()
            self._end_epoch(complete)
        self.clock.note()
        run.end_saves()
        self.hooks.fire_all("on_train_end")

    def _epoch(self) -> bool:
        """Trains the batches that are left of this epoch, with all that belongs to a window.

        A rank without a sample of the global batch has `NOTHING` for a batch: it takes part in the others' collectives,
        and its hooks are not called. Whatever does not change within an epoch is looked up before the loop, which runs
        for every batch.

        Returns:
            True if the epoch is over: its batches are used up, or it is cut. False where a limit or a signal ends the
            run inside it, and a resume continues there.
        """
        progress, window, logs, step = self.progress, self.engine.window, self.logs, self.step
        transfer, count, listens_start = self._run.train_transfer, self.count.batch, self._listens_start
        accumulates, settles, is_watched = self.accumulation is not None, self._settles, self._is_watched
        shares = self.count.shares
        self._left = self._batches()
        for batch, is_last in self._left:
            batch_idx = progress.batch
            if window.is_open:
                window.advance(is_last)
            else:
                window.open(self._window_length() if accumulates else 1, is_last)
                self.window_start = batch_idx
            if shares:
                batch = self._begin_share(*batch)
            elif transfer is not None:
                batch = transfer(batch, 0)
            logs.begin_batch(batch, progress.batches, batch_idx)
            if listens_start and self._is_declined(batch, batch_idx):
                return True
            outputs = self._shadow(batch_idx) if batch is NOTHING else step.run(batch, batch_idx)
            window.end_batch()
            count(batch)
            if window.closes and (settles or is_last or self._cut):
                is_last = self._end_window(is_last)
            if is_watched:
                outputs = detached(outputs)
                self._end_batch(outputs, batch, batch_idx)
            # Freed before the next step, where they would add to the peak of memory.
            outputs = batch = None
            logs.end_batch()
            if shares:
                self._end_share()
            if window.closes:
                if progress.phase == "stepped":
                    self._follow_window(progress.ended)
                if self._cut or self._stops():
                    return progress.ended
        return True

    def _drawn_epoch(self) -> bool:
        """Trains an epoch with a `training_step(dataloader_iter)`, which draws batches itself: a call is a window."""
        progress, window = self.progress, self.engine.window
        self._left = self._batches()
        draws = DrawnBatches(self._left, progress, self.count, self._bring)
        while not draws.is_last:
            self.window_start = batch_idx = progress.batch
            window.open(length=1)
            self.logs.begin_batch(draws, progress.batches, batch_idx)
            if self._listens_start and self._is_declined(draws, batch_idx):
                return True
            try:
                outputs = self.step.run(draws, batch_idx)
            except StopIteration:
                # The step drew past the end: what it had drawn for this turn is dropped, and the epoch is over.
                window.abandon()
                self._end_share()
                self._cut = True
                return True
            window.end_batch()
            self._end_window(draws.is_last)
            outputs = detached(outputs)
            self._end_batch(outputs, draws, batch_idx)
            outputs = None
            self.logs.end_batch()
            self._end_share()
            self._follow_window(progress.ended)
            if progress.ended or self._stops():
                return progress.ended
        return True

    # a batch's start and end ------------------------------------------------------------------------------------------
    def _begin_share(self, batch: Any, share: Share) -> Any:
        """Notes what the ranks have of the global batch, and returns this rank's batch on the device."""
        self.engine.begin_batch(share)
        self.engine.window.weigh(share.weight(self.strategy.data_size), share.idle)
        return self._on_device(batch)

    def _bring(self, drawn: Any) -> Any:
        return self._begin_share(*drawn) if self.count.shares else self._on_device(drawn)

    def _on_device(self, batch: Any) -> Any:
        transfer = self._run.train_transfer
        return batch if transfer is None or batch is None or batch is NOTHING else transfer(batch, 0)

    def _end_share(self) -> None:
        self.engine.end_batch()
        self.engine.window.weigh(1.0, idle=False)

    def _is_declined(self, batch: Any, batch_idx: int) -> bool:
        """Fires `on_train_batch_start`; True if the epoch ends now, not when the window closes."""
        if batch is NOTHING or self.hooks.fire_all("on_train_batch_start", batch, batch_idx) != -1:
            return False
        self._cut = True
        window = self.engine.window
        if window.index > 0 or self._agreement is not None:
            return False
        window.abandon()
        return True

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Fires `on_train_batch_end`; its closing callbacks come after the loggers' row."""
        if batch is not NOTHING:
            self.hooks.fire("on_train_batch_end", outputs, batch, batch_idx)
        if self.engine.window.closes:
            self._log_step()
        self.hooks.close("on_train_batch_end", outputs, batch, batch_idx)

    # an epoch's start and end -----------------------------------------------------------------------------------------
    def _note_listeners(self) -> None:
        self._logs_every = self.arguments.log_every_n_steps if self._run.loggers else 0
        self._listens_start = self.hooks.listens("on_train_batch_start")
        self._is_watched = self.hooks.listens("on_train_batch_end") or bool(self._logs_every)

    def _begin_epoch(self) -> None:
        progress = self.progress
        every = self.arguments.reload_dataloaders_every_n_epochs
        if every and progress.epoch > 0 and progress.epoch % every == 0:
            self.load_training_data(again=True)
            self.validation.load(again=True)
        assert self.cursor is not None
        self.window_start, self._cut = 0, False
        self.hooks.fire_all("on_train_epoch_start")
        # After the hook, as in the plain loop: workers get a copy of the data set as the hook has left it, and the
        # order of a shuffle follows what the hook drew.
        self._iterator = self.cursor.start(progress.epoch)
        self._limit_batches()
        progress.begin_epoch()
        self.strategy.check_trained()

    def _shadow(self, batch_idx: int) -> Any:
        """Shadows the other ranks' step, as this rank has no sample of the global batch. No hook is called."""
        assert self.cursor is not None
        cursor = self.cursor
        self.logs.end_batch()
        if batch_idx == 0:
            self.logs.note_idle("train")
        with self.logs.discarding():
            self.step.shadow(lambda: self._on_device(cursor.filler()), batch_idx)
        return None

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """Yields the batches left of this epoch, sharded ones with their share, and whether each is the last."""
        if self.progress.cut:
            return
        assert self._iterator is not None and self.cursor is not None
        iterator, total = self._waits.timed(self._iterator), self.num_batches
        if self.progress.ended:
            # A run resumed after the epoch's last window: only the loader's end is left to be drawn.
            total = self.progress.batch
        elif total is None:
            limit = self._limit_of_unknown()
            # Nothing is drawn beyond the limit, not even to look at.
            yield from lookahead(itertools.islice(iterator, None if limit is None else limit - self.progress.batch))
            return
        for number in range(self.progress.batch + 1, total + 1):
            try:
                # Not given a name here, which would keep the last batch in memory during a validation.
                yield next(iterator), number == total
            except StopIteration:
                warn_of_length(total, number - 1)
                return
        if self.progress.batch == self.cursor.length:
            # The plain loop's last next(), in which a generator finishes and workers are shut down.
            next(iterator, None)

    def pass_over(self, batches: int) -> None:
        """Draws this many batches of the epoch, or those that are left, and trains on none of them."""
        if pass_over(self._left, batches, self.count, self.engine) and not self.progress.ended:
            # The window has turned out to be the epoch's last one: its validation is due by what it has passed, too.
            self.progress.cut_short()
            self._after_step(True)

    def _limit_of_unknown(self) -> int | None:
        """The maximum number of batches to read from a loader of unknown length; None for no limit."""
        limit = self.arguments.limit_train_batches
        return limit if self.num_batches is None and isinstance(limit, int) else None

    def _end_epoch(self, complete: bool) -> None:
        """Ends an epoch.

        Args:
            complete: False where a limit ended the run inside it: the sums of its metrics are kept, for a resume to
                continue.
        """
        progress = self.progress
        self._left = iter(())  # With it the loader's workers end, where the epoch was cut.
        self.count.end_epoch()
        fell_short = self.num_batches is not None and 0 < progress.batch < self.num_batches
        if self.engine.window.is_open:
            self._close_short_window()
        elif complete and not progress.ended and (self._cut or fell_short or progress.cut):
            self._cut_short()
        if self._run.signals.received is not None and (not complete or progress.phase == "stepped"):
            return
        if complete and progress.batch == 0 and not progress.cut:
            raise ConfigurationError("the training loader gave no batch: an epoch needs at least one.")
        self.strategy.check_trained()
        self.hooks.fire("on_train_epoch_end")
        self._run.send(self.logs.reduce_epoch("train", keep=not complete)[1])
        if complete and self.module.automatic_optimization:
            self._step_on_plateau("epoch", progress.epoch + 1)
        self.clock.note()
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

    def _close_short_window(self) -> None:
        """The loader ended before its reported length: averages the open window over the batches it really had."""
        window = self.engine.window
        window.close_early()
        self.strategy.sync_gradients()
        self.step.close(self.progress.batch - 1)
        window.end_batch()
        self._after_step(True)
        self._log_step()
        self._settle()

    def _cut_short(self) -> None:
        """Ends the epoch after a window that was not known to be its last: a hook cut it, or the length was wrong."""
        self.progress.cut_short()
        # No batch came since the last window's own validation.
        self.window_start = self.progress.batch
        self._after_step(True)
        self._settle()

    def _next_epoch(self) -> None:
        self._former_ended = self._is_read_to_end()
        self.progress.next_epoch()

    # a window's end ---------------------------------------------------------------------------------------------------
    def _window_length(self) -> int:
        """Batches of the window that starts now: the last one of an epoch may be shorter."""
        assert self.accumulation is not None
        self.count.begin_window()
        length = self.accumulation.batches(self.accumulation.at(self.progress), self._run.loaders.samples_per_batch)
        return length if self.num_batches is None else min(length, self.num_batches - self.progress.batch)

    def _end_window(self, is_last: bool) -> bool:
        """Ends a window after its step; returns whether the epoch ends here, also at another rank's request."""
        if self._agreement is not None:
            self._cut = self._agreement.read(self._cut)
        is_last = is_last or self._cut
        self._after_step(is_last)
        return is_last

    def _follow_window(self, is_last: bool) -> None:
        """What comes between two windows, after the batch's hooks."""
        self._settle()
        if self._agreement is not None:
            (self._agreement.exchange if is_last else self._agreement.send)()

    def _after_step(self, is_last: bool) -> None:
        """Notes for checkpoints saved from here on that the window's step is done, and whether a validation is due."""
        progress = self.progress
        is_due = self.validation.is_due(is_last, self.window_start)
        progress.end_window(is_last, is_due, progress.skipped if progress.cut else self.step.was_skipped)
        if is_last and self._run.schedulers and self.module.automatic_optimization:
            self.schedulers.step("epoch", progress.epoch + 1)
        if self._run.profiler is not None and not progress.cut:
            self._run.profiler.step()

    def _log_step(self) -> None:
        """Sends the values of a step to the loggers, if it is one of those that they are sent."""
        step, every = self.progress.global_step, self._logs_every  # Where no step counts, there is nothing new.
        if every and step % every == 0 and self.step.is_counted:
            values = self.logs.step_values("train")
            if self._row[0] == step:
                # `_send_ahead` has sent the others already.
                values = {name: value for name, value in values.items() if self._row[1].get(name) is not value}
            self._run.send(values)
            self._row = step, values

    def _send_ahead(self) -> None:
        """Sends the row of the step just done before a checkpoint: loggers would get it after the hook that saves."""
        ends_window = self.hooks.current == "on_train_batch_end" and self.engine.window.closes
        if ends_window and self._row[0] != self.progress.global_step:
            self._log_step()

    def _settle(self) -> None:
        """Does what is left after a step, in a resume too: its validation, then the schedulers that wait for one."""
        progress = self.progress
        if progress.phase == "stepped" and progress.validation_due and not self.validation.run():
            return
        if progress.phase in ("stepped", "validated"):
            progress.end_validation()
            waits = not (progress.cut or progress.skipped) and self.module.automatic_optimization
            if self._run.schedulers and waits:
                self._step_on_plateau("step", progress.stepped)
            progress.settle()

    def _step_on_plateau(self, interval: str, count: int) -> None:
        """Steps the schedulers that depend on a monitored value, and sends what they log to the loggers."""
        due = self.schedulers.due_on_plateau(interval, count)
        if not due:
            return
        self.logs.begin_apart()
        self.schedulers.step_on_plateau(due, self.logs.callback_metrics)
        every = 1 if interval == "epoch" else self.arguments.log_every_n_steps
        if every and self.progress.global_step % every == 0:
            self._run.send(self.logs.step_values("train"))
        if interval == "epoch" and overrides(self.module, "lr_scheduler_step", TrainModule):
            # These schedulers go by the epoch's values, reduced already: what they log is reduced by itself.
            self._run.send(self.logs.reduce_epoch("train")[1])

    def _validate_at_stop(self) -> None:
        """Validates the weights of a run that `should_stop` ended inside an epoch, unless they just were."""
        asked = self._run.should_stop if self._agreement is None else self._agreement.stops
        if asked and self._past_minimum() and self._run.signals.received is None:
            self.validation.run_at_stop()

    # data -------------------------------------------------------------------------------------------------------------
    def load_training_data(self, again: bool = False) -> None:
        """Gets the training loader, unless it is there.

        Args:
            again: get it anew (`reload_dataloaders_every_n_epochs`).
        """
        if (self.cursor is None or again) and self.arguments.limit_train_batches != 0:
            self.cursor, self.num_batches = self._run.loaders.training()
            self.count.begin_loader(self.cursor.shares)
            check_batches(self.strategy.ranks, self.num_batches)
            self.strategy.check_settings(settings_of(self._run, loader=self._run.loaders.train_loader))

    def _limit_batches(self) -> None:
        """Sets the number of batches of this epoch, which differs if it began with global batches of another size."""
        assert self.cursor is not None
        if self.cursor.length is not None:
            self.num_batches = self._run.loaders.limited(self.cursor.length)

    def _is_read_to_end(self) -> bool:
        """True if no limit and no hook ended the last epoch early."""
        assert self.cursor is not None
        is_limited = self.num_batches != self.cursor.length or self.progress.batch == self._limit_of_unknown()
        return not is_limited and not self.progress.cut

    def progress_to_save(self) -> Progress:
        """The progress that a checkpoint saved now holds; inside a fit, loggers and clock are brought up to it."""
        if self._run.state.stage == "fit":
            self._send_ahead()
            self.clock.note()
        return self._resumable()

    def _resumable(self) -> Progress:
        """The current progress, or that at the start of the open window, which a resume repeats."""
        if not self.engine.window.is_open:
            return self.progress
        return self.count.at_window_start(self.window_start, self.accumulation is not None)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loaders stand: in or between epochs, and for validation between passes.

        Inside a validation that a resume repeats, metrics and random numbers from before it are added.
        """
        if self.cursor is None:
            return {"loader": None, **self.validation.before_pass()}
        progress, validation = self._resumable(), self.validation.loader_states()
        if progress.is_inside:
            loader = {"place": self.cursor.state_dict(progress.batch), "rest": None, "validation": validation}
        else:
            ended = self._former_ended if progress.phase == "epoch_start" else self._is_read_to_end()
            loader = {"place": None, "rest": self.cursor.rest_state(ended), "validation": validation}
        return {"loader": loader, **self.validation.before_pass()}

    # stopping ---------------------------------------------------------------------------------------------------------
    def _is_done(self) -> bool:
        """True if no further epoch begins."""
        return self.limits.epochs_reached(self.progress.epochs_done) or self._stops()

    def _report_if_done(self) -> None:
        """Reports that a resumed run trains nothing, as its checkpoint has reached the limits already."""
        reached = self.limits.reached(self.progress)
        if self._restored is not None and reached and not self.arguments.barebones:
            self._run.print(
                f"nothing is left to do: the run is at epoch {self.progress.epoch}, step {self.progress.global_step}, "
                f"and has reached {' and '.join(reached)}. Give a higher limit to train on."
            )

    def _stops(self) -> bool:
        """True if a limit, a signal or `should_stop` ends the run here, between two windows."""
        run = self._run
        if run.signals.received is not None:
            return True
        if self.limits.max_steps != -1 and self.progress.global_step >= self.limits.max_steps:
            return True
        agreement = self._agreement
        if agreement is None:
            is_up = run.limits.max_seconds is not None and self.clock.time_is_up()
            return is_up or (run.should_stop and self._past_minimum())
        if agreement.stops and self._past_minimum():
            # Also on the ranks that did not ask for it.
            run.ask_to_stop()
            return True
        return agreement.time_is_up

    def seconds(self) -> float:
        """How long this fit has run, its sanity check included and earlier runs of it left out."""
        return time.perf_counter() - self._began

    def _past_minimum(self) -> bool:
        """True if `min_epochs` and `min_steps` are reached, before which `should_stop` has no effect."""
        return self.limits.past_minimum(self.progress.epochs_done, self.progress.global_step)

    # resume -----------------------------------------------------------------------------------------------------------
    def _resume(self) -> None:
        """Takes a resumed run back to its place in the data, and finishes what it had begun of a step or an epoch."""
        if self._restored is None:
            return
        with self._restored.blame("loader"):
            inside = self._go_to(self._restored.get("loader"))
        # Random numbers last, since everything before may draw.
        self._restored.load("logs", "metrics", "rng")
        self.validation.decide(self._restored.get("window_start") if inside else None)
        progress = self.progress
        if self._restored.get("owes_plateau"):
            self._step_on_plateau("epoch", progress.epoch + 1)
        if progress.phase == "epoch_end" and not self._is_done():
            self._next_epoch()
        elif inside and progress.phase != "paused":
            self._settle()
            if self._stops():
                self._end_epoch(complete=progress.ended)

    def _go_to(self, loader: dict[str, Any] | None) -> bool:
        """Takes the loaders back to where they stood, unless `restore=` left them out; True inside an epoch."""
        progress, inside = self.progress, self.progress.is_inside
        assert self.cursor is not None
        if inside and loader is not None:
            self._iterator = self.cursor.resume(progress.epoch, loader["place"])
            self._limit_batches()
        elif inside and (progress.ended or progress.cut):
            # Nothing is left to be read of this epoch.
            self._iterator = iter(())
        elif inside:
            # The epoch starts from its first batch.
            progress.repeat_epoch()
            inside = False
        elif loader is not None:
            self.cursor.load_rest_state(loader["rest"])
        if loader is not None:
            self.validation.load_loader_states(loader["validation"])
        return inside
