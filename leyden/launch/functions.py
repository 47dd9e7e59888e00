"""Runs a function on spawned or forked ranks, for notebooks, interactive sessions and tests."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from leyden.core.devices import types_in_use
from leyden.core.environment import DEVICE_IN_USE, STARTER, RankEnvironment, killed_in_words
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.launch.leaving import raise_quietly
from leyden.launch.meeting import AGENTS_STORE, LOOPBACK, gloo_on_loopback, listen, store_on
from leyden.launch.processes import threads_each
from leyden.launch.tries import Tries, tries
from leyden.launch.watchdog import Watchdog

PATIENCE = 10.0
"""Seconds that the other ranks have to exit on their own after one has failed."""


class RankTrace(Exception):
    """Carries the traceback of an error on a rank, as the error's `__cause__`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_function(start_method: str, count: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(*args)` on several ranks of this machine.

    Args:
        start_method: "spawn" pickles everything and imports the script's module again, "fork" and "notebook" fork, and
            "xla" uses torch_xla, which counts its devices itself.
        count: number of ranks.
        function: function that each rank calls, with the rank's environment variables set.
        *args: the function's arguments.

    Returns:
        The value that rank 0 returned, with tensors copied to the CPU.

    Raises:
        ConfigurationError: if ranks would be forked after CUDA was initialized.
        BaseException: the error of the first rank to fail.
    """
    if start_method == "xla":
        from leyden.launch.xla import run_on_devices

        return run_on_devices(function, *args)
    if start_method != "spawn":
        _check_fork()
    handed: Any = (function, args)
    if start_method == "spawn":
        # As bytes: multiprocessing would move the parameters into shared memory, which every rank would update.
        handed = packed_for("spawn", handed, "strategy='ddp_fork'")
    with tries() as tried:
        while True:
            try:
                return _run_once(start_method, count, handed, tried)
            except Exception:
                if not tried.again():
                    raise


def _run_once(start_method: str, count: int, handed: Any, tried: Tries) -> Any:
    context: Any = multiprocessing.get_context("spawn" if start_method == "spawn" else "fork")
    # Ranks may connect immediately, but the store, which has a thread, opens only after the last fork.
    listener = listen()
    port = listener.getsockname()[1]
    ranks: list[tuple[Any, Any]] = []
    watchdog = Watchdog(count, lambda hang: None)
    for rank in range(count):
        receiver, sender = context.Pipe(duplex=False)
        # Forked ranks inherit the listener and close it, so the port closes with this process.
        own = listener if start_method != "spawn" else None
        variables = {
            **RankEnvironment(rank, rank, count, count, address=(LOOPBACK, port)).variables(),
            # The store lives in this process.
            AGENTS_STORE: "True",
            **gloo_on_loopback(),
            STARTER: start_method,
            **tried.variables(),
            **watchdog.variables(),
        }
        process = context.Process(target=_rank, args=(sender, variables, handed, own), name=f"leyden rank {rank}")
        process.start()
        sender.close()
        ranks.append((process, receiver))
    store = store_on(listener)
    try:
        # Only now, since the watchdog has a thread too.
        with watchdog:
            return _Watch(ranks, watchdog).result()
    finally:
        del store


def _check_fork() -> None:
    if not hasattr(os, "fork"):
        raise ConfigurationError("this operating system cannot fork. Use strategy='ddp_spawn'.")
    if any(kind != "mps" for kind in types_in_use()):
        raise ConfigurationError(DEVICE_IN_USE)


class _Watch:
    """Waits for all ranks. Raises the first error, and ends the other ranks."""

    def __init__(self, ranks: list[tuple[Any, Any]], watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.processes = [process for process, _ in ranks]
        self.open = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
        self.answer: bytes | None = None
        self.failure: tuple[int, Any] | None = None
        """The rank that failed first, with its error, or with its exit code if it sent no error."""

    def result(self) -> Any:
        try:
            self._wait()
        except KeyboardInterrupt:
            # In a notebook only this process receives the signal. Each rank stops its run cleanly and raises it again.
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGINT)
            self._wait()
            raise_quietly(KeyboardInterrupt())
        finally:
            _end(self.processes, PATIENCE if self.failure is not None else 60.0)
        if self.failure is not None:
            self._raise(*self.failure)
        assert self.answer is not None
        return unpacked(self.answer)

    def _wait(self) -> None:
        deadline: float | None = None
        while self.open:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(self.open), timeout)
            if not ready:
                return
            for receiver in ready:
                self._take(receiver)
            if self.failure is not None and deadline is None:
                deadline = time.monotonic() + PATIENCE

    def _take(self, receiver: Any) -> None:
        rank = self.open.pop(receiver)
        try:
            kind, value = receiver.recv()
        except EOFError:
            self.processes[rank].join(PATIENCE)
            kind, value = "ended", self.processes[rank].exitcode
        receiver.close()
        if kind == "returned":
            self.answer = value if rank == 0 else self.answer
        elif self.failure is None or (self.failure[1] == 1 and value != 1):
            # A rank that exited with 1 and sent no error only followed another rank's failure.
            self.failure = (rank, value)

    def _raise(self, rank: int, value: Any) -> None:
        if self.watchdog.hang is not None:
            raise LeydenError(str(self.watchdog.hang))
        if isinstance(value, tuple):
            data, text, trace = value
            error: BaseException = LeydenError(text) if data is None else unpacked(data)
            raise error from RankTrace(trace)
        if isinstance(value, int) and value < 0:
            raise LeydenError(killed_in_words(rank, -value))
        raise LeydenError(f"rank {rank} exited with code {value}; all ranks were terminated.")


def _end(processes: list[Any], patience: float) -> None:
    """Waits for the processes, and kills those that are still running after `patience` seconds."""
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _rank(sender: Any, variables: dict[str, str], handed: Any, listener: socket.socket | None) -> None:
    os.environ.update(variables)
    rank, count = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if listener is not None:
        listener.close()
    if hasattr(os, "setpgrp"):
        # Ctrl-C in a terminal then reaches the caller alone, which forwards it once.
        os.setpgrp()
    # OpenMP's threads do not survive a fork; it would wait for them.
    torch.set_num_threads(1 if variables[STARTER] != "spawn" else threads_each(count))
    try:
        function, args = unpacked(handed) if isinstance(handed, bytes) else handed
        value = function(*args)
        answer = ("returned", packed(value) if rank == 0 else None)
    except SystemExit:
        raise
    except BaseException as error:
        _end_other_ranks(error)
        text = f"{type(error).__name__} on rank {rank}: {error}"
        sender.send(("raised", (_pack(error), text, traceback.format_exc())))
        # The caller received the error and reports it.
        sys.exit(1)
    sender.send(answer)
    sender.close()


def _end_other_ranks(error: BaseException) -> None:
    """Ends the other ranks, which may wait for this one in a call that nothing else would wake."""
    group = sys.modules.get("leyden.strategies.process_group")
    if group is not None:
        group.end_all_ranks(error)


def packed_for(start_method: str, handed: Any, instead: str) -> bytes:
    """Serializes what is passed to ranks. The error names what to use `instead`.

    Raises:
        ConfigurationError: if the value cannot be pickled.
    """
    try:
        return packed(handed)
    except Exception as error:
        raise ConfigurationError(
            f"start_method={start_method!r} could not pickle the Trainer, the module and the loaders: {error}. Define "
            f"classes and functions at the top level of an importable file, or use {instead}."
        ) from error


def packed(value: Any) -> bytes:
    """Serializes a value that a rank receives or returns."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Deserializes the bytes of `packed`. Tensors arrive on the CPU, to take no GPU memory."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _pack(error: BaseException) -> bytes | None:
    """Returns the pickled error, or None if it cannot be pickled."""
    try:
        data = packed(error)
        unpacked(data)
    except Exception:
        return None
    return data
