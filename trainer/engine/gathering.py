"""Checks before `self.all_gather` in a step: that every rank takes part, with tensors of one shape."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.strategies.batch import map_tensors, shape_and_dtype
from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy
    from leyden.trainer.data.sharding import Share

FIX = (
    "Trainer(even_batches=True) fills the last global batch of the training data, drop_last=True of a loader leaves it "
    "out; or keep what you want to gather until the epoch's end, and gather it in a hook there, on every rank."
)


def check_gathered(strategy: Strategy, share: Share | None, data: Any, group: Any) -> None:
    """Raises rather than wait for a rank that has no sample, or abort over tensors that do not fit.

    Shapes cost a message, so they are compared only where they are known to differ or gloo would abort.

    Args:
        strategy: of this rank.
        share: what is known of the current batch.
        data: what is to be gathered.
        group: the process group in which it is gathered; None for all ranks.

    Raises:
        ConfigurationError: on every rank that gathers; the others end with them.
    """
    if share is not None and share.idle:
        raise ConfigurationError(
            f"all_gather in a step: this global batch has {share.total} sample{'s'[: share.total != 1]} for "
            f"{strategy.data_size} ranks, and a rank without one cannot take part. {FIX}"
        )
    check_shapes(strategy, data, group, "all_gather", FIX, known_to_differ=share is not None and not share.even)


def check_shapes(strategy: Strategy, data: Any, group: Any, name: str, fix: str, known_to_differ: bool = False) -> None:
    """Raises where ranks bring tensors of different shapes, rather than read what lies beside them, or abort.

    Args:
        strategy: of this rank.
        data: what is to be gathered.
        group: the process group in which it is gathered; None for all ranks.
        name: of the method that gathers.
        fix: what to do.
        known_to_differ: compare in any case.

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
            f"{name} needs tensors of one shape: rank 0 has {found[0]}, and rank {rank} has {other}. {fix}"
        )


def warn_of_rest(strategy: Strategy, share: Share, data: Any) -> bool:
    """Warns at the first gathering if the epoch's last one will fail, which may be hours away.

    Returns:
        Whether it did.
    """
    ranks = strategy.data_size
    rows: list[bool] = []
    map_tensors(data, lambda tensor: rows.append(tensor.ndim > 0 and tensor.shape[0] == share.here))
    if share.rest % ranks == 0 or (share.rest > ranks and not any(rows)):
        return False
    if strategy.is_global_zero:
        warnings.warn(
            f"all_gather in a step would fail in the last global batch of a whole epoch, which has {share.rest} "
            f"samples for {ranks} ranks. {FIX}",
            stacklevel=5,
        )
    return True
