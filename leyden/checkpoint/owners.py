"""Owners of state: the parts of a run that supply their state to a checkpoint, validate it and load it back.

The Trainer and the Accelerator save and restore in the same three steps. `collect` gets the state of every owner.
`Unclaimed` makes each owner validate its saved state, before anything in the run changes. `Unclaimed.load` passes a
state to its owner when the run reaches it. `trainer/saved/saving.py` and `leyden/accelerator/records/saving.py`
define which file holds which owners. Only the owner knows the structure of its state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from leyden.checkpoint.format.bucket import Place
from leyden.checkpoint.format.errors import blame
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.saved_state import SavedState
from leyden.strategies.base import Strategy
from leyden.strategies.readers import Readers

if TYPE_CHECKING:
    from leyden.checkpoint.writer import CheckpointWriter


class StateOwner(Protocol):
    """A part of a run with a state of its own. Every `Callback` is one."""

    def state_dict(self) -> Any:
        """Returns the state that the part needs to continue: any nest of tensors and plain Python objects."""

    def check_state_dict(self, state: Any) -> None:
        """Raises StateError for a state that `state_dict` cannot have returned. Changes nothing."""

    def load_state_dict(self, state: Any) -> None:
        """Loads a state that `state_dict` returned."""


class RankStateOwner(StateOwner, Protocol):
    """An owner whose state differs between ranks, and is saved in each rank's file."""

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> Any:
        """Returns this rank's state when a different number of data ranks wrote the checkpoint.

        Args:
            states: the state of each data rank that wrote the checkpoint. Only data rank 0, which continues all sums,
                gets all of them. The others get the first state alone, and start sums at zero.
            rank: this rank's data rank.
            seed: a seed for the random numbers of a data rank that did not exist when the checkpoint was saved.
        """


Owners: TypeAlias = Mapping[str, StateOwner]
RankOwners: TypeAlias = Mapping[str, RankStateOwner]


def collect(owners: Owners) -> dict[str, Any]:
    """Returns the owners' states by name."""
    return {name: owner.state_dict() for name, owner in owners.items()}


class Unclaimed:
    """States from one file of a checkpoint, which their owners have validated but not yet loaded.

    A state of None was not saved, as in a checkpoint from `leyden convert`. Its owner starts fresh.

    Args:
        file: the file that the states were read from, for error messages.
        states: the states by owner name, as `collect` returned them. States without an owner in this run are kept for
            `get`.
        owners: the owners of this run.
        needed: the names that every checkpoint must have.

    Raises:
        CheckpointError: if an owner cannot have saved its state; names the file, the owner and the entry.
    """

    def __init__(
        self, file: str | Place, states: Mapping[str, Any], owners: Owners, needed: Collection[str] = ()
    ) -> None:
        self._file, self._owners = file, owners
        with blame(file):
            saved = SavedState(states)
            for name in needed:
                saved.value(name)
        self._states = {name: state for name, state in states.items() if state is not None}
        for name in self.names:
            with self.blame(name):
                owners[name].check_state_dict(self._states[name])

    def __contains__(self, name: str) -> bool:
        """Returns True if the name has both a state in the file and an owner in this run."""
        return name in self._states and name in self._owners

    def get(self, name: str) -> Any:
        """Returns a state, or None if the file has none of this name."""
        return self._states.get(name)

    @property
    def names(self) -> list[str]:
        """The names of this run's owners that have a state in the file, in the owners' order."""
        return [name for name in self._owners if name in self]

    def load(self, *names: str) -> None:
        """Loads the named states into their owners. Skips names without a state or an owner."""
        for name in names:
            if name in self:
                with self.blame(name):
                    self._owners[name].load_state_dict(self._states[name])

    def drop(self, *names: str) -> None:
        """Discards the named states, so that their owners stay as they are."""
        for name in names:
            self._states.pop(name, None)

    def blame(self, name: str) -> AbstractContextManager[None]:
        """Re-raises any error in the block as a CheckpointError that names the file and the owner."""
        return blame(self._file, name)


# the states of ranks --------------------------------------------------------------------------------------------------
OF_OUTPUTS = ("logs", "metrics")
OF_SAMPLES = ("loader", "loaders", *OF_OUTPUTS)
"""The states that depend on samples. Ranks that read the same samples share them, and the first such rank writes them.
All other states are written by every rank.
"""


def rank_file(rank: int) -> str:
    """Returns the name under which a rank's state is saved."""
    return f"rank-{rank}"


def collect_rank(owners: RankOwners) -> dict[str, Any]:
    """Returns this rank's states for its file, with a seed for ranks that a later run may add."""
    return {"seed": torch.initial_seed() % 2**63, **collect(owners)}


def write_rank(writer: CheckpointWriter, strategy: Strategy, states: Mapping[str, Any]) -> None:
    """Writes this rank's states to its file."""
    if strategy.outputs.are_in_parts:
        # Sums and metrics exist only on ranks where a step ends, such as a pipeline's last stage.
        states = {**states, **strategy.outputs.share({name: states[name] for name in OF_OUTPUTS if name in states})}
    shares_samples = not Readers(strategy).is_first
    own = {name: state for name, state in states.items() if not (shares_samples and name in OF_SAMPLES)}
    writer.state(rank_file(strategy.ranks.global_rank), own, of_rank=True)


def saved_data_ranks(reader: CheckpointReader) -> tuple[int, ...]:
    """Returns the data rank of each rank that has a state in a checkpoint. Empty if the checkpoint has only weights."""
    count = 0
    while reader.has(rank_file(count)):
        count += 1
    return reader.manifest.data_ranks[:count] or tuple(range(count))


class RankStates:
    """The saved states that this rank continues from.

    If the checkpoint was written under the same layout, each rank continues from its own state. If only the number of
    data ranks is the same, all ranks of a data rank continue from the state of its first rank. Otherwise owners regroup
    the states. The position in the data is counted in samples of the global order, so every rank takes it from rank 0.

    Attributes:
        files: the names of the states that this rank continues from; its own first.
        path: the first state's file, for messages.
        saved: the number of data ranks that wrote the checkpoint.
        fits: False if a different number of data ranks wrote the checkpoint.
    """

    def __init__(self, reader: CheckpointReader, strategy: Strategy) -> None:
        saved = saved_data_ranks(reader)
        self._reader, self._rank = reader, strategy.data_rank
        self._firsts = [saved.index(data_rank) for data_rank in range(len(set(saved)))]
        self.saved = len(self._firsts)
        self.fits = self.saved == strategy.data_size
        first = self._firsts[self._rank] if self.fits else 0
        own = strategy.ranks.global_rank if list(saved) == strategy.data_ranks else first
        self.files = [rank_file(number) for number in dict.fromkeys((own, first))]
        self.path = reader.path / f"{self.files[0]}.json"

    def read(self, owners: RankOwners, like: Any = None) -> dict[str, Any]:
        """Reads the states. Owners regroup them if a different number of data ranks wrote the checkpoint.

        The classes in the current state `like` are used for the saved ones.

        Raises:
            CheckpointError: if a state cannot be read or regrouped; names the file.
        """
        with blame(self.path):
            if self.fits:
                own, *of_samples = (self._states(file, like) for file in self.files)
                return {**own, **{name: states[name] for states in of_samples for name in OF_SAMPLES if name in states}}
            # Only data rank 0 continues the sums of all data ranks.
            firsts = self._firsts if self._rank == 0 else self._firsts[:1]
            states = [self._states(rank_file(number), like) for number in firsts]
            saved_seed = SavedState(states[0]).integer("seed", 0, least=0, most=2**64)
            seed = rank_seed(saved_seed, self._reader.progress()["global_step"], self._rank)
            regrouped = {
                name: owner.regroup([own[name] for own in states], self._rank, seed)
                for name, owner in owners.items()
                if name in states[0]
            }
            return {**states[0], **regrouped}

    def _states(self, file: str, like: Any) -> dict[str, Any]:
        states: dict[str, Any] = self._reader.state(file, like=like)
        SavedState(states).integer("seed", 0, least=0, most=2**64)
        return states


def rank_seed(seed: int, step: int, rank: int) -> int:
    """Returns the seed for a data rank that has no saved random state of its own."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:4], "little")
