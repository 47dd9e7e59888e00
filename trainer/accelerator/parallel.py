"""ParallelismConfig: how many ranks replicate a model, shard one, and split its layers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.mesh.layout import Layout
from leyden.trainer.accelerator.plugins import FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from leyden.strategies.base import Strategy

SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size")
NOT_YET = {
    "cp_size": "context parallelism is not part of this version. Leave it out.",
    "sp_size": "DeepSpeed's Ulysses is not part of this version: leave it out, and let tp_size split activations along "
    "the sequence, by 'sequence' in the model's plan.",
}
JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard",),
}
"""Accelerate's names of several dimensions together. There is no `cp` beside the others yet."""


@dataclass
class TorchTensorParallelConfig:
    """How layers are split, for `ParallelismConfig(tp_handler=…)`.

    Attributes:
        enable_async_tp: refused.

    Raises:
        ConfigurationError: for `enable_async_tp`.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigurationError(
                "TorchTensorParallelConfig(enable_async_tp=True): an exchange beside a layer's product needs "
                "torch.compile and memory that GPUs share. Leave it out; numbers are the same."
            )


@dataclass
class TorchTensorParallelPlugin:
    """What Accelerate had before `ParallelismConfig(tp_size=…)`, for `Accelerator(torch_tp_plugin=…)`.

    Attributes:
        tp_size: ranks that split each layer.
        torch_device_mesh: refused: the Accelerator makes its own.

    Raises:
        ConfigurationError: for a mesh.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.torch_device_mesh is not None:
            raise ConfigurationError(
                "TorchTensorParallelPlugin(torch_device_mesh=…): the Accelerator makes the mesh of all ranks. Leave it "
                "out, and read accelerator.torch_device_mesh."
            )

    def config(self) -> ParallelismConfig:
        """The same as a `ParallelismConfig`."""
        return ParallelismConfig(tp_size=self.tp_size)


@dataclass
class ParallelismConfig:
    """Sizes of the mesh of ranks, for `Accelerator(parallelism_config=…)`.

    What is left at None is the launcher's `PARALLELISM_CONFIG_<NAME>`, or 1. Where layers are split, the model brings
    the plan (see `MeshStrategy`), or was split as it was loaded.

    Attributes:
        dp_replicate_size: copies of the model; alone it is DDP.
        dp_shard_size: ranks that share one copy; alone it is FSDP, with replicas HSDP.
        tp_size: ranks that split each layer, and share their batches.
        cp_size: ranks that share a sequence: 1 in this version.
        sp_size: ranks of DeepSpeed's Ulysses: 1 in this version.
        cp_backend: "torch"; read by libraries.
        sp_backend: "deepspeed"; read by libraries.
        tp_handler: a `TorchTensorParallelConfig`.
        cp_handler: without effect while cp_size is 1.
        sp_handler: without effect while sp_size is 1.
        pp_size: ranks over which the blocks are dealt out, as stages of a pipeline (`Accelerator.pipeline_step`). Ours.

    Raises:
        ConfigurationError: for a size below 1, and for one that this version does not have.

    Example:
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2)
        >>> config.total_size, config.data_parallel_size, config.non_dp_dim_names
        (16, 8, ['tp'])
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    sp_size: int | None = None
    cp_backend: str = "torch"
    sp_backend: str = "deepspeed"
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            given = getattr(self, name)
            text = str(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", 1) if given is None else given)
            if not text.isdigit() or int(text) < 1:
                raise ConfigurationError(f"ParallelismConfig({name}={text}): give a whole number from 1.")
            if name in NOT_YET and int(text) > 1:
                raise ConfigurationError(f"ParallelismConfig({name}={text}): {NOT_YET[name]}")
            setattr(self, name, int(text))
        self._mesh: DeviceMesh | None = None

    @property
    def layout(self) -> Layout:
        """The sizes as those of a mesh."""
        return Layout(self.dp_replicate_size or 1, self.dp_shard_size or 1, self.tp_size or 1, self.pp_size or 1)

    @property
    def replicas(self) -> int:
        """Copies of the model: `dp_replicate_size`, or 1."""
        return self.layout.dp_replicate

    @property
    def shards(self) -> int:
        """Ranks over which each copy is sharded: `dp_shard_size`, or 1."""
        return self.layout.dp_shard

    @property
    def total_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.layout.size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self.layout.data_size

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that share their samples."""
        return self.layout.tp * self.layout.pp

    @property
    def dp_replicate_enabled(self) -> bool:
        return self.layout.dp_replicate > 1

    @property
    def dp_shard_enabled(self) -> bool:
        return self.layout.dp_shard > 1

    @property
    def tp_enabled(self) -> bool:
        return self.layout.tp > 1

    @property
    def pp_enabled(self) -> bool:
        return self.layout.pp > 1

    @property
    def cp_enabled(self) -> bool:
        return False

    @property
    def sp_enabled(self) -> bool:
        return False

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions over which samples differ."""
        sizes = {"dp_replicate": self.layout.dp_replicate, "dp_shard": self.layout.dp_shard}
        return [name for name, size in sizes.items() if size > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions over which samples are the same."""
        return [name for name in ("pp", "tp") if getattr(self.layout, name) > 1]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions over which a copy of the model is sharded."""
        return ["dp_shard"] if self.dp_shard_enabled else []

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions over which losses are averaged."""
        return self.dp_dim_names

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of FSDP, replicas included."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions of more than one rank."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of all ranks; None before the Accelerator has made it."""
        return self._mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """See `device_mesh`; the device is the Accelerator's."""
        return self._mesh

    def adopt(self, mesh: DeviceMesh | None) -> None:
        """Takes the mesh that the strategy made, and gives its dimensions Accelerate's names. Every rank must call it.

        Args:
            mesh: of all ranks; None for a strategy without one.
        """
        self._mesh = mesh
        if mesh is None or mesh.mesh_dim_names is None:
            return
        for name in set(mesh.mesh_dim_names) & {"replicate", "shard"}:
            mesh[name]._flatten(f"dp_{name}")
        for joined, names in JOINED.items():
            own = tuple(name for name in mesh.mesh_dim_names if name in names or f"dp_{name}" in names)
            if own:
                mesh[own]._flatten(joined)

    def build(self, fsdp_plugin: FullyShardedDataParallelPlugin | None = None) -> str | Strategy:
        """Makes the strategy.

        Args:
            fsdp_plugin: how it is sharded.
        """
        if fsdp_plugin is not None and not self.dp_shard_enabled:
            raise ConfigurationError(
                "fsdp_plugin shards, and ParallelismConfig has dp_shard_size=1: give the ranks that share a model."
            )
        layout = self.layout
        if self.tp_enabled or self.pp_enabled:
            from leyden.strategies.mesh.strategy import MeshStrategy

            plugin = {} if fsdp_plugin is None else fsdp_plugin.arguments()
            return MeshStrategy(layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, **plugin)
        if self.dp_shard_enabled:
            mesh = (layout.dp_replicate, layout.dp_shard) if self.dp_replicate_enabled else None
            built: Strategy = (fsdp_plugin or FullyShardedDataParallelPlugin()).build(mesh)
            return built
        return "ddp" if self.dp_replicate_enabled else "auto"

    def check(self, ranks: int) -> None:
        """Raises ConfigurationError where the sizes do not make up the ranks there are."""
        if self.total_size not in (1, ranks):
            sizes = " × ".join(f"{name} {getattr(self, name)}" for name in SIZES if getattr(self, name) > 1)
            raise ConfigurationError(
                f"ParallelismConfig makes up {self.total_size} ranks ({sizes}), and there are {ranks}: the product of "
                "the sizes must be their number."
            )
