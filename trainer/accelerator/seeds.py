"""set_seed and the random numbers that all ranks are to share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from leyden.strategies.base import Strategy
from leyden.strategies.launch.environment import rank_environment
from leyden.trainer.data.rng import rng_state, seed_everything, set_rng_state


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python, NumPy and torch on every device.

    Args:
        seed: 0 to 2**32 - 1.
        device_specific: each rank has a seed of its own: seed + rank.
        deterministic: torch refuses operations whose results differ from run to run.

    Example:
        >>> set_seed(42)
    """
    place = rank_environment()
    seed_everything(seed + (place.rank if device_specific and place is not None else 0))
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronise(strategy: Strategy, kinds: Sequence[str]) -> None:
    """Gives every rank rank 0's random numbers of some kinds."""
    wanted = [kind for kind in kinds if kind != "generator"]
    if not wanted or strategy.ranks.world_size == 1:
        return
    own = rng_state()
    shared = strategy.ranks.broadcast({kind: own[kind] for kind in wanted if kind in own})
    set_rng_state({**own, **shared})
