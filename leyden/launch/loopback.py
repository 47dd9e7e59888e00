"""The rendezvous of a single machine: a store in the agent, on the loopback device."""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from leyden.launch.meeting import LOOPBACK, listen, store_on

NAME = "leyden-loopback"


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single agent. Port 0 picks a free one.

    torch's "c10d" backend unpickles data from a store that listens on every interface. This one unpickles nothing, and
    its store is reachable from this machine only. The store lives in the agent, so it outlives every rank and answers
    even while a rank is stopped.
    """

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id, self._port = run_id, port
        self._store: Any = None

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # A new store for each start, so restarted ranks do not read the addresses of their predecessors.
        self._store = None
        self._store = store_on(listen(self._port))
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port)
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: no other agent can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
    return LoopbackRendezvous(parameters.run_id, port)


def register() -> str:
    """Registers this rendezvous with torch's engine.

    Returns:
        The backend name to use in a LaunchConfig.
    """
    rendezvous_handler_registry.register(NAME, _handler)
    return NAME
