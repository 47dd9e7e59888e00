"""The command that started a run, as its checkpoints keep it for `leyden replay`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from leyden.strategies.launch.environment import rank_environment
from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.format.errors import blame
from leyden.trainer.format.secrets import masked_words
from leyden.trainer.launched import COMMAND

FILE = "command"
STARTED_IN = os.getcwd()
"""The folder in which this process was started: scripts import Leyden before they, or Hydra, go elsewhere."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line.

    Attributes:
        words: program and arguments; a secret among them is masked.
        folder: the one in which it was given.
    """

    words: list[str]
    folder: str

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> Command | None:
        """The command of this process, or of the `leyden launch` that started it.

        None where no command starts the run again: a notebook, a REPL, ranks that another launcher has started.
        """
        environ = os.environ if environ is None else environ
        words = None
        if COMMAND in environ:
            words = json.loads(environ[COMMAND])
        else:
            ranks = rank_environment(environ)
            is_rank = ranks is not None and ranks.starter != "script"
            if is_rank or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
                return None
        return cls(words_here() if words is None else masked_words(words), STARTED_IN)

    def __str__(self) -> str:
        """The command as a shell takes it, with nothing in it that a terminal would obey."""
        return printable(shlex.join(self.words))

    @property
    def is_whole(self) -> bool:
        """False if a secret is missing in it."""
        return not any("***" in word for word in self.words)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, reader: CheckpointReader) -> Command | None:
        """The command of the run that saved a checkpoint; None if there is none.

        Raises:
            CheckpointError: if the file holds something else.
        """
        if not reader.has(FILE):
            return None
        with blame(reader.path / f"{FILE}.json"):
            saved = SavedState(reader.json(FILE))
            words = [SavedState({"word": word}, "words").text("word") for word in saved.items("words")]
            return cls(words, saved.text("folder"))


def words_here() -> list[str]:
    """Program and arguments of this process; a secret among them is masked."""
    return masked_words([sys.executable, *sys.orig_argv[1:]])


def printable(text: str) -> str:
    r"""Escapes control characters, by which a text from a file could hide a part of itself on a terminal.

    Example:
        >>> printable("rm -r x\x1b[2K")
        'rm -r x\\x1b[2K'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
