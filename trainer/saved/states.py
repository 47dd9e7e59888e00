"""What a run saves besides weights: states of the user's code (`UserStates`), and the run's own parts that have state.

Callbacks, the DataModule and `on_save_checkpoint` save state from rank 0, or from each rank (`state_per_rank`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.checkpoint.buffers import Buffers
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.format.bucket import Place
from leyden.checkpoint.format.codec import class_names, known_classes
from leyden.checkpoint.format.errors import blame
from leyden.checkpoint.format.manifest import KEPT
from leyden.checkpoint.format.secrets import masked_values
from leyden.checkpoint.gradients import OpenGradients, UnreducedGradients
from leyden.checkpoint.owners import RankStateOwner, Unclaimed
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.step_states import StepStates
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState
from leyden.data.rng import RandomNumbers
from leyden.trainer.events.progress import Progress
from leyden.trainer.logging.metric_states import MetricStates
from leyden.trainer.saved.identity import plain

if TYPE_CHECKING:
    from leyden.trainer.run import Run


OWN = "own"
"""The entry in a rank's file that holds its own states."""
COMPARED = 4096
"""Tensors up to this number of elements are compared by value; larger ones, such as averages, by dtype and shape."""


class UserStates:
    """The states of the user's code in a checkpoint: callbacks, DataModule, and hooks that save and load."""

    def __init__(self, run: Run) -> None:
        self._module, self._datamodule = run.module, run.datamodule
        self._callbacks, self._hooks = run.callbacks, run.hooks
        self._user: dict[str, Any] | None = None
        self._file: Place = Path("user.json")
        self._saved: list[Unclaimed] = []

    # saving -----------------------------------------------------------------------------------------------------------
    def compose(self, progress: Progress) -> dict[str, Any]:
        """Returns the contents of the files `callbacks` and `user`. Calls `on_save_checkpoint`.

        Raises:
            ConfigurationError: if two callbacks share a `state_key`.
        """
        callbacks: dict[str, Any] = {}
        for callback in self._callbacks:
            state = callback.state_dict()
            if not state:
                continue
            if callback.state_key in callbacks:
                raise ConfigurationError(
                    f"two callbacks have the same state_key {callback.state_key!r}: override state_key in one of them."
                )
            callbacks[callback.state_key] = state
        checkpoint: dict[str, Any] = {"epoch": progress.epoch, "global_step": progress.global_step}
        self._hooks.fire_all("on_save_checkpoint", checkpoint)
        datamodule = {} if self._datamodule is None else self._datamodule.state_dict()
        return {"callbacks": callbacks, "user": {"checkpoint": checkpoint, "datamodule": datamodule}}

    def own(self, composed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the part of the composed states to save per rank: an entry for the rank's file, or an empty dict."""
        keys = {callback.state_key for callback in self._callbacks if callback.state_per_rank}
        found: dict[str, Any] = {
            "callbacks": {key: state for key, state in composed["callbacks"].items() if key in keys}
        }
        if self._datamodule is not None and self._datamodule.state_per_rank:
            found["datamodule"] = composed["user"]["datamodule"]
        return {OWN: found} if any(found.values()) else {}

    def warn_of_difference(self, composed: Mapping[str, Any], ranks: CheckpointRanks) -> None:
        """Warns of states that differ between ranks, because a checkpoint holds only rank 0's. Every rank calls this.

        Python shows a repeated warning once for each line of the user, so fit warns once.
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
        states |= {f"the entry {name!r} that on_save_checkpoint adds": state for name, state in entries}
        digests = ranks.gather({name: _digest(state) for name, state in states.items()})
        differing = [name for name in states if any(others.get(name) != digests[0].get(name) for others in digests)]
        if differing and ranks.rank == 0:
            warn(
                f"the state of {', '.join(differing)} differs between ranks. A checkpoint holds rank 0's state, which "
                "every rank loads on a resume. On a callback or DataModule, state_per_rank = True saves each rank's "
                "own state, and state_per_rank = False silences this warning.",
            )

    def hparams(self) -> dict[str, Any]:
        """Returns the content of the file `hparams`: the hyperparameters of module and DataModule, masked."""
        owners = {"module": self._module, "datamodule": self._datamodule}
        kept = {name: (owner.kept_hparams, owner.hparams) for name, owner in owners.items() if owner is not None}
        saved = {name: values for name, (keeper, hparams) in kept.items() if (values := keeper.saved(hparams))}
        found = {name: masked_values(values) for name, values in saved.items()}
        records = {name: record for name, (keeper, _) in kept.items() if (record := keeper.to_dict())}
        return {**found, **({KEPT: records} if records else {})}

    # restoring --------------------------------------------------------------------------------------------------------
    def classes(self, reader: CheckpointReader, files: Sequence[str], progress: Progress) -> list[Any]:
        """Returns live objects from which the reader resolves the classes named in a checkpoint's files.

        These are the attributes of callbacks, module and DataModule. If they lack one of the classes, the state of the
        run is composed as well, although hooks have not completed it yet.
        """
        wanted = {name for file in files if reader.has(file) for name in class_names(reader.json(file))}
        if not wanted:
            return []
        owners = [*self._callbacks, self._module, self._datamodule]
        live: list[Any] = [vars(owner) for owner in owners if owner is not None]
        unknown = wanted - {cls.__name__ for cls in known_classes(live).values()}
        if not unknown:
            return live
        try:
            return [*live, self.compose(progress)]
        except Exception as error:
            warn(
                f"{reader.path} has values of type {', '.join(sorted(unknown))}, which load as plain values: no "
                f"attribute of a callback or module has that type, and composing the state before the run failed "
                f"({type(error).__name__}: {error}). Set an attribute of that type in __init__.",
            )
            return live

    def read(self, reader: CheckpointReader, like: Any) -> None:
        """Reads the states of `on_save_checkpoint` and the DataModule, and checks that both are dicts."""
        user: dict[str, Any] = reader.state("user", like=like)
        self._file = reader.path / "user.json"
        with blame(self._file):
            saved = SavedState(user)
            saved.nested("checkpoint")
            saved.nested("datamodule", {})
        self._user = user

    def read_callbacks(
        self, reader: CheckpointReader, like: Any, own: Any, own_file: Place, parts: Mapping[str, Tensor] | None
    ) -> bool:
        """Reads the states of callbacks, and has each callback check its own.

        `like` has live objects, to resolve classes from. `own` is this rank's saved entry, from `own_file`; None or {}
        if there is none. `parts` are the module's parameters, or what this rank holds of them.

        Returns:
            True if this rank has its own states in place of rank 0's.
        """
        with blame(own_file, OWN):
            saved = SavedState({} if own is None else own)
            ours = self._under_current_keys(saved.nested("callbacks", {}).entries)
        per_rank = {callback.state_key: callback for callback in self._callbacks if callback.state_per_rank}
        mine = _unclaimed(own_file, ours, per_rank)
        others = {callback.state_key: callback for callback in self._callbacks if callback.state_key not in mine}
        states = reader.state("callbacks", like=like, parameters=parts)
        self._saved = [mine, _unclaimed(reader.path / "callbacks.json", self._under_current_keys(states), others)]
        own_data = self._datamodule is not None and self._datamodule.state_per_rank and "datamodule" in saved
        if own_data and self._user is not None:
            self._user = {**self._user, "datamodule": saved.value("datamodule")}
        return bool(own_data or any(key in mine for key in per_rank))

    def _under_current_keys(self, states: Any) -> Any:
        """Returns saved states by the callbacks' current keys, also those that an earlier version saved."""
        if not isinstance(states, Mapping):
            return states
        found = dict(states)
        for callback in self._callbacks:
            key, former = callback.state_key, callback._former_state_key
            if key not in found and former in found:
                found[key] = found.pop(former)
        return found

    def take_lightning(self, file: Place, loaded: dict[str, Any], callbacks: Mapping[str, Any]) -> None:
        """Uses a `.ckpt` of Lightning in place of `read` and `read_callbacks`.

        All of its content is passed to `on_load_checkpoint`. The callbacks' states are in Leyden's form, by
        `state_key`.
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
        """Loads the states of DataModule and callbacks, after the weights are loaded."""
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
        """Rolls callbacks back to the states that were read, of a step of the fit that saved them.

        The DataModule keeps its state, because a rollback does not repeat data.
        """
        assert self._user is not None
        with blame(self._file, "on_load_checkpoint"):
            self._hooks.load_into_callbacks(self._user["checkpoint"])
        for callback in self._callbacks:
            states = next((states for states in self._saved if callback.state_key in states), None)
            with nullcontext() if states is None else states.blame(callback.state_key):
                callback.go_back({} if states is None else states.get(callback.state_key), step)

    def replaced_weights(self) -> dict[str, Tensor]:
        """Returns the tensors that callbacks save in place of the module's own, by name."""
        return {name: tensor for callback in self._callbacks for name, tensor in callback.saved_weights().items()}

    def end_weights(self) -> None:
        """Calls `weights_loaded` of the callbacks, after weights and states are loaded."""
        for callback in self._callbacks:
            callback.weights_loaded()


def _unclaimed(file: Place, states: Any, callbacks: Mapping[str, Callback]) -> Unclaimed:
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


def step_states_of(run: Run) -> StepStates:
    """Returns the states that a step changes, except the weights: optimizers, schedulers and scaler."""
    schedulers = [config.scheduler for config in run.schedulers]
    return StepStates(run.engine.strategy, run.module, run.engine.optimizers, schedulers)


def rank_owners(run: Run, ranks: CheckpointRanks) -> dict[str, RankStateOwner]:
    """Returns the owners of rank-specific state, except the data position. RNG state is last: others may draw."""
    return {
        "buffers": Buffers(run.module, ranks, partial(run.strategy.uses_buffer, run.module)),
        "logs": run.logs,
        "metrics": MetricStates(run.module),
        "trained": run.trained,
        "gradients": OpenGradients(run.module, run.engine),
        "unreduced": UnreducedGradients(run.module, run.engine),
        "rng": RandomNumbers(),
    }
