"""Reads this process's rank from the variables of torchrun, SLURM, submitit, Ray or Leyden's launchers."""

from __future__ import annotations

import builtins
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from leyden.core.errors import ConfigurationError

STARTED_IN = ""
"""The folder in which this process was started; empty if it is gone.

Scripts import Leyden before they, or Hydra, change it, so this module must be among those that `Trainer` needs.
"""
with suppress(OSError):
    STARTED_IN = os.getcwd()
STARTER = "LEYDEN_STARTER"
"""Set by Leyden's launchers to "script", "spawn" or "fork"."""
CLUSTER = "LEYDEN_CLUSTER"
"""Class name of the ClusterEnvironment that set torch's variables."""
AGENT = "LEYDEN_AGENT"
"""Process ID of the agent. A rank checks it to see whether its agent is still alive."""
MACHINE_RANGE = "LEYDEN_MACHINE_RANGE"
"""The range of machines, such as 1:4, of a launch during which they come and go."""
MACHINES = ("PET_NNODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM")
"""Variables for a job's number of machines: those of torchrun, which Kubeflow sets, of SkyPilot and of dstack."""
DEVICE_IN_USE = (
    "A GPU is already initialized in this process, so it cannot be forked. Restart the kernel and touch no GPU before "
    "fit (no tensor.cuda(), no torch.cuda.is_available() or other device query), or use strategy='ddp_spawn'."
)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """A process's place among the ranks of a run.

    Attributes:
        rank: global rank, from 0 to `world_size` - 1.
        local_rank: rank on this machine.
        world_size: number of ranks on all machines.
        local_world_size: number of ranks on this machine.
        node_rank: index of this machine.
        starter: launcher of the process: "torchrun", "slurm", "submitit" (its local executor), "Ray", "script",
            "spawn", "fork", the class name of a ClusterEnvironment, or "hand" if only the four variables that torch
            itself needs are set.
        address: host and port of rank 0. None if torch's own variables hold them.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    starter: str = "torchrun"
    address: tuple[str, int] | None = None

    @property
    def size_variable(self) -> str:
        """The variable from which the number of ranks was read, for messages."""
        return {"slurm": "SLURM_STEP_NUM_TASKS", "submitit": "SUBMITIT_LOCAL_NTASKS"}.get(self.starter, "WORLD_SIZE")

    @property
    def num_nodes(self) -> int:
        """Number of machines, assuming that each has as many ranks as this one."""
        return max(1, self.world_size // self.local_world_size)

    def variables(self) -> dict[str, str]:
        """Returns torch's variables for this rank. A launcher that sets them also sets STARTER or CLUSTER."""
        host, port = self.address or ("", 0)
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Reads this process's rank. Returns None if no launcher started it.

    Args:
        environ: the environment variables. Default: those of this process.

    Raises:
        ConfigurationError: if the variables are incomplete or contradict each other.

    Example:
        >>> rank_environment({}) is None
        True
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torch_environment(environ)
    if "LOCAL_RANK" in environ and "WORLD_SIZE" in environ:
        raise ConfigurationError(
            "the environment sets LOCAL_RANK and WORLD_SIZE, but not RANK. Start ranks with torchrun."
        )
    if environ.get("SUBMITIT_EXECUTOR") == "local":
        return _submitit_environment(environ)
    return _slurm_environment(environ)


def machine_range(environ: Mapping[str, str] | None = None) -> range | None:
    """Returns the numbers of machines that may run this job; None if their number is fixed.

    Args:
        environ: the environment variables. Default: those of this process.

    Example:
        >>> list(machine_range({"LEYDEN_MACHINE_RANGE": "1:3"}))
        [1, 2, 3]
    """
    least, _, most = (os.environ if environ is None else environ).get(MACHINE_RANGE, "").partition(":")
    return range(int(least), int(most) + 1) if least else None


def hint_of_meeting() -> str:
    """Returns a hint for machines that may have missed the job that they belong to; "" if their number is fixed."""
    if machine_range() is None:
        return ""
    return " Machines of one launch meet only with the same --main_process_ip and port, or the same --rdzv_endpoint."


def check_launched(environ: Mapping[str, str] | None = None) -> None:
    """Raises if a cluster started this process on several machines, and no launcher made it a rank.

    Trials of Ray Tune inherit the variables from the cluster that Ray runs on, and are meant to train alone.

    Args:
        environ: the environment variables. Default: those of this process.

    Raises:
        ConfigurationError: names the launchers. Without it, each machine would train on its own.

    Example:
        >>> check_launched({"PET_NNODES": "1"})
    """
    environ = os.environ if environ is None else environ
    for name in () if "RAY_JOB_ID" in environ else MACHINES:
        most = environ.get(name, "").rpartition(":")[2]
        if most.isdigit() and int(most) > 1:
            raise ConfigurationError(
                f"{name}={environ[name]}: a cluster started this script on several machines, but no launcher made it a "
                "rank, so each machine would train on its own. Start it with `leyden launch`, which reads the "
                f"cluster's variables, or with torchrun. To run on this machine alone, unset {name}, or use "
                "strategy='single_device'."
            )


def check_one_rank(found: RankEnvironment, devices: int, environ: Mapping[str, str] | None = None) -> None:
    """Raises if RANK counts machines, as in a PyTorchJob, and this machine should run several ranks.

    Args:
        found: this process's rank. Only one without LOCAL_RANK is checked.
        devices: the ranks that this machine should run, as far as its devices and the arguments tell.
        environ: the environment variables. Default: those of this process.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("PET_NPROC_PER_NODE", "")
    count = max(devices, int(wanted) if wanted.isdigit() else 1)
    if found.starter == "hand" and count > 1:
        raise ConfigurationError(
            f"the environment sets RANK={found.rank} of WORLD_SIZE={found.world_size} without LOCAL_RANK, which means "
            f"one rank on each machine, but this machine should run {count}. In a PyTorchJob, RANK counts pods: start "
            "the script with `leyden launch` or torchrun, which start the ranks of each pod. For one rank on each "
            "machine, use devices=1, and no PET_NPROC_PER_NODE above 1."
        )


def _torch_environment(environ: Mapping[str, str]) -> RankEnvironment:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if missing:
        raise ConfigurationError(
            f"the environment sets RANK={rank} and WORLD_SIZE={size}, but not {' or '.join(missing)}, so no launcher "
            "started these ranks. Unset RANK and WORLD_SIZE, or start the script with torchrun."
        )
    started = "LOCAL_RANK" in environ
    local_rank, local_size = _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", 1)
    # Ray Train calls it NODE_RANK. Without a launcher, each machine runs one rank.
    node_rank = _number(environ, "GROUP_RANK", _number(environ, "NODE_RANK", 0) if started else rank)
    if rank >= size or local_rank >= local_size or local_size > size:
        raise ConfigurationError(
            f"the environment sets RANK={rank} of WORLD_SIZE={size} and LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_size}, which is impossible. Unset them, or start the script with torchrun."
        )
    launcher = "Ray" if "RAY_JOB_ID" in environ and "TORCHELASTIC_RUN_ID" not in environ else "torchrun"
    starter = environ.get(STARTER) or environ.get(CLUSTER) or (launcher if started else "hand")
    return RankEnvironment(rank, local_rank, size, local_size, node_rank, starter)


def _slurm_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Reads the rank of an srun task. Batch scripts and shells are not ranks: they have no step, or one task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1:
        return None
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", 0)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    if rank >= size or size % nodes or local_rank >= size // nodes:
        raise ConfigurationError(
            f"srun started task {rank} of {size} (local {local_rank}) on {nodes} machines, but each machine must run "
            "the same number of tasks. Set srun --ntasks-per-node."
        )
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    port = _number(environ, "MASTER_PORT", port_of(environ.get("SLURM_JOB_ID", "")))
    return RankEnvironment(
        *(rank, local_rank, size, size // nodes, _number(environ, "SLURM_NODEID", 0)), "slurm", (host, port)
    )


def _submitit_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Reads the rank of a task of submitit's local executor. Its tasks on a cluster are tasks of srun."""
    size = _number(environ, "SUBMITIT_LOCAL_NTASKS", 1)
    if size == 1:
        return None
    rank, port = _number(environ, "SUBMITIT_LOCAL_GLOBALID"), port_of(environ.get("SUBMITIT_LOCAL_JOB_ID", ""))
    address = "127.0.0.1", _number(environ, "MASTER_PORT", port)
    return RankEnvironment(rank, rank, size, size, 0, "submitit", address)


def submitit_signal(environ: Mapping[str, str] | None = None) -> int | None:
    """Returns the signal that preempts a job of submitit, whose handler requeues the job; None outside of submitit.

    Args:
        environ: the environment variables. Default: those of this process.

    Example:
        >>> submitit_signal({"SUBMITIT_EXECUTOR": "slurm"}) == signal.SIGUSR2
        True
        >>> submitit_signal({}) is None
        True
    """
    environ = os.environ if environ is None else environ
    if "SUBMITIT_EXECUTOR" not in environ:
        return None
    number: int | None = getattr(signal, f"SIG{environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}", None)
    return number


def is_submitit_task() -> bool:
    """Returns True if submitit started this process and handles its signals.

    False in a program that a task has started, which inherits the variables without the handlers.
    """
    number = submitit_signal()
    return number is not None and callable(signal.getsignal(number))


def first_host(nodes: str) -> str:
    """Returns the first host of SLURM's compressed host list.

    Example:
        >>> first_host("gpu[007-012,14],login2")
        'gpu007'
        >>> first_host("node3,node5")
        'node3'
    """
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    assert found is not None
    return f"{found[1]}{found[2] or ''}{found[3]}"


def port_of(job: str) -> int:
    """Derives a port from a job's ID, the same on every rank and above the ports of common services.

    Example:
        >>> port_of("123456")
        18456
    """
    return 15000 + int(re.sub(r"\D", "", job)[-9:] or 0) % 15000


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ConfigurationError(
            f"the environment variable {name}={text!r} is not a number. Start ranks with torchrun."
        )
    return int(text)


def ranks_in_words(numbers: list[int]) -> str:
    """Formats rank numbers for a message.

    Example:
        >>> ranks_in_words([1]), ranks_in_words([1, 2, 3, 7])
        ('rank 1', 'ranks 1 to 3, 7')
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    words = [" to ".join(map(str, span)) for span in spans]
    more = f" and {len(words) - 8} more" if len(words) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(words[:8])}{more}"


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables during the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def is_running(process: int) -> bool:
    """Returns True if a process with this ID exists, even one of another user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def is_interactive() -> bool:
    """Returns True in a REPL, in IPython and in a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")


def killed_in_words(rank: int, number: int) -> str:
    """Returns the message for a rank that a signal killed.

    Example:
        >>> killed_in_words(2, 9)
        'rank 2 was killed by signal 9 (SIGKILL); all ranks were terminated.'
    """
    name = signal.Signals(number).name if number in signal.valid_signals() else "?"
    return f"rank {rank} was killed by signal {number} ({name}); all ranks were terminated."
