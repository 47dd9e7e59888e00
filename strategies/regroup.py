"""A process group that is broken on purpose and made anew, to wake ranks that wait for one that gave up."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


class Connections:
    """The sockets that a block opens: of a process group that is made in it, those between its ranks.

    gloo cannot abort a collective: a rank that waits for another one wakes when the connection is gone.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, int]] = []
        self._before: set[int] = set()

    def __enter__(self) -> Connections:
        self._before = _sockets()
        return self

    def __exit__(self, *error: object) -> None:
        for number in _sockets() - self._before:
            with suppress(OSError):
                self._found.append((number, os.fstat(number).st_ino))

    def cut(self, keep: Any) -> None:
        """Shuts them down, on both sides.

        Args:
            keep: a port whose connections stay: the store's, over which ranks still talk.
        """
        for number, inode in self._found:
            with suppress(OSError):
                if os.fstat(number).st_ino != inode:
                    continue
                with socket.socket(fileno=os.dup(number)) as found:
                    if keep not in (_port(found.getsockname()), _port(found.getpeername())):
                        found.shutdown(socket.SHUT_RDWR)
        self._found = []


def _sockets() -> set[int]:
    found: set[int] = set()
    if not os.path.isdir(FOLDER):
        # Windows lists none: a rank that waits there ends with its time-out.
        return found
    for name in os.listdir(FOLDER):
        with suppress(OSError, ValueError):
            if os.stat(f"{FOLDER}/{name}").st_mode & 0o170000 == 0o140000:
                found.add(int(name))
    return found


def _port(address: Any) -> Any:
    return address[1] if isinstance(address, tuple) else None


class Attempt:
    """One attempt at something that any rank may have to give up, while others wait for it in a collective.

    Over gloo that is tested. Over NCCL each rank aborts its own group, by torch's documented call, which has not run on several
    GPUs yet.

    Args:
        number: of the try; the same on all ranks.
        connections: between the ranks.
    """

    def __init__(self, number: int, connections: Connections) -> None:
        store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        # A connection of its own for each thread: the store's waits block the one that they are made on.
        self._store = dist.PrefixStore(f"leyden/attempt/{number}", store.clone())  # type: ignore[attr-defined]
        self._watched = dist.PrefixStore(f"leyden/attempt/{number}", store.clone())  # type: ignore[attr-defined]
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._connections = connections
        self._done = threading.Event()
        if "nccl" in dist.get_backend():
            # Its collectives wait on the device, which only this rank itself can break off.
            threading.Thread(target=self._watch, name="leyden-attempt", daemon=True).start()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            if self._watched.check(["given up"]):
                dist.group.WORLD.abort()  # type: ignore[union-attr]
                return

    def give_up(self) -> None:
        """Tells all ranks, and wakes those that wait for this one."""
        self._store.set("given up", "1")
        self._connections.cut(_store_port())

    def was_given_up(self, seconds: float = 10.0) -> bool:
        """True if a rank has given up: an error may only follow from that."""
        try:
            self._store.wait(["given up"], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def end(self) -> bool:
        """Waits until every rank has come to its end; True if none has given up."""
        self._store.set(f"ended/{self._rank}", "1")
        for rank in range(self._size):
            while not self._has_ended(rank):
                pass
        self._done.set()
        return not self._store.check(["given up"])

    def _has_ended(self, rank: int) -> bool:
        try:
            self._store.wait([f"ended/{rank}"], timedelta(seconds=60))
        except RuntimeError as error:
            if "imed out" not in str(error) and not isinstance(error, dist.DistStoreError):
                raise
            return False
        return True


def _store_port() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def make_anew(number: int, timeout: timedelta, leave: Callable[[], None]) -> Connections:
    """Leaves the process group, and makes one of the same ranks.

    Args:
        number: of the new one; the same on all ranks.
        timeout: of its collectives.
        leave: lets go of what holds on to the old one.
    """
    backend, rank, size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    bound = dist.group.WORLD.bound_device_id  # type: ignore[union-attr]
    leave()
    gc.collect()
    dist.destroy_process_group()
    fresh = dist.PrefixStore(f"leyden/group/{number}", store)  # type: ignore[attr-defined]
    with Connections() as connections:
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    return connections
