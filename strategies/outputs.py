"""StepOutputs: on which ranks the user's steps reach their end, and return and log something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from leyden.strategies.ranks import Ranks

T = TypeVar("T")
SharedNumbers: TypeAlias = "tuple[list[Any], list[float]]"
"""Numbers of another rank, after their description."""


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

    def begin_numbers(
        self, described: list[Any], numbers: Sequence[Tensor | float]
    ) -> Callable[[], SharedNumbers] | None:
        """Begins to share a step's numbers; all ranks of a pipeline call it for each batch, and none waits.

        Args:
            described: what the numbers are, as JSON can hold it.
            numbers: one for each entry of the description.

        Returns:
            A function that waits, and returns what the rank gave on which this one's steps reach their end. None on
            that rank itself. At most 4 of these functions may be outstanding.
        """
        return None

    def share_scalar(self, scalar: Tensor | None) -> Tensor:
        """Returns a 0-d tensor of the rank where this one's steps reach their end; None elsewhere. No device waits."""
        assert scalar is not None
        return scalar

    def share_tensors(self, tree: T) -> T:
        """Returns what `share` would; tensors of a nested structure stay on their device."""
        return tree
