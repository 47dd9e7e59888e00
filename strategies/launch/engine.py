"""torch's elastic engine: this process as the agent that starts ranks, watches them, and tells how they ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

AGENT = "LEYDEN_AGENT"
"""Process id of the agent, by which a rank knows whether it still has one."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Which of several machines this is, and where they meet."""

    num_nodes: int = 1
    node_rank: int = 0
    address: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How the first rank that failed has ended.

    Attributes:
        rank: its number over all machines.
        failure: torch's record of it.
        code: the exit status that it gives to the launch.
        told: it wrote down an error of its own, before any other.
        note: what was written down by one that only lost its connection; "" if nothing was.
    """

    rank: int
    failure: Any
    code: int
    told: bool
    note: str = ""

    def words(self) -> str:
        """How the rank ended, where it could not say so itself; "" where it told its error."""
        code = int(self.failure.exitcode)
        if self.told:
            return ""
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else "?"
            hint = " Out of memory, perhaps." if -code == signal.SIGKILL else ""
            return f"rank {self.rank} was killed by signal {-code} ({name}); all ranks are ended.{hint}"
        return f"rank {self.rank} ended with exit code {code}, and all ranks with it. {self.note}"


def engine_config(count: int, machines: Machines, logs: str, **others: Any) -> LaunchConfig:
    """The engine's settings.

    Args:
        count: ranks of this machine.
        machines: where several take part.
        logs: folder for what ranks write down.
        **others: further fields of torch's LaunchConfig, in place of ours.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    several = machines.num_nodes > 1
    fields: dict[str, Any] = {
        "min_nodes": machines.num_nodes,
        "max_nodes": machines.num_nodes,
        "nproc_per_node": count,
        "run_id": f"leyden-{machines.port}" if several else uuid.uuid4().hex,
        "rdzv_backend": "static" if several else "c10d",
        "rdzv_endpoint": f"{machines.address}:{machines.port}" if several else "localhost:0",
        "rdzv_configs": {"rank": machines.node_rank, "timeout": 900} if several else {},
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": None if several else "localhost",
    }
    fields.update(others)
    fields.setdefault("logs_specs", DefaultLogsSpecs(log_dir=logs))
    return LaunchConfig(**fields)


def run_engine(
    config: LaunchConfig,
    program: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    folder: str | None = None,
    tell: Callable[[Ended], None] | None = None,
) -> int:
    """Runs a program on the ranks of this machine, and waits for them.

    Args:
        config: how they are started.
        program: what each rank runs.
        arguments: of the program.
        variables: what the ranks find in their environment, beside torch's own variables.
        folder: their working directory; this process's if left out.
        tell: told of the first failure; if left out, what no rank could say of itself is printed.

    Returns:
        The exit status: 0 if all ranks ended well, else that of the first that did not, 128 + n for signal n.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    sys.stdout.flush()
    sys.stderr.flush()
    with _as_agent(variables, folder):
        try:
            elastic_launch(config, program)(*arguments)
        except ChildFailedError as error:
            ended = first_failure(error)
            (tell or _say)(ended)
            return ended.code
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


@contextlib.contextmanager
def _as_agent(variables: Mapping[str, str], folder: str | None) -> Iterator[None]:
    """What the ranks find in their environment, and an engine that leaves the talking to them."""
    environ = {
        AGENT: str(os.getpid()),
        # Ranks that share the engine's own store read stale addresses when they are started a second time.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **variables,
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


def first_failure(error: Any) -> Ended:
    """Which rank of those that ended badly did so first.

    Args:
        error: the engine's ChildFailedError.
    """
    failures: Sequence[tuple[int, Any]] = sorted(error.failures.items(), key=lambda found: found[1].timestamp)
    # One that wrote down its error came before those that only lost their connection to it; SIGTERM is how the engine ends
    # the others, and 1 how they leave.
    told = [(rank, failure) for rank, failure in failures if not _lost(failure)]
    ended = [(rank, failure) for rank, failure in failures if failure.exitcode != -signal.SIGTERM]
    odd = [(rank, failure) for rank, failure in ended if failure.exitcode != 1]
    rank, first = (told or odd or ended or failures)[0]
    code = int(first.exitcode)
    if told:
        return Ended(rank, first, code if code > 0 else 1, True)
    note = next((failure.message["message"] for _, failure in failures if os.path.isfile(failure.error_file)), "")
    return Ended(rank, first, 128 - code if code < 0 else code, False, note)


def _lost(failure: Any) -> bool:
    """True if the rank told no error of its own."""
    if not os.path.isfile(failure.error_file):
        return True
    message = failure.error_file_data.get("message")
    return bool(isinstance(message, dict) and message.get("lost"))


def _say(ended: Ended) -> None:
    if ended.words():
        print(f"leyden: {ended.words()}", file=sys.stderr, flush=True)
