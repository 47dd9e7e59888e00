"""Debug mode: compares what ranks pass to a collective before it, so that a mismatch is an error and not a hang."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.strategies.base import Strategy
from leyden.strategies.batch import in_one_line
from leyden.strategies.errors import LeydenError
from leyden.trainer.data.limits import length_of

if TYPE_CHECKING:
    from leyden.trainer.engine.engine import Engine

VARIABLES = ("LEYDEN_DEBUG", "ACCELERATE_DEBUG_MODE")
TIMEOUT = "LEYDEN_DEBUG_TIMEOUT"
SECONDS = 20.0
"""How long ranks wait for each other at a collective before the missing ones are named."""
_ROOMS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class CollectiveError(LeydenError):
    """Ranks do not agree on a collective: which it is, its shapes, or who takes part."""


_turns = itertools.count()
"""Comparisons are numbered in the order in which they are made, which is the same on all ranks."""


def is_debugging() -> bool:
    """True if the environment asks for it."""
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in VARIABLES)


class Checker:
    """Compares collectives over the ranks, through the store at which they met, which needs no collective.

    It waits for the others as long as the variable LEYDEN_DEBUG_TIMEOUT says, or 20 seconds.

    Args:
        strategy: of the ranks.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._rank, self._size = strategy.ranks.global_rank, strategy.ranks.world_size
        self._strategy = strategy
        self._begin()
        self._seconds = float(os.environ.get(TIMEOUT, SECONDS))

    def _begin(self) -> None:
        """Counts from 0 for each run of this process and each process group, under a new name in the store.

        An attempt that was given up has left ranks at different numbers, and the store keeps what a former run wrote.
        """
        from torch import distributed as dist

        self._group, self._count = self._strategy.ranks.host_group, 0
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(f"leyden/debug/{next(_turns)}", store)  # type: ignore[attr-defined]

    def compare(self, name: str, operands: Any, alike: bool = True) -> None:
        """Waits for all ranks to come to a collective, and compares what they bring.

        Args:
            name: of the collective.
            operands: what is handed to it.
            alike: shapes and dtypes must be equal; False compares the collective's name alone.

        Raises:
            CollectiveError: names the ranks, their shapes and lines, or those that did not come.
        """
        if self._strategy.ranks.host_group is not self._group:
            self._begin()
        number, self._count = self._count, self._count + 1
        if self._size == 1:
            return
        mine = f"{name}\n{describe(operands)}\n{call_site()}"
        self._store.set(f"{number}/{self._rank}", mine)
        if number > 1:
            # Whoever is here has read all that was said two collectives ago.
            self._store.delete_key(f"{number - 2}/{self._rank}")
        found = [self._read(number, rank) for rank in range(self._size)]
        missing = [rank for rank, entry in enumerate(found) if entry is None]
        if missing:
            ranks = ", ".join(str(rank) for rank in missing)
            raise CollectiveError(
                f"rank {self._rank} came to {name} at {call_site()}, and rank {ranks} did not within {self._seconds:g} "
                "s: every rank must call it. Call it outside of any `if accelerator.is_main_process:` and of loops "
                "that are longer on one rank."
            )
        rows = [entry.split("\n") for entry in found if entry is not None]
        if len({row[0] for row in rows}) > 1 or (alike and len({row[1] for row in rows}) > 1):
            calls = "; ".join(f"rank {rank}: {row[0]}({row[1]}) at {row[2]}" for rank, row in enumerate(rows))
            raise CollectiveError(
                f"ranks do not bring the same to a collective: {calls}. Bring tensors of one shape and dtype "
                "(accelerator.pad_across_processes), and call the same collectives in the same order on every rank."
            )

    def _read(self, number: int, rank: int) -> str | None:
        key = f"{number}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self._seconds))
        except RuntimeError:
            # torch raises DistStoreError for a time-out: a RuntimeError.
            return None
        return str(self._store.get(key).decode())


def describe(operands: Any) -> str:
    """Shapes and dtypes of the tensors in a structure, in one line.

    Example:
        >>> import torch
        >>> describe({"x": torch.zeros(2, 3)})
        '{x: float32[2, 3]}'
    """
    if operands is None:
        return ""
    return in_one_line(operands, lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")


def call_site() -> str:
    """File and line of the user's call: the innermost frame outside of Leyden."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        rooms = tuple(os.path.join(_ROOMS, room) + os.sep for room in ("trainer", "strategies", "callbacks", "leyden"))
        if not frame.filename.startswith(rooms) and not frame.filename.endswith("contextlib.py"):
            return f"{frame.filename}:{frame.lineno}"
    return "?"


def begin(engine: Engine, accumulation: int) -> None:
    """Begins a run: each rank prints what it is, and from here on collectives are compared.

    Args:
        engine: of the Trainer, or the Accelerator itself.
        accumulation: batches of a step.
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
    """Prints a line of facts, on every rank."""
    if facts is not None:
        print(facts, file=sys.stderr, flush=True)


def model_facts(rank: int, prepared: nn.Module, bare: nn.Module) -> str:
    """Describes a model as it is on this rank, in one line.

    Args:
        rank: this one.
        prepared: what is called.
        bare: the model itself.
    """
    first = next(bare.parameters(), None)
    wrapper = "no wrapper" if prepared is bare else f"in {type(prepared).__name__}"
    kind = "" if first is None else f", {type(first).__name__} of {first.dtype} on {first.device}"
    return f"leyden: rank {rank}: model {type(bare).__name__} {wrapper}{kind}"


def loader_facts(rank: int, loader: Any) -> str:
    """Describes the data that a rank reads, in one line.

    Args:
        rank: this one.
        loader: the rank's own.
    """
    sampler = type(getattr(loader, "batch_sampler", None) or loader).__name__
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return f"leyden: rank {rank}: loader of {length_of(loader)} batches by {sampler}, batch_size {size}"
