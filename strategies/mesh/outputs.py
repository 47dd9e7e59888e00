"""MeshOutputs: outputs and logs of a mesh's steps. They are on a pipeline's last stage, or in parts on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from leyden.strategies.outputs import SharedNumbers, StepOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from leyden.strategies.mesh.context.context_parallel import ContextParallel
    from leyden.strategies.mesh.mesh_strategy import MeshStrategy
    from leyden.strategies.mesh.pipeline.steps import PipelineSteps
    from leyden.strategies.ranks import Ranks

T = TypeVar("T")


class MeshOutputs(StepOutputs):
    """The outputs and logs of a mesh's steps. Without pp and cp, every rank has all of them.

    Args:
        strategy: the strategy that runs the steps.
    """

    def __init__(self, strategy: MeshStrategy) -> None:
        self._strategy = strategy
        self._steps: PipelineSteps | None = None
        self._context: ContextParallel | None = None

    def follow(self, steps: PipelineSteps | None, context: ContextParallel | None = None) -> None:
        """Attaches what runs the steps of a pipeline, or on parts of sequences; None detaches it."""
        self._steps, self._context = steps, context

    @property
    def are_split(self) -> bool:
        return self._strategy.filled.cp > 1

    def weight_of(self, micro_batch: int) -> Tensor | float:
        return 1.0 if self._context is None else self._context.weight_of(micro_batch)

    def of_all_parts(self, numbers: Tensor) -> Tensor:
        return numbers[None] if self._context is None else self._context.gathered(numbers)

    @property
    def are_in_parts(self) -> bool:
        return self._strategy.filled.pp > 1

    @property
    def are_here(self) -> bool:
        return self._steps is None or self._steps.pipeline.on_last

    @property
    def are_rehearsed(self) -> bool:
        if self._steps is None:
            return self._context is not None and self._context.is_rehearsing
        return self._steps.pipeline.is_rehearsing or self._steps.pipeline.is_filling

    def on_ranks(self, ranks: Ranks) -> list[bool]:
        layout = self._strategy.filled
        if layout.pp == 1:
            return super().on_ranks(ranks)
        schedule = self._strategy.schedule
        last = schedule.rank_of(schedule.stages - 1)
        return [rank // (layout.size // layout.pp) == last for rank in range(layout.size)]

    def share(self, obj: T) -> T:
        return obj if self._steps is None else self._steps.from_last(obj)

    def begin_numbers(
        self, described: list[Any], numbers: Sequence[Tensor | float]
    ) -> Callable[[], SharedNumbers] | None:
        # The last stage's description and numbers reach the other ranks in the background.
        return None if self._steps is None else self._steps.numbers.send(described, numbers)

    def share_scalar(self, scalar: Tensor | None) -> Tensor:
        return super().share_scalar(scalar) if self._steps is None else self._steps.scalar_from_last(scalar)

    def share_tensors(self, tree: T) -> T:
        return tree if self._steps is None else self._steps.tensors_from_last(tree)
