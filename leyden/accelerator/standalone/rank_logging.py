"""get_logger: Python's logging on many ranks, on the main rank only or in rank order."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

import torch

from leyden.core.environment import rank_environment


# Before Python 3.11, LoggerAdapter is not subscriptable at run time.
class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger whose calls take two more arguments.

    `main_process_only` (default True): only the main rank logs. `in_order` (default False): all ranks log one after
    another, and every rank must make the call.
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Logs on the ranks that the arguments select."""
        only_main, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        # Before Python 3.11, stacklevel also counts frames of `logging` itself, such as that of info().
        called_by_logging = (
            sys.version_info < (3, 11) and sys._getframe(1).f_code.co_filename == logging.info.__code__.co_filename
        )
        # As in Accelerate, 2 (or less) is the line of the call, and 3 the line that called its function.
        kwargs["stacklevel"] = max(2, kwargs.get("stacklevel", 2)) + 1 + called_by_logging
        if not self.isEnabledFor(level):
            return
        place = rank_environment()
        rank, size = (0, 1) if place is None else (place.rank, place.world_size)
        if in_order and size > 1:
            for turn in range(size):
                if turn == rank:
                    self._write(level, msg, args, kwargs)
                torch.distributed.barrier()
        elif rank == 0 or not only_main:
            self._write(level, msg, args, kwargs)

    def _write(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        message, options = self.process(msg, kwargs)
        self.logger.log(level, message, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Logs a warning; the same message only once."""
        seen: set[str] = vars(self.logger).setdefault("_leyden_warned", set())
        if str(msg) not in seen:
            seen.add(str(msg))
            self.warning(msg, *args, **{**kwargs, "stacklevel": max(2, kwargs.get("stacklevel", 2)) + 1})


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Returns a logger that knows the ranks.

    Args:
        name: as of `logging.getLogger`.
        log_level: the logger's level; by default that of the variable ACCELERATE_LOG_LEVEL.

    Example:
        >>> get_logger("train").info("on the main rank", main_process_only=True)
    """
    logger = logging.getLogger(name)
    level = log_level if log_level is not None else os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return RankLogger(logger, {})
