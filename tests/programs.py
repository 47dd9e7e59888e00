"""Runs Python programs in processes that have already imported torch: they fork from a server, in milliseconds.

`__main__`, `sys.argv`, `sys.path` and the environment are as under `python COMMAND`. Tests of imports, of standard
input, or of a script that starts its ranks by running itself again use `subprocess` instead.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Imports of a first optimizer step, a shard or a metric, which would take seconds in each process.
PRELOAD = [
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.checkpoint.default_planner"),
    *("torch._dynamo", "torchmetrics", "leyden", "leyden.trainer.trainer"),
]
warm = multiprocessing.get_context("forkserver")
"""Has a server that imports torch once; each process is then forked from it."""
warm.set_forkserver_preload(PRELOAD)


def run_in_fork(work: Callable[[], Any]) -> int:
    """Runs a function in a process forked from this one; returns its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_program(
    command: Sequence[object], folder: Path, output: Path, errors: Path, environ: Mapping[str, str] | None = None
) -> BaseProcess:
    """Starts `python COMMAND` as the leader of a new session.

    Args:
        command: a script with its arguments, or "-c" and code, or "-m" and a module.
        folder: its working folder.
        output: the file for its standard output.
        errors: the file for its standard error; may be `output`.
        environ: its complete environment (default: that of this process).
    """
    words = [str(word) for word in command]
    variables = {"OMP_NUM_THREADS": "1", **(os.environ if environ is None else environ)}
    process = warm.Process(target=_become, args=(words, str(folder), str(output), str(errors), variables))
    process.start()
    return process


def run_program(
    command: Sequence[object],
    folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs `python COMMAND` to completion, in a folder (default: the current one)."""
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as printed:
        output, errors = Path(printed, "output"), Path(printed, "errors")
        process = start_program(words, folder or Path.cwd(), output, errors, environ)
        process.join(timeout)
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        texts = output.read_text(), errors.read_text()
    assert not hangs, f"{words[0]} still ran after {timeout} s:\n{texts[0]}{texts[1]}"
    assert process.exitcode is not None
    return subprocess.CompletedProcess(words, process.exitcode, *texts)


def _become(words: list[str], folder: str, output: str, errors: str, variables: Mapping[str, str]) -> None:
    """Turns this fork of the server into the program."""
    os.setsid()
    # Garbage collections need not visit what the server imported.
    gc.freeze()
    # The program's own processes use the platform's default: loader workers would wait for another fork server.
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    for name, number in ((os.devnull, 0), (output, 1), (errors, 2)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        file = os.open(name, flags, 0o644)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # Spawned workers resolve a script's relative path against this folder.
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    import torch

    torch.set_num_threads(1)
    try:
        _run(words)
        code: Any = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # multiprocessing ends its processes without running exit functions.
    atexit._run_exitfuncs()
    raise SystemExit(code or 0)


def _run(words: list[str]) -> None:
    first, *rest = words
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = ["", *paths]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        sys.path[:0] = ["", *paths]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:0] = [str(Path(first).absolute().parent), *paths]
        runpy.run_path(first, run_name="__main__")
