"""Workers of a DataLoader that is freed in a reference cycle: they are shut down at once, rather than after five seconds each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

# A Trainer and its module refer to each other, so what they read ends by garbage collection. That closes the queues to the
# workers before the iterator tells the workers by them to go, and then waits for each of them (torch 2.13, Python 3.11, tried).
# The queues of an iterator that is still referred to from here outlive it.
_queues: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def iterator_of(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's iterator.

    Example:
        >>> list(iterator_of([1, 2]))
        [1, 2]
    """
    iterator = iter(loader)
    to_workers = getattr(iterator, "_index_queues", None)
    if to_workers is not None:
        _queues[iterator] = to_workers, iterator._worker_result_queue  # type: ignore[attr-defined]
    return iterator
