"""torch's elastic engine: this process is the agent that starts ranks, watches them, and reports how they ended."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from leyden.strategies.launch.environment import AGENT, killed_in_words, ranks_in_words, with_variables
from leyden.strategies.launch.leaving import ExitNotes
from leyden.strategies.launch.meeting import gloo_on_loopback
from leyden.strategies.launch.processes import children, status_of
from leyden.strategies.launch.tries import tries
from leyden.strategies.launch.watchdog import Watchdog, say

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

PASSED_ON = tuple(
    name
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
)
"""Signals that the agent passes on to its ranks, which end in order or as the signal does without a handler."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torch's own variable for the seconds between the signal that an agent passes on and its SIGKILL."""
SAVING = 600.0
"""The same, for ranks that save before they end and have no grace period of their own."""


MEETING_SECONDS = 900
"""Seconds that machines wait for each other."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Which of several machines this is, and where they meet.

    Attributes:
        num_nodes: how many there are.
        node_rank: the number of this one; None if the rendezvous assigns it.
        address: where they meet; "" for ranks of this machine alone, which meet in a store of the agent.
        port: of that address; 0 for any that is free, on this machine alone.
        backend: torch's rendezvous: static or c10d.
        run_id: name of the rendezvous; "" makes one of the port.
        further: settings of the rendezvous.
    """

    num_nodes: int = 1
    node_rank: int | None = 0
    address: str = ""
    port: int = 0
    backend: str = "static"
    run_id: str = ""
    further: Mapping[str, str] = field(default_factory=dict)

    def rendezvous(self) -> dict[str, Any]:
        """The fields of torch's LaunchConfig by which they meet."""
        from leyden.strategies.launch.loopback import register

        if not self.address:
            fields: dict[str, Any] = {"rdzv_backend": register(), "rdzv_endpoint": f"localhost:{self.port}"}
            return {**fields, "rdzv_configs": dict(self.further), "run_id": uuid.uuid4().hex}
        meeting: dict[str, Any] = {"timeout": MEETING_SECONDS}
        if self.backend == "static":
            meeting["rank"] = self.node_rank
        elif self.backend == "c10d" and self.node_rank is not None:
            meeting["is_host"] = self.node_rank == 0
        return {
            "rdzv_backend": self.backend,
            "rdzv_endpoint": f"{self.address}:{self.port}",
            "rdzv_configs": {**meeting, **self.further},
            "run_id": self.run_id or f"leyden-{self.port}",
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """How the first rank that failed has ended.

    Attributes:
        rank: its number over all machines.
        failure: torch's record of it.
        code: the exit status that it gives to the launch.
        reported: it reported an error of its own, before any other.
        note: what was written down by one that only lost its connection; "" if nothing was.
        others: in that case, who was not there any more, and where each of the others was.
    """

    rank: int
    failure: Any
    code: int
    reported: bool
    note: str = ""
    others: str = ""

    def words(self) -> str:
        """How the rank ended, if it could not say so itself; "" if it reported its error."""
        code = int(self.failure.exitcode)
        if self.reported:
            return ""
        if code < 0:
            hint = " Out of memory, perhaps." if -code == signal.SIGKILL else ""
            return f"{killed_in_words(self.rank, -code)}{hint}"
        if self.others:
            return f"{self.others}. Rank {self.rank} waited for it, and all ranks are ended: {self.note}"
        return f"rank {self.rank} ended with exit code {code}, and all ranks with it. {self.note}".rstrip()


def engine_config(
    count: int, machines: Machines, logs: str, patience: float | None = None, **others: Any
) -> LaunchConfig:
    """The engine's settings.

    Args:
        count: ranks of this machine.
        machines: where several take part.
        logs: folder for what ranks write down.
        patience: seconds that ranks have to end in order after a signal, before the agent kills them; None for torch's
            30, or what its variable says.
        **others: further fields of torch's LaunchConfig, which override these.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    fields: dict[str, Any] = {
        "min_nodes": machines.num_nodes,
        "max_nodes": machines.num_nodes,
        "nproc_per_node": count,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": "localhost" if machines.num_nodes == 1 else None,
        **machines.rendezvous(),
    }
    # Older versions of torch have neither.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    if "signals_to_handle" in known:
        fields["signals_to_handle"] = ",".join(PASSED_ON)
    if "shutdown_timeout" in known and patience is not None and SHUTDOWN not in os.environ:
        fields["shutdown_timeout"] = math.ceil(patience)
    fields.update(others)
    fields.setdefault("logs_specs", DefaultLogsSpecs(log_dir=logs))
    return LaunchConfig(**fields)


def run_engine(
    config: LaunchConfig,
    program: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    folder: str | None = None,
    report: Callable[[Ended], None] | None = None,
) -> int:
    """Runs a program on the ranks of this machine, and waits for them.

    Args:
        config: how they are started.
        program: what each rank runs.
        arguments: of the program.
        variables: the ranks' environment, beside torch's own variables.
        folder: their working directory; this process's if left out.
        report: called with the first failure; if left out, a failure that no rank reported is printed.

    Returns:
        The exit status: 0 if all ranks ended well, else that of the first that did not, 128 + n for signal n; that of
        a run that was preempted.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    from leyden.strategies.launch.loopback import NAME

    sys.stdout.flush()
    sys.stderr.flush()
    assert config.logs_specs is not None
    is_alone, notes = config.rdzv_backend == NAME, ExitNotes(config.logs_specs.root_log_dir)
    with tries() as tried, Watchdog(config.nproc_per_node, say, sees_all=config.max_nodes == 1) as watchdog:
        # Ranks of one machine can be started again, for a smaller size.
        alone = {**gloo_on_loopback(), **tried.variables()} if is_alone else {}
        with _as_agent({**alone, **watchdog.variables(), **variables}, folder), _further_signals():
            while True:
                try:
                    elastic_launch(config, program)(*arguments)
                except ChildFailedError as error:
                    if any(watchdog.has_ended(failure.pid) for failure in error.failures.values()):
                        return 1
                    left_with = notes.code()
                    if left_with is not None:
                        return left_with
                    if is_alone and tried.again():
                        continue
                    ended = first_failure(error, config.nproc_per_node)
                    (report or _say)(ended)
                    return ended.code
                except SignalException as error:
                    left_with = notes.code()
                    return 128 + int(error.sigval) if left_with is None else left_with
                except KeyboardInterrupt:
                    return 128 + signal.SIGINT
                return notes.code() or 0


@contextlib.contextmanager
def _further_signals() -> Iterator[None]:
    """Has a torch without `signals_to_handle` (2.9) pass on all of PASSED_ON, SIGUSR1 and SIGUSR2 among them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher.api import LaunchConfig

    def pass_on(number: int, frame: Any) -> None:
        sent = signal.Signals(number)
        raise SignalException(f"process {os.getpid()} received {sent.name}", sigval=sent)

    knows = any(field.name == "signals_to_handle" for field in dataclasses.fields(LaunchConfig))
    names = () if knows or threading.current_thread() is not threading.main_thread() else PASSED_ON
    before = {name: signal.signal(signal.Signals[name], pass_on) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            # None is a handler that was not installed from Python.
            signal.signal(signal.Signals[name], signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _as_agent(variables: Mapping[str, str], folder: str | None) -> Iterator[None]:
    """Sets the ranks' environment, and keeps the engine from printing what they report themselves."""
    environ = {
        AGENT: str(os.getpid()),
        # Ranks that share the store of torch's "c10d" read stale addresses when they are started a second time.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **variables,
    }
    logger, ended = logging.getLogger("torch.distributed.elastic"), threading.Event()
    level, place = logger.level, os.getcwd()
    if sys.platform.startswith("linux"):
        threading.Thread(target=_wake, args=(ended,), name="leyden-wake", daemon=True).start()
    logger.setLevel(logging.CRITICAL)
    if folder is not None:
        os.chdir(folder)
    try:
        with with_variables(environ):
            yield
    finally:
        ended.set()
        os.chdir(place)
        logger.setLevel(level)


def _wake(ended: threading.Event) -> None:
    """Continues stopped ranks, which cannot receive the signal to end: the engine would wait 30 s for each."""
    while not ended.wait(1.0):
        for process in children(os.getpid()):
            with suppress(OSError, KeyError):
                status = status_of(process)
                waits = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
                if status["State"].startswith("T") and waits & 1 << signal.SIGTERM - 1:
                    os.kill(process, signal.SIGCONT)


def first_failure(error: Any, count: int) -> Ended:
    """Which rank of those that ended badly did so first.

    Args:
        error: the engine's ChildFailedError.
        count: ranks of this machine.
    """
    failures: Sequence[tuple[int, Any]] = sorted(error.failures.items(), key=lambda found: found[1].timestamp)
    # One that wrote down its error came before those that only lost their connection to it; SIGTERM is how the engine
    # ends the others, and 1 how they leave.
    reported = [(rank, failure) for rank, failure in failures if not _lost(failure)]
    ended = [(rank, failure) for rank, failure in failures if failure.exitcode != -signal.SIGTERM]
    odd = [(rank, failure) for rank, failure in ended if failure.exitcode != 1]
    rank, first = (reported or odd or ended or failures)[0]
    code = int(first.exitcode)
    if reported:
        return Ended(rank, first, code if code > 0 else 1, True)
    written = next(((rank, failure) for rank, failure in failures if os.path.isfile(failure.error_file)), None)
    if written is None or odd:
        note = "" if written is None else written[1].message["message"]
        return Ended(rank, first, 128 - code if code < 0 else code, False, note)
    rank, first = written
    return Ended(rank, first, 1, False, first.message["message"], _others(rank, first, count, error.failures))


def _others(rank: int, failure: Any, count: int, failures: Mapping[int, Any]) -> str:
    """Describes who had left when a rank lost its connection; "" if it does not know."""
    message = failure.error_file_data["message"]
    here = range(rank - failure.local_rank, rank - failure.local_rank + count)
    # The engine keeps no record of one that ended with 0.
    left = [other for other in message.get("silent", ()) if other in here and other not in failures]
    if left:
        return f"{ranks_in_words(left)} ended with exit code 0, in the middle of what the others do"
    return str(message.get("others", ""))


def _lost(failure: Any) -> bool:
    """True if the rank reported no error of its own."""
    if not os.path.isfile(failure.error_file):
        return True
    message = failure.error_file_data.get("message")
    return bool(isinstance(message, dict) and message.get("lost"))


def _say(ended: Ended) -> None:
    if ended.words():
        print(f"leyden: {ended.words()}", file=sys.stderr, flush=True)
