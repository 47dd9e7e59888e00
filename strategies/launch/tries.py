"""Trying sizes until one fits, on several ranks: all of them are started again for the next size.

A rank that gives up a size exits, but cannot end the others: they wait in a collective that nothing can interrupt, and
what they have wrapped for the process group is useless afterwards. So whoever started the ranks ends them and starts
them again. A file says how many sizes were given up.
"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leyden.strategies.launch.processes import temporary

FILE = "LEYDEN_TRIES"
"""Where ranks write down what they have given up; set by a launcher that starts them again."""
GIVEN_UP = 75
"""Exit status of a rank that has given a try up ("try again", in sysexits.h)."""


class Tries:
    """The tries that the ranks of a launch have given up so far, for their launcher.

    Args:
        path: of the file that they write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _read(path)

    def variables(self) -> dict[str, str]:
        """The environment variables of the ranks."""
        return {FILE: str(self.path)}

    def again(self) -> bool:
        """True if ranks that have ended since the last call gave something up, so that they are to be started again."""
        found = _read(self.path)
        changed, self._seen = found != self._seen, found
        return changed


@contextmanager
def tries() -> Iterator[Tries]:
    """Tries whose file lasts as long as the block."""
    with temporary("tries") as folder:
        yield Tries(folder / "given-up.json")


def starts_again() -> bool:
    """True if the starter of this rank starts all ranks again when a try is given up."""
    return FILE in os.environ


def given_up(name: str) -> int:
    """How many sizes were given up under this name by ranks before this one."""
    return _read(Path(os.environ[FILE])).get(name, 0) if starts_again() else 0


def give_up(name: str, count: int) -> SystemExit:
    """Writes down that so many sizes are given up.

    Args:
        name: the same on all ranks.
        count: sizes that were given up, with this one.

    Returns:
        The exception with which the rank leaves, so that all are started again.
    """
    path = Path(os.environ[FILE])
    found = _read(path)
    # Ranks that give the same size up at the same time write the same.
    found[name] = max(count, found.get(name, 0))
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text(json.dumps(found))
    own.replace(path)
    return SystemExit(GIVEN_UP)


def _read(path: Path) -> dict[str, int]:
    with suppress(OSError):
        return {str(name): int(count) for name, count in json.loads(path.read_text()).items()}
    return {}


# Of what is tried several times by one name, in the order of the script, which is the same on all ranks and each time
# they start.
_numbers: collections.Counter[str] = collections.Counter()


def numbered(name: str) -> str:
    """The name, with its number among those that this process has tried by that name.

    Example:
        >>> numbered("train"), numbered("train")
        ('train#1', 'train#2')
    """
    _numbers[name] += 1
    return f"{name}#{_numbers[name]}"
