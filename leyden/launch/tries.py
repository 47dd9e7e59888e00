"""Retries with smaller sizes on several ranks: after each failed size, the launcher restarts all ranks.

A rank that gives up a size cannot recover the others, which wait in a collective that nothing can interrupt and hold
wrappers of a process group that is now useless. So the rank exits, and the launcher ends and restarts all of them. A
file records how many sizes have failed.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leyden.launch.processes import temporary

FILE = "LEYDEN_TRIES"
"""Path of the file in which ranks record failed sizes. Set by launchers that restart ranks."""
GIVEN_UP = 75
"""Exit code of a rank that gave up a size (EX_TEMPFAIL, "try again", in sysexits.h)."""


class Tries:
    """A launcher's view of the sizes that its ranks have given up.

    Args:
        path: path of the file that the ranks write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _read(path)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables for the ranks."""
        return {FILE: str(self.path)}

    def again(self) -> bool:
        """Returns True if a size was given up since the last call, so the ranks should be restarted."""
        found = _read(self.path)
        changed, self._seen = found != self._seen, found
        return changed


@contextmanager
def tries() -> Iterator[Tries]:
    """Provides `Tries` for the block, with a temporary file."""
    with temporary("tries") as folder:
        yield Tries(folder / "given-up.json")


def starts_again() -> bool:
    """Returns True if this rank's launcher restarts all ranks when a size is given up."""
    return FILE in os.environ


def given_up(name: str) -> int:
    """Returns how many sizes earlier attempts have given up under a name."""
    return _read(Path(os.environ[FILE])).get(name, 0) if starts_again() else 0


def give_up(name: str, count: int) -> SystemExit:
    """Records a failed size.

    Args:
        name: name of the search, the same on all ranks.
        count: number of failed sizes, this one included.

    Returns:
        The exception to raise. The rank then exits, and the launcher restarts all ranks.
    """
    path = Path(os.environ[FILE])
    found = _read(path)
    # Ranks that give up the same size at the same time write the same content.
    found[name] = max(count, found.get(name, 0))
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text(json.dumps(found))
    own.replace(path)
    return SystemExit(GIVEN_UP)


def _read(path: Path) -> dict[str, int]:
    with suppress(OSError):
        return {str(name): int(count) for name, count in json.loads(path.read_text()).items()}
    return {}


# How often each name has been used. The script sets the order, so it is the same on all ranks and in each attempt.
_numbers: collections.Counter[str] = collections.Counter()


def numbered(name: str) -> str:
    """Numbers the uses of a name within this process.

    Example:
        >>> numbered("train"), numbered("train")
        ('train#1', 'train#2')
    """
    _numbers[name] += 1
    return f"{name}#{_numbers[name]}"
