"""StageDraws: random numbers that are alike on all stages outside of what each of them holds, and its own within."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class StageDraws:
    """Switches this rank's random numbers (torch's, Python's and NumPy's) within a step.

    Every stage runs the code of a step before and between the blocks (noise, augmentation, masks), which must draw the
    same on all of them: the ranks of a pipeline begin with one state, and that code draws from it. What only one stage
    runs draws from a seed of its own for each micro-batch, so that the common state stays the same on all: its blocks,
    and on the last stage everything after them.

    Args:
        group: the ranks of the pipeline.
        device: whose random numbers are switched beside the CPU's.
        data_rank: of these ranks, which keeps them apart from the other pipelines.

    Attributes:
        batches: how many batches have begun: a part of every seed, which a checkpoint holds.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, data_rank: int) -> None:
        self._group, self._device, self._data_rank = group, device, data_rank
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators.append(torch.cuda.default_generators[index])
        self.batches = 0
        self._evaluated = 0
        """Batches since then that ran forward alone."""
        self._before: list[Any] = []
        self._after: dict[int, list[Any]] = {}
        self._common: list[Any] | None = None
        self._own: list[Any] | None = None
        self._entry: list[Any] | None = None
        """The common state at the stage's first block, from which every stage continues."""
        self._is_active, self._place = False, ""

    def resume(self, batches: int) -> None:
        """Continues after so many batches."""
        self.batches = batches

    def agree(self) -> None:
        """Every stage continues with the first one's state."""
        for generator in self._generators:
            state = generator.get_state().to(self._device)
            dist.broadcast(state, group=self._group, group_src=0)
            generator.set_state(state.cpu())
        box = [_of_host()]
        dist.broadcast_object_list(box, group=self._group, group_src=0, device=self._device)
        _set_host(box[0])

    @contextmanager
    def of_batch(self, trains: bool = True) -> Iterator[None]:
        """In this context the micro-batches of a batch run.

        Args:
            trains: False for one that runs forward alone.
        """
        self._evaluated = 0 if trains else self._evaluated + 1
        self.batches += trains
        self._before, self._after = self._states(), {}
        try:
            yield
        finally:
            for states in self._after.values():
                self._set(states)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """In this context random numbers are drawn that leave no trace."""
        before = self._states()
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def of_stage(self, stage: int, micro_batch: int) -> Iterator[None]:
        """In this context a micro-batch runs through a stage."""
        self._set(self._after.get(stage, self._before))
        batch = f"{self.batches}.{self._evaluated}"
        self._place = f"{torch.initial_seed()} {batch} {micro_batch} {stage} {self._data_rank}"
        self._is_active, self._own, self._entry = True, None, None
        try:
            yield
        finally:
            self.switch(False)
            self._is_active = False
            self._after[stage] = self._states() if self._entry is None else self._entry

    def enter_blocks(self) -> None:
        """The stage's first block begins."""
        if self._is_active and self._entry is None:
            self._entry = self._states() if self._common is None else self._common
        self.switch(True)

    def switch(self, own: bool) -> None:
        """From here on the stage draws by itself, or what all stages draw."""
        if not self._is_active or own is (self._common is not None):
            return
        if not own:
            assert self._common is not None
            self._own = self._states()
            self._set(self._common)
            self._common = None
            return
        self._common = self._states()
        if self._own is not None:
            self._set(self._own)
            return
        digest = hashlib.blake2b(self._place.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        for generator in self._generators:
            generator.manual_seed(seed)
        random.seed(seed)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(seed % 2**32)

    def _states(self) -> list[Any]:
        return [_of_host(), *(generator.get_state() for generator in self._generators)]

    def _set(self, states: list[Any]) -> None:
        _set_host(states[0])
        for generator, state in zip(self._generators, states[1:], strict=True):
            generator.set_state(state)


def _of_host() -> tuple[Any, Any]:
    """The states of Python's generator and of NumPy's, if something has imported it."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def _set_host(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and states[1] is not None:
        numpy.set_state(states[1])


__all__ = ["StageDraws"]
