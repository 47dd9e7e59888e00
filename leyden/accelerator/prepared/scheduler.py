"""PreparedScheduler: the scheduler that `prepare` returns, which counts optimizer steps on any number of ranks."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from leyden.core.rank_zero import warn
from leyden.trainer.engine.prepared import PreparedOptimizer, unchanged

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping


class PreparedScheduler:
    """A scheduler that steps once per optimizer step, on any number of ranks; steps that a scaler skipped do not count.

    Without `with_optimizer`, it steps whenever `step` is called.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, scheduler: Any, optimizers: Sequence[PreparedOptimizer], stepping: Stepping, with_optimizer: bool
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._stepping = stepping
        self._with_optimizer = with_optimizer
        self._warned_of_end = False

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in vars(self):
            # While the object is being copied, it has no attributes yet.
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedScheduler:
        # The run's engine is shared with the copy.
        scheduler, optimizers = copy.deepcopy((self.scheduler, self.optimizers), memo)
        return PreparedScheduler(scheduler, optimizers, self._stepping, self._with_optimizer)

    def __reduce__(self) -> Any:
        """Pickles the underlying scheduler, since the engine belongs to this process."""
        return unchanged, (self.scheduler,)

    def __copy__(self) -> PreparedScheduler:
        return PreparedScheduler(self.scheduler, self.optimizers, self._stepping, self._with_optimizer)

    def __repr__(self) -> str:
        return repr(self.scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps if the window closes, no optimizer skipped its step, and `total_steps` is not reached."""
        if self._with_optimizer:
            stepping = self._stepping
            if not stepping.window.closes:
                if stepping.accumulation.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                    # torch's check of the call order counts the scheduler's calls.
                    self.scheduler._step_count += 1
                return
            if any(optimizer.step_was_skipped for optimizer in self.optimizers):
                return
        total = getattr(self.scheduler, "total_steps", None)
        if total is not None and self.scheduler.last_epoch >= total:
            self._warn_of_end(total)
        else:
            self.scheduler.step(*args, **kwargs)

    def _warn_of_end(self, total: int) -> None:
        """Warns once. torch's own scheduler would raise, even if the run's length was merely rounded down."""
        if not self._warned_of_end:
            self._warned_of_end = True
            warn(
                f"{type(self.scheduler).__name__} has reached its total_steps={total}; the learning rate stays "
                "constant from here on."
            )


def lengths_of(scheduler: Any) -> set[int]:
    """Returns the numbers of steps that a scheduler was made with, as far as they can be seen; other integers too.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.ones(1)], lr=0.1)
        >>> lengths_of(torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=100))
        {100}
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        # Its patience counts calls.
        return set()
    numbers = [*getattr(scheduler, "milestones", ())]
    numbers += [value for name, value in vars(scheduler).items() if not name.startswith("_") and name != "last_epoch"]
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, functools.partial):
            # As transformers' get_scheduler makes them.
            numbers += [*function.args, *function.keywords.values()]
        elif inspect.isfunction(function):
            seen = inspect.getclosurevars(function)
            numbers += [*seen.nonlocals.values(), *seen.globals.values()]
    parts = [lengths_of(part) for part in getattr(scheduler, "_schedulers", ())]
    return {number for number in numbers if type(number) is int and number > 0}.union(*parts)
