"""The agent: this process starts ranks through torch's elastic engine, watches them, and reports how they ended."""

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

from leyden.core.environment import AGENT, killed_in_words, ranks_in_words, with_variables
from leyden.launch.leaving import INTERRUPTED, ExitNotes, were_interrupted
from leyden.launch.meeting import gloo_on_loopback
from leyden.launch.processes import children, status_of
from leyden.launch.tries import tries
from leyden.launch.watchdog import Watchdog, say

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

PASSED_ON = tuple(
    name
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
)
"""Signals that the agent forwards to its ranks. A rank's own handler, or else the default action, ends it."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torch's variable for the seconds between the forwarded signal and SIGKILL."""
SAVING = 600.0
"""Those seconds for ranks that save before they exit and set no grace period of their own."""

FAREWELL = 10.0
"""Seconds that an agent waits for the others after a preemption. Their ranks have saved, and are ending too."""
MEETING_SECONDS = 900
"""Seconds that machines wait for each other."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a launch, and how they find each other.

    Attributes:
        num_nodes: number of machines; the largest number, if machines may come and go.
        node_rank: index of this machine. None if the rendezvous assigns it.
        address: host of the rendezvous. "" for a single machine, whose ranks meet in a store inside the agent.
        port: port of the rendezvous. 0 picks a free one, on a single machine only.
        backend: torch's rendezvous backend, static or c10d.
        run_id: ID of the rendezvous. "" derives one from the port.
        further: more settings of the rendezvous.
        least: the smallest number of machines, if machines may come and go; 0 for a fixed number.
    """

    num_nodes: int = 1
    node_rank: int | None = 0
    address: str = ""
    port: int = 0
    backend: str = "static"
    run_id: str = ""
    further: Mapping[str, str] = field(default_factory=dict)
    least: int = 0

    def rendezvous(self) -> dict[str, Any]:
        """Returns the rendezvous fields of torch's LaunchConfig."""
        from leyden.launch.loopback import register

        if not self.address:
            fields: dict[str, Any] = {"rdzv_backend": register(), "rdzv_endpoint": f"localhost:{self.port}"}
            return {**fields, "rdzv_configs": dict(self.further), "run_id": uuid.uuid4().hex}
        meeting: dict[str, Any] = {"timeout": MEETING_SECONDS}
        if self.backend == "static":
            meeting["rank"] = self.node_rank
        elif self.backend == "c10d" and self.node_rank is not None:
            meeting["is_host"] = self.node_rank == 0
        backend = self.backend
        if self.least:
            from leyden.launch.membership import MEETING
            from leyden.launch.membership import register as register_members

            backend, meeting = register_members(), {**meeting, **MEETING}
        return {
            "rdzv_backend": backend,
            "rdzv_endpoint": f"{self.address}:{self.port}",
            "rdzv_configs": {**meeting, **self.further},
            "run_id": self.run_id or f"leyden-{self.port}",
        }

    def own_address(self) -> str | None:
        """Returns the address at which ranks elsewhere reach rank 0; None if torch is to find it."""
        return self.address if self.least and self.node_rank == 0 else None


@dataclass(frozen=True, slots=True)
class Ended:
    """How the first rank to fail ended.

    Attributes:
        rank: its global rank.
        failure: torch's record of the failure.
        code: exit status of the whole launch.
        reported: True if it was the first to report an error of its own.
        note: error of a rank that only lost its connection. "" if there is none.
        others: in that case, which ranks had gone and where the remaining ones were.
    """

    rank: int
    failure: Any
    code: int
    reported: bool
    note: str = ""
    others: str = ""

    def words(self) -> str:
        """Describes how the rank ended. "" if it has already reported its own error."""
        code = int(self.failure.exitcode)
        if self.reported:
            return ""
        if code < 0:
            hint = " Out of memory, perhaps." if -code == signal.SIGKILL else ""
            return f"{killed_in_words(self.rank, -code)}{hint}"
        if self.others:
            return f"{self.others}. Rank {self.rank} was waiting for it; all ranks were terminated: {self.note}"
        return f"rank {self.rank} exited with code {code}; all ranks were terminated. {self.note}".rstrip()


def engine_config(
    count: int, machines: Machines, logs: str, patience: float | None = None, **others: Any
) -> LaunchConfig:
    """Returns the engine's settings.

    Args:
        count: ranks on this machine.
        machines: all machines of the launch.
        logs: folder for the ranks' error files and exit notes.
        patience: seconds that ranks have to exit cleanly after a signal before the agent kills them. None for torch's
            30, or for the value of its variable.
        **others: more fields of torch's LaunchConfig, which override these.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    fields: dict[str, Any] = {
        "min_nodes": machines.least or machines.num_nodes,
        "max_nodes": machines.num_nodes,
        "nproc_per_node": count,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "local_addr": "localhost" if machines.num_nodes == 1 else machines.own_address(),
        **machines.rendezvous(),
    }
    # Older versions of torch lack both.
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
    """Runs a program on this machine's ranks and waits for them.

    Args:
        config: the engine's settings.
        program: executable that each rank runs.
        arguments: the program's arguments.
        variables: environment variables for the ranks, in addition to torch's.
        folder: working directory of the ranks. Default: that of this process.
        report: called with the first failure. By default, a failure that no rank has reported is printed.

    Returns:
        The exit status: 0 if all ranks succeeded, the status that a preempted run chose, or else that of the first
        rank to fail, with 128 + n for signal n.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    from leyden.launch.loopback import NAME

    sys.stdout.flush()
    sys.stderr.flush()
    assert config.logs_specs is not None
    is_alone, notes = config.rdzv_backend == NAME, ExitNotes(config.logs_specs.root_log_dir)
    with tries() as tried, Watchdog(config.nproc_per_node, say, sees_all=config.max_nodes == 1) as watchdog:
        # Only the ranks of a single machine can be restarted, to try a smaller size.
        alone = {**gloo_on_loopback(), **tried.variables()} if is_alone else {}
        with (
            _as_agent({**alone, **watchdog.variables(), **variables}, folder),
            _further_signals(),
            _farewell(notes) if config.min_nodes == config.max_nodes else _members(notes),
        ):
            while True:
                try:
                    elastic_launch(config, program)(*arguments)
                except ChildFailedError as error:
                    if any(watchdog.has_ended(failure.pid) for failure in error.failures.values()):
                        return 1
                    left_with = notes.code()
                    if left_with is not None:
                        return left_with
                    if were_interrupted(error.failures.values()):
                        return 128 + signal.SIGINT
                    if is_alone and tried.again():
                        continue
                    ended = first_failure(error, config.nproc_per_node)
                    (report or _say)(ended)
                    return ended.code
                except SignalException as error:
                    left_with = notes.code()
                    return 128 + int(error.sigval) if left_with is None else left_with
                except RendezvousError:
                    left_with = notes.code()
                    if left_with in (None, INTERRUPTED):
                        raise
                    words = "the main machine has left, and the run is saved: the same command continues it"
                    print(f"leyden launch: {words}.", file=sys.stderr, flush=True)
                    return left_with
                except KeyboardInterrupt:
                    return 128 + signal.SIGINT
                # A script that has succeeded has caught its KeyboardInterrupt.
                left_with = notes.code()
                return 0 if left_with in (None, INTERRUPTED) else left_with


@contextlib.contextmanager
def _farewell(notes: ExitNotes) -> Iterator[None]:
    """Shortens torch's wait of 300 s for the other agents once the ranks have left together, as after a preemption.

    An agent that received the signal itself does not come to this barrier, and the wait ignores signals.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    wait: Callable[[Any], None] = SimpleElasticAgent._exit_barrier

    def wait_for_others(agent: Any) -> None:
        if notes.code() is not None:
            agent._exit_barrier_timeout = FAREWELL
        wait(agent)

    SimpleElasticAgent._exit_barrier = wait_for_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        SimpleElasticAgent._exit_barrier = wait  # type: ignore[method-assign]


def _members(notes: ExitNotes) -> contextlib.AbstractContextManager[None]:
    from leyden.launch.membership import member_agents

    return member_agents(notes)


@contextlib.contextmanager
def _further_signals() -> Iterator[None]:
    """Forwards all of PASSED_ON, including SIGUSR1 and SIGUSR2, under a torch without `signals_to_handle` (2.9)."""
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
            # None means that the handler was not installed from Python.
            signal.signal(signal.Signals[name], signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _as_agent(variables: Mapping[str, str], folder: str | None) -> Iterator[None]:
    """Sets the ranks' environment, and silences the engine about errors that the ranks report themselves."""
    environ = {
        AGENT: str(os.getpid()),
        # With a shared "c10d" store, restarted ranks would read stale addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **variables,
    }
    # The agent's logger has a level of its own.
    loggers = [logging.getLogger(f"torch.distributed.elastic{part}") for part in ("", ".agent.server.api")]
    levels, place, ended = [logger.level for logger in loggers], os.getcwd(), threading.Event()
    if sys.platform.startswith("linux"):
        threading.Thread(target=_wake, args=(ended,), name="leyden-wake", daemon=True).start()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    if folder is not None:
        os.chdir(folder)
    try:
        with with_variables(environ):
            yield
    finally:
        ended.set()
        os.chdir(place)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _wake(ended: threading.Event) -> None:
    """Resumes stopped ranks that have a SIGTERM pending. The engine would otherwise wait 30 s for each of them."""
    while not ended.wait(1.0):
        for process in children(os.getpid()):
            with suppress(OSError, KeyError):
                status = status_of(process)
                waits = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
                if status["State"].startswith("T") and waits & 1 << signal.SIGTERM - 1:
                    os.kill(process, signal.SIGCONT)


def first_failure(error: Any, count: int) -> Ended:
    """Finds the rank that failed first, in the engine's ChildFailedError on a machine with `count` ranks."""
    failures: Sequence[tuple[int, Any]] = sorted(error.failures.items(), key=lambda found: found[1].timestamp)
    # A rank with an error of its own failed before those that only lost their connection to it. The others end with
    # SIGTERM from the engine, or exit with 1 on their own.
    reported = [(rank, failure) for rank, failure in failures if not has_lost_others(failure)]
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
    """Describes which ranks had gone when a rank lost its connection. "" if unknown."""
    message = failure.error_file_data["message"]
    here = range(rank - failure.local_rank, rank - failure.local_rank + count)
    # The engine keeps no record of ranks that exited with 0.
    left = [other for other in message.get("silent", ()) if other in here and other not in failures]
    if left:
        return f"{ranks_in_words(left)} exited with code 0 while the others were still running"
    return str(message.get("others", ""))


def has_lost_others(failure: Any) -> bool:
    """Returns True if the rank reported no error of its own."""
    if not os.path.isfile(failure.error_file):
        return True
    message = failure.error_file_data.get("message")
    return bool(isinstance(message, dict) and message.get("lost"))


def _say(ended: Ended) -> None:
    if ended.words():
        print(f"leyden: {ended.words()}", file=sys.stderr, flush=True)
