"""Variables in which clusters describe a machine: torchrun's (PET_…), which Kubeflow sets, SkyPilot's and dstack's.

They override the configuration file, which is the same on all machines, and flags override them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from leyden.cli.launch.plan import ElasticOptions
from leyden.cli.settings.keys import KEYS, ConfigKey
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import Settings
from leyden.core.environment import MACHINES
from leyden.core.errors import ConfigurationError

GPU_COUNTS = ("SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_PER_NODE")
VARIABLES: dict[str, tuple[str, ...]] = {
    "num_machines": MACHINES,
    "nproc_per_node": ("PET_NPROC_PER_NODE", *GPU_COUNTS),
    "machine_rank": ("PET_NODE_RANK", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK"),
    "main_process_ip": ("PET_MASTER_ADDR", "SKYPILOT_NODE_IPS", "DSTACK_MASTER_NODE_IP"),
    "main_process_port": ("PET_MASTER_PORT",),
    "max_restarts": ("PET_MAX_RESTARTS",),
    "rdzv_backend": ("PET_RDZV_BACKEND",),
    "endpoint": ("PET_RDZV_ENDPOINT",),
    "rdzv_id": ("PET_RDZV_ID",),
    "rdzv_conf": ("PET_RDZV_CONF",),
}
"""Maps keys, and options of torch's agent, to the variables that may set them. The first one that is not empty wins."""
PLACE = ("machine_rank", "main_process_ip", "main_process_port")


class MachineRange(int):
    """A range of machines, such as 1:4. As a number, it is the largest one.

    Example:
        >>> MachineRange.read("--nnodes", "1:4"), MachineRange.read("--nnodes", "1:4").least
        (4, 1)
    """

    least: int

    @classmethod
    def read(cls, name: str, text: str) -> int:
        """Reads a range; a plain number if both ends are equal.

        Raises:
            ConfigurationError: if it is invalid.
        """
        least, most = (dataclasses.replace(KEYS["num_machines"], name=name).read(part) for part in text.split(":", 1))
        if least > most:
            raise ConfigurationError(f"{name}: {text} starts above its end: give {most}:{least}.")
        found = cls(most)
        found.least = least
        return found if least < most else int(most)


def cluster_variables(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns what a cluster sets: for each key, the variable and its text. Empty in a process that is a rank.

    Example:
        >>> cluster_variables({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\\n10.0.0.2"})
        {'num_machines': ('SKYPILOT_NUM_NODES', '2'), 'main_process_ip': ('SKYPILOT_NODE_IPS', '10.0.0.1')}
    """
    if "LOCAL_RANK" in environ or _is_slurm_task(environ):
        return {}
    texts = {name: environ.get(name, "").strip() for names in VARIABLES.values() for name in names}
    # SkyPilot lists the addresses of all machines, one a line.
    texts["SKYPILOT_NODE_IPS"] = texts["SKYPILOT_NODE_IPS"].partition("\n")[0].strip()
    named = {key: next((name for name in names if texts[name]), None) for key, names in VARIABLES.items()}
    return {key: (name, texts[name]) for key, name in named.items() if name is not None}


def with_cluster(
    flags: Settings,
    file: Settings,
    elastic: ElasticOptions,
    per_machine: str | None,
    machine: Machine,
    environ: Mapping[str, str],
) -> tuple[Settings, ElasticOptions]:
    """Lays flags over a cluster's variables, and these over the file.

    Args:
        flags: the flags that are keys.
        file: the configuration file.
        elastic: the flags that are options of torch's agent.
        per_machine: the flag `--nproc_per_node`: a number, auto, cpu or gpu.
        machine: the hardware of this machine.
        environ: the environment.

    Raises:
        ConfigurationError: if a variable is invalid, or RANK counts machines; names the fix.
    """
    given = {name for name, value in flags.values.items() if value is not None}
    given |= {field.name for field in dataclasses.fields(elastic) if getattr(elastic, field.name)}
    found = {key: origin for key, origin in cluster_variables(environ).items() if key not in given}
    if per_machine is not None:
        if "num_processes" in given:
            raise ConfigurationError(
                "--nproc_per_node counts the ranks of a machine, --num_processes those of all machines: give one of "
                "them."
            )
        found["nproc_per_node"] = "--nproc_per_node", per_machine
    settings = flags.over(file)
    if "num_processes" in given or _has_no_say(found.get("nproc_per_node", ("", "")), settings):
        found.pop("nproc_per_node", None)
    machines = settings.get("num_machines", 1)
    if "num_machines" in found:
        machines = read_key("num_machines", *found["num_machines"])
    if machines == 1 and "num_machines" not in {*found, *given}:
        _check_rank(environ)
    if machines == 1 or "endpoint" in {*found, *given}:
        # One machine needs no address. An endpoint numbers the machines itself.
        found = {key: origin for key, origin in found.items() if key not in PLACE}
    values = {key: read_key(key, *origin) for key, origin in found.items() if key in KEYS}
    if "nproc_per_node" in found:
        values |= _ranks(*found["nproc_per_node"], machines, settings, machine)
    options: dict[str, Any] = {key: found[key][1] for key in ("endpoint", "rdzv_id") if key in found}
    if "rdzv_conf" in found:
        options["rdzv_conf"] = pairs(*found["rdzv_conf"])
    read = [f"{name}={text}" for name, text in found.values() if name in environ]
    settings = flags.over(Settings(values).over(file))
    return dataclasses.replace(settings, variables=read), dataclasses.replace(elastic, **options)


def read_key(key: str, name: str, text: str) -> Any:
    """Reads the value of a key from a variable or a flag.

    Raises:
        ConfigurationError: if the value is invalid.

    Example:
        >>> read_key("num_machines", "PET_NNODES", "2:2")
        2
    """
    if key == "num_machines" and ":" in text:
        return MachineRange.read(name, text)
    return dataclasses.replace(KEYS[key], name=name).read(text)


def pairs(name: str, text: str) -> dict[str, str]:
    """Reads KEY=VALUE, separated by commas."""
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(equals and key.strip() for key, equals, _ in parts):
        raise ConfigurationError(f"{name} {text}: give KEY=VALUE, separated by commas.")
    return {key.strip(): value.strip() for key, _, value in parts}


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Returns True in a task of srun, whose variables `leyden launch` reads instead."""
    return {"SLURM_STEP_ID", "SLURM_PROCID"} <= set(environ) and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _check_rank(environ: Mapping[str, str]) -> None:
    """Raises if RANK counts machines, and nothing else says that there are several."""
    rank, size = environ.get("RANK"), environ.get("WORLD_SIZE", "")
    if not rank or "LOCAL_RANK" in environ or not size.isdigit() or int(size) == 1 or _is_slurm_task(environ):
        return
    address = environ.get("MASTER_ADDR") or "ADDRESS"
    raise ConfigurationError(
        f"the environment sets RANK={rank} of WORLD_SIZE={size} without LOCAL_RANK, as a PyTorchJob does, which counts "
        f"pods, so each would train on its own: give --num_machines {size} --machine_rank {rank} --main_process_ip "
        f"{address} --main_process_port {environ.get('MASTER_PORT') or 'PORT'}, or unset RANK and WORLD_SIZE."
    )


def _has_no_say(origin: tuple[str, str], settings: Settings) -> bool:
    """Returns True for a cluster's number of GPUs if there are none, or the settings choose other devices."""
    name, text = origin
    chosen = settings.get("gpu_ids", "all") != "all" or _on_cpu(settings) or settings.kind == "XLA"
    return name in GPU_COUNTS and (chosen or text == "0")


def _on_cpu(settings: Settings) -> bool:
    return bool(settings.get("use_cpu", False)) or settings.kind == "MULTI_CPU"


def _ranks(name: str, text: str, machines: int, settings: Settings, machine: Machine) -> dict[str, Any]:
    """Returns the keys for a number of ranks per machine. auto, cpu and gpu mean what they mean to torchrun."""
    has_gpus = machine.gpus > 0 and not _on_cpu(settings)
    if (text == "gpu" or name in GPU_COUNTS) and not has_gpus:
        raise ConfigurationError(
            f"{name}: {text}, but there is no GPU to use on this machine: look at `leyden env`, or give --cpu and "
            "--num_processes."
        )
    if text == "gpu" or (text == "auto" and has_gpus):
        return {"num_processes": -1}
    if text in ("auto", "cpu"):
        return {"num_processes": machines * machine.cpus, "use_cpu": True}
    try:
        return {"num_processes": machines * ConfigKey(name, int, least=1).read(text)}
    except ConfigurationError:
        raise ConfigurationError(f"{name}: {text!r}: give a number from 1, auto, cpu or gpu.") from None
