"""Layout: the dimensions of a mesh of ranks, and their sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import inform

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the outermost dimension, which spans machines, to the innermost, whose ranks are neighbors on one machine."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh's dimensions. Their product is the number of ranks.

    Rank numbers vary fastest along tp: in a mesh of dp_shard 2 × tp 2, ranks 0 and 1 share their batches.

    Attributes:
        dp_replicate: number of replicas of the model; their gradients are averaged.
        dp_shard: ranks over which each replica is sharded, as by FSDP. -1 fills the world.
        tp: ranks over which layers are split. They share their batches.
        pp: ranks over which the model's blocks are divided, as stages of a pipeline. They share their batches.
        cp: ranks over which the sequences of a batch are divided. They share their batches, and shard the model too.
        ep: ranks over which experts are divided. It is a part of dp_shard × cp, not a factor of the product.

    Raises:
        ConfigurationError: for an invalid size; names the dimension.

    Example:
        >>> layout = Layout(dp_shard=-1, tp=2).filled(8)
        >>> str(layout), layout.data_size, layout.data_rank(5)
        ('dp_shard 4 × tp 2', 4, 2)
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if type(self.ep) is not int or self.ep < 1:
            raise ConfigurationError(f"ep={self.ep!r}: use a number of ranks from 1.")
        for name, size in self.sizes.items():
            if type(size) is not int or (size < 1 and size != -1):
                raise ConfigurationError(f"{name}={size!r}: use a number of ranks from 1, or -1 to fill the world.")
        if len(self.open) > 1:
            raise ConfigurationError(f"{' and '.join(self.open)} are both -1: only one dimension can fill the world.")

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dimensions whose product is the number of ranks, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "ep"}

    @property
    def open(self) -> list[str]:
        """The dimensions with size -1, which fill the world."""
        return [name for name, size in self.sizes.items() if size == -1]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """The number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Returns a rank's number among those that read different samples. Ranks of a pp, cp or tp group share it."""
        return rank // (self.tp * self.cp) % self.data_size

    def part_rank(self, rank: int) -> int:
        """Returns a rank's number among those that see different samples, or different parts of their sequences."""
        return rank // self.tp % (self.cp * self.data_size)

    def filled(self, world: int) -> Layout:
        """Returns this layout with -1 replaced by a size, for a world of that many ranks.

        Raises:
            ConfigurationError: if the product of the sizes is not the world size; suggests the nearest sizes that fit.
        """
        fixed = math.prod(size for size in self.sizes.values() if size != -1)
        if not self.open and fixed == world:
            return self._checked()
        if self.open and world % fixed == 0:
            return replace(self, **{self.open[0]: world // fixed})._checked()
        named = ", ".join(f"{name}={size}" for name, size in self.sizes.items() if size != 1)
        raise ConfigurationError(
            f"a mesh of {named} does not match {world} rank{'s'[: world != 1]}: {_nearest(self, world)}."
        )

    def _checked(self) -> Layout:
        """Returns this layout after checking that ep divides the ranks over which a replica is sharded."""
        if self.shards % self.ep:
            copies = f" (dp_replicate={self.dp_replicate} copies experts)" if self.dp_replicate > 1 else ""
            parts = f"dp_shard={self.dp_shard}" + (f" × cp={self.cp}" if self.cp > 1 else "")
            raise ConfigurationError(
                f"ep={self.ep} does not divide {parts}{copies}: experts are divided over ranks that shard the model. "
                f"Choose a dp_shard that is a multiple of {self.ep}, or another ep."
            )
        return self

    @property
    def shards(self) -> int:
        """The number of ranks that shard a replica: those of dp_shard, and of cp."""
        return self.dp_shard * self.cp

    @property
    def expert_dimensions(self) -> dict[str, int]:
        """The sizes of the DeviceMesh of experts: dp_shard × cp is divided into expert_shard and ep."""
        outer = {name: self.sizes[name] for name in ("pp", "dp_replicate") if self.sizes[name] > 1}
        inner = {"tp": self.tp} if self.tp > 1 else {}
        return {**outer, "expert_shard": self.shards // self.ep, "ep": self.ep, **inner}

    @property
    def dimensions(self) -> dict[str, int]:
        """The sizes of the DeviceMesh, by name, from the outermost.

        Dimensions of size 1 are omitted, except dp_shard next to dp_replicate without cp: torch needs it.
        """
        return {name: self.sizes[name] for name in ORDER if self._is_in_mesh(name)}

    @property
    def with_shards_along_cp(self) -> dict[str, int]:
        """Like `dimensions`, with `dp_shard_cp` in place of dp_shard and cp: the ranks that shard a replica."""
        sizes = {**self.dimensions, "dp_shard_cp": self.shards}
        return {name: sizes[name] for name in ("pp", "dp_replicate", "dp_shard_cp", "tp") if name in sizes}

    def _is_in_mesh(self, name: str) -> bool:
        needs_shards = (self.dp_replicate > 1 and self.cp == 1) or self.size == 1
        return self.sizes[name] > 1 or (name == "dp_shard" and needs_shards)

    def __str__(self) -> str:
        sizes = " × ".join(f"{name} {self.sizes[name]}" for name in ORDER if self.sizes[name] > 1) or "1 rank"
        return f"{sizes} (experts over ep {self.ep})" if self.ep > 1 else sizes


def _nearest(layout: Layout, world: int) -> str:
    """Returns the closest sizes whose product is the world size, written as arguments."""

    def distance(sizes: tuple[int, ...]) -> float:
        pairs = zip(sizes, (layout.sizes[name] for name in names), strict=True)
        return sum(abs(math.log(size / given)) for size, given in pairs if given != -1)

    names = ("dp_replicate", "dp_shard", "tp", *(name for name in ("pp", "cp") if layout.sizes[name] > 1))
    sizes = min(_factors(world, len(names)), key=distance)
    return "use " + ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def sequence_ranks(cp: int, sp: int) -> tuple[int, Literal["gather", "ulysses"]]:
    """Returns `cp` and `cp_method` of a MeshStrategy for Accelerate's two sizes that divide sequences.

    Args:
        cp: Accelerate's cp_size.
        sp: Accelerate's sp_size, the ranks of DeepSpeed's Ulysses.

    Raises:
        ConfigurationError: if both are given.

    Example:
        >>> sequence_ranks(1, 2)
        (2, 'ulysses')
    """
    if cp != 1 and sp != 1:
        raise ConfigurationError(
            f"cp_size={cp} and sp_size={sp} both divide sequences over ranks: keep cp_size, which gathers keys and "
            "values, or sp_size, which exchanges heads (Ulysses)."
        )
    return (cp, "gather") if sp == 1 else (sp, "ulysses")


def tell_method(cp: int, method: str) -> None:
    """Tells what Accelerate's sp_size has become, if it was given."""
    if method == "ulysses":
        inform(
            f"sp_size={cp} divides sequences by MeshStrategy(cp={cp}, cp_method='ulysses'), without DeepSpeed. A loop "
            "of your own without a pipeline enters accelerator.maybe_context_parallel"
        )


def check_rotation(name: str) -> None:
    """Refuses Accelerate's cp_comm_strategy "alltoall".

    Raises:
        ConfigurationError: for anything but "allgather".
    """
    if name == "alltoall":
        raise ConfigurationError(
            "cp_comm_strategy='alltoall' passes keys and values around a ring of ranks, which pays only where the work "
            "of a GPU hides the messages, and is not part of this version: leave it out, the numbers are the same. To "
            "exchange heads in place of keys and values (Ulysses), set sp_size in place of cp_size."
        )
    if name != "allgather":
        raise ConfigurationError(f"cp_comm_strategy={name!r} is not known: use 'allgather', or leave it out.")


def layouts_of(world: int, pp: int = 1) -> list[Layout]:
    """Returns every layout of a number of ranks with that pp, from pure sharding to pure replication.

    Example:
        >>> [str(layout) for layout in layouts_of(2)]
        ['dp_shard 2', 'tp 2', 'dp_replicate 2']
    """
    layouts = [Layout(copies, shards, tp, pp) for copies, shards, tp in _factors(world // pp, 3)]
    return sorted(layouts, key=lambda layout: (layout.dp_replicate, layout.tp))


def _factors(world: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to write `world` as an ordered product of `count` sizes."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for sizes in itertools.product(divisors, repeat=count - 1):
        if world % math.prod(sizes) == 0:
            yield *sizes, world // math.prod(sizes)
