"""Owners of state: the parts of a run that give a checkpoint their state, check what it holds, and take it back.

The Trainer and the Accelerator save and restore in the same three steps. `collect` asks every owner for its state.
`Unclaimed` has each owner check its own, before anything of the run has changed. `Unclaimed.load` hands a state to its
owner, when the run reaches it. `trainer/run/saved/saving.py` and `trainer/accelerator/records/saving.py` say which file
holds which owners; only its owner knows what is in a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from leyden.strategies.base import Strategy
from leyden.strategies.readers import Readers
from leyden.strategies.saved_state import SavedState
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.format.errors import blame

if TYPE_CHECKING:
    from leyden.trainer.checkpoint.writer import CheckpointWriter


class StateOwner(Protocol):
    """A part of a run with a state of its own. Every `Callback` is one."""

    def state_dict(self) -> Any:
        """What the part needs to continue: any nest of tensors and plain Python."""

    def check_state_dict(self, state: Any) -> None:
        """Raises StateError for a state that `state_dict` cannot have returned; changes nothing."""

    def load_state_dict(self, state: Any) -> None:
        """Continues from what `state_dict` returned."""


class RankStateOwner(StateOwner, Protocol):
    """An owner whose state differs between ranks: the files of ranks have an entry for it."""

    def regroup(self, states: Sequence[Any], rank: int, seed: int) -> Any:
        """This rank's state, where another number of data ranks wrote the checkpoint.

        Args:
            states: one for each data rank that wrote the checkpoint. Only data rank 0, which carries on all sums, is
                given all of them; the others get the first alone, and start sums at zero.
            rank: the data rank of this one.
            seed: for random numbers of data ranks that did not exist then.
        """


Owners: TypeAlias = Mapping[str, StateOwner]
RankOwners: TypeAlias = Mapping[str, RankStateOwner]


def collect(owners: Owners) -> dict[str, Any]:
    """The states of the owners, by their names."""
    return {name: owner.state_dict() for name, owner in owners.items()}


class Unclaimed:
    """States from one file of a checkpoint, which their owners have checked and not yet taken.

    None stands for a state that was not saved, as in a checkpoint from `leyden convert`: its owner starts fresh.

    Args:
        file: the file they come from, for error messages.
        states: by the owners' names, as `collect` returned them. What nobody here owns is kept for `get`.
        owners: of this run.
        needed: the names that every checkpoint has.

    Raises:
        CheckpointError: if an owner cannot have saved its state; names the file, the owner and the entry.
    """

    def __init__(
        self, file: str | Path, states: Mapping[str, Any], owners: Owners, needed: Collection[str] = ()
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
        """True for an owner of this run that has a state here."""
        return name in self._states and name in self._owners

    def get(self, name: str) -> Any:
        """A state; None where there is none."""
        return self._states.get(name)

    @property
    def names(self) -> list[str]:
        """The owners that have a state here, in their order."""
        return [name for name in self._owners if name in self]

    def load(self, *names: str) -> None:
        """Loads the named states into their owners; skips a name without a state or an owner."""
        for name in names:
            if name in self:
                with self.blame(name):
                    self._owners[name].load_state_dict(self._states[name])

    def drop(self, *names: str) -> None:
        """Leaves these owners as they are."""
        for name in names:
            self._states.pop(name, None)

    def blame(self, name: str) -> AbstractContextManager[None]:
        """Re-raises any error in the block as a CheckpointError that names the file and the owner."""
        return blame(self._file, name)


# the states that ranks have of their own ------------------------------------------------------------------------------
OF_OUTPUTS = ("logs", "metrics")
OF_SAMPLES = ("loader", "loaders", *OF_OUTPUTS)
"""What belongs to samples: the first of the ranks that share them writes it for all. All else is each rank's own."""


def rank_file(rank: int) -> str:
    """The name of the state of one rank."""
    return f"rank-{rank}"


def collect_rank(owners: RankOwners) -> dict[str, Any]:
    """The states of one rank, for its file, and the seed of ranks that a later run adds."""
    return {"seed": torch.initial_seed() % 2**63, **collect(owners)}


def write_rank(writer: CheckpointWriter, strategy: Strategy, states: Mapping[str, Any]) -> None:
    """Writes the states of this rank to its file."""
    if strategy.outputs.are_in_parts:
        # Where steps reach their end, there are sums and metrics.
        states = {**states, **strategy.outputs.share({name: states[name] for name in OF_OUTPUTS if name in states})}
    shares = not Readers(strategy).is_first
    own = {name: state for name, state in states.items() if not (shares and name in OF_SAMPLES)}
    writer.state(rank_file(strategy.ranks.global_rank), own, of_rank=True)


def saved_data_ranks(reader: CheckpointReader) -> tuple[int, ...]:
    """The data rank of each rank that has a state in a checkpoint; none where it holds weights alone."""
    count = 0
    while reader.has(rank_file(count)):
        count += 1
    return reader.manifest.data_ranks[:count] or tuple(range(count))


class RankStates:
    """The states of a checkpoint that this rank continues from.

    Ranks of the layout that wrote it continue from their own. On a layout with as many data ranks, the ranks of each
    continue from its first. On another number, owners regroup what there is: the place in the data is counted in
    samples of the global order, so every rank takes it from rank 0.

    Args:
        reader: of a checkpoint with the states of ranks.
        strategy: says which rank this is, and how many there are.

    Attributes:
        files: the names of the files that this rank continues from; its own first.
        path: the first of them, for messages.
        saved: the number of data ranks that wrote the checkpoint.
        fits: False if another number of data ranks wrote the checkpoint.
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
        """The states, regrouped by their owners where another number of data ranks wrote them.

        Args:
            owners: of this run.
            like: live state, whose classes are used for those saved.

        Raises:
            CheckpointError: if a state cannot be read or regrouped; names the file.
        """
        with blame(self.path):
            if self.fits:
                own, *of_samples = (self._states(file, like) for file in self.files)
                return {**own, **{name: states[name] for states in of_samples for name in OF_SAMPLES if name in states}}
            # Only the first data rank has to see what the others had summed up.
            firsts = self._firsts if self._rank == 0 else self._firsts[:1]
            states = [self._states(rank_file(number), like) for number in firsts]
            kept = SavedState(states[0]).integer("seed", 0, least=0, most=2**64)
            seed = rank_seed(kept, self._reader.progress()["global_step"], self._rank)
            found = {name: owner for name, owner in owners.items() if name in states[0]}
            regrouped = {
                name: owner.regroup([own[name] for own in states], self._rank, seed) for name, owner in found.items()
            }
            return {**states[0], **regrouped}

    def _states(self, file: str, like: Any) -> dict[str, Any]:
        states: dict[str, Any] = self._reader.state(file, like=like)
        SavedState(states).integer("seed", 0, least=0, most=2**64)
        return states


def rank_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a data rank that has no random numbers of its own to continue with."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:4], "little")
