"""Peak memory in each phase of a step, for the error about a batch that does not fit."""

from __future__ import annotations

import torch

from leyden.core.devices import peak_memory, reset_peak_memory, used_memory
from leyden.core.text import size_of


class PeakMemory:
    """Measures peak memory phase by phase: allocations by torch on a GPU, memory of the process elsewhere.

    A process reports only its overall peak, so elsewhere a later phase never shows a lower peak.

    Args:
        device: the device to measure.

    Attributes:
        phase: the current phase; "" between steps.

    Example:
        >>> peak = PeakMemory(torch.device("cpu"))
        >>> peak.begin("forward", measures=True)
        >>> peak.phase
        'forward'
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}
        self._measures = False
        self.phase = ""

    def begin(self, phase: str, measures: bool) -> None:
        """Ends the current phase and begins the next.

        Args:
            phase: "forward", "backward" or "step"; "" for none.
            measures: whether to measure the peak. On a GPU this resets torch's own peak, which user code may read.
        """
        if self._measures:
            self._record()
        self.phase, self._measures = phase, measures and bool(phase)
        if self._measures:
            reset_peak_memory(self._device)

    def _record(self) -> None:
        self._peaks[self.phase] = max(peak_memory(self._device), self._peaks.get(self.phase, 0))

    def failed(self) -> str:
        """Returns the peaks of all phases as text, after the current phase failed."""
        self._record()
        peaks = ", ".join(f"{phase} {size_of(peak)}" for phase, peak in self._peaks.items() if peak)
        used = used_memory(self._device)
        total = f" of {size_of(used[-1])}" if used is not None else ""
        return f"{peaks}{total}" if peaks else "unknown"
