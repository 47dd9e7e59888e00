"""ParallelismConfig: how many ranks replicate a model, and how many share one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.accelerator.plugins import FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
NOT_YET = {"tp_size": "tensor", "cp_size": "context", "sp_size": "sequence"}


@dataclass
class ParallelismConfig:
    """Sizes of the mesh of ranks, for `Accelerator(parallelism_config=…)`.

    What is left at None is the launcher's `PARALLELISM_CONFIG_<NAME>`, or 1. Data parallelism is what there is today.

    Attributes:
        dp_replicate_size: copies of the model; alone it is DDP.
        dp_shard_size: ranks that share one copy; alone it is FSDP, with replicas HSDP.
        tp_size: tensor parallelism: 1 in this version.
        cp_size: context parallelism: 1 in this version.
        sp_size: sequence parallelism: 1 in this version.

    Raises:
        ConfigurationError: for a size below 1, and for one that this version does not have.

    Example:
        >>> ParallelismConfig(dp_replicate_size=2, dp_shard_size=4).total_size
        8
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            given = getattr(self, name)
            text = str(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", 1) if given is None else given)
            if not text.isdigit() or int(text) < 1:
                raise ConfigurationError(f"ParallelismConfig({name}={text}): give a whole number from 1.")
            if name in NOT_YET and int(text) > 1:
                raise ConfigurationError(
                    f"ParallelismConfig({name}={text}): {NOT_YET[name]} parallelism is not part of this version. Leave "
                    "it out."
                )
            setattr(self, name, int(text))

    @property
    def replicas(self) -> int:
        return self.dp_replicate_size or 1

    @property
    def shards(self) -> int:
        return self.dp_shard_size or 1

    @property
    def total_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.replicas * self.shards

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self.total_size

    @property
    def dp_replicate_enabled(self) -> bool:
        return self.replicas > 1

    @property
    def dp_shard_enabled(self) -> bool:
        return self.shards > 1

    @property
    def tp_enabled(self) -> bool:
        return False

    @property
    def cp_enabled(self) -> bool:
        return False

    @property
    def sp_enabled(self) -> bool:
        return False

    @property
    def cp_backend(self) -> str:
        """Accelerate's default, which transformers' Trainer reads whether or not sequences are shared."""
        return "torch"

    @property
    def sp_backend(self) -> str:
        """The same."""
        return "deepspeed"

    def build(self, fsdp_plugin: FullyShardedDataParallelPlugin | None = None) -> str | Strategy:
        """Makes the strategy.

        Args:
            fsdp_plugin: how it is sharded.
        """
        if self.dp_shard_enabled:
            mesh = (self.replicas, self.shards) if self.dp_replicate_enabled else None
            built: Strategy = (fsdp_plugin or FullyShardedDataParallelPlugin()).build(mesh)
            return built
        if fsdp_plugin is not None:
            raise ConfigurationError(
                "fsdp_plugin shards, and ParallelismConfig has dp_shard_size=1: give the ranks that share a model."
            )
        return "ddp" if self.dp_replicate_enabled else "auto"

    def check(self, ranks: int) -> None:
        """Raises ConfigurationError if the product of the sizes is not the number of ranks."""
        if self.total_size not in (1, ranks):
            raise ConfigurationError(
                f"ParallelismConfig makes up {self.total_size} ranks ({self.replicas} × {self.shards}), and there are "
                f"{ranks}: dp_replicate_size × dp_shard_size must be their number."
            )
