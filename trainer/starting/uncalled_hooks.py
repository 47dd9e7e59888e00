"""Warns of misspelled names: methods that look like hooks but are never called, and monitors that nothing logs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from leyden.callbacks.base import Callback
from leyden.core.errors import nearest
from leyden.core.rank_zero import warn
from leyden.trainer.datamodule import DataModule
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.trainer.run import Run

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
            warn(f"{type(owner).__name__}.{name} is never called: {why}")


def _uncalled_hooks(owner: object) -> Iterator[tuple[str, str]]:
    """Yields the methods that are never called, each with the hook that was probably meant."""
    base = next((base for base in (TrainModule, DataModule, Callback) if isinstance(owner, base)), None)
    if base is None:
        return
    classes = type(owner).__mro__
    user_classes = [kind for kind in classes if issubclass(kind, base) and not kind.__module__.startswith("leyden.")]
    known = {name for kind in classes if kind not in user_classes for name in dir(kind)}
    hooks = [name for name in dir(base) if _is_hook(name)]
    methods = dict.fromkeys(name for kind in user_classes for name, member in vars(kind).items() if callable(member))
    for name in methods:
        meant = None if name in known else FORMER.get(name) or _nearest_hook(name, hooks, methods)
        if meant is not None:
            yield name, meant


def _nearest_hook(name: str, hooks: list[str], methods: Container[str]) -> str | None:
    """Returns the hook whose name a method of this name misspells; None if it is not one."""
    close = difflib.get_close_matches(_with_usual_ending(name), hooks, n=1, cutoff=0.85) if _is_hook(name) else []
    # Beside the hook itself, a method of a similar name is a part of it, such as configure_optimizer.
    return close[0] if close and (name.startswith("on_") or close[0] not in methods) else None


def _is_hook(name: str) -> bool:
    """Returns True for names in the form of hooks, steps and loaders."""
    return name.startswith(("on_", "configure_")) or name.endswith(("_step", "_dataloader", "_dataloaders"))


def _with_usual_ending(name: str) -> str:
    return re.sub(r"_(begin|begins|starts)$", "_start", re.sub(r"_(finish|finished|done|complete|stop)$", "_end", name))


def misspelled(owner: object, method: str) -> str:
    """Returns a hint for an error about a missing method: the user's method that was probably meant to be it."""
    uncalled = [name for name in dir(type(owner)) if not hasattr(TrainModule, name)]
    close = difflib.get_close_matches(method, uncalled, n=1, cutoff=0.8)
    return f" Did you mean it by {close[0]}?" if close else ""


def warn_of_unlogged_monitors(run: Run) -> None:
    """Warns, after the first validation, of monitored names that look misspelled: validation did not log them.

    It cannot be an error: the name may be logged in training, or by later validations. A name that neither is similar
    to a logged one nor looks like validation's causes no warning.
    """
    logged = sorted(run.logs.callback_metrics())
    if not logged or not run.strategy.ranks.is_global_zero:
        return
    owners = [*run.callbacks, *run.schedulers]
    for owner in owners:
        monitor = getattr(owner, "monitor", None)
        if not isinstance(monitor, str) or monitor in logged:
            continue
        if "val" in monitor.lower() or difflib.get_close_matches(monitor, logged, n=1, cutoff=0.85):
            who = type(getattr(owner, "scheduler", owner)).__name__
            warn(
                f"{who} monitors {monitor!r}, which validation did not log before training. {nearest(monitor, logged)}",
            )
