"""Ranks from a plain script: this process becomes the agent of torch's elastic engine, and the ranks run the script anew."""

from __future__ import annotations

import builtins
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.environment import STARTER

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

AGENT = "LEYDEN_AGENT"
"""Process id of the agent, by which a rank knows whether it still has one."""


def obstacle() -> str | None:
    """Why this process's script cannot be run anew by ranks; None if it can."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "pytest runs this"
    if is_interactive():
        return "this is an interactive session"
    if multiprocessing.parent_process() is not None:
        return "this is a process of multiprocessing"
    if file is None or not os.path.exists(file):
        return "there is no script file (python -c, or a script from stdin)"
    return None


def is_interactive() -> bool:
    """True in a REPL, IPython and a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")


@dataclass(frozen=True, slots=True)
class Machines:
    """Which of several machines this is, and where they meet."""

    num_nodes: int = 1
    node_rank: int = 0
    address: str = ""
    port: int = 0


def machines_of(num_nodes: int) -> Machines:
    """Reads NODE_RANK, MASTER_ADDR and MASTER_PORT, which a script that is started on each machine needs.

    Raises:
        ConfigurationError: if one of them is missing.
    """
    if num_nodes == 1:
        return Machines()
    values = {name: os.environ.get(name, "") for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in values.items() if not value]
    if missing or not values["NODE_RANK"].isdigit() or not values["MASTER_PORT"].isdigit():
        raise ConfigurationError(
            f"num_nodes={num_nodes}: start the script on each machine with NODE_RANK (0 to {num_nodes - 1}), MASTER_ADDR and "
            f"MASTER_PORT (of machine 0) in its environment{', now without ' + ' and '.join(missing) if missing else ''}; or "
            f"with torchrun --nnodes={num_nodes}, or srun."
        )
    node_rank = int(values["NODE_RANK"])
    if node_rank >= num_nodes:
        raise ConfigurationError(f"NODE_RANK={node_rank} and num_nodes={num_nodes}: count machines from 0.")
    return Machines(num_nodes, node_rank, values["MASTER_ADDR"], int(values["MASTER_PORT"]))


def run_ranks(count: int, machines: Machines | None = None, folder: str | None = None) -> int:
    """Runs this process's own command line on so many ranks, and waits for them.

    Args:
        count: ranks of this machine.
        machines: where several take part.
        folder: the working directory that the command line was given in.

    Returns:
        The exit status: 0 if all ranks ended well, else that of the first that did not, 128 + n for signal n.

    Raises:
        ConfigurationError: where there is no command line that could be run anew.
    """
    why = obstacle()
    if why is not None:
        raise ConfigurationError(
            f"strategy='ddp' starts its ranks by running the script anew, and {why}. Use strategy='ddp_notebook' (ranks are "
            "forked; nothing is imported anew) or 'ddp_spawn' (for classes in files that can be imported), or put it into a "
            "script."
        )
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="leyden-ranks-") as logs, _as_agent(count, folder):
        config = _config(count, machines or Machines(), logs)
        try:
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
        except ChildFailedError as error:
            return _status(error)
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


def _config(count: int, machines: Machines, logs: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    several = machines.num_nodes > 1
    rendezvous: dict[str, Any] = {"rank": machines.node_rank, "timeout": 900} if several else {}
    return LaunchConfig(
        min_nodes=machines.num_nodes,
        max_nodes=machines.num_nodes,
        nproc_per_node=count,
        run_id=f"leyden-{machines.port}" if several else uuid.uuid4().hex,
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=f"{machines.address}:{machines.port}" if several else "localhost:0",
        rdzv_configs=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=None if several else "localhost",
        logs_specs=DefaultLogsSpecs(log_dir=logs),
    )


@contextlib.contextmanager
def _as_agent(count: int, folder: str | None) -> Iterator[None]:
    """What the ranks find in their environment, and an engine that leaves the talking to them."""
    environ = {
        STARTER: "script",
        AGENT: str(os.getpid()),
        # Ranks that share the engine's own store read stale addresses when they are started a second time.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count)),
    }
    before = {name: os.environ.get(name) for name in environ}
    logger = logging.getLogger("torch.distributed.elastic")
    level, place = logger.level, os.getcwd()
    os.environ.update(environ)
    logger.setLevel(logging.CRITICAL)
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(place)
        logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _status(error: Any) -> int:
    """The exit status that the first failure gives; says what no rank could say of itself."""
    failures: Sequence[tuple[int, Any]] = sorted(error.failures.items(), key=lambda found: found[1].timestamp)
    # One that wrote down its error came before those that only lost their connection to it; SIGTERM is how the engine ends
    # the others, and 1 how they leave.
    told = [(rank, failure) for rank, failure in failures if not _lost(failure)]
    ended = [(rank, failure) for rank, failure in failures if failure.exitcode != -signal.SIGTERM]
    odd = [(rank, failure) for rank, failure in ended if failure.exitcode != 1]
    rank, first = (told or odd or ended or failures)[0]
    code = int(first.exitcode)
    if told:
        return code if code > 0 else 1
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else "?"
        hint = " Out of memory, perhaps." if -code == signal.SIGKILL else ""
        _say(f"rank {rank} was killed by signal {-code} ({name}); all ranks are ended.{hint}")
        return 128 - code
    text = next((failure.message["message"] for _, failure in failures if os.path.isfile(failure.error_file)), "")
    _say(f"rank {rank} ended with exit code {code}, and all ranks with it. {text}")
    return code


def _lost(failure: Any) -> bool:
    """True if the rank told no error of its own."""
    if not os.path.isfile(failure.error_file):
        return True
    message = failure.error_file_data.get("message")
    return bool(isinstance(message, dict) and message.get("lost"))


def _say(text: str) -> None:
    print(f"leyden: {text}", file=sys.stderr, flush=True)
