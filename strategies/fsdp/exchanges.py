"""Counts the exchanges of a pass through a sharded module, so that a rank can end a pass that has failed on it.

The other ranks go on to the end of theirs, and wait there for this one: for each group's parameters, and for gradients.
What is exchanged has the same size whatever the batch. So the rank runs the pass again with one sample, and leaves out
the exchanges that it has had its part in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from leyden.strategies.fsdp.restart import parameter_groups


class Exchanges:
    """The exchanges of one pass, of all groups of some modules.

    Args:
        roots: modules that FSDP shards; what is in them is counted too.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._done = self._left_out = 0
        parts = {id(part): part for root in roots for part in root.modules() if isinstance(part, FSDPModule)}
        for part in parts.values():
            for group in parameter_groups(part._get_fsdp_state()):
                gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
                part.set_custom_all_gather(CountedExchange(self, gather))  # type: ignore[arg-type]
                part.set_custom_reduce_scatter(CountedExchange(self, scatter))  # type: ignore[arg-type]

    def begin(self) -> None:
        """Begins a pass."""
        self._done = self._left_out = 0

    def begin_again(self) -> None:
        """Begins the failed pass again: it leaves out what has been exchanged."""
        self._done, self._left_out = 0, self._done

    def is_next_left_out(self) -> bool:
        """True if the next exchange has already happened."""
        return self._done < self._left_out

    def count(self) -> None:
        """Counts an exchange, which happened or was left out."""
        self._done += 1


class CountedExchange:
    """How a group exchanges one thing, counted.

    Args:
        exchanges: counts.
        own: how it is exchanged: torch's way, or the user's own.
    """

    def __init__(self, exchanges: Exchanges, own: Any) -> None:
        self._exchanges = exchanges
        # Of an earlier fit.
        self._own: Any = own._own if isinstance(own, CountedExchange) else own
        self.allocate = self._own.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._exchanges.is_next_left_out():
            # Nothing of this pass counts.
            output_tensor.zero_()
            work = None
        else:
            work = self._own(output_tensor, input_tensor, *args, **kwargs)
        self._exchanges.count()
        return work
