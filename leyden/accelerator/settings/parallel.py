"""ParallelismConfig: the ranks that replicate a model, shard it, split its layers, divide experts, form a pipeline."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leyden.accelerator.ranks import joined_strategy
from leyden.accelerator.settings.plugins import FullyShardedDataParallelPlugin
from leyden.core.errors import ConfigurationError, kind_of
from leyden.strategies.mesh.layout import ORDER, Layout, check_rotation, sequence_ranks, tell_method

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from leyden.strategies.base import Strategy

SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size")
FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
}
"""Accelerate's names of flattened dimensions."""


@dataclass
class TorchTensorParallelConfig:
    """Tensor-parallel settings, for `ParallelismConfig(tp_handler=…)`.

    Attributes:
        enable_async_tp: refused: overlapping needs torch.compile and memory shared by GPUs.

    Raises:
        ConfigurationError: for `enable_async_tp`.
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigurationError(
                "TorchTensorParallelConfig(enable_async_tp=True) is not supported: overlapping communication with a "
                "layer's matmul needs torch.compile and memory shared by GPUs. Leave it out; the numbers are the same."
            )


@dataclass
class TorchContextParallelConfig:
    """Settings of context parallelism, for `ParallelismConfig(cp_handler=…)`.

    Attributes:
        cp_comm_strategy: "allgather": each rank collects the keys and values of the others. None takes the launcher's
            `PARALLELISM_CONFIG_CP_COMM_STRATEGY`, or "allgather". "alltoall" is refused.

    Raises:
        ConfigurationError: for another `cp_comm_strategy`.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        check_rotation(self.cp_comm_strategy)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of DeepSpeed's Ulysses, for `ParallelismConfig(sp_handler=…)`. DeepSpeed is not needed.

    Attributes:
        sp_seq_length: no effect: sequences may have any length that 2 · sp_size · tp_size divides.
        sp_seq_length_is_variable: no effect.
        sp_attn_implementation: "sdpa". None takes the launcher's `PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION`.

    Raises:
        ConfigurationError: for another `sp_attn_implementation`.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = os.environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        if self.sp_attn_implementation not in (None, "sdpa"):
            raise ConfigurationError(
                f"sp_attn_implementation={self.sp_attn_implementation!r} is not supported: sequences are divided in "
                "torch's attention. Load the model with attn_implementation='sdpa', and leave this out."
            )


@dataclass
class TorchTensorParallelPlugin:
    """Accelerate's predecessor of `ParallelismConfig(tp_size=…)`, for `Accelerator(torch_tp_plugin=…)`.

    Attributes:
        tp_size: ranks that split each layer.
        torch_device_mesh: refused: the Accelerator creates its own mesh.

    Raises:
        ConfigurationError: for a `torch_device_mesh`.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.torch_device_mesh is not None:
            raise ConfigurationError(
                "TorchTensorParallelPlugin(torch_device_mesh=…) is not supported: the Accelerator creates the mesh. "
                "Leave it out, and read accelerator.torch_device_mesh."
            )


@dataclass
class ParallelismConfig:
    """Sizes of the device mesh, for `Accelerator(parallelism_config=…)`.

    A size of None takes the launcher's `PARALLELISM_CONFIG_<NAME>`, or 1. Under tensor parallelism the model brings its
    plan (see `MeshStrategy`), or is loaded already split.

    Attributes:
        dp_replicate_size: replicas of the model; alone it means DDP.
        dp_shard_size: ranks that shard one replica; alone it means FSDP, with replicas HSDP.
        tp_size: ranks that split each layer and share their batches.
        cp_size: ranks that divide the sequences of a batch, in `Accelerator.maybe_context_parallel`, or with `pp_size`
            in every step; they shard the model too.
        sp_size: the same by exchanging heads, as DeepSpeed's Ulysses does, without DeepSpeed.
        cp_backend: "torch"; only read by libraries.
        sp_backend: "deepspeed"; only read by libraries.
        tp_handler: a `TorchTensorParallelConfig`.
        cp_handler: a `TorchContextParallelConfig`.
        sp_handler: a `DeepSpeedSequenceParallelConfig`.
        pp_size: ranks of the pipeline, each with its stages (`Accelerator.pipeline_step`). Not in Accelerate.
        ep_size: ranks that divide the experts of a mixture (`MeshStrategy(ep=…)`), a part of dp_shard_size × cp_size
            and no factor of `total_size`. Without `dp_shard_size`, it sets it. Not in Accelerate 1.15.

    Raises:
        ConfigurationError: for a size below 1, and for sizes that do not go together.

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
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    ep_size: int | None = None

    def __post_init__(self) -> None:
        has_shards = self.dp_shard_size is not None or "PARALLELISM_CONFIG_DP_SHARD_SIZE" in os.environ
        for name in (*SIZES, "ep_size"):
            given = getattr(self, name)
            text = str(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", 1) if given is None else given)
            if not text.isdigit() or int(text) < 1:
                raise ConfigurationError(f"ParallelismConfig({name}={text}): use an integer of at least 1.")
            setattr(self, name, int(text))
        kinds: dict[str, type] = {"cp": TorchContextParallelConfig, "sp": DeepSpeedSequenceParallelConfig}
        for name, kind in kinds.items():
            handler = getattr(self, f"{name}_handler")
            if handler is None and getattr(self, f"{name}_size") > 1:
                setattr(self, f"{name}_handler", kind())
            elif handler is not None and not isinstance(handler, kind):
                raise ConfigurationError(
                    f"ParallelismConfig({name}_handler=…) got {kind_of(handler)}. Pass a {kind.__name__}."
                )
        if not has_shards and self.ep_size and self.cp_size and self.sp_size:
            # Experts are divided over ranks that shard the model: these, and those of cp.
            self.dp_shard_size = self.ep_size // math.gcd(self.ep_size, self.cp_size * self.sp_size)
        # Sizes that do not go together raise here.
        self.layout.filled(self.layout.size)
        self._mesh: DeviceMesh | None = None

    @property
    def layout(self) -> Layout:
        """The sizes as a mesh layout."""
        cp, _ = sequence_ranks(self.cp_size or 1, self.sp_size or 1)
        sizes = self.dp_replicate_size, self.dp_shard_size, self.tp_size, self.pp_size, cp, self.ep_size
        return Layout(*(size or 1 for size in sizes))

    @property
    def total_size(self) -> int:
        """Number of ranks in the mesh."""
        return self.layout.size

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, that see different samples."""
        return self.layout.data_size

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that share the same samples."""
        return self.layout.tp * self.layout.pp * self.layout.cp

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
        return (self.cp_size or 1) > 1

    @property
    def sp_enabled(self) -> bool:
        return (self.sp_size or 1) > 1

    @property
    def ep_enabled(self) -> bool:
        return self.layout.ep > 1

    @property
    def _cp_dim_names(self) -> list[str]:
        return ["cp"] if self.cp_enabled else ["sp"] if self.sp_enabled else []

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the dimensions along which samples differ."""
        sizes = {"dp_replicate": self.layout.dp_replicate, "dp_shard": self.layout.dp_shard}
        return [name for name, size in sizes.items() if size > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of the dimensions along which samples are the same."""
        return [name for name in ("pp", "tp") if getattr(self.layout, name) > 1] + self._cp_dim_names

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Names of the dimensions along which a replica is sharded."""
        return (["dp_shard"] if self.dp_shard_enabled else []) + self._cp_dim_names

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Names of the dimensions along which losses are averaged."""
        return self.dp_dim_names + self._cp_dim_names

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of FSDP's dimensions, including replicas."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the dimensions with more than one rank."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of all ranks; None before the Accelerator has created it."""
        return self._mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Returns `device_mesh`. If the Accelerator has not created it yet, and with a `device_type`, builds it."""
        if self._mesh is None and device_type is not None:
            self._mesh = self.build_device_mesh(device_type)
        return self._mesh

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Builds a mesh of these sizes, for code that needs one before the Accelerator exists. All ranks must call it.

        Args:
            device_type: "cpu" or "cuda".

        Returns:
            The mesh, with Accelerate's names for its dimensions; None if all sizes are 1.
        """
        if self.total_size == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        self.check(joined_strategy("cpu" if device_type == "cpu" else None).ranks.world_size)
        sizes = {name: self.layout.sizes[name] for name in ORDER if self.layout.sizes[name] > 1}
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._name_jointly(mesh)
        return mesh

    def adopt(self, mesh: DeviceMesh | None) -> None:
        """Adopts the strategy's mesh, and adds Accelerate's names for its dimensions. Every rank must call it.

        Args:
            mesh: the mesh of all ranks; None for a strategy without one.
        """
        self._mesh = mesh
        if mesh is not None:
            self._name_jointly(mesh)

    def _name_jointly(self, mesh: DeviceMesh) -> None:
        """Adds Accelerate's names for a mesh's dimensions, and for several of them together."""
        known = mesh.mesh_dim_names or ()
        for name in set(known) & {"replicate", "shard"}:
            mesh[name]._flatten(f"dp_{name}")
        if self.sp_enabled:
            mesh["cp"]._flatten("sp")
        for flattened, names in FLATTENED.items():
            own = tuple(name for name in known if name in names or f"dp_{name}" in names)
            if own:
                mesh[own]._flatten(flattened)

    def build(self, fsdp_plugin: FullyShardedDataParallelPlugin | None = None) -> str | Strategy:
        """Builds the strategy.

        Args:
            fsdp_plugin: settings for the sharding.
        """
        layout = self.layout
        if fsdp_plugin is not None and layout.dp_shard == layout.cp == 1:
            raise ConfigurationError(
                "fsdp_plugin needs ranks to shard over, but ParallelismConfig has dp_shard_size=1. Set dp_shard_size."
            )
        if max(layout.tp, layout.pp, layout.cp, layout.ep) > 1:
            from leyden.strategies.mesh.mesh_strategy import MeshStrategy

            options: dict[str, Any] = {**layout.sizes, "ep": layout.ep}
            if fsdp_plugin is not None:
                options |= fsdp_plugin.arguments()
            if self.sp_enabled:
                options["cp_method"] = "ulysses"
                tell_method(layout.cp, "ulysses")
            return MeshStrategy(**options)
        if self.dp_shard_enabled:
            mesh = (layout.dp_replicate, layout.dp_shard) if self.dp_replicate_enabled else None
            built: Strategy = (fsdp_plugin or FullyShardedDataParallelPlugin()).build(mesh)
            return built
        return "ddp" if self.dp_replicate_enabled else "auto"

    def check(self, ranks: int) -> None:
        """Raises ConfigurationError unless the product of the sizes is the number of ranks, or 1."""
        if self.total_size not in (1, ranks):
            sizes = " × ".join(f"{name} {getattr(self, name)}" for name in SIZES if getattr(self, name) > 1)
            experts = ", and for ep_size one that divides dp_shard_size × cp_size" if self.ep_enabled else ""
            raise ConfigurationError(
                f"ParallelismConfig needs {self.total_size} ranks ({sizes}), but there are {ranks}. Choose sizes whose "
                f"product is the number of ranks{experts}."
            )
