"""The errors that Leyden raises, and the wording they share."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class LeydenError(RuntimeError):
    """Base class of every error that Leyden itself raises during a run."""


class ConfigurationError(LeydenError, ValueError):
    """An argument, or a combination of arguments, that cannot work. The message names the fix."""


class StateError(LeydenError, ValueError):
    """Saved state that its owner cannot have written: an entry is missing, of another kind, or out of range.

    Args:
        key: the entry, such as `last_step`, or a path to it.
        reason: what is wrong with it.

    Attributes:
        key: the same.
        reason: the same.

    Example:
        >>> str(StateError("batch", "is -3, and must be at least 0"))
        'batch is -3, and must be at least 0'
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} {reason}")
        self.key = key
        self.reason = reason


class UnknownArgumentError(ConfigurationError, TypeError):
    """An argument that a function does not have; a TypeError, as Python's own. The message names the nearest that it
    has.
    """


class MissingExtraError(LeydenError, ImportError):
    """An optional package is needed and not installed.

    Args:
        package: the name on the package index.
        extra: the pip extra of Leyden that installs it, or None.
        purpose: what it was needed for.

    Example:
        >>> str(MissingExtraError("wandb", "wandb", "WandbLogger"))
        "WandbLogger needs the package 'wandb': pip install 'leyden[wandb]'"
    """

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        install = f"'leyden[{extra}]'" if extra else package
        super().__init__(f"{purpose} needs the package '{package}': pip install {install}")


@contextmanager
def needs(package: str, extra: str | None, purpose: str) -> Iterator[None]:
    """Turns a failed import in the block into a MissingExtraError, whose arguments these are."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error


def add_note(error: BaseException, note: str) -> None:
    """Ends the traceback with a line of ours; before Python 3.11 errors take no notes, and it stands above the
    traceback.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        print(note, file=sys.stderr)


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
"""Messages of torch's allocators, CUDA, its libraries and the system."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors by which torch, a GPU's libraries and the system say that memory is short."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


SHOWN = 8
"""So many known names an error lists at most."""


def nearest(name: str, known: Iterable[str], main: Sequence[str] = ()) -> str:
    """The hint that ends an error about an unknown name: the nearest known one, and all of them if they are few.

    Args:
        name: the unknown one.
        known: those that there are.
        main: the names to list if there are many and none is near; the first ones if left out.

    Example:
        >>> nearest("bf61", ["bf16", "fp16"])
        "Did you mean 'bf16'? Known: bf16, fp16."
        >>> nearest("step_70", [f"step_{number}" for number in range(20)])
        "Did you mean 'step_7'? Near it: step_0, step_17, step_10, step_9, step_8, step_6, step_5."
    """
    names = [str(item) for item in known]
    if not names:
        return "There is none."
    close = difflib.get_close_matches(str(name), names, n=SHOWN, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'?" if close else ""
    if len(names) <= SHOWN:
        return f"{hint} Known: {', '.join(names)}.".lstrip()
    if not close:
        return f"Known, among others: {', '.join(main or names[:SHOWN])}."
    return hint if len(close) == 1 else f"{hint} Near it: {', '.join(close[1:])}."


def kind_of(value: object) -> str:
    """Describes a value for an error message, with an article.

    Example:
        >>> [kind_of(value) for value in (1, "text", None, int, ConfigurationError())]
        ['an int', 'a str', 'None', 'the class int', 'a ConfigurationError']
    """
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else with_article(type(value).__name__)


# By sound: an LSTM and an MSELoss are spelt out by letters, a UNet begins as "you" does, and so does a UserModule.
_VOWEL = re.compile(r"[AEFHILMNORSX](?=[A-Z0-9])|[aeio]|[AEIO]|[Uu](?!ni|se|[A-Z])")


def with_article(name: str) -> str:
    """The name of a class with "a" or "an" before it.

    Example:
        >>> [with_article(name) for name in ("EarlyStopping", "int", "LSTM", "UNet", "DDPStrategy", "Module", "Unset")]
        ['an EarlyStopping', 'an int', 'an LSTM', 'a UNet', 'a DDPStrategy', 'a Module', 'an Unset']
    """
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"
