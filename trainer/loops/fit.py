"""The fit loop: epochs, accumulation windows, and the validation between them. Its order stands in trainer/hooks.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.agreement import Agreement
from leyden.trainer.data.cursor import LoaderCursor, lookahead
from leyden.trainer.data.rng import isolated_rng, set_rng_state, undoing
from leyden.trainer.data.sharding import NOTHING
from leyden.trainer.differences import check_batches
from leyden.trainer.logs import Value, load_metric_states, metric_states
from leyden.trainer.loops.count import Count
from leyden.trainer.loops.draws import Draws, draws_itself
from leyden.trainer.loops.evaluate import EvaluationLoop
from leyden.trainer.loops.step import AutomaticStep, ManualStep, Step, detached
from leyden.trainer.plan import settings_of

if TYPE_CHECKING:
    from leyden.trainer.progress import Progress
    from leyden.trainer.trainer import Trainer


class FitLoop:
    """One call of `Trainer.fit`.

    Args:
        trainer: holds the parts; their hooks, logs and progress are those of this run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.hooks = trainer.hooks
        self.logs = trainer.logs
        self.progress = trainer.progress
        self.accelerator = trainer.accelerator
        self.restored: dict[str, Any] | None = None
        """Loader state and random numbers of what the run goes on from; None to begin anew."""
        self.cursor: LoaderCursor | None = None
        self.num_batches: int | None = None
        """Batches in an epoch, as limited; None where the loader does not know."""
        self.validation: EvaluationLoop | None = None
        self.step: Step
        self._iterator: Iterator[Any] | None = None
        self._validate_every: int | None = None
        self._waits = False
        """Something follows a step: a validation, schedulers, or a profiler that counts it."""
        self._window_start = 0
        self._former_ended = True
        """The epoch before this one was read to its end."""
        self._clock = time.perf_counter()
        self.count = Count(trainer)
        self._row: tuple[int, Mapping[str, Value]] = (-1, {})
        """The step of the loggers' last row, and its values."""
        self._draws = False
        self._agreement = Agreement(self) if trainer.world_size > 1 else None

    # the story --------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Trains until a limit is reached or somebody asks it to stop."""
        module = self.trainer.module
        step = AutomaticStep if module.automatic_optimization else ManualStep
        self.step = step(self.trainer, self.trainer.step_function("training_step"))
        self.accelerator.manual = not module.automatic_optimization
        self._draws = draws_itself(module.training_step)
        if self._draws and self.trainer.strategy.data_size > 1:
            raise ConfigurationError(
                "training_step(dataloader_iter) draws its own batches, so ranks cannot weigh them or end together: take the batch as "
                "an argument, or run on one device."
            )
        if self._draws and self.trainer.accumulation is not None:
            raise ConfigurationError(
                "training_step(dataloader_iter) draws its own batches, so accumulation cannot count them: draw several in one "
                "step instead."
            )
        self._sanity_check()
        self.load_training_data()
        self._load_validation_data()
        self._validate_every = self._validation_interval()
        self._waits = (
            self.validation is not None or bool(self.trainer.lr_scheduler_configs) or bool(self.trainer.profiler)
        )
        self.trainer.announce()
        self.hooks.fire_all("on_train_start")
        self._clock = time.perf_counter()
        if self._agreement is not None:
            self._agreement.exchange()
        self._go_on()
        while not self._is_done():
            self._epoch()
        self.note_time()
        self.hooks.fire_all("on_train_end")

    def _epoch(self) -> None:
        progress, hooks, logs, step = self.progress, self.hooks, self.logs, self.step
        accelerator, window, draws = self.accelerator, self.accelerator.window, self._draws
        agreement, count = self._agreement, self.count.batch
        transfer = None if draws else self.trainer.transfer
        listens_start, listens_end = hooks.listens("on_train_batch_start"), hooks.listens("on_train_batch_end")
        waits, accumulates = self._waits, self.trainer.accumulation is not None
        logs_every = self.trainer.log_every_n_steps if self.trainer.loggers else 0
        if progress.phase == "epoch_start":
            self._begin_epoch()
        cut, complete = progress.cut, True
        for batch, is_last in () if cut else Draws(self).turns() if draws else self.batches():
            batch_idx, present = progress.batch, batch is not NOTHING
            if not window.is_open:
                window.open(self._window_length() if accumulates else 1)
                self._window_start = batch_idx
            window.closes = is_last or window.index == window.length - 1
            if transfer is not None and present:
                batch = transfer(batch, 0)
            logs.batch, logs.tick = batch, progress.batches
            if listens_start and present and hooks.fire_all("on_train_batch_start", batch, batch_idx) == -1:
                cut = True
                if window.index == 0 and agreement is None:
                    window.is_open = False
                    break
            try:
                outputs = step.run(batch, batch_idx) if present else self._skip(batch_idx)
            except StopIteration:
                if not draws:
                    raise
                # The step drew past the end: what it had drawn for this turn is dropped, and the epoch is over.
                window.is_open, cut = False, True
                break
            accelerator.end_batch()
            if draws:
                is_last = batch.is_last
            else:
                count(batch)
            if window.closes:
                if agreement is not None:
                    cut = agreement.read(cut)
                is_last = is_last or cut
                if waits:
                    self._after_step(is_last)
                else:
                    progress.phase, progress.ended = "settled", is_last
            if listens_end:
                outputs = detached(outputs)
                if present:
                    hooks.fire("on_train_batch_end", outputs, batch, batch_idx)
            if logs_every and window.closes and not progress.global_step % logs_every:
                self._log_step(logs_every)
            if listens_end:
                hooks.close("on_train_batch_end", outputs, batch, batch_idx)
            # Neither may live on into the next step, where it would add to the peak of memory.
            outputs = batch = logs.batch = None
            if window.closes:
                if progress.phase == "stepped":
                    self._settle()
                if agreement is not None:
                    (agreement.exchange if is_last else agreement.send)()
                if cut or self._stops():
                    complete, cut = is_last, False
                    break
        else:
            cut = cut or (not progress.ended and self.num_batches is not None and 0 < progress.batch < self.num_batches)
        self._end_epoch(complete, cut)

    # an epoch's begin and end -----------------------------------------------------------------------------------------
    def _begin_epoch(self) -> None:
        progress = self.progress
        every = self.trainer.arguments.reload_dataloaders_every_n_epochs
        if every and progress.epoch > 0 and progress.epoch % every == 0:
            self.load_training_data(again=True)
            self._load_validation_data(again=True)
        assert self.cursor is not None
        self._window_start = 0
        self.hooks.fire_all("on_train_epoch_start")
        # After the hook, as in the plain loop: workers get a copy of the data set as the hook has left it, and the order of a
        # shuffle follows what the hook drew.
        self._iterator = self.cursor.start(progress.epoch)
        self._limit_batches()
        progress.phase = "settled"
        self.trainer.strategy.check_trained()

    def _skip(self, batch_idx: int) -> Any:
        """This rank has no sample of the global batch: it takes part in the others' step, and nobody hears of it."""
        assert self.cursor is not None
        cursor, trainer = self.cursor, self.trainer
        transfer = trainer.transfer

        def filler() -> Any:
            batch = cursor.filler()
            return batch if transfer is None or batch is None else transfer(batch, 0)

        self.logs.batch = None
        if batch_idx == 0:
            self.logs.idle.add(("train", -1))
        self.step.skip(filler, batch_idx)
        return None

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """The batches that are left of this epoch, each with the word whether it is the last."""
        assert self.cursor is not None
        return self._shares() if self.cursor.shares else self._batches()

    def _shares(self) -> Iterator[tuple[Any, bool]]:
        """This rank's batches, or `NOTHING`, with the weight of each in the window."""
        engine, ranks = self.accelerator, self.trainer.strategy.data_size
        window = engine.window
        try:
            for pair, is_last in self._batches():
                share, held = pair[1], [pair[0]]
                window.weight, window.idle, engine.share = share.weight(ranks), share.idle, share
                # Without a name here, which would keep the last batch through a validation.
                pair = None
                yield held.pop(), is_last
        finally:
            window.weight, window.idle, engine.share = 1.0, False, None

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        iterator, total = self._iterator, self.num_batches
        assert iterator is not None and self.cursor is not None
        if self.progress.ended:
            # Of a run that goes on after its last window: only the end is left to be drawn.
            total = self.progress.batch
        elif total is None:
            limit = self._limit_of_unknown()
            # Nothing is drawn beyond the limit, not even to look at.
            yield from lookahead(itertools.islice(iterator, None if limit is None else limit - self.progress.batch))
            return
        for number in range(self.progress.batch + 1, total + 1):
            try:
                # Without a name of its own here, which would keep the last batch through a validation.
                yield next(iterator), number == total
            except StopIteration:
                warnings.warn(
                    f"the training loader says that it has {total} batches and ended after {number - 1}: give it the right "
                    "length, or none at all.",
                    stacklevel=2,
                )
                return
        if self.progress.batch == self.cursor.length:
            # The plain loop's last next(), in which a generator finishes and workers are sent home.
            next(iterator, None)

    def _limit_of_unknown(self) -> int | None:
        """The most batches that are read of a loader without a length; None for all."""
        limit = self.trainer.arguments.limit_train_batches
        return limit if self.num_batches is None and isinstance(limit, int) else None

    def _end_epoch(self, complete: bool, cut: bool = False) -> None:
        """Ends an epoch; one that a limit broke off keeps its sums, so that a resume can go on inside it."""
        progress = self.progress
        if self.accelerator.window.is_open:
            self._close_short_window()
        elif cut and not progress.cut:
            self._cut_short()
        if self.trainer.signals.received is not None and (not complete or progress.phase == "stepped"):
            return
        if complete and progress.batch == 0 and not progress.cut:
            raise ConfigurationError("the training loader gave no batch: an epoch needs at least one.")
        self.hooks.fire("on_train_epoch_end")
        self.trainer.send(self.logs.reduce_epoch("train", keep=not complete)[1])
        if complete and self.trainer.module.automatic_optimization:
            self.step.step_plateau_schedulers("epoch", progress.epoch + 1)
        self.note_time()
        progress.phase = "epoch_end" if complete else "paused"
        self.hooks.close("on_train_epoch_end")
        if self._agreement is not None:
            self._agreement.exchange(epoch_ends=True)
        if complete:
            self._iterator = None
            if not self._is_done():
                self._next_epoch()

    def _close_short_window(self) -> None:
        """The loader ended before its length said: the batches of the open window count by their true number."""
        window = self.accelerator.window
        window.index -= 1
        window.closes = True
        self.trainer.strategy.sync_gradients()
        self.step.close(self.progress.batch - 1)
        self.accelerator.end_batch()
        self._after_step(True)
        self._log_step(self.trainer.log_every_n_steps)
        self._settle()

    def _cut_short(self) -> None:
        """The epoch is over, by -1 or a wrong length, after a window that was not known to be its last."""
        self.progress.cut = True
        # No batch came since the last window's own validation.
        self._window_start = self.progress.batch
        self._after_step(True)
        self._settle()

    def _next_epoch(self) -> None:
        self._former_ended = self._is_read_to_end()
        self.progress.epoch += 1
        self.progress.batch, self.progress.cut, self.progress.ended = 0, False, False
        self.progress.phase = "epoch_start"

    # a window's end ---------------------------------------------------------------------------------------------------
    def _window_length(self) -> int:
        """Batches of the window that begins now: the last one of an epoch may be shorter."""
        assert self.trainer.accumulation is not None
        self.count.begin_window()
        length = self.trainer.accumulation.length(self.progress.epoch)
        return length if self.num_batches is None else min(length, self.num_batches - self.progress.batch)

    def _after_step(self, is_last: bool) -> None:
        """What belongs to the step itself: a checkpoint saved from here on has it done."""
        progress = self.progress
        progress.phase, progress.ended = "stepped", is_last
        progress.validation_due = self._validation_due(is_last)
        if not progress.cut:
            progress.skipped = bool(self.accelerator.prepared_optimizers) and not self.accelerator.stepped
        if is_last and self.trainer.lr_scheduler_configs and self.trainer.module.automatic_optimization:
            self.step.step_schedulers("epoch", progress.epoch + 1)
        if self.trainer.profiler is not None and not progress.cut:
            self.trainer.profiler.step()

    def _log_step(self, every: int) -> None:
        if self.accelerator.manual and not self.accelerator.stepped:
            # No step was done, so these would be further values of the last one.
            return
        step = self.progress.global_step
        if self.trainer.loggers and every and step % every == 0:
            values = self.logs.step_values("train")
            if self._row[0] == step:
                # A save has sent the others ahead.
                values = {name: value for name, value in values.items() if self._row[1].get(name) is not value}
            self.trainer.send(values)
            self._row = step, values

    def send_ahead(self) -> None:
        """What a hook of a batch's end saves has its step done, so the loggers' row of that step belongs before it."""
        ends_window = self.hooks.current == "on_train_batch_end" and self.accelerator.window.closes
        if ends_window and self._row[0] != self.progress.global_step:
            self._log_step(self.trainer.log_every_n_steps)

    def _settle(self) -> None:
        """What follows a step: its validation, then the schedulers that wait for one. A resume goes on here."""
        progress = self.progress
        if progress.phase == "stepped":
            if progress.validation_due and not self._validate():
                return
            progress.phase = "validated"
        if progress.phase == "validated":
            progress.validation_due = False
            waits = not (progress.cut or progress.skipped) and self.trainer.module.automatic_optimization
            if self.trainer.lr_scheduler_configs and waits:
                self.step.step_plateau_schedulers("step", progress.stepped)
            progress.phase = "settled"

    # validation -------------------------------------------------------------------------------------------------------
    def _validate(self) -> bool:
        """Validates; False if a signal broke it off, so that it is still to be done."""
        assert self.validation is not None
        self.note_time()
        self.trainer.strategy.synchronize_buffers()
        self.progress.seconds_at_validation = self.progress.seconds
        undo = self._undo_validation()
        done = False
        try:
            done = self.validation.run() is not None
        finally:
            if not done:
                # After an error the device may be of no use, and the error is what counts.
                with suppress(Exception):
                    undo()
        if self._agreement is not None:
            self._agreement.exchange()
        return done

    def _undo_validation(self) -> Callable[[], None]:
        """Gives what brings loaders, metrics and random numbers back to now: a pass that was broken off is done again."""
        assert self.validation is not None
        validation, modules = self.validation, list(self.trainer.module.named_modules())
        loaders, metrics = validation.loader_states(), metric_states(modules)
        undo_rng = undoing([cursor.loader for cursor, _ in validation.loaders])

        def undo() -> None:
            validation.load_loader_states(loaders)
            load_metric_states(modules, metrics)
            undo_rng()

        return undo

    def _validation_interval(self) -> int | None:
        """Batches between two validations; None for the end of an epoch, or an interval in time."""
        interval, total = self.trainer.val_check_interval, self.num_batches
        if isinstance(interval, int):
            if self.trainer.check_val_every_n_epoch is not None and total is not None and interval > total:
                raise ConfigurationError(
                    f"val_check_interval={interval} is more than the {total} batches of an epoch: give a smaller number, or "
                    "check_val_every_n_epoch=None to count over epochs."
                )
            return interval
        if not isinstance(interval, float) or interval == 1.0:
            return None
        if total is None:
            raise ConfigurationError(
                f"val_check_interval={interval} is a fraction of an epoch, and the training loader has no length: give a "
                "number of batches."
            )
        if total * interval < 1:
            raise ConfigurationError(
                f"val_check_interval={interval} of {total} batches is less than one batch: give at least {1 / total:.3g}."
            )
        return math.floor(total * interval)

    def _validation_due(self, is_last: bool) -> bool:
        """True if the window that closed reached or passed a point of validation."""
        progress, every_epochs = self.progress, self.trainer.check_val_every_n_epoch
        if self.validation is None or (every_epochs is not None and (progress.epoch + 1) % every_epochs):
            return False
        if self.trainer.val_check_seconds is not None:
            agreement = self._agreement
            return self.validation_time_is_up() if agreement is None else agreement.validation_is_due
        if self._validate_every is None:
            return is_last
        done = progress.batch if every_epochs is not None else progress.batches
        before = done - (progress.batch - self._window_start)
        return done // self._validate_every > before // self._validate_every

    def _sanity_check(self) -> None:
        """A few validation batches before the first step, which leave no trace in counters or random numbers."""
        count, trainer = self.trainer.num_sanity_val_steps, self.trainer
        if count == 0 or self.restored is not None or not trainer.enable_validation:
            return
        trainer.state.sanity_checking = True
        self.hooks.fire_all("on_sanity_check_start")
        self._load_validation_data()
        if self.validation is not None:
            with isolated_rng([cursor.loader for cursor, _ in self.validation.loaders]):
                self.validation.run(limit=None if count == -1 else count)
        self.hooks.fire_all("on_sanity_check_end")
        trainer.state.sanity_checking = False
        self.logs.clear()

    # data -------------------------------------------------------------------------------------------------------------
    def load_training_data(self, again: bool = False) -> None:
        """Gets the training loader, unless it is there."""
        if self.cursor is None or again:
            self.cursor, self.num_batches = self.trainer.sources.training()
            self.count.shares = self.cursor.shares
            check_batches(self.trainer.strategy, self.num_batches)
            self.trainer.strategy.check_settings(settings_of(self.trainer, loader=self.trainer.sources.train_loader))

    def _limit_batches(self) -> None:
        """The batches of this epoch: fewer or more where it was begun with global batches of another size."""
        assert self.cursor is not None
        if self.cursor.length is not None:
            self.num_batches = self.trainer.sources.limited(self.cursor.length)

    def _load_validation_data(self, again: bool = False) -> None:
        if self.validation is not None and not again:
            return
        loaders = self.trainer.sources.evaluation("val")
        self.validation = (
            EvaluationLoop(self.trainer, "validation", loaders) if any(limit != 0 for _, limit in loaders) else None
        )

    def loader_state(self, progress: Progress) -> dict[str, Any] | None:
        """Where the loaders stand: the training one at a place in the epoch or between two, the others between passes."""
        if self.cursor is None:
            return None
        inside = progress.phase not in ("epoch_start", "epoch_end")
        ended = self._former_ended if progress.phase == "epoch_start" else self._is_read_to_end()
        return {
            "place": self.cursor.state_dict(progress.batch) if inside else None,
            "rest": None if inside else self.cursor.rest_state(ended),
            "validation": [] if self.validation is None else self.validation.loader_states(),
        }

    def _is_read_to_end(self) -> bool:
        """True if the epoch that is over was not broken off by a limit or a hook."""
        assert self.cursor is not None
        is_limited = self.num_batches != self.cursor.length or self.progress.batch == self._limit_of_unknown()
        return not is_limited and not self.progress.cut

    def window_start(self) -> Progress:
        """The progress at the start of the open window, which a resume then repeats."""
        progress, done = self.progress, self.progress.batch - self._window_start
        samples = self.count.window_samples if self.trainer.accumulation is not None else progress.samples
        return dataclasses.replace(
            progress,
            batch=self._window_start,
            batches=progress.batches - done,
            samples=samples,
            phase="settled",
            exact=False,
        )

    def estimated_steps(self) -> float:
        """Optimizer steps of the whole fit; inf where it has no end."""
        limit = self.trainer.max_steps if self.trainer.max_steps != -1 else float("inf")
        epochs = self.trainer.max_epochs
        if epochs in (None, -1) or self.num_batches is None:
            return limit
        accumulation, total = self.trainer.accumulation, 0
        for epoch in range(epochs or 0):
            total += math.ceil(self.num_batches / (accumulation.length(epoch) if accumulation is not None else 1))
        return min(limit, total)

    # stopping ---------------------------------------------------------------------------------------------------------
    def _is_done(self) -> bool:
        """True if no further epoch begins."""
        limit = self.trainer.max_epochs
        return (limit is not None and limit != -1 and self._epochs_done() >= limit) or self._stops()

    def _stops(self) -> bool:
        """True if a limit or a wish ends the run here, between two windows."""
        trainer = self.trainer
        if trainer.signals.received is not None:
            return True
        if trainer.max_steps != -1 and self.progress.global_step >= trainer.max_steps:
            return True
        agreement = self._agreement
        if agreement is None:
            return (trainer.max_seconds is not None and self.time_is_up()) or (
                trainer.should_stop and self._past_minimum()
            )
        if agreement.stops and self._past_minimum():
            # On the ranks that did not ask for it, too.
            trainer.should_stop = True
            return True
        return agreement.time_is_up

    def _past_minimum(self) -> bool:
        arguments = self.trainer.arguments
        steps = self.progress.global_step
        return self._epochs_done() >= (arguments.min_epochs or 0) and steps >= (arguments.min_steps or 0)

    def _epochs_done(self) -> int:
        return self.progress.epoch + (self.progress.phase == "epoch_end")

    # time -------------------------------------------------------------------------------------------------------------
    def elapsed(self) -> float:
        """Seconds of training, over all resumes."""
        return self.progress.seconds + time.perf_counter() - self._clock

    def time_is_up(self) -> bool:
        """True if training has taken `max_time`."""
        limit = self.trainer.max_seconds
        return limit is not None and self.elapsed() >= limit

    def validation_time_is_up(self) -> bool:
        """True if a validation is due by an interval in time."""
        interval = self.trainer.val_check_seconds
        return interval is not None and self.elapsed() - self.progress.seconds_at_validation >= interval

    def note_time(self) -> None:
        """Brings `progress.seconds` up to now."""
        now = time.perf_counter()
        self.progress.seconds += now - self._clock
        self._clock = now

    # resume -----------------------------------------------------------------------------------------------------------
    def _go_on(self) -> None:
        """After a resume: finishes what the saved run had begun, down to the end of its last epoch."""
        if self.restored is None:
            return
        progress, saved, loader = self.progress, self.restored, self.restored["loader"]
        inside = progress.phase not in ("epoch_start", "epoch_end")
        assert self.cursor is not None
        if inside and loader is not None:
            self._iterator = self.cursor.resume(progress.epoch, loader["place"])
            self._limit_batches()
        elif inside and (progress.ended or progress.cut):
            # Nothing is left to be read of this epoch.
            self._iterator = iter(())
        elif inside:
            # Only the place was left out of what is restored: the epoch begins anew.
            progress.batch, progress.phase, inside = 0, "epoch_start", False
        elif loader is not None:
            self.cursor.load_rest_state(loader["rest"])
        if loader is not None and self.validation is not None:
            self.validation.load_loader_states(loader["validation"])
        if saved["logs"] is not None:
            self.logs.load_state_dict(saved["logs"], self.trainer.module)
            load_metric_states(self.trainer.module.named_modules(), saved["metrics"])
        if saved["rng"] is not None:
            set_rng_state(saved["rng"])
        if progress.phase == "epoch_end" and not self._is_done():
            self._next_epoch()
        elif inside and progress.phase != "paused":
            self._settle()
            if self._stops():
                self._end_epoch(complete=progress.ended)
