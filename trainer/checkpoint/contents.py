"""What goes into a file of a checkpoint: text, or tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from leyden.trainer.format.manifest import FileEntry
from leyden.trainer.format.safefile import write_file, write_tensors
from leyden.trainer.format.unflushed import Unflushed


class Content(ABC):
    """What one file will hold."""

    @abstractmethod
    def write(self, path: Path, unflushed: Unflushed) -> FileEntry:
        """Writes it to a new file, and returns the file's entry in the manifest.

        Args:
            path: of a file that does not exist yet.
            unflushed: takes over the file, and flushes it later.

        Raises:
            OSError: if it cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Text(Content):
    """A file of JSON."""

    data: bytes

    def write(self, path: Path, unflushed: Unflushed) -> FileEntry:
        return write_file(path, [self.data], unflushed=unflushed)


@dataclass(frozen=True, slots=True)
class Tensors(Content):
    """A safetensors file.

    Attributes:
        tensors: plain dense tensors, by key.
        metadata: strings for the header.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None = None

    def write(self, path: Path, unflushed: Unflushed) -> FileEntry:
        return write_tensors(path, self.tensors, self.metadata, unflushed)
