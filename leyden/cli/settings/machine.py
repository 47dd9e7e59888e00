"""The hardware of this machine, as far as a launch depends on it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from leyden.core.devices import find_device, find_devices
from leyden.launch.processes import available_cpus

NUMA = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of one machine.

    Attributes:
        gpus: number of GPUs.
        kind: torch's type of device for them: cuda, xpu, ….
        cpus: number of CPUs that this process may use.
        numa_nodes: number of NUMA nodes; 0 if unknown.
        slurm: srun is installed, or this is a SLURM job.
        bf16: the GPUs compute in bf16.
        fp8: the GPUs compute in fp8.
        supposed: the GPUs are assumed: a file describes another machine.
    """

    gpus: int = 0
    kind: str = "cuda"
    cpus: int = 1
    numa_nodes: int = 1
    slurm: bool = False
    bf16: bool = False
    fp8: bool = False
    supposed: bool = False


def this_machine() -> Machine:
    """Detects the hardware of this machine without creating a context on a GPU."""
    device = find_device()
    gpus = len(find_devices()) if device.type not in ("cpu", "mps") else 0
    # The driver answers this without creating a context on the device.
    capability = torch.cuda.get_device_capability(0) if device.type == "cuda" else (0, 0)
    return Machine(
        gpus=gpus,
        kind=device.type if gpus else "cuda",
        cpus=available_cpus(),
        numa_nodes=max(1, len(list(NUMA.glob("node[0-9]*")))),
        slurm=shutil.which("srun") is not None or "SLURM_JOB_ID" in os.environ,
        bf16=capability >= (8, 0),
        fp8=capability >= (8, 9),
    )
