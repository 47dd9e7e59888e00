"""Tells the user's code from Leyden, installed packages and Python itself, by the folders in which these really are.

Names alone do not tell: a checkout, a project or a home may be called leyden, torch or lib/python-work.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from pathlib import Path

LEYDEN = str(Path(__file__).parents[1]) + os.sep
"""The folder of the package, under which all of its files are imported, in a checkout too."""
# torch is only located: a rank of a launch imports this file before the user's script, which may not need torch.
_TORCH = importlib.util.find_spec("torch")
assert _TORCH is not None
_LIBRARIES = tuple(
    path(os.path.dirname(str(file))) + os.sep
    for file in (os.__file__, _TORCH.origin)
    for path in (str, os.path.realpath)
)
"""The folders of Python's standard library, and of a torch that is used from its own checkout."""
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_NO_FILES = ("<frozen ", "<string>")


def is_users(file: str) -> bool:
    """Returns True for a file of the user's code, given as in a traceback.

    Example:
        >>> is_users("train.py"), is_users(os.__file__), is_users(__file__)
        (True, False, False)
    """
    if file.startswith((LEYDEN, *_LIBRARIES, *_NO_FILES)):
        return False
    return not any(folder in file for folder in _INSTALLED)


def users_frame(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the user's code.

    Without any it is the innermost frame outside of Leyden, as for a program that is installed itself; without that the
    innermost one. None for an empty stack.
    """
    frames = list(stack)
    own = [frame for frame in frames if is_users(frame.filename)]
    own = own or [frame for frame in frames if not frame.filename.startswith(LEYDEN)] or frames
    return own[-1] if own else None
