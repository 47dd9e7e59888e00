"""The step of `accumulate_grad_batches="auto"`: a batch that does not fit into memory is retried in micro-batches."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leyden.core.devices import free_cached_memory
from leyden.core.errors import ConfigurationError, LeydenError, is_out_of_memory
from leyden.core.rank_zero import warn
from leyden.data.rng import isolated_rng
from leyden.data.sharding import is_indexed
from leyden.strategies.micro_batches import MicroBatch, cut, rows_of, together
from leyden.strategies.window import Window
from leyden.trainer.engine.engine import needs_closure
from leyden.trainer.engine.prepared import clear_gradients
from leyden.trainer.loops.batches import takes_iterator
from leyden.trainer.loops.largest_batch import largest_batch
from leyden.trainer.loops.peak_memory import PeakMemory
from leyden.trainer.loops.step import AutomaticStep, detached
from leyden.trainer.loops.user_step import take_snapshot, without_side_effects

if TYPE_CHECKING:
    from leyden.callbacks.gradient_accumulation import AutoAccumulation
    from leyden.trainer.events.hooks import Hooks
    from leyden.trainer.loops.schedulers import Schedulers
    from leyden.trainer.run import Run

SMALL_BUFFER = 2**20
"""Size in bytes up to which a buffer is always copied before a batch; larger ones only if they are known to change."""


class OutOfMemory(LeydenError, torch.OutOfMemoryError):
    """Not even one sample fits into memory, or a batch cannot be split.

    Args:
        message: the attempted sizes, the peak memory of each phase, and advice.
        of_another_rank: True if another rank failed; that rank reports the error.
    """

    def __init__(self, message: str, of_another_rank: bool = False) -> None:
        super().__init__(message)
        self.of_another_rank = of_another_rank


@dataclass(frozen=True)
class Failure:
    """A rank's report of a pass that ran out of memory.

    Attributes:
        rank: the global rank.
        device: the rank's device.
        phase: "forward" or "backward".
        rows: number of samples in the rank's batch; None if it cannot be split (see `reason`).
        part: number of samples in its largest micro-batch.
        peaks: peak memory of each phase, as text.
        error: type and first line of the error.
        reason: why the batch cannot be split any further; "" if it can.
    """

    rank: int
    device: str
    phase: str
    rows: int | None
    part: int | None
    peaks: str
    error: str
    reason: str

    def describe(self) -> str:
        """Returns where memory ran out, and the peak memory of each phase."""
        size = "" if self.rows is None else f" with {self.part} of the batch's {self.rows} samples"
        return f"out of memory on rank {self.rank} ({self.device}) in {self.phase}{size}; peak memory: {self.peaks}"


def check_auto(run: Run) -> None:
    """Rejects, before training, settings that do not work with micro-batches.

    Raises:
        ConfigurationError: if the module, its optimizers or the strategy cannot run a batch in parts.
    """
    module, strategy = run.module, run.strategy
    refusal = strategy.refusals.get("micro_batches")
    if refusal is not None:
        refusal = f"strategy={strategy.name!r}: {refusal}, and a number for accumulate_grad_batches"
    elif not module.automatic_optimization:
        refusal = "manual optimization: split the batch in training_step"
    elif takes_iterator(module.training_step):
        refusal = "training_step(dataloader_iter), which draws its own batches: take the batch as an argument"
    elif any(map(needs_closure, run.engine.optimizers)):
        refusal = "an optimizer that evaluates the loss several times (LBFGS): use 1, and smaller batches"
    elif strategy.ranks.world_size > 1:
        refusal = waiting_part(module)
    if refusal is not None:
        raise ConfigurationError(f"accumulate_grad_batches='auto' does not work with {refusal}.")


def waiting_part(module: nn.Module) -> str | None:
    """Returns a refusal that names a submodule in which ranks wait for each other within a pass; None without one."""
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            return (
                f"the SyncBatchNorm {name} on several ranks, which waits in each pass for ranks that may have run out "
                "of memory: use group or layer norm, or omit sync_batchnorm"
            )
    return None


class AutoStep(AutomaticStep):
    """Treats each batch as one window, run in one pass or in micro-batches with accumulated gradients.

    If a pass runs out of memory, no optimizer has stepped yet. The step drops the gradients, restores random states,
    buffers and metrics, and runs the batch again in twice as many micro-batches. The result is bit for bit that of a
    run that uses this number of micro-batches from this batch on.

    With several ranks, all must retry together, but a rank inside a collective cannot be interrupted. Under DDP no pass
    waits for another rank: gradients are exchanged once all ranks have agreed that their passes succeeded. Under FSDP
    passes do wait, so a rank whose pass failed completes it with one sample (`strategies/fsdp/collectives.py`).

    Args:
        run: the run of the fit.
        training_step: the user's `training_step`, as `Run.step_function` returns it.
        schedulers: the run's schedulers.
        sizes: the number of micro-batches per batch.
    """

    def __init__(
        self, run: Run, training_step: Callable[..., Any], schedulers: Schedulers, sizes: AutoAccumulation
    ) -> None:
        super().__init__(run, training_step, schedulers, accumulates=False)
        self.fit = run  # `run` is a method.
        self.sizes = sizes
        self.is_distributed = run.strategy.ranks.world_size > 1
        self.defers_exchange = self.is_distributed and run.strategy.exchanges_late
        """True if gradients are exchanged after the passes of all ranks, and not during them."""
        self.waits_in_passes = self.is_distributed and not self.defers_exchange
        """True if each pass waits for the other ranks."""
        self.micro = Window(is_open=True, alone=self.is_distributed)
        """The micro-batches' own window, which the strategy receives instead of the batch's window."""
        self.memory = PeakMemory(run.strategy.root_device)
        self.snapshots = Snapshots(run.module)
        self.largest: Any = None
        """A large batch to try before the first batch; None for no trial."""
        self.measures_memory = True
        """True for the passes whose peak memory is measured: the first ones, and those after a failure."""

    def begin(self) -> None:
        if not self.sizes.try_largest:
            return
        largest = largest_batch(self.fit.loaders.train_loader)
        # Either all ranks run a trial or none does. The ranks' results may differ if the data set draws its sizes.
        self.largest = None if self.strategy.ranks.any(largest is None) else largest

    def run_without_samples(self, filler: Callable[[], Any], batch_idx: int) -> None:
        # The other ranks know that this rank has no sample, and skip the trial.
        self.largest = None
        super().run_without_samples(filler, batch_idx)

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
        """Runs a trial of the largest candidate before the first batch. Only the number of micro-batches is kept."""
        largest, self.largest = self.largest, None
        if self.engine.share is not None and self.engine.share.idle:
            # Ranks without a sample do not take part in the trial.
            return
        if self.fit.loaders.train_transfer is not None:
            with isolated_rng():
                largest = self.fit.loaders.train_transfer(largest, 0)
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        extra = (batch_idx,) if self.takes_index else ()
        trial = Attempt(self, largest, batch_idx, counts=False)
        with self.fit.logs.discarding():
            while not trial.is_done:
                with trial:
                    for part in trial.parts():
                        with self.hooks.inside("training_step"):
                            trial.add(self.forward_backward(self.training_step, part.batch, extra, self.micro, trial))
        for parameter, grad in gradients:
            parameter.grad = grad

    def close(self, batch_idx: int) -> None:
        self.memory.begin("step", self.measures_memory)
        try:
            super().close(batch_idx)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in the optimizer's step of batch {batch_idx} (epoch {self.progress.epoch}), where "
                f"smaller micro-batches do not help; peak memory: {self.memory.failed()}. Use an optimizer with less "
                f"state, strategy='fsdp', or precision='bf16-true'. The error was: {error}"
            ) from error
        self.memory.begin("", False)
        self.measures_memory = False

    def _run_filler(self, filler: Callable[[], Any], batch_idx: int) -> None:
        """Takes part in the other ranks' agreements and exchanges on a rank without a sample."""
        extra = (batch_idx,) if self.takes_index else ()
        batch = None if self.defers_exchange else filler()
        attempt = Attempt(self, None, batch_idx)
        while not attempt.is_done:
            with attempt:
                self.open_micro(self.sizes.micro_batches)
                for place in range(0 if self.defers_exchange else self.micro.length):
                    self.begin_micro(place, 1.0)
                    self.fill(one_sample_of(batch), extra)

    # called by an attempt ---------------------------------------------------------------------------------------------
    def begin_window(self, batch_idx: int, clears: bool) -> None:
        """Starts the first attempt at a batch; clears the gradients if `clears`."""
        if clears and self.only_clears:
            clear_gradients(self.optimizers)
        elif clears:
            self._zero_grad(batch_idx)
        if self.defers_exchange:
            # DDP does this in the first forward pass after an exchange, but these passes run without exchanges.
            self.strategy.synchronize_buffers()

    def open_micro(self, length: int) -> None:
        """Opens the window of a batch's micro-batches."""
        self.micro.open(length)
        if self.waits_in_passes:
            share, ranks = self.engine.share, self.strategy.data_size
            self.micro.divide_by(share.total / ranks if share is not None and share.sized else 1.0)

    def begin_micro(self, place: int, weight: float) -> None:
        """Begins the micro-batch at position `place`; `weight` multiplies its mean loss."""
        self.micro.place(place, place == self.micro.length - 1 and not self.defers_exchange, weight)
        self.memory.begin("forward", self.measures_memory)
        self.strategy.begin_pass()

    def fill(self, batch: Any, extra: tuple[Any, ...]) -> None:
        """Takes part in the exchanges of a micro-batch in which this rank has no sample."""
        with self.fit.logs.discarding(), without_side_effects(self.module):
            self.strategy.shadow_batch(self.training_step, batch, extra, self.micro)

    def agree(self, own: Failure | None, has_items: bool) -> tuple[list[Failure], bool]:
        """Returns the failures of all ranks, and whether any rank's loss has `num_items`."""
        if not self.is_distributed:
            return ([] if own is None else [own]), has_items
        ranks = self.strategy.ranks
        failed, any_items = ranks.exchange_flags((own is not None, has_items))()
        failures = [failure for failure in ranks.all_gather_object(own) if failure is not None] if failed else []
        return failures, any_items

    def exchange(self, has_items: bool, any_items: bool) -> None:
        """Reduces the gradients over ranks after the passes of all ranks have succeeded."""
        if any_items:
            if not has_items:
                self.micro.begin_items(0, 1.0 if self.micro.divisor is None else self.micro.divisor)
            # Replaces the divisor of this rank's backward with the items of all ranks.
            self.engine.close_window(self.micro)
        if self.defers_exchange:
            self.strategy.sync_gradients()

    def split_batch(self, batch: Any) -> list[MicroBatch]:
        """Splits a batch into the current number of micro-batches, or into single samples if it has fewer.

        If passes wait for other ranks, all ranks get the same number, and some parts may have no sample that counts.
        """
        count = self.sizes.micro_batches
        if count == 1:
            return [MicroBatch(batch, 1, 1.0)]
        self._check_rows(batch)
        parts = cut(batch, count)
        return parts if self.waits_in_passes else [part for part in parts if part.rows]

    def _check_rows(self, batch: Any) -> None:
        """Raises ConfigurationError if the first dimension is not the known number of samples."""
        rows, share, loader, expected = rows_of(batch), self.engine.share, self.fit.loaders.train_loader, None
        if share is not None:
            expected = share.here if share.sized else None
        elif is_indexed(loader) and self.fit.loaders.cursor is not None:
            # The last batch may be smaller.
            expected = None if self.progress.batch + 1 == self.fit.loaders.cursor.length else loader.batch_size
        if expected and rows != expected:
            raise ConfigurationError(
                f"a batch of {expected} samples cannot be split into micro-batches: its first tensor has {rows} rows. "
                "Return tensors of shape (samples, …), or lists with an entry per sample, from the loader's "
                "collate_fn, and transpose them to (time, samples, …) in training_step if needed."
            )

    def describe(self, error: Exception, batch: Any) -> Failure:
        """Returns this rank's report of a pass that ran out of memory."""
        ranks, rows, part, reason = self.strategy.ranks, None, None, ""
        count = self.sizes.micro_batches
        try:
            rows = rows_of(batch)
            part = -(-rows // count)
            self._check_rows(batch)
            if part == 1:
                reason = "a micro-batch of one sample cannot be split"
            else:
                cut(batch, 2 * count)
        except ConfigurationError as refusal:
            reason = str(refusal).removesuffix(".")
        device = str(self.strategy.root_device)
        text = str(error).strip().splitlines()
        line = f"{type(error).__name__}: {text[0] if text else ''}"
        return Failure(ranks.global_rank, device, self.memory.phase, rows, part, self.memory.failed(), line, reason)

    def shrink_micro_batches(self, failures: list[Failure], trial: str = "") -> None:
        """Doubles the number of micro-batches, and reports it.

        Args:
            failures: the reports of all ranks that failed.
            trial: text that marks a trial batch; "" for a batch of the run.

        Raises:
            OutOfMemory: if a batch cannot be split any further.
        """
        final = next((failure for failure in failures if failure.reason), None)
        place = f"{trial}at step {self.progress.global_step} (epoch {self.progress.epoch}, batch {self.progress.batch})"
        if final is not None:
            raise OutOfMemory(
                f"{final.describe()}, {place}. accumulate_grad_batches='auto' cannot split it further: {final.reason}. "
                "Use precision='bf16-mixed', activation checkpointing (torch.utils.checkpoint), strategy='fsdp', or "
                f"shorter samples. The error was: {final.error}",
                of_another_rank=all(failure.rank != self.strategy.ranks.global_rank for failure in failures),
            )
        self.memory.begin("", False)
        self.measures_memory, before = True, self.sizes.micro_batches
        count = self.sizes.cut_finer()
        self.fit.report(
            f"leyden: {failures[0].describe()}, {place}. From this batch on, each batch runs in {count} micro-batches "
            f"instead of {before}. The global batch, its gradient and the number of steps are unchanged. The error "
            f"was: {failures[0].error}"
        )
        if before == 1 and any(isinstance(part, _BatchNorm) and part.training for part in self.module.modules()):
            warn(
                "batch norm now computes its statistics per micro-batch, not per batch. Use group or layer norm if "
                "this changes results too much.",
            )


class Attempt:
    """The attempts at one batch: runs its micro-batches, in ever smaller parts, until they fit into memory.

    As a context manager it encloses the passes of one attempt; on exit all ranks agree whether it succeeded. It also
    serves as the strategy's backward hooks, which tell it when the backward phase begins.

    Args:
        step: the step that runs the batch.
        batch: this rank's batch; None if it has no sample.
        batch_idx: the batch's index.
        counts: False for a trial, which leaves no effects.
    """

    def __init__(self, step: AutoStep, batch: Any, batch_idx: int, counts: bool = True) -> None:
        self.is_done = False
        self._counts = counts
        self._step, self._batch, self._batch_idx = step, batch, batch_idx
        self._restore: Callable[[], None] | None = None
        self._stack = ExitStack()
        self._parts: list[MicroBatch] = []
        self._outputs: list[Any] = []
        hooks: Hooks = step.hooks
        self.on_before_backward = (*(hooks.on_before_backward if counts else ()), self._begin_backward)
        self.on_after_backward = hooks.on_after_backward if counts else ()
        self.backward = hooks.backward

    def _begin_backward(self, loss: Tensor) -> None:
        self._step.memory.begin("backward", self._step.measures_memory)

    @property
    def _extra(self) -> tuple[Any, ...]:
        return (self._batch_idx,) if self._step.takes_index else ()

    # one attempt ------------------------------------------------------------------------------------------------------
    def __enter__(self) -> Attempt:
        step = self._step
        if self._restore is None and self._counts:
            step.begin_window(self._batch_idx, clears=self._batch is not None)
        self._parts, self._outputs = [], []
        self._restore = step.snapshots.take()
        self._stack.enter_context(step.fit.logs.by_micro_batch())
        if step.defers_exchange:
            self._stack.enter_context(step.strategy.gradient_sync(False))
        return self

    def parts(self) -> Iterator[MicroBatch]:
        """Yields the micro-batches that have samples, after preparing window and logs for each."""
        step, weight = self._step, self._step.window.weight if self._counts else 1.0
        self._parts = parts = step.split_batch(self._batch)
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
        """Keeps the step's output for a micro-batch."""
        # Detached, because the graph keeps the inputs alive.
        self._outputs.append(outputs if len(self._parts) == 1 else detached(outputs))

    def outputs(self) -> Any:
        """Returns the output that the step would have returned for the whole batch."""
        if len(self._parts) == 1:
            return self._outputs[0]
        parts = [part for part in self._parts if part.rows]
        losses = [read_output(output) for output in self._outputs]
        weighted = [
            loss if num_items is not None else loss * part.share
            for (loss, num_items), part in zip(losses, parts, strict=True)
        ]
        return together(self._outputs, parts, torch.stack(weighted).sum())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not (isinstance(error, Exception) and is_out_of_memory(error)):
            self._stack.__exit__(kind, error, trace)
            return False
        try:
            return self._end(kind, error, trace)
        except BaseException:
            # Restore the strategy's state, because another fit may use it.
            self._stack.close()
            raise

    def _end(self, kind: type[BaseException] | None, error: Exception | None, trace: TracebackType | None) -> bool:
        """Ends an attempt; returns True, which suppresses the error, if any rank failed and all must retry."""
        step = self._step
        own = None if error is None else step.describe(error, self._batch)
        if error is not None:
            # Drops the values logged in earlier passes of this attempt; the retry logs them again.
            self._stack.__exit__(kind, error, trace)
            free(error)
            assert own is not None
            self._abandon(own)
        has_items = error is None and self._batch is not None and step.micro.num_items is not None
        failures, any_items = step.agree(own, has_items)
        if failures:
            if error is None:
                retry = LeydenError("another rank is out of memory")
                self._stack.__exit__(type(retry), retry, None)
            self._roll_back()
            step.shrink_micro_batches(failures, "" if self._counts else "in a trial of a large batch ")
            return True
        if not self._counts:
            self._stack.__exit__(None, None, None)
            self._roll_back()
            self.is_done = True
            return False
        if any_items and not has_items and self._batch is not None:
            raise ConfigurationError(
                "training_step returned num_items on some ranks but not on others. Return it on every rank or on none."
            )
        step.exchange(has_items, any_items)
        self._stack.__exit__(None, None, None)
        self.is_done = True
        return False

    def _abandon(self, own: Failure) -> None:
        """Abandons this attempt after running the passes that the other ranks wait for."""
        step = self._step
        if own.reason and not step.defers_exchange:
            # Final: the other ranks are inside their passes, and this rank's error ends them.
            step.shrink_micro_batches([own])
        try:
            step.strategy.abandon_pass(self._end_passes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            step.shrink_micro_batches([replace(own, part=1, reason="a single sample does not fit either")])

    def _end_passes(self) -> None:
        """Runs the failed micro-batch and the remaining ones with one sample, because the other ranks run theirs."""
        step, window = self._step, self._step.micro
        sample, hooks = one_sample_of(self._batch), SilentHooks(self.backward)
        with step.fit.logs.discarding(), step.hooks.inside("training_step"):
            for place in range(window.index, window.length):
                if place > window.index:
                    step.begin_micro(place, 1.0)
                step.strategy.forward_backward(step.training_step, sample, self._extra, window, hooks)

    def _roll_back(self) -> None:
        step = self._step
        clear_gradients(step.optimizers)
        self._outputs, self._parts = [], []
        assert self._restore is not None
        self._restore()


@dataclass(frozen=True)
class SilentHooks:
    """Backward hooks for a pass whose result does not count: only the module's own `backward` runs.

    Attributes:
        backward: the module's `backward` if it overrides it; otherwise None.
    """

    backward: Callable[[Tensor], Any] | None
    on_before_backward: tuple[Callable[[Tensor], Any], ...] = ()
    on_after_backward: tuple[Callable[[], Any], ...] = ()


def one_sample_of(batch: Any) -> Any:
    """Returns the first sample of a batch: `cut` fills up with it if there are more parts than samples."""
    return cut(batch, rows_of(batch) + 1)[-1].batch


def free(error: BaseException) -> None:
    """Frees the tensors held by the stack frames of a failed pass."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    free_cached_memory()


def read_output(outputs: Any) -> tuple[Tensor, Any]:
    """Returns the loss and `num_items` of a micro-batch after its backward."""
    if isinstance(outputs, Tensor):
        return outputs, None
    return outputs["loss"], outputs.get("num_items")


class Snapshots:
    """Takes snapshots of the state that passes change, except gradients: buffers, metrics and random states.

    A large buffer is copied before the first batch, and then only once it is known to change. A constant buffer costs
    nothing.

    Args:
        module: the module whose passes are run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[str, tuple[int, int]] = {}
        """For each large buffer, the tensor's id and version before the last pass."""
        self._changing: set[str] = set()

    def take(self) -> Callable[[], None]:
        """Takes a snapshot; returns a function that restores it, to be called once."""
        return take_snapshot(self._module, self._needs_copy)

    def _needs_copy(self, name: str, buffer: Tensor) -> bool:
        if buffer.is_inference() or buffer.nbytes <= SMALL_BUFFER:
            return True
        now = id(buffer), buffer._version
        before = self._seen.get(name)
        self._seen[name] = now
        if before is not None and before != now:
            self._changing.add(name)
        return before is None or name in self._changing
