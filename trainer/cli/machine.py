"""What this machine has, as far as it matters for how to run on it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

NUMA = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of a machine.

    Attributes:
        gpus: how many CUDA devices.
        cpus: how many this process may run on.
        numa_nodes: groups of CPUs, each with memory of its own; 0 where that is not known.
        slurm: srun is here, or this is a job of SLURM.
        bf16: the GPUs compute in bf16.
        fp8: the GPUs compute in fp8.
        supposed: its GPUs are those of another machine, which a file describes.
    """

    gpus: int = 0
    cpus: int = 1
    numa_nodes: int = 1
    slurm: bool = False
    bf16: bool = False
    fp8: bool = False
    supposed: bool = False


def this_machine() -> Machine:
    """Looks at this machine. No process of it holds a GPU afterwards."""
    import torch

    gpus = torch.cuda.device_count()
    # Asked of the driver, which makes no context on the device.
    capability = torch.cuda.get_device_capability(0) if gpus else (0, 0)
    return Machine(
        gpus=gpus,
        cpus=available_cpus(),
        numa_nodes=max(1, len(list(NUMA.glob("node[0-9]*")))),
        slurm=shutil.which("srun") is not None or "SLURM_JOB_ID" in os.environ,
        bf16=capability >= (8, 0),
        fp8=capability >= (8, 9),
    )


def available_cpus() -> int:
    """CPUs that this process may use, which in a container can be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
