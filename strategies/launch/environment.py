"""Which rank this process is, by the variables that torchrun, SLURM or a launcher of Leyden have set."""

from __future__ import annotations

import builtins
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from leyden.strategies.errors import ConfigurationError

STARTER = "LEYDEN_STARTER"
"""Set by our own launchers: "script", "spawn", "fork"."""
CLUSTER = "LEYDEN_CLUSTER"
"""The class of the ClusterEnvironment that has set torch's variables."""
AGENT = "LEYDEN_AGENT"
"""Process id of the agent, by which a rank knows whether it still has one."""
CUDA_IN_USE = (
    "CUDA is in use already by this process, and cannot be forked: restart the kernel, and touch no GPU before fit (no "
    "tensor.cuda(), no torch.cuda.is_available() or other call that asks the device); or use strategy='ddp_spawn'."
)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """A process's place among the ranks of a run.

    Attributes:
        rank: from 0 to `world_size` - 1, over all machines.
        local_rank: the same on this machine.
        world_size: ranks on all machines.
        local_world_size: ranks on this machine.
        node_rank: which machine this is.
        starter: who started it: "torchrun", "slurm", "script", "spawn", "fork", the class of a ClusterEnvironment, or
            "hand" where only the four variables that torch itself needs are set.
        address: host and port of rank 0; None if torch's own variables have them.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    starter: str = "torchrun"
    address: tuple[str, int] | None = None

    @property
    def num_nodes(self) -> int:
        """Machines, where each has as many ranks as this one."""
        return max(1, self.world_size // self.local_world_size)

    def variables(self) -> dict[str, str]:
        """torch's variables, from which the process reads this place; who sets them sets STARTER or CLUSTER, too."""
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
    """Reads this process's rank; None if nobody has started ranks.

    Args:
        environ: the variables; those of this process if left out.

    Raises:
        ConfigurationError: if they are incomplete or contradict each other; names them.

    Example:
        >>> rank_environment({}) is None
        True
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _torch_environment(environ)
    if "LOCAL_RANK" in environ and "WORLD_SIZE" in environ:
        raise ConfigurationError(
            "the environment has LOCAL_RANK and WORLD_SIZE, but no RANK: start ranks with torchrun."
        )
    return _slurm_environment(environ)


def _torch_environment(environ: Mapping[str, str]) -> RankEnvironment:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if missing:
        raise ConfigurationError(
            f"the environment has RANK={rank} and WORLD_SIZE={size}, but no {' and no '.join(missing)}, so nobody has "
            "started these ranks: unset RANK and WORLD_SIZE, or start the script with torchrun."
        )
    started = "LOCAL_RANK" in environ
    local_rank, local_size = _number(environ, "LOCAL_RANK", 0), _number(environ, "LOCAL_WORLD_SIZE", 1)
    # Without a starter each machine has one rank.
    node_rank = _number(environ, "GROUP_RANK", 0 if started else rank)
    if rank >= size or local_rank >= local_size or local_size > size:
        raise ConfigurationError(
            f"the environment says RANK={rank} of WORLD_SIZE={size}, LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_size}, which cannot be: unset them, or start the script with torchrun."
        )
    starter = environ.get(STARTER) or environ.get(CLUSTER) or ("torchrun" if started else "hand")
    return RankEnvironment(rank, local_rank, size, local_size, node_rank, starter)


def _slurm_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Reads a task of srun. A batch script or shell is not a rank: it has no step, or a step of a single task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1:
        return None
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", 0)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    if rank >= size or size % nodes or local_rank >= size // nodes:
        raise ConfigurationError(
            f"srun says task {rank} of {size} (local {local_rank}) on {nodes} machines: ask for as many tasks on each, "
            "with srun --ntasks-per-node."
        )
    host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    port = _number(environ, "MASTER_PORT", port_of(environ.get("SLURM_JOB_ID", "")))
    return RankEnvironment(
        *(rank, local_rank, size, size // nodes, _number(environ, "SLURM_NODEID", 0)), "slurm", (host, port)
    )


def first_host(nodes: str) -> str:
    """The first of SLURM's compressed list of hosts.

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
    """The port that every rank of a job works out alike from its number: above those that services use.

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
        raise ConfigurationError(f"the environment variable {name}={text!r} is no number: start ranks with torchrun.")
    return int(text)


def ranks_in_words(numbers: list[int]) -> str:
    """Numbers of ranks in words, such as "ranks 0 and 2".

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
    """Returns True if there is a process of this number, perhaps of another user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def is_interactive() -> bool:
    """True in a REPL, IPython and a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")


def killed_in_words(rank: int, number: int) -> str:
    """The sentence about a rank that a signal has killed.

    Example:
        >>> killed_in_words(2, 9)
        'rank 2 was killed by signal 9 (SIGKILL); all ranks are ended.'
    """
    name = signal.Signals(number).name if number in signal.valid_signals() else "?"
    return f"rank {rank} was killed by signal {number} ({name}); all ranks are ended."
