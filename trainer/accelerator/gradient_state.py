"""GradientState: the accumulation window under Accelerate's names, for libraries that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.strategies.errors import ConfigurationError
from leyden.trainer.accelerator.plugins import GradientAccumulationPlugin

if TYPE_CHECKING:
    from leyden.trainer.accelerator.loader import PreparedLoader
    from leyden.trainer.accelerator.stepping import Stepping


class GradientState:
    """The accumulation window and the loader that is being read, as `accelerator.gradient_state`.

    It holds nothing of its own: two Accelerators have two of them.

    Args:
        stepping: has the window.

    Raises:
        ConfigurationError: without an Accelerator; Accelerate keeps one state for the whole process, Leyden does not.

    Example:
        >>> from leyden import Accelerator
        >>> Accelerator(cpu=True, gradient_accumulation_steps=4).gradient_state.num_steps
        4
    """

    def __init__(self, stepping: Stepping | None = None) -> None:
        if stepping is None or isinstance(stepping, GradientAccumulationPlugin):
            raise ConfigurationError(
                "GradientState() has no state of the whole process to return: read accelerator.gradient_state of the "
                "Accelerator that trains."
            )
        self._stepping = stepping

    @property
    def sync_gradients(self) -> bool:
        """See `Accelerator.sync_gradients`."""
        return self._stepping.window.closes

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """transformers' Trainer calls this for each batch."""
        self._stepping.close_with_this_batch(sync_gradients)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings of the accumulation."""
        return dict(vars(self._stepping.accumulation))

    @property
    def num_steps(self) -> int:
        """Batches of one optimizer step."""
        return self._stepping.accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self._stepping.accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """See `GradientAccumulationPlugin`."""
        return self._stepping.accumulation.sync_with_dataloader

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The prepared loader that is read now, the innermost of several."""
        return self._stepping.active_loader

    @property
    def in_dataloader(self) -> bool:
        """A prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """The current batch is the loader's last one."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of a filled last global batch that are no repeats; 0 where none are repeats, -1 outside a loader."""
        active = self.active_dataloader
        if active is None:
            return -1
        return sum(true for _, true in active.samples) if active.samples is not None else 0

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, "
            f"num_steps={self.num_steps})"
        )
