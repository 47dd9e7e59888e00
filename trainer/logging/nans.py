"""A loss that is nan: seen in values that were read back for a logger or a bar anyway, and told at the run's end."""

from __future__ import annotations

import warnings


class Nans:
    """The losses of a run that are nan, each with the step since which it is."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def note(self, numbers: dict[str, float], step: int) -> dict[str, float]:
        """Looks at values that were read back, and returns them."""
        for name, number in numbers.items():
            if number == number:
                self._since.pop(name, None)
            elif "loss" in name.lower():
                self._since.setdefault(name, step)
        return numbers

    def warn(self) -> None:
        """At the end of a fit: warns of losses that were nan until then."""
        if self._since:
            since = ", ".join(f"{name!r} since step {step}" for name, step in self._since.items())
            warnings.warn(
                f"the loss was nan until the run's end ({since}), and so may the weights be: train again with detect_anomaly=True, which "
                "names the batch and the operation, with a lower learning rate, or with gradient_clip_val=1.0.",
                stacklevel=2,
            )
