"""Debug mode: compares the inputs of all ranks before each collective, so that a mismatch raises instead of hanging."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.core.errors import LeydenError
from leyden.core.rank_zero import inform, to_stderr
from leyden.core.tree import in_one_line
from leyden.core.user_code import users_frame
from leyden.strategies.base import Strategy

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine

VARIABLES = ("LEYDEN_DEBUG", "ACCELERATE_DEBUG_MODE")
TIMEOUT = "LEYDEN_DEBUG_TIMEOUT"
SECONDS = 20.0
"""Default of LEYDEN_DEBUG_TIMEOUT: seconds that ranks wait for each other at a collective."""


class CollectiveError(LeydenError):
    """Ranks do not agree on a collective: on its kind, its shapes, or the participating ranks."""


_prefixes = itertools.count()
"""Numbers the Checkers of this process. The order of their creation is the same on all ranks."""


def is_debugging() -> bool:
    """Returns True if an environment variable enables debug mode."""
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in VARIABLES)


class Checker:
    """Compares collectives over the ranks through the rendezvous store, which needs no collective.

    It waits for the other ranks for LEYDEN_DEBUG_TIMEOUT seconds, by default 20.

    Args:
        strategy: the strategy of the run.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._rank, self._size = strategy.ranks.global_rank, strategy.ranks.world_size
        self._strategy = strategy
        self._begin()
        self._seconds = float(os.environ.get(TIMEOUT, SECONDS))

    def _begin(self) -> None:
        """Restarts the count at 0 under a new prefix in the store, for each run and each process group.

        After an abandoned attempt, ranks may be at different counts, and the store still holds the entries of earlier
        runs.
        """
        from torch import distributed as dist

        self._group, self._count = self._strategy.ranks.host_group, 0
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(f"leyden/debug/{next(_prefixes)}", store)  # type: ignore[attr-defined]

    def compare(self, name: str, operands: Any, alike: bool = True) -> None:
        """Waits until all ranks reach a collective, and compares their inputs.

        Args:
            name: the name of the collective.
            operands: the input of the collective.
            alike: whether shapes and dtypes must match; False compares only the collective's name.

        Raises:
            CollectiveError: if inputs differ or a rank is missing. The message names ranks, shapes and code lines.
        """
        if self._strategy.ranks.host_group is not self._group:
            self._begin()
        number, self._count = self._count, self._count + 1
        if self._size == 1:
            return
        mine = f"{name}\n{describe(operands)}\n{call_site()}"
        self._store.set(f"{number}/{self._rank}", mine)
        if number > 1:
            # All ranks have reached the previous collective, so they have read the entries of the collective before it.
            self._store.delete_key(f"{number - 2}/{self._rank}")
        entries = [self._read(number, rank) for rank in range(self._size)]
        missing = [rank for rank, entry in enumerate(entries) if entry is None]
        if missing:
            ranks = ", ".join(str(rank) for rank in missing)
            raise CollectiveError(
                f"rank {self._rank} reached {name} at {call_site()}, but rank {ranks} did not within {self._seconds:g} "
                "s. Every rank must call it: move it out of any `if accelerator.is_main_process:`, and out of loops "
                "that run longer on one rank."
            )
        calls = [entry.split("\n") for entry in entries if entry is not None]
        names, shapes = {call[0] for call in calls}, {call[1] for call in calls}
        if len(names) > 1 or (alike and len(shapes) > 1):
            listing = "; ".join(f"rank {rank}: {call[0]}({call[1]}) at {call[2]}" for rank, call in enumerate(calls))
            raise CollectiveError(
                f"ranks disagree on a collective: {listing}. Pass tensors of the same shape and dtype "
                "(accelerator.pad_across_processes), and call the same collectives in the same order on every rank."
            )

    def _read(self, number: int, rank: int) -> str | None:
        key = f"{number}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self._seconds))
        except RuntimeError:
            # On a timeout, torch raises DistStoreError, a RuntimeError.
            return None
        return str(self._store.get(key).decode())


def describe(operands: Any) -> str:
    """Returns the shapes and dtypes of the tensors in a nested structure, in one line.

    Example:
        >>> import torch
        >>> describe({"x": torch.zeros(2, 3)})
        '{x: float32[2, 3]}'
    """
    if operands is None:
        return ""
    return in_one_line(operands, lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")


def call_site() -> str:
    """Returns file and line of the user's call."""
    frame = users_frame(traceback.extract_stack(sys._getframe(1)))
    return f"{frame.filename}:{frame.lineno}" if frame is not None else "?"


def begin(engine: Engine, accumulation: int) -> None:
    """Starts debug mode for a run: prints a line about each rank, and installs the comparison of collectives.

    Args:
        engine: the engine of a Trainer or an Accelerator.
        accumulation: number of batches per step.
    """
    strategy = engine.strategy
    report(
        f"leyden: rank {strategy.ranks.global_rank} of {strategy.ranks.world_size} (local "
        f"{strategy.ranks.local_rank}), device {strategy.root_device}, strategy {strategy.name}, precision "
        f"{strategy.precision.name}, accumulation {accumulation}"
    )
    if strategy.ranks.world_size > 1:
        engine.check_collectives(Checker(strategy))


def report(facts: str | None) -> None:
    """Logs a line of facts, on every rank."""
    if facts is not None:
        inform(facts, to_stderr, every_rank=True)


def model_facts(rank: int, prepared: nn.Module, bare: nn.Module) -> str:
    """Describes a model on this rank, in one line.

    Args:
        rank: the global rank of this process.
        prepared: the prepared module.
        bare: the unwrapped module.
    """
    first = next(bare.parameters(), None)
    wrapper = "no wrapper" if prepared is bare else f"in {type(prepared).__name__}"
    kind = "" if first is None else f", {type(first).__name__} of {first.dtype} on {first.device}"
    return f"leyden: rank {rank}: model {type(bare).__name__} {wrapper}{kind}"


def loader_facts(rank: int, loader: Any) -> str:
    """Describes the data loader of this rank, in one line.

    Args:
        rank: the global rank of this process.
        loader: this rank's loader.
    """
    from leyden.data.limits import length_of

    sampler = type(getattr(loader, "batch_sampler", None) or loader).__name__
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return f"leyden: rank {rank}: loader of {length_of(loader)} batches by {sampler}, batch_size {size}"
