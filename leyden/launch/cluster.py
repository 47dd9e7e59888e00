"""ClusterEnvironment: a process's rank on a cluster, with subclasses under Lightning's names."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from leyden.core.devices import parse_devices
from leyden.core.environment import (
    CLUSTER,
    STARTER,
    RankEnvironment,
    first_host,
    port_of,
    rank_environment,
)
from leyden.core.errors import ConfigurationError

CONTRACT = ("creates_processes_externally", "main_address", "main_port", "world_size", "global_rank", "local_rank")


class ClusterEnvironment(ABC):
    """Tells the Trainer which rank this process is, for ranks that an external launcher starts.

    It is a plugin with Lightning's contract. torchrun, srun and `leyden launch` are recognized without one. Its answers
    are published in torch's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …) before the Trainer looks for
    devices. Any object with these methods works, including Lightning's own environments.

    Example:
        >>> class Farm(ClusterEnvironment):
        ...     creates_processes_externally = True
        ...     main_address, main_port = "127.0.0.1", 23456
        ...     def world_size(self):
        ...         return int(os.environ.get("FARM_SIZE", 1))
        ...     def global_rank(self):
        ...         return int(os.environ.get("FARM_RANK", 0))
        ...     def local_rank(self):
        ...         return self.global_rank()
        >>> is_cluster(Farm())
        True
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """True if the ranks are already running. If False, the Trainer starts this machine's ranks."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The host of rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """A free port on that host, the same on all ranks."""

    @staticmethod
    def detect() -> bool:
        """Returns True in a process that this kind of cluster started. Leyden never calls it."""
        return False

    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks on all machines."""

    def set_world_size(self, size: int) -> None:
        """Receives the number of ranks that the Trainer's arguments request."""

    @abstractmethod
    def global_rank(self) -> int:
        """This process's number among all ranks."""

    def set_global_rank(self, rank: int) -> None:
        """Receives this process's global rank, computed from `node_rank`, `local_rank` and the Trainer's arguments."""

    @abstractmethod
    def local_rank(self) -> int:
        """This process's number among the ranks of its machine."""

    def node_rank(self) -> int:
        """The index of this machine."""
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises if the Trainer's arguments do not fit the cluster.

        Args:
            num_devices: ranks per machine.
            num_nodes: number of machines.
        """

    def teardown(self) -> None:
        """Called when a run ends."""


def is_cluster(plugin: Any) -> bool:
    """Returns True for an object with the contract of a ClusterEnvironment."""
    return not isinstance(plugin, type) and all(hasattr(type(plugin), name) for name in CONTRACT)


def publish(plugin: Any, devices: Any, num_nodes: int) -> None:
    """Sets torch's variables from a ClusterEnvironment, unless a known launcher has already set them.

    Args:
        plugin: the environment.
        devices: the Trainer's argument. If it does not fix a number, the world size divided by `num_nodes` is used.
        num_nodes: the Trainer's argument.

    Raises:
        ConfigurationError: if the environment's answers contradict each other or the Trainer's arguments.
    """
    if STARTER in os.environ or (getattr(plugin, "is_recognized", False) and rank_environment() is not None):
        return
    kind = type(plugin).__name__
    if not plugin.creates_processes_externally:
        if num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but {kind} does not start processes on other machines. Remove the plugin and "
                "start the script on each machine with torchrun or `leyden launch`."
            )
        return
    given = parse_devices(devices)
    count = given if isinstance(given, int) else len(given) if given else max(1, plugin.world_size() // num_nodes)
    node, local = plugin.node_rank(), plugin.local_rank()
    plugin.set_world_size(count * num_nodes)
    plugin.set_global_rank(node * count + local)
    validate = getattr(plugin, "validate_settings", None)
    if callable(validate):
        validate(num_devices=count, num_nodes=num_nodes)
    size, rank = plugin.world_size(), plugin.global_rank()
    here = size // num_nodes
    if size % num_nodes or not 0 <= rank < size or not 0 <= local < here or not 0 <= node < num_nodes:
        raise ConfigurationError(
            f"{kind} reports rank {rank} of {size}, local rank {local} on machine {node}, which contradicts "
            f"num_nodes={num_nodes} ({size / num_nodes:g} ranks per machine). Set Trainer(num_nodes=…) to the job's "
            "number of machines."
        )
    address = str(plugin.main_address), int(plugin.main_port)
    os.environ.update(RankEnvironment(rank, local, size, here, node, kind, address).variables())
    os.environ[CLUSTER] = kind


# by Lightning's names -------------------------------------------------------------------------------------------------
class LightningEnvironment(ClusterEnvironment):
    """Has the Trainer start this machine's ranks, as it does without a plugin."""

    creates_processes_externally = False
    main_address = "127.0.0.1"
    main_port = 0

    def __init__(self) -> None:
        self._size, self._rank = 1, 0

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        self._size = size

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        self._rank = rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))


class FromVariables(ClusterEnvironment):
    """Base class for launchers that describe each rank in environment variables.

    Attributes:
        variables: maps each method to the variables that may hold its value. The first one that is set wins.
        starter: name of the launcher, for messages.
        job: variable with the job's ID, from which every rank derives the port. Empty for port 29500.
        is_recognized: True if Leyden recognizes these ranks without a plugin, and then trusts the launcher's number of
            machines over num_nodes.
    """

    creates_processes_externally = True
    variables: ClassVar[dict[str, tuple[str, ...]]] = {}
    starter: ClassVar[str] = ""
    job: ClassVar[str] = ""
    is_recognized: ClassVar[bool] = False

    def _number(self, name: str) -> int:
        for variable in self.variables[name]:
            if os.environ.get(variable, "").isdigit():
                return int(os.environ[variable])
        raise ConfigurationError(
            f"{type(self).__name__} needs {' or '.join(self.variables[name])} in the environment, and it is not set. "
            f"Start the script with {self.starter}, or remove the plugin."
        )

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        port = port_of(os.environ.get(self.job, "")) if self.job else 29500
        return int(os.environ.get("MASTER_PORT") or port)

    @classmethod
    def detect(cls) -> bool:
        return all(any(one in os.environ for one in cls.variables[name]) for name in ("world_size", "global_rank"))

    def world_size(self) -> int:
        return self._number("world_size")

    def global_rank(self) -> int:
        return self._number("global_rank")

    def local_rank(self) -> int:
        return self._number("local_rank")

    def node_rank(self) -> int:
        return self._number("node_rank")


class TorchElasticEnvironment(FromVariables):
    """Ranks started by torchrun. Leyden recognizes them without this plugin too."""

    variables: ClassVar = {
        "world_size": ("WORLD_SIZE",),
        "global_rank": ("RANK",),
        "local_rank": ("LOCAL_RANK",),
        "node_rank": ("GROUP_RANK",),
    }
    starter, is_recognized = "torchrun", True


class SLURMEnvironment(FromVariables):
    """Tasks of srun. Leyden recognizes them without this plugin too.

    Args:
        auto_requeue: ignored. `Trainer(resume="auto")` saves and requeues a preempted job on every cluster.
        requeue_signal: must be None. Set the signals with `Preemption` instead.

    Raises:
        ConfigurationError: if `requeue_signal` is given.
    """

    variables: ClassVar = {
        "world_size": ("SLURM_STEP_NUM_TASKS",),
        "global_rank": ("SLURM_PROCID",),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
    }
    starter, job, is_recognized = "srun", "SLURM_JOB_ID", True

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        if requeue_signal is not None:
            raise ConfigurationError(
                f"SLURMEnvironment(requeue_signal={requeue_signal!r}) is not supported. Use Trainer(resume='auto', "
                "preemption=Preemption(signals=…)), which saves and requeues (from leyden.trainer import Preemption)."
            )
        self.auto_requeue = auto_requeue

    @property
    def main_address(self) -> str:
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST") or "127.0.0.1"
        return os.environ.get("MASTER_ADDR") or first_host(nodes)


class MPIEnvironment(FromVariables):
    """Processes started by `mpirun` of Open MPI, MPICH or Intel MPI. mpi4py is not needed.

    On several machines, set MASTER_ADDR to the host of rank 0, for example with `mpirun -x MASTER_ADDR=…`.
    """

    variables: ClassVar = {
        "world_size": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        "global_rank": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
        "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    }
    starter, job = "mpirun", "PMIX_NAMESPACE"

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" not in os.environ and self._number("local_size") < self.world_size():
            raise ConfigurationError(
                "MPIEnvironment does not know the host of rank 0. Set it with mpirun -x MASTER_ADDR=…"
            )
        return super().main_address

    def node_rank(self) -> int:
        return self.global_rank() // self._number("local_size")


class LSFEnvironment(FromVariables):
    """Tasks of LSF's `jsrun`. The file LSB_DJOB_RANKFILE lists the hosts; its first line is the launch node."""

    variables: ClassVar = {
        "world_size": ("JSM_NAMESPACE_SIZE",),
        "global_rank": ("JSM_NAMESPACE_RANK",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
    }
    starter, job = "jsrun", "LSB_JOBID"

    @property
    def main_address(self) -> str:
        return self._hosts()[0]

    def node_rank(self) -> int:
        hosts, here = self._hosts(), socket.gethostname()
        if here not in hosts:
            raise ConfigurationError(
                f"this host, {here}, is missing from the hosts in LSF's LSB_DJOB_RANKFILE: {', '.join(hosts)}."
            )
        return hosts.index(here)

    def _hosts(self) -> list[str]:
        file = Path(os.environ.get("LSB_DJOB_RANKFILE", ""))
        lines = file.read_text(encoding="utf-8").split() if file.is_file() else []
        if len(lines) < 2:
            raise ConfigurationError(
                f"LSB_DJOB_RANKFILE={str(file)!r} lists no hosts. Start the script with jsrun, or remove the plugin."
            )
        return list(dict.fromkeys(lines[1:]))


class KubeflowEnvironment(FromVariables):
    """Pods of Kubeflow's PyTorchJob, one rank per pod."""

    variables: ClassVar = {"world_size": ("WORLD_SIZE",), "global_rank": ("RANK",)}
    starter = "Kubeflow's PyTorchJob"

    @classmethod
    def detect(cls) -> bool:
        return "KUBERNETES_PORT" in os.environ and "LOCAL_RANK" not in os.environ and super().detect()

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()
