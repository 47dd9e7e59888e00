"""StepOutputs: the ranks on which the user's steps run to completion and produce outputs and logged values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from leyden.strategies.ranks import Ranks

T = TypeVar("T")
SharedNumbers: TypeAlias = "tuple[list[Any], list[float]]"
"""The description of another rank's numbers, and the numbers."""


class StepOutputs:
    """Outputs and logged values of the user's steps, seen from one rank. Here every rank completes every step.

    In a pipeline only the last stage completes a step and has outputs. A strategy that runs a pipeline sets
    `strategy.outputs` to a subclass.
    """

    @property
    def are_in_parts(self) -> bool:
        """True if a batch is split into micro-batches and the step runs once for each of them."""
        return False

    @property
    def are_split(self) -> bool:
        """True if each rank of a group runs the step on a part of every sequence, so that the ranks' values differ."""
        return False

    def weight_of(self, micro_batch: int) -> Tensor | float:
        """Returns the weight of a value that a micro-batch of this rank's part has logged, in a mean over all parts."""
        return 1.0

    def of_all_parts(self, numbers: Tensor) -> Tensor:
        """Stacks the numbers of the ranks that run parts of the same sequences: (parts, *numbers.shape)."""
        return numbers[None]

    @property
    def are_here(self) -> bool:
        """False while a step runs that this rank does not complete. Values logged by it are ignored."""
        return True

    @property
    def are_rehearsed(self) -> bool:
        """True during a dry run that only determines which tensors the stages exchange. It leaves no trace."""
        return False

    def on_ranks(self, ranks: Ranks) -> list[bool]:
        """Returns for every rank whether it completes steps."""
        return [True] * ranks.world_size

    def share(self, obj: T) -> T:
        """Returns the object of the rank that completes this rank's steps. All ranks of a pipeline call it."""
        return obj

    def begin_numbers(
        self, described: list[Any], numbers: Sequence[Tensor | float]
    ) -> Callable[[], SharedNumbers] | None:
        """Starts sharing a step's numbers without waiting. All ranks of a pipeline call it for each batch.

        Args:
            described: description of the numbers, serializable as JSON.
            numbers: one number for each entry of the description.

        Returns:
            A function that waits for the numbers of the rank that completes this rank's steps, and returns them. None
            on that rank itself. At most 4 of these functions may be pending.
        """
        return None

    def share_scalar(self, scalar: Tensor | None) -> Tensor:
        """Returns the 0-d tensor of the rank that completes this rank's steps, without a device sync.

        Args:
            scalar: the tensor, or None on all other ranks.
        """
        assert scalar is not None
        return scalar

    def share_tensors(self, tree: T) -> T:
        """Like `share`, for a nested structure whose tensors stay on their device."""
        return tree
