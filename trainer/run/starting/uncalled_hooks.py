"""Warns of methods that look like hooks but are never called: hooks of Lightning 1, and misspelled ones."""

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
"""The hooks of Lightning 1, each with its replacement."""


def warn_of_uncalled_hooks(*owners: object) -> None:
    """Warns of each method of a module, DataModule or callback that looks like a hook but is never called.

    Args:
        *owners: the module, DataModule and callbacks of a run.
    """
    for owner in owners:
        for name, replacement in _uncalled_hooks(owner):
            if name not in FORMER:
                why = f"it is not a hook. Did you mean {replacement}?"
            else:
                why = f"it was a hook of Lightning 1. Override {replacement} instead"
                # The former hooks without "on_" received the outputs of all steps.
                why += "." if name.startswith("on_") else ", and collect the outputs of the steps in an attribute."
            warnings.warn(f"{type(owner).__name__}.{name} is never called: {why}", stacklevel=2)


def _uncalled_hooks(owner: object) -> Iterator[tuple[str, str]]:
    """Yields the methods that are never called, each with the hook that was probably meant."""
    base = next((base for base in (TrainModule, DataModule, Callback) if isinstance(owner, base)), None)
    if base is None:
        return
    classes = type(owner).__mro__
    user_classes = [kind for kind in classes if issubclass(kind, base) and not kind.__module__.startswith("leyden.")]
    known = {name for kind in classes if kind not in user_classes for name in dir(kind)}
    hooks = [name for name in dir(base) if name.startswith("on_")]
    methods = dict.fromkeys(name for kind in user_classes for name, member in vars(kind).items() if callable(member))
    for name in methods:
        if name in known:
            continue
        if name in FORMER:
            yield name, FORMER[name]
        elif name.startswith("on_"):
            close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.85)
            if close:
                yield name, close[0]
