"""How ranks meet: one store for all, on the loopback device if they share a machine; an error names who is missing."""

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

from leyden.strategies.errors import LeydenError
from leyden.strategies.launch.environment import AGENT, STARTER, RankEnvironment, ranks_in_words

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"
AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: "True" if the store at MASTER_ADDR belongs to the starter of the ranks, else "False"."""
SAID_AFTER = 6.0
"""Seconds after which a rank says whom it waits for."""
STORE_OPENS = timedelta(minutes=5)
"""For how long a rank looks for rank 0's store, which opens as soon as rank 0 starts its first run."""


def listen(port: int = 0) -> socket.socket:
    """A socket on the loopback device, to which nobody outside of this machine can connect.

    Args:
        port: its port; 0 for any that is free.
    """
    return socket.create_server((LOOPBACK, port), backlog=4096)


def store_on(listener: socket.socket, timeout: timedelta = timedelta(minutes=30)) -> TCPStore:
    """A store that serves the ranks of this machine. torch's own would listen on every interface.

    Args:
        listener: what `listen` returned; the store owns it from now on.
        timeout: how long its own waits last.
    """
    return _store(LOOPBACK, listener.getsockname()[1], True, timeout, listener.detach())


def _store(host: str, port: int, is_host: bool, timeout: timedelta, listener: int | None = None) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # As torch chooses: its wheels for Windows are built without.
    libuv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
    return TCPStore(
        host, port, None, is_host, timeout, wait_for_workers=False, master_listen_fd=listener, use_libuv=libuv
    )


def gloo_on_loopback() -> dict[str, str]:
    """Makes gloo listen on loopback alone, for ranks of one machine, unless the user has set the variable."""
    name = "GLOO_SOCKET_IFNAME"
    if sys.platform == "win32" or name in os.environ:
        return {}
    return {name: "lo0" if sys.platform == "darwin" else "lo"}


def meet(environment: RankEnvironment, timeout: timedelta) -> tuple[Store, bool]:
    """Waits until all ranks are there. After a few seconds a rank prints which ones it waits for.

    Args:
        environment: of this rank.
        timeout: how long ranks wait for each other in a collective; here for five minutes at least, since they may
            start one after the other.

    Returns:
        The store that they share, and whether it lives in this process.

    Raises:
        LeydenError: if rank 0's store does not open in five minutes, a rank does not come in time, or rank 0 has ended.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    host, port = environment.address or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    is_host = environment.rank == 0 and os.environ.get(AGENTS_STORE) != "True"
    if not is_host:
        _await_store(environment, host, port)
    opens_here = is_host and _is_loopback(host)
    store = store_on(listen(port), timeout) if opens_here else _store(host, port, is_host, timeout)
    # Ranks that were started again find nothing of the ones before them.
    shared = PrefixStore(f"leyden/ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    _count(shared, environment, f"{host}:{port}", max(timeout, STORE_OPENS))
    return shared, is_host


def _await_store(environment: RankEnvironment, host: str, port: int) -> None:
    """Waits until rank 0's store can be reached."""
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
        _say(f"{_this(environment)} waits for rank 0, whose store at {at} is not open ({why}).", environment)

    if not until(is_open, STORE_OPENS.total_seconds(), say):
        raise LeydenError(
            f"{_this(environment)} has waited {STORE_OPENS.total_seconds():.0f} s for rank 0, whose store at {at} does "
            f"not open ({why}). {_fix(environment)}"
        )


def _count(store: Store, environment: RankEnvironment, at: str, limit: timedelta) -> None:
    """Has every rank report that it is there; rank 0 waits for all, and the others for rank 0."""
    keys = [f"here/{rank}" for rank in range(environment.world_size)]
    wanted, missing = (keys if environment.rank == 0 else ["all here"]), ""

    def say() -> None:
        nonlocal missing
        missing = ranks_in_words([rank for rank, key in enumerate(keys) if not store.check([key])])
        # One rank says it for all.
        if environment.rank == 0:
            _say(f"{_this(environment)} waits at {at} for {missing}.", environment)

    try:
        store.set(keys[environment.rank], "1")
        all_here = until(lambda: store.check(wanted), limit.total_seconds(), say)
        if environment.rank == 0 and all_here:
            store.set("all here", "1")
    except RuntimeError as error:
        raise LeydenError(
            f"{_this(environment)} has lost the store at {at} before all ranks were there: rank 0, or who started it, "
            "has ended. What it printed says why."
        ) from error
    if not all_here:
        raise LeydenError(
            f"{_this(environment)} has waited {limit.total_seconds():.0f} s at {at} for {missing or 'other ranks'}. "
            f"{_fix(environment)}"
        )


def until(
    condition: Callable[[], bool], limit: float, say: Callable[[], None] | None = None, most: float = 0.2
) -> bool:
    """Waits for a condition; returns False if it does not hold within the limit. Ctrl-C ends the wait.

    Args:
        condition: asked again and again.
        limit: seconds.
        say: called once, after `SAID_AFTER` seconds.
        most: the longest pause between two questions, in seconds.
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
    # A launcher of Leyden starts all ranks, and ends them if one ends: if they are slow there is nothing to do.
    if STARTER not in os.environ and AGENT not in os.environ:
        print(f"leyden: {text} {_fix(environment)}", file=sys.stderr, flush=True)


def _this(environment: RankEnvironment) -> str:
    return f"rank {environment.rank} of {environment.world_size}"


def _fix(environment: RankEnvironment) -> str:
    if environment.starter == "slurm":
        return (
            "srun's variables (SLURM_PROCID, SLURM_STEP_NUM_TASKS) say so: look at what the other tasks have printed."
        )
    names = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    values = " ".join(f"{name}={os.environ[name]}" for name in names)
    return (
        f"The environment says so: {values}. If nobody starts other ranks, these variables are left over: unset "
        f"{' '.join(names)}; else look at what the other ranks have printed."
    )


def _is_loopback(host: str) -> bool:
    with suppress(OSError):
        return socket.gethostbyname(host).startswith("127.")
    return False
