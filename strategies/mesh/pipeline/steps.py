"""PipelineSteps: training and evaluation steps, gradients and outputs of a model that is cut into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from leyden.core.errors import ConfigurationError
from leyden.core.tree import widest_float
from leyden.strategies.fsdp.gradients import clip_by, total_norm
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.context.sequence import SequencePart
from leyden.strategies.mesh.pipeline.cross_stage_reads import check_cross_stage_reads
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.numbers import NumberBroadcast
from leyden.strategies.mesh.pipeline.payload import PayloadSpec
from leyden.strategies.mesh.pipeline.rng import PipelineRNG
from leyden.strategies.mesh.pipeline.schedule import Pipeline, Schedule
from leyden.strategies.micro_batches import MicroBatch, cut, together
from leyden.strategies.window import BackwardHooks, Window, read_loss, zeroed

if TYPE_CHECKING:
    from leyden.strategies.mesh.context.context_parallel import ContextParallel
    from leyden.strategies.mesh.mesh_strategy import MeshStrategy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the ranks of a pipeline learn before they train.

    Attributes:
        payloads: what each stage receives, by the signature of a micro-batch and the stage.
        counts_items: True if steps return num_items with their losses.
    """

    payloads: Mapping[tuple[Any, int], PayloadSpec]
    counts_items: bool


class PipelineSteps:
    """Runs steps through a pipeline, for a MeshStrategy.

    Args:
        strategy: the strategy, which provides precision, ranks and data ranks.
        root: the whole model.
        holdings: the parts of the model that this rank's stages hold.
        schedule: the order in which micro-batches run.
        group: the ranks of the pipeline.
        before_backward: called before each backward pass (see `Pipeline`).
        context: runs steps on parts of sequences: every batch is then a `SequencePart`. None if sequences are whole.
    """

    def __init__(
        self,
        strategy: MeshStrategy,
        root: nn.Module,
        holdings: Holdings,
        schedule: Schedule,
        group: dist.ProcessGroup,
        before_backward: Callable[[bool, Any], None],
        context: ContextParallel | None,
    ) -> None:
        self._strategy, self.root, self.holdings, self._group = strategy, root, holdings, group
        self._context = context
        device = strategy.root_device
        self.rng = PipelineRNG(group, device, strategy.data_rank, holdings.stages)
        host_group = strategy.ranks.host_group
        assert host_group is not None
        # FSDP gathers a group before its first forward of a batch, in the same order with and without a rehearsal. If
        # it gathers more often, a rehearsal adds gathers, which the other ranks of the shards must join. They must join
        # the exchange of tokens with experts over ep, too.
        frees_after_forward = strategy.settings["reshard_after_forward"] is not False
        self._rehearses_with_all = strategy.layout.ep > 1 or (strategy.shard_mesh is not None and frees_after_forward)
        self.pipeline = Pipeline(
            root,
            holdings,
            schedule,
            group,
            device,
            self.rng,
            before_backward,
            host_group,
            self._rehearses_with_all,
            context,
        )
        self._shared = holdings.shared_slots()
        self._divisor = 1.0
        """Divides losses that are sums over items, before backward: a power of two near the number of items."""
        self._counts_items = False
        """True if steps return num_items with their losses."""
        self._items: Tensor | float = 0
        """Number of items in the accumulation window so far."""
        self._is_synchronized = False
        """True once the ranks' random generators have been synchronized."""
        self.numbers = NumberBroadcast(group, self.pipeline.last_rank, device)

    # rehearsals elsewhere ---------------------------------------------------------------------------------------------
    def rehearse_alone(self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...]) -> Rehearsal:
        """Rehearses all micro-batches of a batch on a rank that holds all stages."""
        step, counts_items = self._step(step_fn, extra), False
        with torch.no_grad():
            for part in self.pipeline.unrehearsed(cut(batch, self.pipeline.schedule.micro_batches)):
                outputs = self.pipeline.relay(step, part.batch, part.signature)
                counts_items = isinstance(outputs, dict) and outputs.get("num_items") is not None
        return Rehearsal(self.pipeline.payloads, counts_items)

    def expect(self, rehearsal: Rehearsal) -> None:
        """Takes what `rehearse_alone` has learned elsewhere, in place of `start`."""
        self.pipeline.expect(rehearsal.payloads)
        self._counts_items = rehearsal.counts_items

    # a batch ----------------------------------------------------------------------------------------------------------
    def start(self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...]) -> None:
        """Prepares the first step of a run, with its batch. Every rank of the run must call it."""
        self._synchronize_rng()
        own_items = self._rehearse(step_fn, cut(batch, self.pipeline.schedule.micro_batches), extra)
        items = [number for found in self._strategy.ranks.all_gather_object(own_items) for number in found or ()]
        counts = [number for number in items if number is not None]
        self._counts_items = bool(counts)
        # Dividing by a power of two changes no bit of a gradient, so the choice of the first batch does not matter.
        self._divisor = 2.0 ** round(math.log2(max(1.0, *counts))) if counts else 1.0

    def _synchronize_rng(self) -> None:
        self.rng.synchronize()
        self._is_synchronized = True

    def _rehearse(
        self, step_fn: Callable[..., Any], parts: Sequence[MicroBatch], extra: tuple[Any, ...]
    ) -> list[float | None]:
        """Rehearses micro-batches of new sizes. The ranks of a pipeline share their batches, so they need not agree.

        Returns:
            num_items of each rehearsed micro-batch, on the last stage; None elsewhere, or if the step returned none.
        """
        unrehearsed, ranks = self.pipeline.unrehearsed(parts), self._strategy.ranks
        count = len(unrehearsed)
        if self._rehearses_with_all:
            count = int(ranks.reduce(torch.tensor(count), ranks.host_group, "max"))
        step = self._step(step_fn, extra)
        chosen = [*unrehearsed, *[parts[0]] * (count - len(unrehearsed))]
        return [self._rehearse_part(step, part) for part in chosen]

    def _rehearse_part(self, step: Callable[[Any], Any], part: MicroBatch) -> float | None:
        rehearse = partial(self.pipeline.rehearse, step, part, _items_of)
        items: float | None = rehearse()
        check_cross_stage_reads(self.pipeline, self.holdings, rehearse)
        return items

    def rehearse_whole(self, step: Callable[[Any], Any], batch: Any, read: Callable[[Any], T]) -> T | None:
        """Runs a step forward on a whole batch, without gradients and traces. Every rank of the pipeline must call it.

        Returns:
            What `read` returned for the step's outputs, on the rank with the last stage; None on the others.

        Raises:
            ConfigurationError: if `read` raises one. Raised on every rank of the pipeline.
        """
        found: T | None = self.pipeline.rehearse(step, MicroBatch(batch, 1, 1.0), read)
        return found

    def _step(self, step_fn: Callable[..., Any], extra: tuple[Any, ...]) -> Callable[[Any], Any]:
        """Returns the user's step as a function of a batch, run in the precision's context."""
        precision, context = self._strategy.precision.forward_context, self._context

        def step(batch: Any) -> Any:
            if precision is None:
                return step_fn(batch, *extra)
            with precision():
                return step_fn(batch, *extra)

        def step_in_parts(part: SequencePart) -> Any:
            assert context is not None
            with context.running(part):
                return step(part.batch)

        return step if context is None else step_in_parts

    def forward_backward(
        self,
        step_fn: Callable[..., Any],
        batch: Any,
        extra: tuple[Any, ...],
        window: Window,
        hooks: BackwardHooks | None,
        counts: bool = True,
    ) -> Any:
        """Runs a batch through the pipeline, forward and backward.

        Args:
            step_fn: the user's step.
            batch: the whole batch of this data rank.
            extra: further arguments of the step.
            window: the accumulation window.
            hooks: called around backward; None for none.
            counts: False for a filler, on a data rank without a batch of its own: its loss is zero.

        Returns:
            What the step would have returned for the whole batch, on the rank with the last stage; None on the others.
        """
        if hooks is not None and hooks.backward is not None:
            raise ConfigurationError(
                "the module has a backward() of its own, which a pipeline cannot call: each stage runs backward on its "
                "own outputs. Remove it, or use a strategy without pp."
            )
        parts = cut(batch, self.pipeline.schedule.micro_batches)
        self._rehearse(step_fn, parts, extra)
        if window.index == 0:
            self._items = 0
        losses: list[Tensor] = []

        def to_loss(outputs: Any, part: MicroBatch) -> Tensor:
            loss, num_items = read_loss(outputs)
            if not part.rows or not counts:
                return self._strategy.precision.scale_loss(zeroed(loss))
            if self._context is not None:
                self._context.count(num_items)
            for hook in hooks.on_before_backward if hooks is not None else ():
                hook(loss)
            losses.append(loss.detach() if num_items is not None else loss.detach() * part.share)
            return self._strategy.precision.scale_loss(self._weighted(loss, num_items, part, window))

        found = self.pipeline.train(self._step(step_fn, extra), parts, to_loss)
        for after in hooks.on_after_backward if hooks is not None else ():
            after()
        outputs = together(found, parts, torch.stack(losses).sum()) if self.pipeline.has_last and counts else None
        if self._context is not None:
            outputs = self._context.with_totals(outputs)
        if self._counts_items and outputs is not None:
            self._items = self._items + outputs["num_items"]
        if window.closes:
            self._close(window)
        return outputs

    def _weighted(self, loss: Tensor, num_items: Tensor | float | None, part: MicroBatch, window: Window) -> Tensor:
        """Returns a micro-batch's loss, weighted by its share of the batch and of the accumulation window."""
        if (num_items is not None) is not self._counts_items:
            raise ConfigurationError(
                "training_step returned num_items for some batches and not for others: return it always or never."
            )
        if num_items is not None:
            return loss / self._divisor
        loss = loss * part.share
        if window.weight != 1.0:
            loss = loss * window.weight
        return loss / window.length if window.length > 1 else loss

    def _close(self, window: Window) -> None:
        """Closes a window: sums the gradients of tied parameters, and broadcasts the number of items to all stages."""
        for module, name in self._shared:
            self._sum_tied_gradients(module._parameters[name])
        if not self._counts_items:
            return
        device, items = self._strategy.root_device, self._items
        # Filled on the device: copying a number to a GPU would wait for its pending work.
        total = torch.zeros((), dtype=widest_float(device), device=device)
        total += items.detach().reshape(()) if isinstance(items, Tensor) else items
        dist.broadcast(total, group=self._group, group_src=self.pipeline.last_rank)
        # Gradients are averaged over the parts of a sequence, too.
        window.begin_items(total, self._divisor * self._strategy.layout.cp)

    def _sum_tied_gradients(self, parameter: nn.Parameter | None) -> None:
        """Sums the gradients of a parameter that the first and the last stage share."""
        first, last = self.pipeline.schedule.rank_of(0), self.pipeline.last_rank
        if parameter is None or not parameter.requires_grad or first == last or self.pipeline.rank not in (first, last):
            return
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            # The gradient of an embedding split along its vocabulary is partial: each rank has a part of the sum.
            grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = grad
        own = local(grad)
        received, peer = torch.empty_like(own), last if self.pipeline.rank == first else first
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        own.add_(received)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T | None:
        """Runs a step forward on the whole batch. Stages overlap: an earlier one may already run the next batch.

        Returns:
            What the step returned, on the rank with the last stage; None on the others.
        """
        if not self._is_synchronized:
            self._synchronize_rng()
        self.rng.begin_batch(trains=False)
        outputs: T | None = self.pipeline.relay(self._step(step_fn, extra), batch, switches_rng=True)
        return outputs

    # gradients --------------------------------------------------------------------------------------------------------
    def clip_norm(self, parameters: Sequence[Tensor], value: float, norm_type: float) -> Tensor:
        """Clips gradients to a total norm over all stages; returns the norm before clipping, the same on every rank."""
        counted = [p for p in self.counted(parameters) if p.grad is not None]
        device = self._strategy.root_device
        # Reduced in the widest dtype: stages may differ in dtype, or have no gradients.
        norm = total_norm(counted, norm_type).to(device) if counted else torch.zeros((), device=device)
        dtype = norm.dtype
        norm = norm.to(widest_float(device))
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._group)
            norm = norm ** (1.0 / norm_type)
        norm = norm.to(dtype)
        clip_by(parameters, value, norm)
        return norm

    def reduce_max(self, number: Tensor) -> None:
        """Reduces a number to its maximum over the stages, in place. Every rank of the pipeline must call it."""
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Returns the parameters of this rank's stages. A parameter that two stages share counts on the first rank."""
        shared = {id(module._parameters[name]) for module, name in self._shared} if self.pipeline.rank else set()
        return [p for p in parameters if id(p) not in shared and p not in self.holdings.absent]

    # outputs of the last stage ----------------------------------------------------------------------------------------
    def from_last(self, obj: T) -> T:
        """Returns the last stage's object on every rank of the pipeline. Every rank must call it."""
        box = [obj]
        dist.broadcast_object_list(box, group=self._group, group_src=self.pipeline.last_rank)
        return box[0]

    def scalar_from_last(self, scalar: Tensor | None) -> Tensor:
        """Like `from_last`, for a 0-d tensor in float32. Ranks without the last stage may pass None."""
        device = self._strategy.root_device
        shared = torch.zeros((), device=device) if scalar is None else scalar.to(device, torch.float32, copy=True)
        dist.broadcast(shared, group=self._group, group_src=self.pipeline.last_rank)
        return shared

    def tensors_from_last(self, tree: T) -> T:
        """Like `from_last`, for a nested structure whose tensors are broadcast without pickling."""
        spec = PayloadSpec(self.from_last(PayloadSpec(tree).tree))
        has_last = self.pipeline.has_last
        tensors = [leaf.contiguous() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] if has_last else []
        for tensor in (shared := tensors or spec.allocate(self._strategy.root_device)):
            dist.broadcast(tensor, group=self._group, group_src=self.pipeline.last_rank)
        return tree if has_last else spec.rebuild(shared)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Removes all hooks from the model."""
        self.pipeline.runner.remove()


def _items_of(outputs: Any) -> float | None:
    """Returns the num_items of `training_step`; None if its loss is a mean."""
    num_items = outputs.get("num_items") if isinstance(outputs, dict) else None
    return None if num_items is None else float(num_items)
