"""Before a resume changes anything: each owner is asked whether the state in the checkpoint can be its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.errors import blame

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback


def check_callbacks(folder: Path, callbacks: Iterable[Callback], saved: Mapping[str, Any]) -> None:
    """Asks each callback about the state that it is going to be given.

    Raises:
        CheckpointError: if one cannot have saved it; names the file, the callback and the entry.
    """
    file = folder / "callbacks.json"
    with blame(file):
        SavedState(saved)
    for callback in callbacks:
        key = callback.state_key
        if key in saved:
            with blame(file, key):
                SavedState(saved[key])
                callback.check_state_dict(saved[key])
