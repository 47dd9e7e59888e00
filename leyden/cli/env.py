"""`leyden env` prints the versions and hardware of this machine, for a bug report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys

import click
import torch
import torch.distributed as dist

from leyden.checkpoint.format.secrets import masked_text, masked_value
from leyden.cli.launch.cluster_variables import VARIABLES, cluster_variables
from leyden.cli.settings.machine import this_machine
from leyden.cli.settings.settings import found_file
from leyden.core.devices import runtime_of
from leyden.core.text import aligned, size_of
from leyden.launch.processes import available_cpus

PACKAGES = (
    *("torch", "numpy", "safetensors", "torchmetrics", "tensorboard", "wandb", "click", "pyyaml"),
    *("deepspeed", "torchao", "transformers", "torch_xla", "megatron-core", "accelerate", "lightning", "torchdata"),
)
SHOWN = (
    *("LEYDEN_", "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "OMP_", "CUDA_VISIBLE", "MASTER_"),
    *("SLURM_STEP_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"),
)
SHOWN_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "XDG_CACHE_HOME"),
    *(name for names in VARIABLES.values() for name in names),
)


@click.command("env")
def command() -> None:
    """Print versions, devices, variables and the configuration file, for a bug report.

    Only environment variables that decide how ranks run are shown; keys and tokens are masked.
    """
    click.echo("\n".join(aligned([*_versions(), *_machine(), *_variables()])))
    path, why = found_file()
    if path is None:
        click.echo(f"\nno configuration file: {why}")
        return
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    click.echo(
        f"\n{path}{why and f' ({why})'}:\n" + "".join(f"  {masked_text(line)}\n" for line in text.splitlines()),
        nl=False,
    )


def _versions() -> list[tuple[str, str]]:
    rows = [("leyden", sys.modules["leyden"].__version__)]
    rows += [("python", f"{platform.python_version()} ({sys.executable})"), ("system", platform.platform())]
    for name in PACKAGES:
        try:
            # torch.__version__ has the build after its +, which the wheels' metadata on PyPI leaves out.
            rows.append((name, str(torch.__version__) if name == "torch" else importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return rows


def _machine() -> list[tuple[str, str]]:
    machine = this_machine()
    rows = [("CPUs", f"{available_cpus()} of {os.cpu_count()}, {platform.processor() or platform.machine()}")]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        rows.append(("memory", size_of(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))))
    rows.append(("NUMA nodes", str(machine.numa_nodes)))
    backends = [
        name
        for name in ("gloo", "nccl", "xccl", "mpi", "ucc")
        if dist.is_available() and dist.is_backend_available(name)
    ]
    rows.append(("backends", ", ".join(backends)))
    rows.append(("torch's CUDA", str(torch.version.cuda or "none")))
    for index in range(machine.gpus):
        found = runtime_of(machine.kind).get_device_properties(index)
        capability = f", sm_{found.major}{found.minor}" if machine.kind == "cuda" else ""
        rows.append((f"GPU {index}", f"{found.name}, {size_of(found.total_memory)}{capability}"))
    if not machine.gpus:
        rows.append(("GPUs", "none that torch sees"))
    rows.append(("srun", shutil.which("srun") or "none"))
    cluster = [f"{key} {text} ({name})" for key, (name, text) in cluster_variables(os.environ).items()]
    rows.append(("cluster", ", ".join(cluster) or "no variables of one"))
    return rows


def _variables() -> list[tuple[str, str]]:
    return [
        (name, masked_value(name, " ".join(value.split("\n"))))
        for name, value in sorted(os.environ.items())
        if name.startswith(SHOWN) or name in SHOWN_NAMES
    ]
