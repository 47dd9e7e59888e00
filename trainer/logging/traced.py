"""TracedLogs, what `self.log` of a compiled step records into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from leyden.trainer.logging.logs import Logs


class TracedLogs:
    """Keeps what a compiled step logs in a list, and records it when the step is over.

    torch.compile traces `self.log` with the step that calls it, and compiles again once a number that it has read
    changes. The counters of Logs change with every batch: a step that traced them would be compiled anew each time, and
    left uncompiled after `recompile_limit` times (8). A list that each step finds empty stays the same, and the step
    stays one graph.

    Args:
        logs: what records the values.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._waiting: list[tuple[Any, ...]] = []

    def record(self, name: str, value: Any, options: tuple[Any, ...], enable_graph: bool, *rest: Any) -> None:
        """Records one value, now or when the compiled step is over; see `Logs.record`."""
        if not torch.compiler.is_compiling():
            self._logs.record(name, value, options, enable_graph, *rest)
            return
        if isinstance(value, torch.Tensor):
            # The step may change it in place.
            value = value.clone() if enable_graph else value.detach().clone()
        self._waiting.append((name, value, options, enable_graph, *rest))

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled step, followed by the recording of what it has logged."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            # A step that has failed may have left some.
            self._waiting.clear()
            output = step(*args, **kwargs)
            for values in self._waiting:
                self._logs.record(*values)
            self._waiting.clear()
            return output

        return recorded
