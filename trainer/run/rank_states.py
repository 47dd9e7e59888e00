"""State of callbacks and DataModule on several ranks: rank 0's for all, or each rank its own where the owner says `state_per_rank`."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.regrouped import saved_ranks
from leyden.trainer.format.errors import blame
from leyden.trainer.run.identity import plain

if TYPE_CHECKING:
    from leyden.trainer.checkpoint.peers import Peers
    from leyden.trainer.trainer import Trainer

OWN = "own"
"""The entry of a rank's file."""
COMPARED = 4096
"""Tensors of so many elements are compared by value; larger ones, such as averages of weights, by dtype and shape alone."""


def own_states(trainer: Trainer, composed: Mapping[str, Any]) -> dict[str, Any]:
    """What of the composed state each rank keeps for itself: an entry for its file, or none."""
    keys = {callback.state_key for callback in trainer.callbacks if callback.state_per_rank}
    found: dict[str, Any] = {
        "callbacks": {key: composed["callbacks"][key] for key in composed["callbacks"] if key in keys}
    }
    if trainer.datamodule is not None and trainer.datamodule.state_per_rank:
        found["datamodule"] = composed["user"]["datamodule"]
    return {OWN: found} if any(found.values()) else {}


def with_own(
    trainer: Trainer, reader: CheckpointReader, rank: Mapping[str, Any], callbacks: dict[str, Any], user: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of callbacks and user in which this rank's own have taken the place of rank 0's.

    Args:
        trainer: whose callbacks and DataModule say what is per rank.
        reader: of the checkpoint.
        rank: this rank's part of it; rank 0's, if it was saved by another number of ranks.
        callbacks: rank 0's.
        user: rank 0's.
    """
    own, ours = rank.get(OWN, {}), dict[str, Any]()
    with blame(reader.path / f"rank-{trainer.strategy.data_rank}.json", OWN):
        states = SavedState(own).nested("callbacks", {})
        for callback in trainer.callbacks:
            key = callback.state_key
            if callback.state_per_rank and key in states:
                ours[key] = states.nested(key).entries
                callback.check_state_dict(ours[key])
    splits = trainer.datamodule is not None and trainer.datamodule.state_per_rank and "datamodule" in own
    if (ours or splits) and trainer.is_global_zero and saved_ranks(reader) != trainer.strategy.data_size:
        warnings.warn(
            f"{reader.path} was saved by {saved_ranks(reader)} rank(s), and {trainer.strategy.data_size} resume it: what callbacks "
            "or a DataModule keep per rank is rank 0's on all of them.",
            stacklevel=2,
        )
    return {**callbacks, **ours}, {**user, "datamodule": own["datamodule"]} if splits else user


def warn_of_difference(trainer: Trainer, composed: Mapping[str, Any], ranks: Peers) -> None:
    """Says whose state differs between ranks, as a checkpoint holds rank 0's alone. Every rank calls it.

    Python shows a warning of the same words once, so that a run is told once.
    """
    if ranks.size == 1:
        return
    states = {
        f"the callback {callback.state_key}": composed["callbacks"].get(callback.state_key)
        for callback in trainer.callbacks
        if callback.state_per_rank is None
    }
    if trainer.datamodule is not None and trainer.datamodule.state_per_rank is None:
        states[f"the DataModule {type(trainer.datamodule).__name__}"] = composed["user"]["datamodule"]
    entries = composed["user"]["checkpoint"].items()
    states |= {f"what on_save_checkpoint puts under {name!r}": state for name, state in entries}
    digests = ranks.gather({name: _digest(state) for name, state in states.items()})
    differing = [name for name in states if any(others.get(name) != digests[0].get(name) for others in digests)]
    if differing and ranks.rank == 0:
        warnings.warn(
            f"the state of {', '.join(differing)} differs between ranks. A checkpoint holds rank 0's, and a resume hands it to every "
            "rank. For a callback or DataModule, state_per_rank = True keeps each rank's own, and False ends this warning.",
            stacklevel=2,
        )


def _digest(state: Any) -> str:
    return hashlib.sha256(json.dumps(plain(state, of_tensor=_compared), sort_keys=True).encode()).hexdigest()


def _compared(tensor: Tensor) -> Any:
    values = plain(tensor) if tensor.numel() <= COMPARED else None
    return [str(tensor.dtype), list(tensor.shape), values]
