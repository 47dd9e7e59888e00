"""rank_zero_only and related functions: code, messages and warnings of rank 0, during a run or before it."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch.distributed as dist

from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError
from leyden.core.user_code import LEYDEN, is_users

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

# Two threads would otherwise show each other's messages.
_ONE_AT_A_TIME = threading.RLock()
LOGGER = logging.getLogger("leyden")
if LOGGER.level == logging.NOTSET:
    # The root logger's default level, WARNING, would hide most of what a run says.
    LOGGER.setLevel(logging.INFO)


class RankZeroOnly:
    """A decorator: only rank 0 calls the function. On other ranks the call returns a default.

    The rank is looked up at each call, so decorated code may be imported before ranks are started. The function must
    not use collectives or `barrier`: rank 0 would wait forever for the other ranks.

    Example:
        >>> @rank_zero_only
        ... def download():
        ...     return "data"
        >>> download(), rank_zero_only.rank
        ('data', 0)
        >>> rank_zero_only(len, default=0)([1, 2])
        2
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """This process's rank, or 0 if no ranks are started. A script may set it, as Lightning scripts do."""
        if self._rank is not None:
            return self._rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        try:
            environment = rank_environment()
        except ConfigurationError:
            # A log message must not end a program that starts no ranks.
            return 0
        return 0 if environment is None else environment.rank

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank

    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def __call__(self, function: Callable[P, T], default: D) -> Callable[P, T | D]: ...
    def __call__(self, function: Callable[P, Any], default: Any = None) -> Callable[P, Any]:
        @functools.wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> Any:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


def rank_zero_info(message: object, *args: Any, **kwargs: Any) -> None:
    """Logs an info message on rank 0, to the logger "leyden".

    Args:
        message: message with `%` placeholders for `args`, as in `logging.Logger.info`.
        *args: values for the placeholders.
        **kwargs: keyword arguments of `logging.Logger.info`.
    """
    if rank_zero_only.rank == 0:
        _log(to_stderr, logging.INFO, message, *args, **kwargs)


def rank_zero_debug(message: object, *args: Any, **kwargs: Any) -> None:
    """Logs a debug message on rank 0, shown if the logger "leyden" has the level DEBUG. See `rank_zero_info`."""
    if rank_zero_only.rank == 0:
        _log(to_stderr, logging.DEBUG, message, *args, **kwargs)


def to_stdout(text: str) -> None:
    """Prints to the stdout of the moment, flushed: a pipe would otherwise hold the text until its buffer is full."""
    print(text, flush=True)


def to_stderr(text: str) -> None:
    """Prints to the stderr of the moment, flushed."""
    print(text, file=sys.stderr, flush=True)


def inform(text: str, write: Callable[[str], None] = to_stdout, every_rank: bool = False) -> None:
    """Tells the user something about a run, on rank 0: logs it to the logger "leyden" at the level INFO.

    Args:
        text: one or more lines.
        write: how a script without logging shows the text.
        every_rank: log on the rank that calls, for facts that other ranks do not know.
    """
    if every_rank or rank_zero_only.rank == 0:
        _log(write, logging.INFO, text)


class _Writer(logging.Handler):
    """Passes the text of each record to a function."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


def _start_anew() -> None:
    """Forgets, in a forked process, what another thread of the parent was showing."""
    global _ONE_AT_A_TIME
    _ONE_AT_A_TIME = threading.RLock()
    for handler in list(LOGGER.handlers):
        if isinstance(handler, _Writer):
            LOGGER.removeHandler(handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def _log(write: Callable[[str], None], level: int, message: object, *args: Any, **kwargs: Any) -> None:
    """Logs to the handlers that the script has set up. Without any, `write` shows the message."""
    # Attributes the message to the caller's line, two frames up: above this function and the one that called it.
    kwargs = {**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 2}
    with _ONE_AT_A_TIME:
        if LOGGER.hasHandlers():
            LOGGER.log(level, message, *args, **kwargs)
            return
        # Only for this message: a handler that stays would keep a stale stream, and repeat what other handlers show.
        writer = _Writer(write)
        LOGGER.addHandler(writer)
        try:
            LOGGER.log(level, message, *args, **kwargs)
        finally:
            LOGGER.removeHandler(writer)


def rank_zero_warn(message: object, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Issues a warning on rank 0.

    Args:
        message: the text of the warning.
        category: the warning's class.
        stacklevel: as in `warnings.warn`, where 1 is the line of the call.

    Example:
        >>> rank_zero_warn("lr is low", stacklevel=2)
    """
    if rank_zero_only.rank == 0:
        warnings.warn(str(message), category, stacklevel=stacklevel + 1)


def rank_zero_deprecation(message: object, stacklevel: int = 1) -> None:
    """Issues a DeprecationWarning on rank 0."""
    rank_zero_warn(message, DeprecationWarning, stacklevel + 1)


def warn(message: str, category: type[Warning] = UserWarning, every_rank: bool = False) -> None:
    """Issues a warning at the user's line that led to it, on rank 0.

    Args:
        message: the text of the warning.
        category: the warning's class.
        every_rank: warn on the rank that finds out, for facts that other ranks do not know.
    """
    if every_rank or rank_zero_only.rank == 0:
        warnings.warn(message, category, stacklevel=_depth_of_user())


def _depth_of_user() -> int:
    """Returns the stack level, in `warn`, of the user's innermost line, or else of the first outside of Leyden."""
    frame: types.FrameType | None = sys._getframe(2)
    depth, outside = 2, None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return depth
        if outside is None and not file.startswith(LEYDEN):
            outside = depth
        frame, depth = frame.f_back, depth + 1
    return outside or 2
