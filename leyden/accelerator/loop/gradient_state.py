"""GradientState: the accumulation window under Accelerate's names, for libraries that read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.accelerator.settings.plugins import GradientAccumulationPlugin
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping
    from leyden.accelerator.prepared.loader import PreparedLoader


class GradientState:
    """A view of the accumulation window and the active loader, as `accelerator.gradient_state`.

    It holds no state of its own, and each Accelerator has its own view.

    Raises:
        ConfigurationError: without an Accelerator; Accelerate keeps one state per process, Leyden does not.

    Example:
        >>> from leyden import Accelerator
        >>> Accelerator(cpu=True, gradient_accumulation_steps=4).gradient_state.num_steps
        4
    """

    def __init__(self, stepping: Stepping | None = None) -> None:
        if stepping is None or isinstance(stepping, GradientAccumulationPlugin):
            raise ConfigurationError(
                "GradientState() is not global in Leyden: each Accelerator has its own. Use accelerator.gradient_state."
            )
        self._stepping = stepping

    @property
    def sync_gradients(self) -> bool:
        """See `Accelerator.sync_gradients`."""
        return self._stepping.window.closes

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Sets `sync_gradients`; transformers' Trainer calls this for each batch."""
        self._stepping.close_with_this_batch(sync_gradients)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation settings."""
        return dict(vars(self._stepping.accumulation))

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
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
        """The prepared loader being iterated, the innermost if nested; None outside any."""
        return self._stepping.active_loader

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True in the loader's last batch."""
        return self._stepping.is_last_batch

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """None, and the prepared loaders being iterated, the innermost last."""
        return [None, *self._stepping.reading]

    initialized = True
    is_xla_gradients_synced = False

    @staticmethod
    def _reset_state() -> None:
        """Does nothing: no state is shared. Scripts and tests written for Accelerate call it between two runs."""

    @property
    def remainder(self) -> int:
        """Real samples in a last global batch filled with duplicates; 0 without duplicates, -1 outside a loader."""
        active = self.active_dataloader
        if active is None:
            return -1
        return sum(real for _, real in active.samples) if active.samples is not None else 0

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, "
            f"num_steps={self.num_steps})"
        )
