"""TracedLogs, the recorder behind `self.log` in compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from leyden.trainer.logging.logs import Logs


class TracedLogs:
    """Buffers the values that a compiled step logs, and records them once the step has ended.

    torch.compile traces `self.log` together with the step that calls it, and recompiles when a number that it has read
    changes. The counters of Logs change with every batch, so a step that traced them would recompile each time, and run
    uncompiled after `recompile_limit` (8) recompilations. The buffer is empty at the start of every step, so the trace
    stays valid and the step remains one graph.

    Args:
        logs: the Logs that record the values.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._buffer: list[tuple[Any, ...]] = []

    def record(self, name: str, value: Any, options: tuple[Any, ...], enable_graph: bool, *rest: Any) -> None:
        """Records one value: immediately, or after the step if it is compiled. See `Logs.record`."""
        if not torch.compiler.is_compiling():
            self._logs.record(name, value, options, enable_graph, *rest)
            return
        if isinstance(value, torch.Tensor):
            # Copy the value, since the step may change it in place.
            value = value.clone() if enable_graph else value.detach().clone()
        self._buffer.append((name, value, options, enable_graph, *rest))

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs the compiled step and then records the values that it logged."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            # A failed step may have left values behind.
            self._buffer.clear()
            output = step(*args, **kwargs)
            for values in self._buffer:
                self._logs.record(*values)
            self._buffer.clear()
            return output

        return recorded
