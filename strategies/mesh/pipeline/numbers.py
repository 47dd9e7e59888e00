"""NumberBroadcast: sends the numbers that the last stage of a pipeline logs to the other stages."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from leyden.core.devices import copies_aside, start_reading
from leyden.core.tree import widest_float
from leyden.strategies.outputs import SharedNumbers

NUMBERS = 63
"""Largest number of values in a message. More values take a slower path, through the process group's store."""
IN_FLIGHT = 4
"""Number of messages that may be unread on a rank."""

Description: TypeAlias = "list[Any]"


class NumberBroadcast:
    """Broadcasts numbers from the last stage to every rank of a pipeline. A rank waits only when it reads them.

    Each batch has one message of fixed size. It begins with the version of its description. A rank fetches a
    description from the process group's store when it reads that version for the first time.

    Args:
        group: the ranks of the pipeline.
        source: the rank in the group that holds the last stage.
        device: the device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._is_source = dist.get_rank(group) == source
        self._dtype = widest_float(device)
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"leyden numbers {group.group_name}", store)  # type: ignore[attr-defined]
        self._descriptions: list[Description] = [[]]
        """Descriptions by version. Version 0 is empty."""
        self._versions: dict[Any, int] = {}
        """Description → version, on the last stage only."""
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._stored: deque[str] = deque()
        """Keys of oversized messages in the store, oldest first."""
        self._stored_count = 0
        self._empty = torch.zeros(1 + NUMBERS, dtype=self._dtype, device=device)

    def send(self, description: Description, numbers: Sequence[Tensor | float]) -> Callable[[], SharedNumbers] | None:
        """Sends the message of a batch, or starts to receive it. Every rank must call it once per batch.

        Args:
            description: JSON-serializable entries, one for each number; read on the last stage only.
            numbers: the numbers; read on the last stage only.

        Returns:
            A function that waits for the message and returns its description and numbers; None on the last stage.
        """
        message = self._message(description, numbers) if self._is_source else torch.empty_like(self._empty)
        work = dist.broadcast(message, group=self._group, group_src=self._source, async_op=True)
        if not self._is_source:
            return partial(self._read, self._arriving(work, message))
        self._in_flight.append((work, message))
        if len(self._in_flight) > IN_FLIGHT:
            self._in_flight.popleft()[0].wait()
        return None

    def _arriving(self, work: Any, message: Tensor) -> Callable[[], list[float]]:
        """Returns a function that waits for a message and returns its numbers."""
        if copies_aside(self._device):
            # The device's stream waits for the message, the host does not. Copied only when it is read, a message would
            # wait for the batches queued since.
            work.wait()
            return start_reading(message)

        def read() -> list[float]:
            work.wait()
            return message.tolist()  # type: ignore[no-any-return]

        return read

    def _message(self, description: Description, numbers: Sequence[Tensor | float]) -> Tensor:
        if not description:
            return self._empty
        version = self._versions.setdefault(tuple(map(tuple, description)), len(self._versions) + 1)
        if version == len(self._descriptions):
            self._store.set(f"{version}", json.dumps(description))
            self._descriptions.append(description)
        if len(numbers) > NUMBERS:
            numbers = [self._put_into_store([float(number) for number in numbers])]
        message = torch.zeros_like(self._empty)
        message[0] = version
        for i, number in enumerate(numbers, start=1):
            # An assignment would copy a tensor of the CPU, and wait.
            message[i].fill_(number)
        return message

    def _put_into_store(self, numbers: list[float]) -> float:
        """Stores numbers until every rank must have read them; returns the index of their key."""
        self._stored_count += 1
        key = _key(self._stored_count)
        self._store.set(key, json.dumps(numbers))
        self._stored.append(key)
        if len(self._stored) > 2 * IN_FLIGHT:
            self._store.delete_key(self._stored.popleft())
        return float(self._stored_count)

    def _read(self, arrived: Callable[[], list[float]]) -> SharedNumbers:
        version, *numbers = arrived()
        while len(self._descriptions) <= version:
            self._descriptions.append(json.loads(self._store.get(f"{len(self._descriptions)}")))
        description = self._descriptions[int(version)]
        if len(description) > NUMBERS:
            numbers = json.loads(self._store.get(_key(int(numbers[0]))))
        return description, numbers[: len(description)]


def _key(index: int) -> str:
    return f"numbers {index}"
