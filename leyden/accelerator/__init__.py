"""The `Accelerator` and its parts, for custom training loops, under Hugging Face Accelerate's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyden.accelerator.accelerator import Accelerator as Accelerator

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    """Imports the Accelerator when it is first used: its parts are modules of this package."""
    if name == "Accelerator":
        from leyden.accelerator.accelerator import Accelerator

        return Accelerator
    from leyden.compat.accelerate.absent import attribute

    return attribute(__name__, name)
