"""The content of a checkpoint's file: text or tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from leyden.checkpoint.format.manifest import FileEntry
from leyden.checkpoint.format.safefile import write_file, write_tensors
from leyden.checkpoint.format.secrets import OWNERS, is_marked
from leyden.checkpoint.format.unflushed import Unflushed


class Content(ABC):
    """The content of one file, before it is written."""

    @abstractmethod
    def write(self, path: Path, unflushed: Unflushed) -> FileEntry:
        """Writes the content to a new file and returns the file's manifest entry.

        Args:
            path: the path of the new file.
            unflushed: takes over the open file, and flushes it later.

        Raises:
            OSError: if the file cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Text(Content):
    """A file of JSON."""

    data: bytes

    def write(self, path: Path, unflushed: Unflushed) -> FileEntry:
        mode = OWNERS if is_marked(self.data.decode()) else 0o666
        return write_file(path, [self.data], unflushed=unflushed, mode=mode)


@dataclass(frozen=True, slots=True)
class Tensors(Content):
    """A safetensors file.

    Attributes:
        tensors: plain dense tensors, by key.
        metadata: strings for the file's header.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] | None = None

    def write(self, path: Path, unflushed: Unflushed) -> FileEntry:
        return write_tensors(path, self.tensors, self.metadata, unflushed)
