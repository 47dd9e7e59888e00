"""Arguments that a strategy takes without naming them: DistributedDataParallel's, and words of other trainers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable


def passed_on(made: object) -> list[str]:
    """The names of arguments that a class takes as `**kwargs`, and checks itself.

    Example:
        >>> from leyden.strategies import DDPStrategy
        >>> "find_unused_parameters" in passed_on(DDPStrategy), passed_on(dict)
        (True, [])
    """
    found: dict[str, None] = {}
    for owner in inspect.getmro(made) if isinstance(made, type) else ():
        if owner.__module__.startswith("leyden.strategies."):
            found |= dict.fromkeys(_of(owner.__name__))
    return list(found)


def _of(strategy: str) -> Iterable[str]:
    # Each is imported already: the class is there.
    if strategy == "DDPStrategy":
        from torch.nn.parallel import DistributedDataParallel

        from leyden.strategies.ddp import OWN

        return set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", *OWN}
    if strategy == "FSDPStrategy":
        from leyden.strategies.fsdp.fsdp1_names import HANDLERS, TAKEN

        return (*HANDLERS, *TAKEN)
    if strategy == "DeepSpeedStrategy":
        from leyden.strategies.deepspeed.config import ARGUMENTS

        return ARGUMENTS
    return ()
