"""rank_zero_only and its kin: what a script does on its first rank alone, before a run as well as within one."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch.distributed as dist

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.launch.environment import rank_environment

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class RankZeroOnly:
    """A decorator: only the first rank calls the function; elsewhere the call returns a default.

    The rank is looked up at each call, so that decorated code may be imported before ranks are started. No rank may
    wait in the function for the others, which do not come: keep collectives and `barrier` out of it.

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
        """This process's rank; 0 where nobody has started ranks. A script may set it, as those for Lightning do."""
        if self._rank is not None:
            return self._rank
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        try:
            place = rank_environment()
        except ConfigurationError:
            # A message may not end a program that starts no ranks.
            return 0
        return 0 if place is None else place.rank

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank

    @overload
    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def __call__(self, function: Callable[P, T], default: D) -> Callable[P, T | D]: ...
    def __call__(self, function: Callable[P, Any], default: Any = None) -> Callable[P, Any]:
        @functools.wraps(function)
        def on_the_first(*args: P.args, **kwargs: P.kwargs) -> Any:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_the_first


rank_zero_only = RankZeroOnly()


def rank_zero_info(message: object, *args: Any, **kwargs: Any) -> None:
    """Logs a message on the first rank, in the logger "leyden".

    Args:
        message: with `%` places for `args`, as `logging.Logger.info` takes it.
        *args: fill the places.
        **kwargs: of `logging.Logger.info`.
    """
    _log(logging.INFO, message, *args, **kwargs)


def rank_zero_debug(message: object, *args: Any, **kwargs: Any) -> None:
    """Logs a message on the first rank, for a logger "leyden" whose level is DEBUG; see `rank_zero_info`."""
    _log(logging.DEBUG, message, *args, **kwargs)


def _log(level: int, message: object, *args: Any, **kwargs: Any) -> None:
    if rank_zero_only.rank:
        return
    logger = logging.getLogger("leyden")
    if not logger.hasHandlers():
        # A script that has set up no logging sees them on its terminal; one that has decides for itself.
        logger.addHandler(logging.StreamHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    # The line that is named is the caller's, above this function and that of the level.
    logger.log(level, message, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 2})


def rank_zero_warn(message: object, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warns on the first rank.

    Args:
        message: the words.
        category: of the warning.
        stacklevel: 1 names the line of the call, as `warnings.warn` does.

    Example:
        >>> rank_zero_warn("lr is low", stacklevel=2)
    """
    if rank_zero_only.rank == 0:
        warnings.warn(str(message), category, stacklevel=stacklevel + 1)


def rank_zero_deprecation(message: object, stacklevel: int = 1) -> None:
    """Warns of something deprecated on the first rank, by a DeprecationWarning."""
    rank_zero_warn(message, DeprecationWarning, stacklevel + 1)
