"""StepOutputs: on which ranks the user's steps reach their end, and return and log something."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from leyden.strategies.ranks import Ranks

T = TypeVar("T")
D = TypeVar("D")


class StepOutputs:
    """What the user's steps return and log, seen from one rank. Here every step reaches its end on every rank.

    In a pipeline only the last stage has outputs. A strategy that runs one has a subclass as `strategy.outputs`.
    """

    @property
    def are_in_parts(self) -> bool:
        """True where a batch runs as several micro-batches, and the step once for each of them."""
        return False

    @property
    def are_here(self) -> bool:
        """False while a step runs that does not reach its end on this rank: what it logs does not count."""
        return True

    @property
    def are_rehearsed(self) -> bool:
        """True while a step runs only to show what passes between the stages: it leaves no trace."""
        return False

    def on_ranks(self, ranks: Ranks) -> list[bool]:
        """For every rank, whether steps reach their end there."""
        return [True] * ranks.world_size

    def share(self, obj: T) -> T:
        """Returns the object of the rank where this one's steps reach their end; all ranks of a pipeline call it."""
        return obj

    def share_numbers(self, described: D, numbers: list[float]) -> tuple[D, list[float]]:
        """Returns what `share` would of both; quicker while the description stays the same from call to call."""
        return described, numbers

    def share_scalar(self, scalar: Tensor | None) -> Tensor:
        """Returns a 0-d tensor of the rank where this one's steps reach their end; None elsewhere. No device waits."""
        assert scalar is not None
        return scalar

    def share_tensors(self, tree: T) -> T:
        """Returns what `share` would; tensors of a nested structure stay on their device."""
        return tree


__all__ = ["StepOutputs"]
