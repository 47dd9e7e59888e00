"""Counts the collectives of a pass through a sharded module, so that a rank whose pass failed can still complete it.

The other ranks continue their passes and block in the collectives that the failed rank has not joined: all-gathers of
parameters and reduce-scatters of gradients. The sizes of these collectives do not depend on the batch. So the failed
rank replays the pass with one sample, and skips the collectives that it joined before the failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from leyden.strategies.fsdp.restart import parameter_groups


class CollectiveCounter:
    """Counts the collectives of one pass, over all FSDP groups of some modules.

    Args:
        roots: modules that FSDP shards; the groups nested in them are counted too.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._joined = self._to_skip = 0
        parts = {id(part): part for root in roots for part in root.modules() if isinstance(part, FSDPModule)}
        for part in parts.values():
            for group in parameter_groups(part._get_fsdp_state()):
                gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
                part.set_custom_all_gather(CountedCollective(self, gather))  # type: ignore[arg-type]
                part.set_custom_reduce_scatter(CountedCollective(self, scatter))  # type: ignore[arg-type]

    def begin(self) -> None:
        """Begins a pass."""
        self._joined = self._to_skip = 0

    def begin_replay(self) -> None:
        """Begins a replay of the failed pass, which skips the collectives that the rank has already joined."""
        self._joined, self._to_skip = 0, self._joined

    def skips_next(self) -> bool:
        """Returns True if the rank joined the next collective before its pass failed."""
        return self._joined < self._to_skip

    def count(self) -> None:
        """Counts a collective that was joined or skipped."""
        self._joined += 1


class CountedCollective:
    """A counted all-gather or reduce-scatter of one FSDP group.

    Args:
        counter: the counter of the pass.
        collective: the callable that runs the collective: torch's, or the user's own.
    """

    def __init__(self, counter: CollectiveCounter, collective: Any) -> None:
        self._counter = counter
        # An earlier fit may have wrapped the collective already.
        self._collective: Any = collective._collective if isinstance(collective, CountedCollective) else collective
        self.allocate = self._collective.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._counter.skips_next():
            # The results of a replay are discarded, so any values do.
            output_tensor.zero_()
            work = None
        else:
            work = self._collective(output_tensor, input_tensor, *args, **kwargs)
        self._counter.count()
        return work
