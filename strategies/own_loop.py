"""OwnLoop: the part of a strategy that only custom training loops need."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class OwnLoop:
    """The part of a strategy that only the Accelerator calls, not the Trainer. Most strategies keep these no-ops."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Returns the wrapper that the loop calls in place of a module, such as DDP's."""
        return module

    def release(self) -> None:
        """Drops the wrappers, and with them their references to the process group."""

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context in which ranks that are out of batches still take part in the others' collectives."""
        return nullcontext()

    def sync_in_backward(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which backward exchanges gradients although the forward pass ran without sync."""
        return nullcontext()

    def clip_each_step(self, value: float) -> None:
        """Sets the norm that an engine clips each step to. Only a launch's configuration can ask for it."""

    def end_turn(self) -> None:
        """Marks the end of one iteration, so that a strategy that records operations can submit them to the device.

        Called before the next batch is drawn, or after an optimizer step if no loader is prepared.
        """
