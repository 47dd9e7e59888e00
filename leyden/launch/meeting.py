"""How ranks meet: in one shared store, on the loopback device if they share a machine. Errors name missing ranks."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from leyden.core.environment import AGENT, STARTER, RankEnvironment, ranks_in_words
from leyden.core.errors import LeydenError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: "True" if the launcher hosts the store at MASTER_ADDR, else "False"."""
SAID_AFTER = 6.0
"""Seconds of waiting after which a rank prints which ranks are missing."""
STORE_OPENS = timedelta(minutes=5)
"""How long a rank waits for rank 0's store, which opens when rank 0 starts its first run."""


def listen(port: int = 0) -> socket.socket:
    """Opens a listening socket on the loopback device, which other machines cannot reach. Port 0 picks a free one."""
    return socket.create_server((LOOPBACK, port), backlog=4096)


def store_on(listener: socket.socket, timeout: timedelta = timedelta(minutes=30)) -> TCPStore:
    """Opens a store for the ranks of this machine. torch's own would listen on every interface.

    It takes over the socket from `listen`. The timeout limits its own waits.
    """
    return _store(LOOPBACK, listener.getsockname()[1], True, timeout, listener.detach())


def _store(host: str, port: int, is_host: bool, timeout: timedelta, listener: int | None = None) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The same choice as torch's, whose Windows wheels are built without libuv.
    libuv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
    return TCPStore(
        host, port, None, is_host, timeout, wait_for_workers=False, master_listen_fd=listener, use_libuv=libuv
    )


def gloo_on_loopback() -> dict[str, str]:
    """Returns the variable that makes gloo listen on loopback only; empty if the user has set it."""
    name = "GLOO_SOCKET_IFNAME"
    if sys.platform == "win32" or name in os.environ:
        return {}
    return {name: "lo0" if sys.platform == "darwin" else "lo"}


def meet(environment: RankEnvironment, timeout: timedelta) -> tuple[Store, bool]:
    """Waits until all ranks have joined. After a few seconds, prints which ranks are missing.

    Args:
        environment: this rank's environment.
        timeout: timeout of collectives. Ranks wait for each other for at least five minutes here, since they may start
            one after another.

    Returns:
        The shared store, and whether it lives in this process.

    Raises:
        LeydenError: if rank 0's store does not open within five minutes, a rank does not join in time, or rank 0 exits.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    host, port = environment.address or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_host = environment.rank == 0 and os.environ.get(AGENTS_STORE) != "True"
    if not is_host:
        _await_store(environment, host, port)
    opens_here = is_host and _is_loopback(host)
    store = store_on(listen(port), timeout) if opens_here else _store(host, port, is_host, timeout)
    shared = PrefixStore(f"leyden/ranks/{attempt()}", store)
    _count(shared, environment, f"{host}:{port}", max(timeout, STORE_OPENS))
    return shared, is_host


def attempt() -> str:
    """Returns a prefix for keys of the ranks' store, so restarted ranks do not see those of their predecessors.

    A store in rank 0 is new for each start, and agents that joined at different times count restarts differently.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get(AGENTS_STORE) == "True" else "0"


def _await_store(environment: RankEnvironment, host: str, port: int) -> None:
    """Waits until rank 0's store accepts connections."""
    at, why = f"{host}:{port}", ""

    def is_open() -> bool:
        nonlocal why
        try:
            with socket.create_connection((host, port), timeout=5.0):
                return True
        except OSError as error:
            why = str(error)
            return False

    def say() -> None:
        _say(f"{_this(environment)} is waiting for rank 0, whose store at {at} is not open ({why}).", environment)

    if not until(is_open, STORE_OPENS.total_seconds(), say):
        raise LeydenError(
            f"{_this(environment)} waited {STORE_OPENS.total_seconds():.0f} s for rank 0, but its store at {at} did "
            f"not open ({why}). {_fix(environment)}"
        )


def _count(store: Store, environment: RankEnvironment, at: str, limit: timedelta) -> None:
    """Announces this rank in the store. Rank 0 waits for all ranks, and the others wait for rank 0."""
    keys = [f"here/{rank}" for rank in range(environment.world_size)]
    wanted, missing = (keys if environment.rank == 0 else ["all here"]), ""

    def say() -> None:
        nonlocal missing
        missing = ranks_in_words([rank for rank, key in enumerate(keys) if not store.check([key])])
        # One rank prints for all.
        if environment.rank == 0:
            _say(f"{_this(environment)} is waiting at {at} for {missing}.", environment)

    try:
        store.set(keys[environment.rank], "1")
        all_here = until(lambda: store.check(wanted), limit.total_seconds(), say)
        if environment.rank == 0 and all_here:
            store.set("all here", "1")
    except RuntimeError as error:
        raise LeydenError(
            f"{_this(environment)} lost the store at {at} before all ranks had joined: rank 0, or its launcher, has "
            "exited. Its output says why."
        ) from error
    if not all_here:
        raise LeydenError(
            f"{_this(environment)} waited {limit.total_seconds():.0f} s at {at} for {missing or 'other ranks'}. "
            f"{_fix(environment)}"
        )


def until(
    condition: Callable[[], bool], limit: float, say: Callable[[], None] | None = None, most: float = 0.2
) -> bool:
    """Polls a condition until it holds. Returns False if it does not within the limit. Ctrl-C ends the wait.

    `say` is called once, after `SAID_AFTER` seconds. `most` is the longest pause between two polls, in seconds.
    """
    begin, pause, wait = time.monotonic(), threading.Event(), 0.005
    while not condition():
        waited = time.monotonic() - begin
        if waited > SAID_AFTER and say is not None:
            say()
            say = None
        if waited > limit:
            return False
        pause.wait(wait)
        wait = min(most, wait * 1.5)
    return True


def _say(text: str, environment: RankEnvironment) -> None:
    # Leyden's launchers start all ranks and end them if one exits, so the user need not act on a slow start.
    if STARTER not in os.environ and AGENT not in os.environ:
        print(f"leyden: {text} {_fix(environment)}", file=sys.stderr, flush=True)


def _this(environment: RankEnvironment) -> str:
    return f"rank {environment.rank} of {environment.world_size}"


def _fix(environment: RankEnvironment) -> str:
    if environment.starter in ("slurm", "submitit"):
        return (
            f"The number of ranks comes from the variable {environment.size_variable} of {environment.starter}. Check "
            "the output of the other tasks."
        )
    names = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    values = " ".join(f"{name}={os.environ[name]}" for name in names)
    return (
        f"The environment sets {values}. If no launcher starts other ranks, these variables are left over: unset "
        f"{' '.join(names)}. Otherwise check the output of the other ranks."
    )


def _is_loopback(host: str) -> bool:
    with suppress(OSError):
        return socket.gethostbyname(host).startswith("127.")
    return False
