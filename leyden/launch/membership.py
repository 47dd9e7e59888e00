"""Machines that come and go during a launch: torch's c10d rendezvous and agent, held to one world.

torch restarts ranks if a machine waits to join. It overlooks a machine that has gone while the ranks of the others
hang, and one that the others took for dead, which trains on while they form a second world. Here each agent compares
the machines of the rendezvous with those of its own world, every second, and restarts its ranks if they differ.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from torch.distributed.launcher import api

from leyden.core.errors import LeydenError
from leyden.launch.leaving import INTERRUPTED, ExitNotes
from leyden.launch.meeting import until

NAME = "leyden-membership"
MEETING = {
    "join_timeout": 900,
    "last_call_timeout": 10,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 5,
    "read_timeout": 60,
}
"""Settings of the rendezvous, in seconds: how long a machine waits for a world, and a world for more machines; how
often a machine gives a sign of life, and how many may be missing; how long the store may take to answer. torch's own
take 45 s to form a smaller world."""
TIMEOUTS = ("join", "last_call", "close", "heartbeat")
PAUSE = 0.5
"""Seconds between two looks at a world that has lost a connection."""


class JobOver(RendezvousError):  # type: ignore[misc]
    """The job ended on other machines.

    Attributes:
        took_part: True if this machine had ranks in it.
    """

    def __init__(self, took_part: bool) -> None:
        super().__init__("the job has ended on the other machines")
        self.took_part = took_part


class Membership(dynamic.DynamicRendezvousHandler):  # type: ignore[misc]
    """The rendezvous of machines that come and go.

    The machine with the store gets rank 0, and the others the order in which they came. The others may leave; rank 0,
    which locks the folder of the run, then restarts on the same machine and need not wait for the lock.

    Attributes:
        leaves: True once this machine is to leave without ending the job of the others.
    """

    leaves = False
    _is_lost = False
    """True once the store has not answered."""
    _answer = 60.0
    """Seconds within which the store has to answer."""
    _order = 0
    _members: frozenset[Any] = frozenset()
    _size = 0

    @classmethod
    def create(cls, parameters: RendezvousParameters) -> Membership:
        """Connects to the store, or hosts it. The others wait until it is open."""
        host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        is_host = parameters.get_as_bool("is_host")
        if not (_matches_machine_hostname(host) if is_host is None else is_host):
            _await_main(host, port, int(parameters.get("join_timeout")))
        backend, store = create_backend(parameters)
        seconds = {name: parameters.get_as_int(f"{name}_timeout") for name in TIMEOUTS}
        given = {name: timedelta(seconds=value) for name, value in seconds.items() if value is not None}
        interval, attempts = (int(parameters.get(name)) for name in ("keep_alive_interval", "keep_alive_max_attempt"))
        world = parameters.run_id, store, backend, parameters.min_nodes, parameters.max_nodes, parameters.local_addr
        handler = cast("Membership", cls.from_backend(*world, dynamic.RendezvousTimeout(**given), interval, attempts))
        handler._answer = float(parameters.get("read_timeout"))
        handler._order = 0 if is_host else store.add("leyden/machines", 1)
        return handler

    def get_backend(self) -> str:
        return NAME

    @property
    def size(self) -> int:
        """The number of machines in the current world; 0 before the first."""
        return self._size

    @property
    def patience(self) -> float:
        """Seconds after which a machine that has gone without notice is known to have gone."""
        settings = self.settings
        return float(settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt + 2 * PAUSE)

    def next_rendezvous(self) -> RendezvousInfo:
        took_part = self._size > 0
        try:
            found = super().next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise JobOver(took_part) from error
        self._members, self._size = frozenset(self._read().participants), found.world_size
        orders = PrefixStore("leyden", found.store)
        orders.set(str(found.rank), str(self._order))
        places = [(int(orders.get(str(rank))), rank) for rank in range(found.world_size)]
        rank = sorted(places).index((self._order, found.rank))
        address = RendezvousStoreInfo.build(rank, orders, self._this_node.addr)
        return RendezvousInfo(found.store, rank, found.world_size, address)

    def num_nodes_waiting(self) -> int:
        """Returns the number of machines that wait to join; at least 1 if a machine of this world has gone."""
        state = self._read()
        return max(len(state.wait_list), 0 if self._is_whole(state) else 1)

    def is_closed(self) -> bool:
        return bool(self._read().closed)

    def is_whole(self) -> bool:
        """Returns True if the rendezvous has exactly the machines of this world."""
        return self._is_whole(self._read())

    def leave_at_end(self) -> None:
        """Makes `shutdown` leave the world, and not end the job of the others."""
        self.leaves = True

    def leave(self) -> None:
        """Leaves the world, for the others to go on at once."""
        if self._is_lost:
            return
        self._stop_heartbeats()
        with contextlib.suppress(RendezvousError):
            self._op_executor.run(dynamic._RendezvousExitOp(), self._get_deadline(self.settings.timeout.heartbeat))

    def shutdown(self) -> bool:
        if not (self.leaves or self._is_lost):
            return bool(super().shutdown())
        self.leave()
        return True

    def _is_whole(self, state: Any) -> bool:
        return set(state.participants) == self._members and len(self._members) == self._size

    def _read(self) -> Any:
        """Returns the state of the rendezvous.

        Raises:
            RendezvousConnectionError: if the store does not answer, not even the thread that gives signs of life. torch
                does not limit that thread's wait, during which nothing else can use the connection.
        """
        if not self._heartbeat_lock.acquire(timeout=self._answer):
            self._is_lost = True
            raise RendezvousConnectionError("the store does not answer")
        try:
            self._state_holder.sync()
            # The thread that gives signs of life changes the participants in place.
            return copy.deepcopy(self._state_holder.state)
        except RendezvousConnectionError:
            self._is_lost = True
            raise
        finally:
            self._heartbeat_lock.release()


class MemberAgent(LocalElasticAgent):  # type: ignore[misc]
    """An agent that restarts its ranks when machines come or go, and leaves alone if its own machine goes.

    `notes` reads the exit codes of its ranks; all else is as for torch's agent.
    """

    def __init__(self, notes: ExitNotes, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._notes, self._worlds = notes, 0
        self._membership = cast("Membership", self._worker_group.spec.rdzv_handler)

    def run(self, role: str = "default") -> RunResult:
        try:
            return cast("RunResult", super().run(role))
        except SignalException:
            self._membership.leave()
            raise

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            return super()._invoke_run(role)
        except RendezvousError:
            # Without the other machines, ranks cannot save. torch's 30 s end those that wait for them.
            self._shutdown()
            raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        before = self._membership.size
        while True:
            try:
                super()._rendezvous(worker_group)
                break
            except DistStoreError:
                # A machine has gone between the meeting and the exchange of ranks: meet again.
                continue
        if before:
            machines, ranks = self._membership.size, worker_group.workers[0].world_size
            text = f"the run goes on with {machines} machine{'s' * (machines > 1)}, {ranks} rank{'s' * (ranks > 1)}"
            print(f"leyden launch: {text}", file=sys.stderr, flush=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._notes.forget()
        # torch counts no restart, and would delete the logs of the world before.
        attempt = f"attempt_{worker_group.spec.max_restarts - self._remaining_restarts}"
        for folder in Path(self._logs_specs.root_log_dir).glob(f"*/{attempt}"):
            folder.rename(folder.with_name(f"{attempt}-world_{self._worlds}"))
        self._worlds += 1
        return dict(super()._start_workers(worker_group))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        is_orderly = worker_group.state == WorkerState.HEALTHY and self._membership.is_whole()
        if is_orderly and hasattr(self, "_shutdown_timeout"):
            # All ranks are there to save together. Without one of them, the others would wait for it in vain.
            self._shutdown(timeout=self._shutdown_timeout)
        else:
            super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and self._notes.code() not in (None, INTERRUPTED):
            if not self._notes.came_here():
                return self._restarted(worker_group)
            self._membership.leave_at_end()
        if result.state == WorkerState.FAILED and self._has_lost_a_machine(result):
            return self._restarted(worker_group)
        return result

    def _restarted(self, worker_group: WorkerGroup) -> RunResult:
        self._restart_workers(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _has_lost_a_machine(self, result: RunResult) -> bool:
        """Returns True if ranks failed because a machine left. That is known once its signs of life are missing."""
        from leyden.launch.elastic import has_lost_others

        end = time.monotonic() + self._membership.patience
        while all(has_lost_others(failure) for failure in result.failures.values()):
            if self._membership.num_nodes_waiting():
                return True
            if time.monotonic() > end or self._membership.is_closed():
                return False
            time.sleep(PAUSE)
        return False

    def _exit_barrier(self) -> None:
        if not self._membership.leaves:
            super()._exit_barrier()  # type: ignore[no-untyped-call]


def _await_main(host: str, port: int, limit: float) -> None:
    """Waits until the store of the main machine accepts connections. torch's own client shows C++ frames meanwhile."""

    def is_open() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return True
        return False

    def say() -> None:
        print(f"leyden launch: waiting for the main machine at {host}:{port}", file=sys.stderr, flush=True)

    if not until(is_open, limit, say):
        raise LeydenError(
            f"the main machine at {host}:{port} did not answer within {limit:.0f} s: start `leyden launch` there with "
            "--machine_rank 0, check --main_process_ip, and open the port in its firewall."
        )


def register() -> str:
    """Registers the rendezvous with torch's engine.

    Returns:
        The backend name to use in a LaunchConfig.
    """
    rendezvous_handler_registry.register(NAME, Membership.create)
    return NAME


@contextlib.contextmanager
def member_agents(notes: ExitNotes) -> Iterator[None]:
    """Has torch's engine use a MemberAgent during the block."""

    def agent(*args: Any, **others: Any) -> MemberAgent:
        return MemberAgent(notes, *args, **others)

    torchs = vars(api)
    torchs["LocalElasticAgent"] = agent
    try:
        yield
    finally:
        torchs["LocalElasticAgent"] = LocalElasticAgent
