"""Numbers: what the last stage of a pipeline logs in a step, on its way to the other stages."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from leyden.strategies.batch import widest_float
from leyden.strategies.outputs import SharedNumbers

NUMBERS = 63
"""The most numbers of a message. Where there are more, they take the slower way, through the store."""
IN_FLIGHT = 4
"""So many messages may be unread on a rank."""

Described: TypeAlias = "list[Any]"


class Numbers:
    """Brings numbers from the last stage to every rank of a pipeline. No rank waits before it reads them.

    Each batch has one message, of one size. It begins with the number of its description, which a rank fetches from
    the store of the process group when it reads that number for the first time.

    Args:
        group: the ranks of the pipeline.
        source: the rank in it that holds the last stage.
        device: of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self._is_source = dist.get_rank(group) == source
        self._dtype = widest_float(device)
        store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"leyden numbers {group.group_name}", store)  # type: ignore[attr-defined]
        self._descriptions: list[Described] = [[]]
        self._versions: dict[Any, int] = {}
        """On the last stage, the place of each description in the list."""
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._stored: deque[str] = deque()
        self._sent = 0
        self._empty = torch.zeros(1 + NUMBERS, dtype=self._dtype, device=device)

    def send(self, described: Described, numbers: Sequence[Tensor | float]) -> Callable[[], SharedNumbers] | None:
        """Sends or receives the message of a batch. Every rank of the pipeline calls it, for each batch.

        Args:
            described: what the numbers are, as JSON can hold it; only the last stage's counts.
            numbers: one for each entry of the description.

        Returns:
            A function that waits for the message and returns the last stage's description and numbers; None there.
        """
        message = self._message(described, numbers) if self._is_source else torch.empty_like(self._empty)
        work = dist.broadcast(message, group=self._group, group_src=self._source, async_op=True)
        if not self._is_source:
            return lambda: self._read(work, message)
        self._in_flight.append((work, message))
        if len(self._in_flight) > IN_FLIGHT:
            self._in_flight.popleft()[0].wait()
        return None

    def _message(self, described: Described, numbers: Sequence[Tensor | float]) -> Tensor:
        if not described:
            return self._empty
        version = self._versions.setdefault(tuple(map(tuple, described)), len(self._versions) + 1)
        if version == len(self._descriptions):
            self._store.set(f"{version}", json.dumps(described))
            self._descriptions.append(described)
        if len(numbers) > NUMBERS:
            numbers = [self._keep([float(number) for number in numbers])]
        message = torch.zeros_like(self._empty)
        message[0] = version
        for place, number in enumerate(numbers, start=1):
            message[place] = number
        return message

    def _keep(self, numbers: list[float]) -> float:
        """Puts numbers into the store, for as long as they may be unread; returns under which number."""
        self._sent += 1
        self._store.set(f"of batch {self._sent}", json.dumps(numbers))
        self._stored.append(f"of batch {self._sent}")
        if len(self._stored) > 2 * IN_FLIGHT:
            self._store.delete_key(self._stored.popleft())
        return float(self._sent)

    def _read(self, work: Any, message: Tensor) -> SharedNumbers:
        work.wait()
        version, *numbers = message.tolist()
        while len(self._descriptions) <= version:
            self._descriptions.append(json.loads(self._store.get(f"{len(self._descriptions)}")))
        described = self._descriptions[int(version)]
        if len(described) > NUMBERS:
            numbers = json.loads(self._store.get(f"of batch {int(numbers[0])}"))
        return described, numbers[: len(described)]
