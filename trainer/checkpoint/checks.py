"""Before a resume changes anything: each owner is asked whether the state in the checkpoint can be its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from leyden.strategies.errors import StateError
from leyden.strategies.saved_state import SavedState, brief
from leyden.trainer.data.places import check_place
from leyden.trainer.data.rng import check_rng_state
from leyden.trainer.format.errors import blame
from leyden.trainer.logging.metric_states import check_metric_states

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.trainer.events.progress import Progress
    from leyden.trainer.logging.logs import Logs


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


def check_user(file: Path, state: Any) -> None:
    """What hooks of the module, the callbacks and the DataModule have saved is their own; it lies in two dicts.

    Raises:
        CheckpointError: if it does not.
    """
    with blame(file):
        saved = SavedState(state)
        saved.nested("checkpoint")
        saved.nested("datamodule", {})


def check_rank(file: Path, state: Any, logs: Logs, module: nn.Module, progress: Progress | None) -> None:
    """Asks the owners of a rank's state: sums of logged values, metrics, buffers, random numbers and the place in the data.

    Args:
        file: that it was read from.
        state: of one rank.
        logs: of the run.
        module: of the run.
        progress: of the checkpoint, where it is taken back.

    Raises:
        CheckpointError: if one cannot have saved its part; names the file and the entry.
    """
    with blame(file):
        saved = SavedState(state)
        # A checkpoint that was converted from another trainer's has no sums, and may have no random numbers.
        if saved.value("logs") is not None:
            logs.check_state(state["logs"])
            check_metric_states(module.named_modules(), saved.value("metrics"))
        if saved.value("rng") is not None:
            check_rng_state(state["rng"])
        saved.integer("seed", 0, least=0, most=2**64)
        _check_buffers(saved.nested("buffers", {}), module)
        if saved.value("loader") is not None:
            _check_loader(saved.nested("loader"), progress)


def _check_buffers(saved: SavedState, module: nn.Module) -> None:
    here = module.state_dict() if saved.entries else {}
    for name, value in saved.entries.items():
        if name in here and (not isinstance(value, Tensor) or value.shape != here[name].shape):
            raise StateError(saved.path(name), f"is {brief(value)}, and must be a tensor of {tuple(here[name].shape)}")


def _check_loader(saved: SavedState, progress: Progress | None) -> None:
    if saved.value("place") is not None:
        place = saved.nested("place")
        check_place(place)
        batches = place.integer("batches", least=0)
        if progress is not None and batches != progress.batch:
            raise StateError(place.path("batches"), f"is {batches}, and progress.json says {progress.batch}")
    elif progress is not None and progress.phase not in ("epoch_start", "epoch_end"):
        raise StateError(saved.path("place"), f"is missing, and the run stands inside an epoch ({progress.phase})")
    if saved.value("rest") is not None:
        check_place(saved.nested("rest"))
    elif saved.value("place") is None:
        raise StateError(saved.path("rest"), "is missing")
    for number, state in enumerate(saved.items("validation")):
        check_place(SavedState(state, saved.path(f"validation[{number}]")))


# Lists of as many numbers as an optimizer has groups, or of schedulers within one.
_BY_GROUP = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_schedulers"}
_POSITIVE = {"step_size", "T_max", "T_0", "T_i", "total_steps", "total_size", "step_ratio"}
_COUNTERS = {"last_epoch": -1, "_step_count": 0, "num_bad_epochs": 0, "cooldown_counter": 0, "last_batch_iteration": -1}


def check_schedulers(file: Path, state: Any, schedulers: Iterable[Any]) -> None:
    """Compares the saved state of torch's own schedulers with what they hold now: the same kinds, and counters that can be.

    Raises:
        CheckpointError: if one cannot have saved it; names the file and the entry.
    """
    with blame(file):
        saved = SavedState(state)
        saved.nested("precision")
        found = saved.items("schedulers")
        for number, (scheduler, own) in enumerate(zip(schedulers, found, strict=False)):
            entries = SavedState(own, f"schedulers[{number}]")
            # How one of the user's own saves its state is its own matter.
            if type(scheduler).__module__.startswith("torch.optim."):
                for key in entries.entries:
                    if key == "optimizer" or callable(getattr(type(scheduler), str(key), None)):
                        raise StateError(entries.path(key), f"is no state of {type(scheduler).__name__}")
                _check_like(entries, scheduler.state_dict())


def _check_like(saved: SavedState, now: Mapping[str, Any]) -> None:
    for key, present in now.items():
        if key in _COUNTERS:
            saved.integer(key, least=_COUNTERS[key], most=2**53)
        elif key not in saved or present is None:
            continue
        elif isinstance(present, bool):
            saved.flag(key)
        elif isinstance(present, (int, float)):
            saved.number(key, least=1e-300 if key in _POSITIVE else None)
        elif isinstance(present, str):
            saved.text(key)
        elif isinstance(present, (list, tuple)):
            items = saved.items(key)
            if key in _BY_GROUP and len(items) != len(present):
                raise StateError(saved.path(key), f"has {len(items)} entries, and must have {len(present)}")
            for number, item in enumerate(items[: len(present)]):
                _check_like(SavedState({"": item}, saved.path(f"{key}[{number}]")), {"": present[number]})
        elif isinstance(present, dict):
            _check_like(saved.nested(key), present)
