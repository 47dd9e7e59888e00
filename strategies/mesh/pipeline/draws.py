"""StageDraws: random numbers that are alike on all stages outside of what each of them holds, and its own within."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class StageDraws:
    """Switches this rank's random numbers within a step.

    Every stage runs the code of a step around the blocks (noise, augmentation, masks), which must draw the same on all
    of them: the ranks of a pipeline begin with one state, and that code draws from it. What only one stage runs draws
    from a seed of its own for each micro-batch, so that the common state stays the same on all.

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
        self._before: list[Tensor] = []
        self._after: dict[int, list[Tensor]] = {}
        self._common: list[Tensor] | None = None
        self._own: list[Tensor] | None = None
        self._is_active, self._place = False, ""

    def agree(self) -> None:
        """Every stage continues with the first one's state."""
        for generator in self._generators:
            state = generator.get_state().to(self._device)
            dist.broadcast(state, group=self._group, group_src=0)
            generator.set_state(state.cpu())

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """In this context the micro-batches of a batch run."""
        self.batches += 1
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
        self._place = f"{torch.initial_seed()} {self.batches} {micro_batch} {stage} {self._data_rank}"
        self._is_active, self._own = True, None
        try:
            yield
        finally:
            self.switch(False)
            self._is_active = False
            self._after[stage] = self._states()

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
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


__all__ = ["StageDraws"]
