"""Runs a function of a test on several ranks: real processes, with the environment that torchrun sets."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from programs import warm

DEBUG = {"LEYDEN_DEBUG": "1", "LEYDEN_DEBUG_TIMEOUT": "3"}
"""Variables of ranks in debug mode, which compares the arguments of collectives."""


def free_port() -> int:
    """Returns a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank of a single machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }


def kill_every_rank() -> None:
    """Kills this rank by SIGKILL, once all ranks have called this at the same point of their run."""
    # The last rank may find the others gone already.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def run_world(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 240,
    environ: Mapping[str, str] | None = None,
    may_fail: bool = False,
) -> list[Any]:
    """Calls `function(*args)` on every rank and returns their results, in the order of ranks.

    Args:
        size: number of ranks.
        function: a function at the top of a test file; it reads its rank from the environment, as a user's script does.
        *args: arguments of the function, which must be picklable.
        timeout: seconds after which ranks that hang are killed, and the test fails.
        environ: additional environment variables of each rank.
        may_fail: return the exception's text ("TypeError: …"), or the exit code of a rank that ended silently,
            in place of a result.
    """
    port = free_port()
    file, name = sys.modules[function.__module__].__file__, function.__name__
    ranks = []
    for rank in range(size):
        receiver, sender = warm.Pipe(duplex=False)
        variables = {**rank_environment(rank, size, port), **(environ or {})}
        process = warm.Process(target=_rank, args=(sender, file, name, args, variables), daemon=False)
        process.start()
        sender.close()
        ranks.append((process, receiver))
    deadline = time.monotonic() + timeout
    results: list[Any] = []
    failures: list[str] = []
    for rank, (process, receiver) in enumerate(ranks):
        kind, value = "silent", None
        try:
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                kind, value = receiver.recv()
            else:
                kind = "hangs"
        except EOFError:
            pass
        process.join(max(0.1, min(30.0, deadline - time.monotonic())) if kind != "hangs" else 0.1)
        if process.is_alive():
            kind = "hangs"
            process.kill()
            process.join()
        receiver.close()
        if kind == "returned":
            results.append(value)
        elif may_fail and kind != "hangs":
            results.append(value[0] if kind == "raised" else process.exitcode)
        else:
            text = value[1] if kind == "raised" else ""
            failures.append(f"rank {rank} {kind} (exit code {process.exitcode})\n{text}")
    assert not failures, "\n\n".join(failures)
    return results


def _rank(sender: Any, file: str, name: str, args: tuple[Any, ...], variables: dict[str, str]) -> None:
    # Spares the garbage collector what the server imported, which took up to half of a rank's time.
    gc.freeze()
    # The platform's default, as in a script: a loader's workers would wait for a server that imports torch first.
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    os.environ.update(variables)
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("test_of_ranks", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_of_ranks"] = module
    spec.loader.exec_module(module)
    try:
        answer = ("returned", getattr(module, name)(*args))
    except SystemExit:
        raise
    except BaseException as error:
        answer = ("raised", (f"{type(error).__name__}: {error}", traceback.format_exc()))
    sender.send(answer)
    sender.close()
