"""The step of `accumulate_grad_batches="auto"`: a batch that does not fit into memory is run again in smaller parts."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.strategies.errors import ConfigurationError, LeydenError, is_out_of_memory
from leyden.strategies.micro_batches import MicroBatch, cut, rows_of, together
from leyden.strategies.window import Window
from leyden.trainer.data.rng import isolated_rng
from leyden.trainer.data.sharding import is_indexed
from leyden.trainer.engine.engine import needs_closure
from leyden.trainer.loops.batches import draws_itself
from leyden.trainer.loops.largest_batch import largest_batch
from leyden.trainer.loops.peak_memory import PeakMemory
from leyden.trainer.loops.step import AutomaticStep, clear_gradients, detached
from leyden.trainer.loops.user_step import undoing_steps, without_trace

if TYPE_CHECKING:
    from leyden.callbacks.gradient_accumulation import AutoAccumulation
    from leyden.trainer.events.hooks import Hooks
    from leyden.trainer.loops.schedulers import Schedulers
    from leyden.trainer.run.state import Run

SMALL = 2**20
"""Bytes of a buffer that is kept before each batch, whether it has changed before or not."""


class OutOfMemory(LeydenError, torch.OutOfMemoryError):
    """Not even one sample fits into memory, or a batch cannot be cut.

    Args:
        message: what was tried, the peak of memory in each phase, and what to do.
        of_another_rank: the error is one of another rank, which reports it.
    """

    def __init__(self, message: str, of_another_rank: bool = False) -> None:
        super().__init__(message)
        self.of_another_rank = of_another_rank


@dataclass(frozen=True)
class Failure:
    """What a rank says about a pass that did not fit.

    Attributes:
        rank: which one.
        device: of that rank.
        phase: "forward" or "backward".
        rows: samples of its batch; None if it cannot be cut, for the `reason`.
        part: samples of its largest micro-batch.
        peaks: of memory, in words.
        error: what was raised, in one line.
        reason: why the batch cannot be cut any further; "" if it can.
    """

    rank: int
    device: str
    phase: str
    rows: int | None
    part: int | None
    peaks: str
    error: str
    reason: str

    def words(self) -> str:
        """Where memory ran out, and with how much."""
        size = "" if self.rows is None else f" with {self.part} of the batch's {self.rows} samples"
        return f"out of memory on rank {self.rank} ({self.device}) in {self.phase}{size}; peak of memory: {self.peaks}"


def check_auto(run: Run) -> None:
    """Refuses what cannot be run in micro-batches, before training.

    Raises:
        ConfigurationError: names the fix.
    """
    module, strategy = run.module, run.strategy
    refusal = strategy.refusals.get("micro_batches")
    if refusal is not None:
        refusal = f"strategy={strategy.name!r}: {refusal}, and accumulate_grad_batches a number"
    elif not module.automatic_optimization:
        refusal = "manual optimisation, which steps by itself: cut the batch in training_step"
    elif draws_itself(module.training_step):
        refusal = "training_step(dataloader_iter), which draws its own batches: take the batch as an argument"
    elif any(map(needs_closure, run.engine.optimizers)):
        refusal = "an optimizer that evaluates the loss several times (LBFGS): give a number, 1, and smaller batches"
    elif strategy.ranks.world_size > 1:
        refusal = waiting_part(module)
    if refusal is not None:
        raise ConfigurationError(f"accumulate_grad_batches='auto' cannot go with {refusal}.")


def waiting_part(module: nn.Module) -> str | None:
    """The part of a module in which ranks wait for each other within a pass, and what to do; None without one."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            return (
                f"the SyncBatchNorm {name} on several ranks, which waits in each pass for ranks that may have run out "
                "of memory: use group or layer norm, or leave sync_batchnorm out"
            )
    return None


class AutoStep(AutomaticStep):
    """One batch is one window: run in one pass, or in micro-batches whose gradients are accumulated.

    If memory runs out in a pass, nothing has been stepped yet. So its gradients are dropped, random numbers, buffers
    and metrics are set back, and the batch is run again in twice as many micro-batches. The result is bit for bit that
    of a run with this number from this batch on.

    On several ranks all must do so together, and a rank in a collective cannot be reached. Under DDP no pass waits for
    another rank: the ranks agree when all have their gradients, and exchange them then. Under FSDP passes do wait, so
    that a rank whose pass has failed ends it with one sample, for the others (`strategies/fsdp/collectives.py`).

    Args:
        run: of the fit.
        training_step: the user's, as `Run.step_function` returns it.
        schedulers: those of the run.
        sizes: into how many micro-batches batches are cut.
    """

    def __init__(
        self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, sizes: AutoAccumulation
    ) -> None:
        super().__init__(run, training_step, schedulers, accumulates=False)
        self.fit = run
        self.sizes = sizes
        self.several = run.strategy.ranks.world_size > 1
        self.late = self.several and run.strategy.exchanges_late
        """Gradients are exchanged when all ranks have theirs, and not in the passes."""
        self.micro = Window(is_open=True, alone=self.several)
        """The window of the micro-batches, as the strategy sees it."""
        self.memory = PeakMemory(run.strategy.root_device)
        self.keeper = Keeper(run.module)
        self.largest: Any = None
        """A batch to be tried before the first one; None without one."""
        self.measures = True
        """The next passes note how much memory each phase takes: the first ones, and those after a failure."""

    def begin(self) -> None:
        if not self.sizes.try_largest:
            return
        found = largest_batch(self.fit.loaders.train_loader)
        # All ranks try one, or none does: a data set may draw its sizes.
        self.largest = None if self.strategy.ranks.any(found is None) else found

    def shadow(self, filler: Callable[[], Any], batch_idx: int) -> None:
        # The other ranks know that this one has no sample, and leave the trial out.
        self.largest = None
        super().shadow(filler, batch_idx)

    def run(self, batch: Any, batch_idx: int) -> Any:
        if self.largest is not None:
            self._try_largest(batch_idx)
        extra = (batch_idx,) if self.takes_index else ()
        attempt = Attempt(self, batch, batch_idx)
        while not attempt.is_done:
            with attempt:
                for part in attempt.parts():
                    with self.hooks.inside("training_step"):
                        attempt.add(self.forward_backward(self.training_step, part.batch, extra, self.micro, attempt))
        self.outputs = outputs = attempt.outputs()
        self.close(batch_idx)
        self.outputs = None
        return outputs

    def _try_largest(self, batch_idx: int) -> None:
        """Tries the largest batch that was looked at, before the first one: nothing of it stays but how it was cut."""
        largest, self.largest = self.largest, None
        if self.engine.share is not None and self.engine.share.idle:
            # A rank without a sample is not here.
            return
        if self.fit.train_transfer is not None:
            with isolated_rng():
                largest = self.fit.train_transfer(largest, 0)
        before = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        extra = (batch_idx,) if self.takes_index else ()
        trial = Attempt(self, largest, batch_idx, counts=False)
        with self.fit.logs.discarding():
            while not trial.is_done:
                with trial:
                    for part in trial.parts():
                        with self.hooks.inside("training_step"):
                            trial.add(self.forward_backward(self.training_step, part.batch, extra, self.micro, trial))
        for parameter, grad in before:
            parameter.grad = grad

    def close(self, batch_idx: int) -> None:
        self.memory.begin("step", self.measures)
        try:
            super().close(batch_idx)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in the optimizer's step of batch {batch_idx} (epoch {self.progress.epoch}), which "
                f"smaller micro-batches would not help; peak of memory: {self.memory.failed()}. Try an optimizer with "
                f"less state, strategy='fsdp', or precision='bf16-true'. The error was: {error}"
            ) from error
        self.memory.begin("", False)
        self.measures = False

    def _run_shadow(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Does what the other ranks wait for, on a rank without a sample: it agrees with them, and exchanges."""
        extra = (batch_idx,) if self.takes_index else ()
        one = None if self.late else filler()
        attempt = Attempt(self, None, batch_idx)
        while not attempt.is_done:
            with attempt:
                self.open_micro(self.sizes.micro_batches)
                for place in range(0 if self.late else self.micro.length):
                    self.begin_micro(place, 1.0)
                    self.fill(cut(one, rows_of(one) + 1)[-1].batch, extra)

    # what an attempt asks ---------------------------------------------------------------------------------------------
    def begin_window(self, batch_idx: int, clears: bool) -> None:
        """Clears gradients before the first try of a batch, unless that is done."""
        if clears and self.only_clears:
            clear_gradients(self.optimizers)
        elif clears:
            self._zero_grad(batch_idx)
        if self.late:
            # As DDP does in the first forward pass after an exchange; here no pass exchanges anything.
            self.strategy.synchronize_buffers()

    def open_micro(self, length: int) -> None:
        """Begins the window of a batch's micro-batches."""
        self.micro.open(length)
        share = self.engine.share
        if self.several and not self.late:
            known = share is not None and share.sized
            self.micro.divide_by(share.total / self.strategy.data_size if known and share is not None else 1.0)

    def begin_micro(self, place: int, weight: float) -> None:
        """Begins the micro-batch at a place, whose mean loss has this weight."""
        self.micro.place(place, place == self.micro.length - 1 and not self.late, weight)
        self.memory.begin("forward", self.measures)
        self.strategy.begin_pass()

    def fill(self, batch: Any, extra: tuple[Any, ...]) -> None:
        """Takes part in what the other ranks exchange for a micro-batch, of which this one has no sample."""
        with self.fit.logs.discarding(), without_trace(self.module):
            self.strategy.shadow_batch(self.training_step, batch, extra, self.micro)

    def agree(self, own: Failure | None, has_items: bool) -> tuple[list[Failure], bool]:
        """What the ranks have found: whose passes failed, and whether any loss has `num_items`."""
        if not self.several:
            return ([] if own is None else [own]), has_items
        ranks = self.strategy.ranks
        failed, any_items = ranks.exchange_flags((own is not None, has_items))()
        return ([found for found in ranks.all_gather_object(own) if found is not None] if failed else []), any_items

    def exchange(self, has_items: bool, any_items: bool) -> None:
        """Brings the gradients of all ranks together, once all have theirs."""
        if any_items:
            if not has_items:
                self.micro.begin_items(0, 1.0 if self.micro.divisor is None else self.micro.divisor)
            # By items of all ranks, in place of what this one's backward has divided by.
            self.engine.close_window(self.micro)
        if self.late:
            self.strategy.sync_gradients()

    def cut_batch(self, batch: Any) -> list[MicroBatch]:
        """The micro-batches of a batch: as many as there are now, or one for each sample.

        Where passes wait for other ranks, all have as many, some of which may have no sample that counts.
        """
        count = self.sizes.micro_batches
        if count == 1:
            return [MicroBatch(batch, 1, 1.0)]
        self._check_rows(batch)
        parts = cut(batch, count)
        return parts if self.several and not self.late else [part for part in parts if part.rows]

    def _check_rows(self, batch: Any) -> None:
        """Raises ConfigurationError if the first dimension is not that of the samples, where their number is known."""
        rows, share, loader, known = rows_of(batch), self.engine.share, self.fit.loaders.train_loader, None
        if share is not None:
            known = share.here if share.sized else None
        elif is_indexed(loader) and self.fit.loaders.cursor is not None:
            # The last batch may be smaller.
            known = None if self.progress.batch + 1 == self.fit.loaders.cursor.length else loader.batch_size
        if known and rows != known:
            raise ConfigurationError(
                f"a batch of {known} samples cannot be cut into micro-batches, since its first tensor has {rows} rows: "
                "let the loader's collate_fn return tensors (samples, …), or lists with an entry for each sample, "
                "and have training_step transpose what is to be (time, samples, …)."
            )

    def describe(self, error: Exception, batch: Any) -> Failure:
        """What this rank says of a pass that did not fit."""
        ranks, rows, part, reason = self.strategy.ranks, None, None, ""
        count = self.sizes.micro_batches
        try:
            rows = rows_of(batch)
            part = -(-rows // count)
            self._check_rows(batch)
            if part == 1:
                reason = "a micro-batch of one sample cannot be cut"
            else:
                cut(batch, 2 * count)
        except ConfigurationError as refusal:
            reason = str(refusal)
        device = str(self.strategy.root_device)
        text = str(error).strip().splitlines()
        line = f"{type(error).__name__}: {text[0] if text else ''}"
        return Failure(ranks.global_rank, device, self.memory.phase, rows, part, self.memory.failed(), line, reason)

    def give_up_size(self, failures: list[Failure], trial: str = "") -> None:
        """Goes on with twice as many micro-batches, and says so.

        Args:
            failures: of all ranks on which it failed.
            trial: where, if it is none of the run's own batches.

        Raises:
            OutOfMemory: if a batch cannot be cut any further.
        """
        final = next((failure for failure in failures if failure.reason), None)
        place = f"{trial}at step {self.progress.global_step} (epoch {self.progress.epoch}, batch {self.progress.batch})"
        if final is not None:
            raise OutOfMemory(
                f"{final.words()}, {place}, and accumulate_grad_batches='auto' ends here: {final.reason}. Try "
                "precision='bf16-mixed', activation checkpointing (torch.utils.checkpoint), strategy='fsdp', or "
                f"shorter samples. The error was: {final.error}",
                of_another_rank=all(failure.rank != self.strategy.ranks.global_rank for failure in failures),
            )
        self.memory.begin("", False)
        self.measures, before = True, self.sizes.micro_batches
        count = self.sizes.cut_finer()
        self.fit.print(
            f"leyden: {failures[0].words()}, {place}. From this batch on each batch is run in {count} micro-batches in "
            f"place of {before}; the global batch, its gradient and the number of steps stay. The error was: "
            f"{failures[0].error}"
        )
        if before == 1 and any(isinstance(part, _BatchNorm) and part.training for part in self.module.modules()):
            warnings.warn(
                "batch norm takes its statistics over each micro-batch, which is smaller than the batch: use group or "
                "layer norm, if that matters.",
                stacklevel=2,
            )


class Attempt:
    """The passes of a batch: all of its micro-batches, again and again in more of them, until they fit.

    It is a context: around the passes of one try, at whose end all ranks agree whether it counts. It is also what the
    strategy is handed for hooks around backward, so that the phase is known.

    Args:
        step: whose batch it is.
        batch: this rank's; None if it has no sample.
        batch_idx: its number.
        counts: False for a trial, of which nothing stays.
    """

    def __init__(self, step: AutoStep, batch: Any, batch_idx: int, counts: bool = True) -> None:
        self.is_done = False
        self._counts = counts
        self._step, self._batch, self._batch_idx = step, batch, batch_idx
        self._undo: Callable[[], None] | None = None
        self._stack = ExitStack()
        self._parts: list[MicroBatch] = []
        self._outputs: list[Any] = []
        hooks: Hooks = step.hooks
        self.on_before_backward = (*(hooks.on_before_backward if counts else ()), self._begin_backward)
        self.on_after_backward = hooks.on_after_backward if counts else ()
        self.backward = hooks.backward

    def _begin_backward(self, loss: Tensor) -> None:
        self._step.memory.begin("backward", self._step.measures)

    @property
    def _extra(self) -> tuple[Any, ...]:
        return (self._batch_idx,) if self._step.takes_index else ()

    # one try ----------------------------------------------------------------------------------------------------------
    def __enter__(self) -> Attempt:
        step = self._step
        if self._undo is None and self._counts:
            step.begin_window(self._batch_idx, clears=self._batch is not None)
        self._parts, self._outputs = [], []
        self._undo = step.keeper.keep()
        self._stack.enter_context(step.fit.logs.by_micro_batch())
        if step.late:
            self._stack.enter_context(step.strategy.gradient_sync(False))
        return self

    def parts(self) -> Iterator[MicroBatch]:
        """The micro-batches, each as the strategy and the logs see it."""
        step, weight = self._step, self._step.window.weight if self._counts else 1.0
        self._parts = parts = step.cut_batch(self._batch)
        rows, length = sum(part.rows for part in parts), len(parts)
        step.open_micro(length)
        for place, part in enumerate(parts):
            step.begin_micro(place, weight * (part.rows * length / rows))
            if part.rows:
                step.fit.logs.begin_part(part.batch)
                yield part
            else:
                step.fill(part.batch, self._extra)

    def add(self, outputs: Any) -> None:
        """Takes what the step has returned for a micro-batch."""
        # Without their graph, of which backward keeps the inputs.
        self._outputs.append(outputs if len(self._parts) == 1 else detached(outputs))

    def outputs(self) -> Any:
        """What the step would have returned for the whole batch."""
        if len(self._parts) == 1:
            return self._outputs[0]
        parts = [part for part in self._parts if part.rows]
        found = [read_output(output) for output in self._outputs]
        weighed = [
            loss if num_items is not None else loss * part.share
            for (loss, num_items), part in zip(found, parts, strict=True)
        ]
        return together(self._outputs, parts, torch.stack(weighed).sum())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not (isinstance(error, Exception) and is_out_of_memory(error)):
            self._stack.__exit__(kind, error, trace)
            return False
        try:
            return self._end(kind, error, trace)
        except BaseException:
            # The strategy serves another fit.
            self._stack.close()
            raise

    def _end(self, kind: type[BaseException] | None, error: Exception | None, trace: TracebackType | None) -> bool:
        """Ends a try; True if it failed on any rank, so that another one follows."""
        step = self._step
        own = None if error is None else step.describe(error, self._batch)
        if error is not None:
            # Whatever this rank has logged in passes that went well is logged again.
            self._stack.__exit__(kind, error, trace)
            free(error)
            assert own is not None
            self._abandon(own)
        has_items = error is None and self._batch is not None and step.micro.num_items is not None
        failures, any_items = step.agree(own, has_items)
        if failures:
            if error is None:
                again = LeydenError("another rank is out of memory")
                self._stack.__exit__(type(again), again, None)
            self._take_back()
            step.give_up_size(failures, "" if self._counts else "in a trial of a large batch ")
            return True
        if not self._counts:
            self._stack.__exit__(None, None, None)
            self._take_back()
            self.is_done = True
            return False
        if any_items and not has_items and self._batch is not None:
            raise ConfigurationError(
                "training_step returned num_items on some ranks of a global batch and not on others: return it always "
                "or never."
            )
        step.exchange(has_items, any_items)
        self._stack.__exit__(None, None, None)
        self.is_done = True
        return False

    def _abandon(self, own: Failure) -> None:
        """Abandons the passes of this try, after those that the other ranks wait for."""
        step = self._step
        if own.reason and not step.late:
            # The others are in the middle of their passes, and are ended.
            step.give_up_size([own])
        try:
            step.strategy.abandon_pass(self._end_passes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            step.give_up_size([replace(own, part=1, reason="one sample, tried after that, does not fit either")])

    def _end_passes(self) -> None:
        """Runs the micro-batch that has failed, and those after it, with one sample: the other ranks run theirs."""
        step, window = self._step, self._step.micro
        [*_, one] = cut(self._batch, rows_of(self._batch) + 1)
        hooks = Quiet(self.backward)
        with step.fit.logs.discarding(), step.hooks.inside("training_step"):
            for place in range(window.index, window.length):
                if place > window.index:
                    step.begin_micro(place, 1.0)
                step.strategy.forward_backward(step.training_step, one.batch, self._extra, window, hooks)

    def _take_back(self) -> None:
        step = self._step
        clear_gradients(step.optimizers)
        self._outputs, self._parts = [], []
        assert self._undo is not None
        self._undo()


@dataclass(frozen=True)
class Quiet:
    """Hooks of a backward pass that does not count.

    Attributes:
        backward: the module's own; None without one.
    """

    backward: Callable[[Tensor], Any] | None
    on_before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    on_after_backward: tuple[Callable[[], Any], ...] = ()


def free(error: BaseException) -> None:
    """Frees the tensors that the frames of a failed pass still hold."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def read_output(outputs: Any) -> tuple[Tensor, Any]:
    """The loss of a micro-batch, which went backward already, and its `num_items`."""
    if isinstance(outputs, Tensor):
        return outputs, None
    return outputs["loss"], outputs.get("num_items")


class Keeper:
    """Keeps what passes change beside gradients, so that it can be set back: buffers, metrics, random numbers.

    A large buffer is kept before the first batch, and from its first change on: one that never changes costs nothing.

    Args:
        module: whose passes are run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[str, tuple[int, int]] = {}
        """Large buffers as they were before the last pass: which tensor, and its version."""
        self._changing: set[str] = set()

    def keep(self) -> Callable[[], None]:
        """Returns a function that sets everything back to now; to be called once."""
        return undoing_steps(self._module, self._may_change)

    def _may_change(self, name: str, buffer: Tensor) -> bool:
        if buffer.is_inference() or buffer.nbytes <= SMALL:
            return True
        now = id(buffer), buffer._version
        before = self._seen.get(name)
        self._seen[name] = now
        if before is not None and before != now:
            self._changing.add(name)
        return before is None or name in self._changing
