"""Runs the user's script on one rank of `leyden launch`, as `python script.py` would, and records the error if it
fails.

Usage: `python -m leyden.cli.launch.rank script.py …` or `python -m leyden.cli.launch.rank -m module …`.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import json
import os
import runpy
import socket
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

from leyden.core.user_code import users_frame
from leyden.launch.leaving import ERROR_FILE, has_noted_exit

TRACE = "traceback.txt"
"""A file next to torch's error file, with the full traceback, or the stack at the time of a signal."""


def main(arguments: list[str]) -> None:
    """Runs a script or module as the main module of this process."""
    folder = _folder()
    sys.excepthook = _record
    if folder is not None:
        _report_restart(folder)
        # Kept open: a signal handler writes to it.
        faulthandler.enable(open(folder / TRACE, "w"))  # noqa: SIM115
    try:
        _run(arguments)
    except SystemExit:
        # Preemption is not a failure: after one, the agent would start the ranks again.
        if not has_noted_exit():
            raise


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    script = arguments[0]
    if not os.path.isfile(script):
        runpy.run_path(script, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec")
    # The script runs in the real main module, where subprocesses and pickles of its classes look for them.
    module = sys.modules["__main__"]
    kept = {"__name__": "__main__", "__builtins__": builtins, "__file__": script, "__spec__": None, "__package__": None}
    module.__dict__.clear()
    module.__dict__.update(kept, __cached__=None, __doc__=None, __loader__=None)
    exec(code, module.__dict__)


def _folder() -> Path | None:
    path = os.environ.get(ERROR_FILE)
    return Path(path).parent if path else None


def _record(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Records the error that ended this rank, for the launcher to report once. Without a launcher, shows it here."""
    folder = _folder()
    shown = _of_the_user(trace)
    if folder is None or issubclass(kind, KeyboardInterrupt):
        # The hook shows the exception's own traceback, not the one it is handed.
        sys.__excepthook__(kind, error.with_traceback(shown), shown)
        return
    text = "".join(traceback.format_exception(kind, error, shown))
    with contextlib.suppress(OSError):
        (folder / TRACE).write_text(text, encoding="utf-8")
        path = folder / Path(os.environ[ERROR_FILE]).name
        record = _recorded(path)
        last = f"{kind.__name__}: {error}"
        rank = os.environ.get("RANK", "0")
        record.setdefault("message", f"rank {rank}: {last}")
        record.setdefault("lost", _is_lost(error))
        record.setdefault("extraInfo", {"py_callstack": text, "timestamp": str(int(time.time()))})
        record.update(exception=last, line=_line(error, shown), host=socket.gethostname(), time=time.time())
        path.write_text(json.dumps({"message": record}), encoding="utf-8")


def _recorded(path: Path) -> dict[str, Any]:
    """Returns the content of the error file, which the run may have written before the error reached the hook."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads(path.read_text(encoding="utf-8"))["message"]
        return found if isinstance(found, dict) else {}
    return {}


def _is_lost(error: BaseException) -> bool:
    """Returns True for a lost connection to another rank, which is a consequence and never the cause."""
    if "torch.distributed" not in sys.modules:
        return False
    from leyden.launch.failure import is_lost

    return is_lost(error)


def _of_the_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the traceback without its first frames, those of this file and of runpy."""
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            break
        trace = trace.tb_next
    return trace


def _line(error: BaseException, trace: types.TracebackType | None) -> str:
    """Returns the innermost line of the user's own code, as text."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frame = users_frame(traceback.extract_tb(trace))
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}" if frame is not None else ""


def _report_restart(folder: Path) -> None:
    """Prints, on the first rank of a machine, why all ranks were restarted."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if count == 0 or os.environ.get("LOCAL_RANK") != "0":
        return
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    before = folder.parent.parent / f"attempt_{count - 1}"
    found = [record for path in before.glob("*/error.json") if (record := _recorded(path)).get("message")]
    found.sort(key=lambda record: (bool(record.get("lost")), float(record.get("time", 0))))
    why = str(found[0]["message"]) if found else "a rank was killed from outside, here or on another machine"
    trace = str(found[0].get("extraInfo", {}).get("py_callstack", "")) if found else ""
    print(f"{trace}leyden launch: restart {count} of {limit}, since {why}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Imported under its own name: the script replaces the contents of the main module.
    from leyden.cli.launch import rank

    rank.main(sys.argv[1:])
