"""Methods that look like hooks and are never called: hooks of Lightning 1, and misspelt ones."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator

from leyden.callbacks.base import Callback
from leyden.trainer.datamodule import DataModule
from leyden.trainer.module import TrainModule

FORMER = {
    **{f"{stage}_epoch_end": f"on_{stage}_epoch_end" for stage in ("validation", "test")},
    **{f"{stage}_step_end": f"{stage}_step" for stage in ("training", "validation", "test")},
    "training_epoch_end": "on_train_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_keyboard_interrupt": "on_exception",
    "on_init_end": "setup",
}
"""Lightning 1's hooks, and those that do their work today."""


def warn_of_unheard(*owners: object) -> None:
    """Warns once for each method of a module, DataModule or callback that its writer must take for a hook.

    Args:
        *owners: those of a run.
    """
    for owner in owners:
        for name, today in _unheard(owner):
            if name not in FORMER:
                why = f"it is no hook. Did you mean {today}?"
            else:
                why = f"it was a hook of Lightning 1. Write {today}"
                # Those that were given all outputs of an epoch.
                why += "." if name.startswith("on_") else ", and keep what it needs of the steps in a list of your own."
            warnings.warn(f"{type(owner).__name__}.{name} is never called: {why}", stacklevel=2)


def _unheard(owner: object) -> Iterator[tuple[str, str]]:
    """Names that nobody calls, each with the hook that was meant."""
    base = next((base for base in (TrainModule, DataModule, Callback) if isinstance(owner, base)), None)
    if base is None:
        return
    own = [kind for kind in type(owner).__mro__ if issubclass(kind, base) and not kind.__module__.startswith("leyden.")]
    ours = {name for kind in type(owner).__mro__ if kind not in own for name in dir(kind)}
    hooks = [name for name in dir(base) if name.startswith("on_")]
    for name, member in {name: member for kind in own for name, member in vars(kind).items()}.items():
        if name in ours or not callable(member):
            continue
        if name in FORMER:
            yield name, FORMER[name]
        elif name.startswith("on_"):
            close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
            if close:
                yield name, close[0]
