"""What a rank of `leyden launch` runs: the script as `python script.py` would, and a record of how it ended if it failed.

`python -m leyden.trainer.cli.rank script.py …`, or `-m module …` after it.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACE = "traceback.txt"
"""Beside the error file of torch's engine: the whole traceback, or where a signal struck."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PLACES = ("site-packages", "dist-packages", os.sep + "torch" + os.sep, "<frozen ")


def main(arguments: list[str]) -> None:
    """Runs a script or a module in this process, as its main one."""
    folder = _folder()
    sys.excepthook = _record
    if folder is not None:
        _tell_restart(folder)
        # Kept open: it is written from within a signal's handler.
        faulthandler.enable(open(folder / TRACE, "w"))  # noqa: SIM115
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
    # The real main module, so that processes that the script starts, and pickles of its classes, find it.
    module = sys.modules["__main__"]
    kept = {"__name__": "__main__", "__builtins__": builtins, "__file__": script, "__spec__": None, "__package__": None}
    module.__dict__.clear()
    module.__dict__.update(kept, __cached__=None, __doc__=None, __loader__=None)
    exec(code, module.__dict__)


def _folder() -> Path | None:
    path = os.environ.get(ERROR_FILE)
    return Path(path).parent if path else None


def _record(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Writes down what ended this rank; the launch tells it, once. Without one it is shown here."""
    folder = _folder()
    shown = _of_the_user(trace)
    if folder is None or issubclass(kind, KeyboardInterrupt):
        # What is shown is the exception's own traceback.
        sys.__excepthook__(kind, error.with_traceback(shown), shown)
        return
    text = "".join(traceback.format_exception(kind, error, shown))
    with contextlib.suppress(OSError):
        (folder / TRACE).write_text(text, encoding="utf-8")
        path = folder / Path(os.environ[ERROR_FILE]).name
        told = _told(path)
        last = f"{kind.__name__}: {error}"
        rank = os.environ.get("RANK", "0")
        told.setdefault("message", f"rank {rank}: {last}")
        told.setdefault("lost", _is_lost(error))
        told.setdefault("extraInfo", {"py_callstack": text, "timestamp": str(int(time.time()))})
        told.update(exception=last, line=_line(error, shown), host=socket.gethostname(), time=time.time())
        path.write_text(json.dumps({"message": told}), encoding="utf-8")


def _told(path: Path) -> dict[str, Any]:
    """What the run has written of its error before it came here."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads(path.read_text(encoding="utf-8"))["message"]
        return found if isinstance(found, dict) else {}
    return {}


def _is_lost(error: BaseException) -> bool:
    """True if only the connection to another rank was lost, which is no cause."""
    if "torch.distributed" not in sys.modules:
        return False
    from leyden.strategies.launch.failure import is_lost

    return is_lost(error)


def _of_the_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of this file and of runpy, which stand first."""
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            break
        trace = trace.tb_next
    return trace


def _line(error: BaseException, trace: types.TracebackType | None) -> str:
    """The innermost line of the user's own code."""
    frames = traceback.extract_tb(trace)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    ours = str(Path(__file__).resolve().parents[2])
    own = [frame for frame in frames if not any(place in frame.filename for place in PLACES)]
    own = [frame for frame in own if not frame.filename.startswith((sys.prefix, sys.base_prefix))] or own
    own = [
        frame for frame in own if f"{os.sep}leyden{os.sep}" not in frame.filename and not _within(frame.filename, ours)
    ] or own
    chosen = own or list(frames)
    return f"{chosen[-1].filename}, line {chosen[-1].lineno}, in {chosen[-1].name}" if chosen else ""


def _within(file: str, folder: str) -> bool:
    """True for our own files in a checkout, where the package's name is not in their path."""
    return any(file.startswith(os.path.join(folder, room) + os.sep) for room in ("trainer", "callbacks", "strategies"))


def _tell_restart(folder: Path) -> None:
    """The first rank of a machine says why all were started anew."""
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if count == 0 or os.environ.get("LOCAL_RANK") != "0":
        return
    limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
    before = folder.parent.parent / f"attempt_{count - 1}"
    found = sorted(_failures(before), key=lambda told: (bool(told.get("lost")), float(told.get("time", 0))))
    why = str(found[0]["message"]) if found else "a rank was ended from outside, or another machine's was"
    print(f"leyden launch: restart {count} of {limit}, since {why} (more in {before})", file=sys.stderr, flush=True)


def _failures(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("*/error.json"):
        told = _told(path)
        if told.get("message"):
            yield told


if __name__ == "__main__":
    # As a module of its own, whose names are still there when the script has taken the main one's place.
    from leyden.trainer.cli import rank

    rank.main(sys.argv[1:])
