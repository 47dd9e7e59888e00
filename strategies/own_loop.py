"""What a strategy does for a training loop that the user writes, and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class OwnLoop:
    """The part of a strategy that the Accelerator calls and the Trainer does not; most strategies need none of it."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Returns what the loop calls in place of a module that was set up, such as DDP's wrapper."""
        return module

    def release(self) -> None:
        """Drops what `wrap` made, and its hold on the process group."""

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context in which ranks without further batches take part in what the others exchange."""
        return nullcontext()

    def sync_in_backward(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which backward exchanges the gradients of a forward pass that ran without exchange."""
        return nullcontext()

    def clip_each_step(self, value: float) -> None:
        """Clips each step to a norm, as a launch's configuration asks of an engine; other loops clip themselves."""

    def end_turn(self) -> None:
        """Ends one turn of the loop: the next batch is drawn, or an optimizer has stepped without a prepared loader.

        A strategy that collects operations hands them to the device.
        """
