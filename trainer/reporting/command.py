"""The command that started a run, saved in its checkpoints for `leyden replay`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from leyden.checkpoint.format.errors import blame
from leyden.checkpoint.format.secrets import masked_words
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.environment import STARTED_IN, rank_environment
from leyden.core.saved_state import SavedState
from leyden.core.text import printable
from leyden.trainer.launched import COMMAND

FILE = "command"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line."""

    words: list[str]
    """The program and its arguments, with secrets masked."""
    folder: str
    """The working directory of the command."""

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> Command | None:
        """Returns the command of this process, or of the `leyden launch` that started it.

        None if no command can start the run again: in a notebook, a REPL, or ranks started by another launcher.
        """
        environ = os.environ if environ is None else environ
        if COMMAND in environ:
            return cls(masked_words(json.loads(environ[COMMAND])), STARTED_IN)
        ranks = rank_environment(environ)
        is_rank = ranks is not None and ranks.starter != "script"
        if is_rank or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
            return None
        return cls(words_here(), STARTED_IN)

    def __str__(self) -> str:
        """Returns the command in shell syntax, with control characters escaped."""
        return printable(shlex.join(self.words))

    @property
    def is_whole(self) -> bool:
        """False if a secret in the command is masked."""
        return not any("***" in word for word in self.words)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, reader: CheckpointReader) -> Command | None:
        """Returns the command of the run that saved a checkpoint; None if the checkpoint has none.

        Raises:
            CheckpointError: if the file does not hold a command.
        """
        if not reader.has(FILE):
            return None
        with blame(reader.path / f"{FILE}.json"):
            saved = SavedState(reader.json(FILE))
            words = [SavedState({"word": word}, "words").text("word") for word in saved.items("words")]
            return cls(words, saved.text("folder"))


def words_here() -> list[str]:
    """Returns the program and arguments of this process, with secrets masked."""
    return masked_words([sys.executable, *sys.orig_argv[1:]])
