"""LocalSGD: ranks step independently and average their weights every few steps."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

    from leyden.accelerator.accelerator import Accelerator


class LocalSGD:
    """Context that replaces gradient synchronization by averaging weights every `local_sgd_steps` steps and at its end.

    Source: Zhang, De Sa, Mitliagkas, Ré: Parallel SGD: When does averaging help? (2016).

    Args:
        accelerator: the loop's Accelerator.
        model: the prepared model.
        local_sgd_steps: steps between averages.
        enabled: False makes the context a no-op.

    Example:
        >>> from leyden import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> with LocalSGD(accelerator=accelerator, model=nn.Linear(1, 1), local_sgd_steps=8) as local_sgd:
        ...     local_sgd.step()
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise ConfigurationError(f"LocalSGD(local_sgd_steps={local_sgd_steps}): use 1 or more.")
        if enabled and (not accelerator.strategy.replicates or accelerator.strategy.drives_one):
            raise ConfigurationError("LocalSGD needs the whole model on every rank. Use strategy='ddp'.")
        self.enabled = enabled and accelerator.num_processes > 1
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._stack.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._stack.close()
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Counts an optimizer step, and averages if due. Call it after each batch; inside a window it is a no-op."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        self.accelerator.wait_for_everyone()
        for parameter in self.model.parameters():
            parameter.copy_(self.accelerator.strategy.ranks.reduce(parameter, reduction="mean"))
