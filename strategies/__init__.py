"""Strategies: where the model lives and how ranks communicate. `find_strategy` turns a name into a strategy.

    from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy, DeepSpeedStrategy, XLAStrategy

`base.py` is the contract. `single.py` and `ddp.py` are one file each; `fsdp/`, `mesh/`, `deepspeed/` and `xla/` are
folders. `process_group.py` is shared by the strategies with several ranks, and `precision/`
handles dtypes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leyden.core.devices import find_device, find_devices, parse_devices
from leyden.core.environment import check_launched, is_interactive, rank_environment
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.lazy import lazy_name
from leyden.core.ported import ported
from leyden.core.rank_zero import inform
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.single import SingleDeviceStrategy
from leyden.strategies.window import Window

if TYPE_CHECKING:
    from leyden.launch.cluster import ClusterEnvironment as ClusterEnvironment
    from leyden.launch.cluster import KubeflowEnvironment as KubeflowEnvironment
    from leyden.launch.cluster import LightningEnvironment as LightningEnvironment
    from leyden.launch.cluster import LSFEnvironment as LSFEnvironment
    from leyden.launch.cluster import MPIEnvironment as MPIEnvironment
    from leyden.launch.cluster import SLURMEnvironment as SLURMEnvironment
    from leyden.launch.cluster import TorchElasticEnvironment as TorchElasticEnvironment
    from leyden.strategies.ddp import DDPStrategy as DDPStrategy
    from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from leyden.strategies.expert_balancer import ExpertBalancer as ExpertBalancer
    from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy as FSDPStrategy
    from leyden.strategies.mesh.balance import balance_loss as balance_loss
    from leyden.strategies.mesh.balance import routers_in_float32 as routers_in_float32
    from leyden.strategies.mesh.context.attention import sequence_positions as sequence_positions
    from leyden.strategies.mesh.mesh_strategy import MeshStrategy as MeshStrategy
    from leyden.strategies.mesh.model_parallel import ModelParallelStrategy as ModelParallelStrategy
    from leyden.strategies.precision.amp import MixedPrecision as MixedPrecision
    from leyden.strategies.precision.fp8 import Float8Precision as Float8Precision
    from leyden.strategies.precision.transformer_engine import (
        TransformerEnginePrecision as TransformerEnginePrecision,
    )
    from leyden.strategies.precision.true import DoublePrecision as DoublePrecision
    from leyden.strategies.precision.true import HalfPrecision as HalfPrecision
    from leyden.strategies.xla.ddp import XLADDPStrategy as XLADDPStrategy
    from leyden.strategies.xla.xla_strategy import XLAFSDPStrategy as XLAFSDPStrategy
    from leyden.strategies.xla.xla_strategy import XLAStrategy as XLAStrategy

_HOMES = {
    **dict.fromkeys(
        (
            *("ClusterEnvironment", "KubeflowEnvironment", "LSFEnvironment", "LightningEnvironment", "MPIEnvironment"),
            *("SLURMEnvironment", "TorchElasticEnvironment"),
        ),
        "leyden.launch.cluster",
    ),
    "DDPStrategy": "leyden.strategies.ddp",
    "DeepSpeedStrategy": "leyden.strategies.deepspeed.deepspeed_strategy",
    "DoublePrecision": "leyden.strategies.precision.true",
    "FSDPStrategy": "leyden.strategies.fsdp.fsdp_strategy",
    "Float8Precision": "leyden.strategies.precision.fp8",
    "sequence_positions": "leyden.strategies.mesh.context.attention",
    "HalfPrecision": "leyden.strategies.precision.true",
    "MeshStrategy": "leyden.strategies.mesh.mesh_strategy",
    "MixedPrecision": "leyden.strategies.precision.amp",
    "ModelParallelStrategy": "leyden.strategies.mesh.model_parallel",
    "TransformerEnginePrecision": "leyden.strategies.precision.transformer_engine",
    "XLADDPStrategy": "leyden.strategies.xla.ddp",
    "XLAFSDPStrategy": "leyden.strategies.xla.xla_strategy",
    "XLAStrategy": "leyden.strategies.xla.xla_strategy",
    "balance_loss": "leyden.strategies.mesh.balance",
    "ExpertBalancer": "leyden.strategies.expert_balancer",
    "routers_in_float32": "leyden.strategies.mesh.balance",
}

DDP = ("leyden.strategies.ddp", "DDPStrategy")
FSDP = ("leyden.strategies.fsdp.fsdp_strategy", "FSDPStrategy")
MESH = ("leyden.strategies.mesh.mesh_strategy", "MeshStrategy")
DEEPSPEED = ("leyden.strategies.deepspeed.deepspeed_strategy", "DeepSpeedStrategy")
# Name -> module, class, arguments. Imported lazily: a run without torch.distributed starts faster.
SEVERAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": (*DDP, {}),
    "ddp_spawn": (*DDP, {"start_method": "spawn"}),
    "ddp_fork": (*DDP, {"start_method": "fork"}),
    "ddp_notebook": (*DDP, {"start_method": "notebook"}),
}
for _name, (_module, _class, _arguments) in list(SEVERAL.items()):
    for _unused in (True, False):
        SEVERAL[f"{_name}_find_unused_parameters_{str(_unused).lower()}"] = (
            _module,
            _class,
            {**_arguments, "find_unused_parameters": _unused},
        )
SEVERAL |= {
    "fsdp": (*FSDP, {}),
    "fsdp_shard_grad_op": (*FSDP, {"reshard_after_forward": False}),
    "fsdp_cpu_offload": (*FSDP, {"cpu_offload": True}),
    "hsdp": (*FSDP, {"device_mesh": "auto"}),
    "mesh": (*MESH, {}),
    "tp": (*MESH, {"dp_shard": 1, "tp": -1}),
    "fsdp_tp": (*MESH, {"tp": "auto"}),
    "cp": (*MESH, {"dp_shard": 1, "cp": -1}),
    "xla": ("leyden.strategies.xla.xla_strategy", "XLAStrategy", {}),
    "xla_fsdp": ("leyden.strategies.xla.xla_strategy", "XLAFSDPStrategy", {}),
    "xla_ddp": ("leyden.strategies.xla.ddp", "XLADDPStrategy", {}),
    "deepspeed": (*DEEPSPEED, {}),
    "deepspeed_stage_1": (*DEEPSPEED, {"stage": 1}),
    "deepspeed_stage_2": (*DEEPSPEED, {"stage": 2}),
    "deepspeed_stage_2_offload": (*DEEPSPEED, {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": (*DEEPSPEED, {"stage": 3}),
    "deepspeed_stage_3_offload": (
        *DEEPSPEED,
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
}
XLA = ("xla", "tpu")
"""Accelerators that need torch_xla."""
XLA_NAMES = ("xla", "xla_fsdp", "xla_ddp")
NAMES = ("auto", "single_device", *SEVERAL)
MAIN_NAMES = ("auto", "single_device", "ddp", "fsdp", "mesh", "deepspeed", "xla")
"""One name of each kind, for an error about a name that resembles none."""


def find_strategy(
    strategy: str | Strategy,
    accelerator: str = "auto",
    devices: Any = "auto",
    num_nodes: int = 1,
    precision: Precision | None = None,
) -> Strategy:
    """Returns the strategy for a name, placed on the given devices of this machine.

    Args:
        strategy: a name from `NAMES`, or a strategy. "auto" means "single_device" for one device and "ddp" for
            several, or "ddp_notebook" for several devices requested in an interactive session.
        accelerator: "cpu", "gpu", "xla", "tpu", "auto", or a type of device: "cuda", "mps", "xpu", ….
        devices: the Trainer's `devices`, which sets the number of ranks on this machine. "auto" also counts ranks that
            are already started.
        num_nodes: number of machines.
        precision: the Precision plugin. None keeps the precision of a strategy object.

    Raises:
        ConfigurationError: if the name is unknown, a device does not exist, or the number of ranks already started
            differs.
        MissingExtraError: if strategy or precision needs a package that is not installed.
    """
    found: Strategy
    if isinstance(strategy, Strategy):
        found = strategy
        if precision is not None:
            found.precision = precision
    else:
        strategy = strategy.lower() if isinstance(strategy, str) else strategy
        name, devices = _choose(strategy, accelerator, devices, num_nodes)
        if name == "single_device":
            found = SingleDeviceStrategy(_single_device(accelerator, devices, num_nodes), precision)
        else:
            module, class_name, arguments = SEVERAL[name]
            found = getattr(importlib.import_module(module), class_name)(precision=precision, **arguments)
    found.place_on(accelerator, devices, num_nodes)
    # Checked last: if the strategy refuses the precision, no package would help.
    found.precision.check_package()
    return found


def _choose(name: str, accelerator: str, devices: Any, num_nodes: int) -> tuple[str, Any]:
    """Returns the name of the strategy, with "auto" resolved, and the devices to use."""
    _check_name(name)
    if name == "auto" and accelerator in XLA:
        name = "xla"
    if name not in ("single_device", *XLA_NAMES) and _defaults_to_one_device(accelerator, devices, num_nodes):
        inform("leyden: an interactive session runs on one device by default. Pass devices=… for more.")
        devices = 1
    return _auto_strategy(accelerator, devices, num_nodes) if name == "auto" else name, devices


def _check_name(strategy: object) -> None:
    if not isinstance(strategy, str):
        fix = f"use a name such as {', '.join(MAIN_NAMES)}, or a Strategy"
        raise ConfigurationError(f"strategy={strategy!r}: {ported(strategy, fix)}.")
    if strategy not in NAMES:
        raise ConfigurationError(
            f"strategy={strategy!r} is not known in this version. {nearest(strategy, NAMES, MAIN_NAMES)}"
        )


def _defaults_to_one_device(accelerator: str, devices: Any, num_nodes: int) -> bool:
    """Returns True if devices="auto" would start several ranks in a notebook, which nobody asked for."""
    unspecified = is_interactive() and num_nodes == 1 and parse_devices(devices) is None and rank_environment() is None
    return unspecified and len(find_devices(accelerator, devices)) > 1


def _auto_strategy(accelerator: str, devices: Any, num_nodes: int) -> str:
    """Returns the strategy name for the ranks that are started, or that the arguments plan."""
    environment = rank_environment()
    if environment is not None:
        # A single rank needs no process group. If the arguments ask for more ranks, "ddp" raises.
        wanted = parse_devices(devices)
        count = len(wanted) if isinstance(wanted, list) else wanted or 1
        return "ddp" if environment.world_size * count * num_nodes > 1 else "single_device"
    if num_nodes == 1:
        check_launched()
    if len(find_devices(accelerator, devices)) * num_nodes == 1:
        return "single_device"
    return "ddp_notebook" if is_interactive() else "ddp"


def _single_device(accelerator: str, devices: Any, num_nodes: int) -> Any:
    """Returns the one device that the arguments name, or the first device for "auto"."""
    wanted = parse_devices(devices)
    if wanted is None or find_device(accelerator).type == "cpu":
        count = 1 if wanted is None else wanted if isinstance(wanted, int) else len(wanted)
        found = [find_device(accelerator)] * count
    else:
        found = find_devices(accelerator, devices)
    if len(found) * num_nodes != 1:
        raise ConfigurationError(
            f"strategy='single_device' contradicts devices={devices!r} and num_nodes={num_nodes}. Use devices=1 and "
            "num_nodes=1, or strategy='ddp'."
        )
    return found[0]


__all__ = [
    "Precision",
    "SingleDeviceStrategy",
    "Strategy",
    "Window",
    "find_device",
    "find_strategy",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    """Imports a strategy on first use: a run without torch.distributed starts faster."""
    return lazy_name(__name__, _HOMES, name)
