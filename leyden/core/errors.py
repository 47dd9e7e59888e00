"""The errors that Leyden raises, and helpers for their messages."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class LeydenError(RuntimeError):
    """Base class of every error that Leyden itself raises during a run."""


class ConfigurationError(LeydenError, ValueError):
    """An invalid argument, or an invalid combination of arguments. The message names the fix."""


class StateError(LeydenError, ValueError):
    """Saved state that its owner cannot have written: an entry is missing, of the wrong type, or out of range.

    Args:
        key: the entry, such as `last_step`, or a path to it.
        reason: the defect of the entry, phrased to follow the key.

    Attributes:
        key: the `key` argument.
        reason: the `reason` argument.

    Example:
        >>> str(StateError("batch", "is -3, and must be at least 0"))
        'batch is -3, and must be at least 0'
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} {reason}")
        self.key = key
        self.reason = reason


class UnknownArgumentError(ConfigurationError, TypeError):
    """An unknown argument of a function. The message suggests similar names. A TypeError, as in Python itself."""


class MissingExtraError(LeydenError, ImportError):
    """A required optional package is not installed.

    Args:
        package: the name on the package index.
        extra: the pip extra of Leyden that installs the package, or None.
        purpose: the feature that needs the package.

    Example:
        >>> str(MissingExtraError("wandb", "wandb", "WandbLogger"))
        "WandbLogger needs the package 'wandb': pip install 'leyden[wandb]'"
    """

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        install = f"'leyden[{extra}]'" if extra else package
        super().__init__(f"{purpose} needs the package '{package}': pip install {install}")


@contextmanager
def needs(package: str, extra: str | None, purpose: str) -> Iterator[None]:
    """Turns a failed import within the block into a MissingExtraError with the same arguments."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error


def add_note(error: BaseException, note: str) -> None:
    """Adds a note that Python prints below the traceback. Before Python 3.11, prints the note to stderr instead."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        print(note, file=sys.stderr)


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
"""Parts of the messages of torch's allocators, CUDA, its libraries and the operating system."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True for out-of-memory errors of torch, of GPU libraries, and of the operating system."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


SHOWN = 8
"""Maximum number of known names that an error lists."""


def nearest(name: str, known: Iterable[str], main: Sequence[str] = ()) -> str:
    """Returns the hint that ends an error about an unknown name: similar names, and all known ones if they are few.

    Args:
        name: the unknown name.
        known: all known names.
        main: the names to list if there are many and none is similar. Default: the first known names.

    Example:
        >>> nearest("bf61", ["bf16", "fp16"])
        "Did you mean 'bf16'? Known: bf16, fp16."
        >>> nearest("step_70", [f"step_{number}" for number in range(20)])
        "Did you mean 'step_7'? Similar: step_0, step_17, step_10, step_9, step_8, step_6, step_5."
    """
    names = [str(item) for item in known]
    if not names:
        return "There are none."
    close = difflib.get_close_matches(str(name), names, n=SHOWN, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'?" if close else ""
    if len(names) <= SHOWN:
        return f"{hint} Known: {', '.join(names)}.".lstrip()
    if not close:
        return f"Known names include {', '.join(main or names[:SHOWN])}."
    return hint if len(close) == 1 else f"{hint} Similar: {', '.join(close[1:])}."


def kind_of(value: object) -> str:
    """Describes a value by its type, with an article, for an error message.

    Example:
        >>> [kind_of(value) for value in (1, "text", None, int, ConfigurationError())]
        ['an int', 'a str', 'None', 'the class int', 'a ConfigurationError']
    """
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else with_article(type(value).__name__)


# By sound: LSTM and MSELoss are pronounced letter by letter, and UNet and UserModule start like "you".
_VOWEL = re.compile(r"[AEFHILMNORSX](?=[A-Z0-9])|[aeio]|[AEIO]|[Uu](?!ni|se|[A-Z])")


def with_article(name: str) -> str:
    """Returns the name of a class with "a" or "an" before it.

    Example:
        >>> [with_article(name) for name in ("EarlyStopping", "int", "LSTM", "UNet", "DDPStrategy", "Module", "Unset")]
        ['an EarlyStopping', 'an int', 'an LSTM', 'a UNet', 'a DDPStrategy', 'a Module', 'an Unset']
    """
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"
