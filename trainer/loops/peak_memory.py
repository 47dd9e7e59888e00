"""The peak of memory in each phase of a step, for the message about a batch that does not fit."""

from __future__ import annotations

import sys

import torch

from leyden.trainer.format.text import size_of


class PeakMemory:
    """Measures phases one after the other: on CUDA what torch has allocated, elsewhere what the process has used.

    Of a process only its peak so far is known, so that a later phase's is never the lower one.

    Args:
        device: whose memory it is.

    Attributes:
        phase: the one that is under way; "" between steps.

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
        """Begins a phase, and ends the one before; "" begins none.

        Args:
            phase: "forward", "backward" or "step".
            measures: take its peak. On CUDA that sets torch's own back, which others may want to read.
        """
        if self._measures:
            self._note()
        self.phase, self._measures = phase, measures and bool(phase)
        if self._measures and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _note(self) -> None:
        self._peaks[self.phase] = max(self._now(), self._peaks.get(self.phase, 0))

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            import resource
        except ImportError:
            # Windows has none.
            return 0
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Kilobytes on Linux, bytes on a Mac.
        return used if sys.platform == "darwin" else used * 1024

    def failed(self) -> str:
        """The peaks of each phase, after the current one has failed."""
        self._note()
        found = ", ".join(f"{phase} {size_of(peak)}" for phase, peak in self._peaks.items() if peak)
        total = ""
        if self._device.type == "cuda":
            total = f" of {size_of(torch.cuda.get_device_properties(self._device).total_memory)}"
        return f"{found}{total}" if found else "not known here"
