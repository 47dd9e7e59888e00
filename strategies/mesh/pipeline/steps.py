"""The steps of a model that is cut into stages: what a strategy does with a batch, its loss and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from leyden.strategies.batch import widest_float
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.fsdp.gradients import clip_by, total_norm
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.draws import StageDraws
from leyden.strategies.mesh.pipeline.forms import Form
from leyden.strategies.mesh.pipeline.numbers import Numbers
from leyden.strategies.mesh.pipeline.readings import check_readings
from leyden.strategies.mesh.pipeline.schedule import Pipeline, Schedule
from leyden.strategies.micro_batches import MicroBatch, cut, together
from leyden.strategies.window import BackwardHooks, Window, read_loss, zeroed

if TYPE_CHECKING:
    from leyden.strategies.mesh.strategy import MeshStrategy

T = TypeVar("T")


class PipelineSteps:
    """Runs steps through a pipeline, for a MeshStrategy.

    Args:
        strategy: with its precision, ranks and data ranks.
        root: the model, whole.
        holdings: what the stages of this rank hold of it.
        schedule: in which order micro-batches run.
        group: the ranks of the pipeline.
        before_backward: called before each backward pass, with whether it is the last of its batch on this rank.
    """

    def __init__(
        self,
        strategy: MeshStrategy,
        root: nn.Module,
        holdings: Holdings,
        schedule: Schedule,
        group: dist.ProcessGroup,
        before_backward: Callable[[bool], None],
    ) -> None:
        self._strategy, self.root, self.holdings, self._group = strategy, root, holdings, group
        device = strategy.root_device
        self.draws = StageDraws(group, device, strategy.data_rank, holdings.stages)
        self.pipeline = Pipeline(root, holdings, schedule, group, device, self.draws, before_backward)
        self._shared = holdings.shared_slots()
        self._divisor = 1.0
        """What losses that are sums over items are divided by on their way back: a power of two, near their number."""
        self._counts_items = False
        self._items: Tensor | float = 0
        self._agreed = False
        self.numbers = Numbers(group, self.pipeline.last_rank, device)

    # a batch ----------------------------------------------------------------------------------------------------------
    def start(self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...]) -> None:
        """Begins a run with its first batch. Every rank of the run calls it."""
        self._agree()
        seen = self._rehearse(step_fn, cut(batch, self.pipeline.schedule.micro_batches), extra)
        items = [found for found in self._strategy.ranks.all_gather_object(seen) if found]
        numbers = [number for found in items for number in found if number is not None]
        self._counts_items = bool(numbers)
        # A power of two changes no bit of a gradient, so runs that begin with other batches are alike.
        self._divisor = 2.0 ** round(math.log2(max(1.0, *numbers))) if numbers else 1.0

    def _agree(self) -> None:
        self.draws.agree()
        self._agreed = True

    def _rehearse(
        self, step_fn: Callable[..., Any], parts: Sequence[MicroBatch], extra: tuple[Any, ...]
    ) -> list[float | None]:
        """Runs what is new among the micro-batches, on all ranks as often: shards are gathered for each."""
        unknown, ranks = self.pipeline.unknown(parts), self._strategy.ranks
        count = len(unknown)
        if self._strategy.shard_mesh is not None:
            count = int(ranks.reduce(torch.tensor(count), ranks.host_group, "max"))
        step = self._step(step_fn, extra)
        chosen = [*unknown, *[parts[0]] * (count - len(unknown))]
        return [self._rehearse_part(step, part) for part in chosen]

    def _rehearse_part(self, step: Callable[[Any], Any], part: MicroBatch) -> float | None:
        def rehearse() -> float | None:
            found: float | None = self.pipeline.rehearse(step, part, _items_of)
            return found

        items = rehearse()
        check_readings(self.pipeline, self.holdings, self._strategy.ranks, rehearse)
        return items

    def _step(self, step_fn: Callable[..., Any], extra: tuple[Any, ...]) -> Callable[[Any], Any]:
        context = self._strategy.precision.forward_context

        def step(batch: Any) -> Any:
            if context is None:
                return step_fn(batch, *extra)
            with context():
                return step_fn(batch, *extra)

        return step

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
            counts: False for a batch in the place of one that this data rank does not have: its loss is zero.

        Returns:
            What the step would have returned for the whole batch, on the rank with the last stage; None on the others.
        """
        if hooks is not None and hooks.backward is not None:
            raise ConfigurationError(
                "the module has a backward() of its own, which a pipeline cannot call: stages go backward from what "
                "they have sent. Remove it, or use a strategy without pp."
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
            for hook in hooks.on_before_backward if hooks is not None else ():
                hook(loss)
            losses.append(loss.detach() if num_items is not None else loss.detach() * part.share)
            return self._strategy.precision.scale_loss(self._weighed(loss, num_items, part, window))

        found = self.pipeline.train(self._step(step_fn, extra), parts, to_loss)
        for after in hooks.on_after_backward if hooks is not None else ():
            after()
        if window.closes:
            self._close(window)
        if not (self.pipeline.has_last and counts):
            return None
        return together(found, parts, torch.stack(losses).sum())

    def _weighed(self, loss: Tensor, num_items: Tensor | float | None, part: MicroBatch, window: Window) -> Tensor:
        if (num_items is not None) is not self._counts_items:
            raise ConfigurationError(
                "training_step returned num_items for some batches and not for others: return it always or never."
            )
        if num_items is not None:
            self._items = self._items + num_items
            return loss / self._divisor
        loss = loss * part.share
        if window.weight != 1.0:
            loss = loss * window.weight
        return loss / window.length if window.length > 1 else loss

    def _close(self, window: Window) -> None:
        """Brings to every stage what only one of them has: gradients of tied parameters, and the number of items."""
        for module, name in self._shared:
            self._sum_ends(module._parameters[name])
        if not self._counts_items:
            return
        device = self._strategy.root_device
        total = torch.as_tensor(self._items, device=device).to(widest_float(device)).detach().clone().reshape(())
        dist.broadcast(total, group=self._group, group_src=self.pipeline.last_rank)
        window.begin_items(total, self._divisor)

    def _sum_ends(self, parameter: nn.Parameter | None) -> None:
        """Adds the gradients that the first and the last stage have of one parameter."""
        first, last = self.pipeline.schedule.rank_of(0), self.pipeline.last_rank
        if parameter is None or not parameter.requires_grad or first == last or self.pipeline.rank not in (first, last):
            return
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            # An embedding split by its words has a gradient that is a part of the sum on each rank.
            grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = grad
        own = local(grad)
        other, peer = torch.empty_like(own), last if self.pipeline.rank == first else first
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        own.add_(other)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T | None:
        """Runs a step forward, with the whole batch at once: while one stage runs it, the one before runs the next."""
        if not self._agreed:
            self._agree()
        self.draws.begin_batch(trains=False)
        outputs: T | None = self.pipeline.relay(self._step(step_fn, extra), batch, draws=True)
        return outputs

    # gradients --------------------------------------------------------------------------------------------------------
    def clip_norm(self, parameters: Sequence[Tensor], value: float, norm_type: float) -> Tensor:
        """Clips gradients to a total norm over all stages; returns the norm before, the same on every rank."""
        counted = [p for p in self.counted(parameters) if p.grad is not None]
        device = self._strategy.root_device
        # Stages may have other dtypes, or no gradient at all.
        norm = total_norm(counted, norm_type).to(device) if counted else torch.zeros((), device=device)
        own = norm.dtype
        norm = norm.to(widest_float(device))
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=self._group)
            norm = norm ** (1.0 / norm_type)
        norm = norm.to(own)
        clip_by(parameters, value, norm)
        return norm

    def largest(self, number: Tensor) -> None:
        """Replaces a number, in place, by the largest over the stages. Every rank of the pipeline calls it."""
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)

    def counted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of this rank's stages; those that two stages share count on the first."""
        again = {id(module._parameters[name]) for module, name in self._shared} if self.pipeline.rank else set()
        return [p for p in parameters if id(p) not in again and p not in self.holdings.absent]

    # what only one stage has ------------------------------------------------------------------------------------------
    def from_last(self, obj: T) -> T:
        """The object of the rank with the last stage, on every rank of the pipeline, which must all call it."""
        box = [obj]
        dist.broadcast_object_list(
            box, group=self._group, group_src=self.pipeline.last_rank, device=self._strategy.root_device
        )
        return box[0]

    def scalar_from_last(self, scalar: Tensor | None) -> Tensor:
        """Does what `from_last` does for a 0-d tensor, in float32; None on ranks that have none."""
        device = self._strategy.root_device
        shared = torch.zeros((), device=device) if scalar is None else scalar.to(device, torch.float32, copy=True)
        dist.broadcast(shared, group=self._group, group_src=self.pipeline.last_rank)
        return shared

    def tensors_from_last(self, tree: T) -> T:
        """Does what `from_last` does for a nested structure, whose tensors are not pickled."""
        form = Form(self.from_last(Form(tree).tree))
        has_them = self.pipeline.has_last
        tensors = [leaf.contiguous() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] if has_them else []
        for tensor in (shared := tensors or form.room(self._strategy.root_device)):
            dist.broadcast(tensor, group=self._group, group_src=self.pipeline.last_rank)
        return tree if has_them else form.filled(shared)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Leaves the model as it was."""
        self.pipeline.passages.remove()


def _items_of(outputs: Any) -> float | None:
    """What `training_step` returned as num_items; None where the loss is a mean."""
    num_items = outputs.get("num_items") if isinstance(outputs, dict) else None
    return None if num_items is None else float(num_items)
