"""The states of callbacks, DataModule and `on_save_checkpoint`: rank 0's, or each rank's own (`state_per_rank`)."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.trainer.checkpoint.owners import Unclaimed
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.events.progress import Progress
from leyden.trainer.format.codec import class_names, known_classes
from leyden.trainer.format.errors import blame
from leyden.trainer.format.manifest import KEPT
from leyden.trainer.run.saved.identity import plain

if TYPE_CHECKING:
    from leyden.trainer.run.state import Run

OWN = "own"
"""The entry of a rank's file."""
COMPARED = 4096
"""Tensors of so many elements are compared by value; larger ones, such as averages of weights, by dtype and shape."""


class UserStates:
    """What the user's own code keeps in a checkpoint: callbacks, DataModule, and hooks that save and load.

    Args:
        run: whose user's code it is.
    """

    def __init__(self, run: Run) -> None:
        self._module, self._datamodule = run.module, run.datamodule
        self._callbacks, self._hooks = run.callbacks, run.hooks
        self._user: dict[str, Any] | None = None
        self._file = Path("user.json")
        self._saved: list[Unclaimed] = []

    # saving -----------------------------------------------------------------------------------------------------------
    def compose(self, progress: Progress) -> dict[str, Any]:
        """The states as the files `callbacks` and `user` hold them; calls `on_save_checkpoint`."""
        callbacks: dict[str, Any] = {}
        for callback in self._callbacks:
            state = callback.state_dict()
            if not state:
                continue
            if callback.state_key in callbacks:
                raise ConfigurationError(
                    f"two callbacks have the state_key {callback.state_key!r}: override state_key so that they differ."
                )
            callbacks[callback.state_key] = state
        checkpoint: dict[str, Any] = {"epoch": progress.epoch, "global_step": progress.global_step}
        self._hooks.fire_all("on_save_checkpoint", checkpoint)
        datamodule = {} if self._datamodule is None else self._datamodule.state_dict()
        return {"callbacks": callbacks, "user": {"checkpoint": checkpoint, "datamodule": datamodule}}

    def own(self, composed: Mapping[str, Any]) -> dict[str, Any]:
        """Of what `compose` returned, the part that each rank keeps for itself: an entry of its file, or none."""
        keys = {callback.state_key for callback in self._callbacks if callback.state_per_rank}
        found: dict[str, Any] = {
            "callbacks": {key: state for key, state in composed["callbacks"].items() if key in keys}
        }
        if self._datamodule is not None and self._datamodule.state_per_rank:
            found["datamodule"] = composed["user"]["datamodule"]
        return {OWN: found} if any(found.values()) else {}

    def warn_of_difference(self, composed: Mapping[str, Any], ranks: CheckpointRanks) -> None:
        """Warns of states that differ between ranks, as a checkpoint holds rank 0's alone. Every rank calls it.

        Python shows a warning of the same words once, so a run warns once.
        """
        if ranks.size == 1:
            return
        states = {
            f"the callback {callback.state_key}": composed["callbacks"].get(callback.state_key)
            for callback in self._callbacks
            if callback.state_per_rank is None
        }
        if self._datamodule is not None and self._datamodule.state_per_rank is None:
            states[f"the DataModule {type(self._datamodule).__name__}"] = composed["user"]["datamodule"]
        entries = composed["user"]["checkpoint"].items()
        states |= {f"what on_save_checkpoint puts under {name!r}": state for name, state in entries}
        digests = ranks.gather({name: _digest(state) for name, state in states.items()})
        differing = [name for name in states if any(others.get(name) != digests[0].get(name) for others in digests)]
        if differing and ranks.rank == 0:
            warnings.warn(
                f"the state of {', '.join(differing)} differs between ranks. A checkpoint holds rank 0's, and a resume "
                "hands it to every rank. For a callback or DataModule, state_per_rank = True keeps each rank's own, "
                "and False ends this warning.",
                stacklevel=2,
            )

    def hparams(self) -> dict[str, Any]:
        """The hyperparameters of module and DataModule, as the file `hparams` holds them; empty without any."""
        owners = {"module": self._module, "datamodule": self._datamodule}
        kept = {name: (owner.kept_hparams, owner.hparams) for name, owner in owners.items() if owner is not None}
        found = {name: values for name, (keeper, hparams) in kept.items() if (values := keeper.saved(hparams))}
        records = {name: record for name, (keeper, _) in kept.items() if (record := keeper.to_dict())}
        return {**found, **({KEPT: records} if records else {})}

    # restoring --------------------------------------------------------------------------------------------------------
    def classes(self, reader: CheckpointReader, files: Sequence[str], progress: Progress) -> list[Any]:
        """Live state from which the reader takes the classes of values in a checkpoint's files.

        These are the attributes of callbacks, module and DataModule. Only for a class that is in none of them the state
        of the run is composed, before any hook of the run has made it.
        """
        wanted = {name for file in files if reader.has(file) for name in class_names(reader.json(file))}
        if not wanted:
            return []
        owners = [*self._callbacks, self._module, self._datamodule]
        live: list[Any] = [vars(owner) for owner in owners if owner is not None]
        unknown = wanted - {cls.__name__ for cls in known_classes(live, None).values()}
        if not unknown:
            return live
        try:
            return [*live, self.compose(progress)]
        except Exception as error:
            warnings.warn(
                f"{reader.path} has values of {', '.join(sorted(unknown))}, which come back as plain ones: no "
                f"attribute of a callback or module is of that class, and the state could not be composed before the "
                f"run ({type(error).__name__}: {error}). Have an attribute of that class from the start.",
                stacklevel=2,
            )
            return live

    def read(self, reader: CheckpointReader, like: Any) -> None:
        """Reads the states of `on_save_checkpoint` and the DataModule, and checks that they are two dicts."""
        user: dict[str, Any] = reader.state("user", like=like)
        self._file = reader.path / "user.json"
        with blame(self._file):
            saved = SavedState(user)
            saved.nested("checkpoint")
            saved.nested("datamodule", {})
        self._user = user

    def read_callbacks(self, reader: CheckpointReader, like: Any, own: Any, own_file: Path) -> bool:
        """Reads the states of callbacks, and lets each check its own.

        Args:
            reader: of the checkpoint.
            like: live state, for the classes in it.
            own: what `own` returned for this rank; None or {} where there is none.
            own_file: which it was read from.

        Returns:
            True if this rank has states of its own in place of rank 0's.
        """
        with blame(own_file, OWN):
            saved = SavedState({} if own is None else own)
            ours = saved.nested("callbacks", {}).entries
        per_rank = {callback.state_key: callback for callback in self._callbacks if callback.state_per_rank}
        mine = _unclaimed(own_file, ours, per_rank)
        others = {callback.state_key: callback for callback in self._callbacks if callback.state_key not in mine}
        states = reader.state("callbacks", like=like, parameters=dict(self._module.named_parameters()))
        self._saved = [mine, _unclaimed(reader.path / "callbacks.json", states, others)]
        splits = self._datamodule is not None and self._datamodule.state_per_rank and "datamodule" in saved
        if splits and self._user is not None:
            self._user = {**self._user, "datamodule": saved.value("datamodule")}
        return bool(splits or any(key in mine for key in per_rank))

    def take_lightning(self, file: Path, loaded: dict[str, Any], callbacks: Mapping[str, Any]) -> None:
        """Takes a `.ckpt` of Lightning for what `read` and `read_callbacks` read.

        Args:
            file: the checkpoint.
            loaded: what it holds, which is all handed to `on_load_checkpoint`.
            callbacks: states by `state_key`, as callbacks here save them.
        """
        data = {} if self._datamodule is None else loaded.get(type(self._datamodule).__qualname__)
        self._file, self._user = file, {"checkpoint": loaded, "datamodule": data or {}}
        self._saved = [_unclaimed(file, callbacks, {one.state_key: one for one in self._callbacks})]

    def load_into_module(self) -> None:
        """Calls the module's `on_load_checkpoint`, before the weights are loaded."""
        if self._user is not None:
            with blame(self._file, "on_load_checkpoint"):
                self._hooks.load_into_module(self._user["checkpoint"])

    def load(self) -> None:
        """Hands DataModule and callbacks their states, after the weights are loaded."""
        if self._user is None:
            return
        if self._datamodule is not None and self._user.get("datamodule"):
            with blame(self._file, "datamodule"):
                self._datamodule.load_state_dict(self._user["datamodule"])
        with blame(self._file, "on_load_checkpoint"):
            self._hooks.load_into_callbacks(self._user["checkpoint"])
        for callback in self._callbacks:
            for states in self._saved:
                states.load(callback.state_key)

    def go_back(self, step: int) -> None:
        """Has callbacks go back to what was read, within the fit that saved it. The DataModule stays: it is the data's.

        Args:
            step: of the checkpoint.
        """
        assert self._user is not None
        with blame(self._file, "on_load_checkpoint"):
            self._hooks.load_into_callbacks(self._user["checkpoint"])
        for callback in self._callbacks:
            states = next((states for states in self._saved if callback.state_key in states), None)
            with nullcontext() if states is None else states.blame(callback.state_key):
                callback.go_back({} if states is None else states.get(callback.state_key), step)

    def replaced_weights(self) -> dict[str, Tensor]:
        """What callbacks have a checkpoint hold in place of the module's own tensors, by name."""
        return {name: tensor for callback in self._callbacks for name, tensor in callback.saved_weights().items()}

    def end_weights(self) -> None:
        """Calls the hook of callbacks that follows the loading of weights and states."""
        for callback in self._callbacks:
            callback.weights_loaded()


def _unclaimed(file: Path, states: Any, callbacks: Mapping[str, Callback]) -> Unclaimed:
    with blame(file):
        saved = SavedState(states)
        for key in callbacks:
            saved.nested(key, {})
    return Unclaimed(file, states, callbacks)


def _digest(state: Any) -> str:
    return hashlib.sha256(json.dumps(plain(state, of_tensor=_compared), sort_keys=True).encode()).hexdigest()


def _compared(tensor: Tensor) -> Any:
    values = plain(tensor) if tensor.numel() <= COMPARED else None
    return [str(tensor.dtype), list(tensor.shape), values]
