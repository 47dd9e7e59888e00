"""Checks before `self.all_gather` in a step that every rank takes part, with tensors of the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.tree import map_tensors, shape_and_dtype

if TYPE_CHECKING:
    from leyden.data.sharding import Share
    from leyden.strategies.base import Strategy

FIX = (
    "Use Trainer(even_batches=True) to fill the last global batch of the training data, or drop_last=True in a loader "
    "to leave it out. Or collect the values, and gather them on every rank in a hook at the end of the epoch."
)


def check_gathered(strategy: Strategy, share: Share | None, data: Any, group: Any) -> None:
    """Raises if a gather would wait for a rank without a sample, or abort on tensors of different shapes.

    Comparing shapes costs a message, so it only happens if the shapes are known to differ or gloo would abort.

    Args:
        strategy: the strategy of the run.
        share: the shares of the ranks in the current global batch; None if they are unknown.
        data: the tensors to gather.
        group: the process group to gather over; None for all ranks.

    Raises:
        ConfigurationError: on every rank that gathers. The other ranks end with them.
    """
    if share is not None and share.idle:
        raise ConfigurationError(
            f"all_gather in a step: this global batch has {share.total} sample{'s'[: share.total != 1]} for "
            f"{strategy.data_size} ranks, and a rank without a sample cannot take part. {FIX}"
        )
    check_shapes(strategy, data, group, "all_gather", FIX, known_to_differ=share is not None and not share.even)


def check_shapes(strategy: Strategy, data: Any, group: Any, name: str, fix: str, known_to_differ: bool = False) -> None:
    """Raises if ranks pass tensors of different shapes. The backend would read out of bounds or abort.

    Args:
        strategy: the strategy of the run.
        data: the tensors to gather.
        group: the process group to gather over; None for all ranks.
        name: the name of the gathering method, for the message.
        fix: the advice at the end of the message.
        known_to_differ: True if shapes are expected to differ; they are then compared on every backend.

    Raises:
        ConfigurationError: on every rank that gathers.
    """
    tensors: list[Tensor] = []
    map_tensors(data, tensors.append)
    if not known_to_differ and not strategy.ranks.aborts_on_shapes(tensors, group):
        return
    found = strategy.ranks.differing(", ".join(map(shape_and_dtype, tensors)), group)
    if found:
        rank, other = next((rank, text) for rank, text in enumerate(found) if text != found[0])
        raise ConfigurationError(
            f"{name} needs tensors of the same shape, but rank 0 has {found[0]} and rank {rank} has {other}. {fix}"
        )


def warn_of_rest(strategy: Strategy, share: Share, data: Any) -> bool:
    """Warns at the first gather if the gather in the epoch's last batch will fail, which may be hours away.

    Returns:
        True if the gather will fail. Only rank 0 warns.
    """
    ranks = strategy.data_size
    has_row_per_sample: list[bool] = []
    map_tensors(data, lambda tensor: has_row_per_sample.append(tensor.ndim > 0 and tensor.shape[0] == share.here))
    if share.rest % ranks == 0 or (share.rest > ranks and not any(has_row_per_sample)):
        return False
    if strategy.is_global_zero:
        warn(
            f"all_gather in a step will fail in the last global batch of a full epoch, which has {share.rest} samples "
            f"for {ranks} ranks. {FIX}",
        )
    return True
