"""StageDraws: random numbers that are equal on all stages, except in the layers that each stage holds."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from leyden.strategies.mesh.rng import generators_of

NEVER_DRAW = (nn.Embedding, nn.Linear, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d)
"""Layers whose forward draws no random number."""


class StageDraws:
    """Switches this rank's random numbers (torch's, Python's and NumPy's) within a step.

    Every stage runs the code of a step before the blocks (noise, augmentation, masks), which must draw the same on all
    of them: the ranks of a pipeline begin with one state, and that code draws from it. From the first block on each
    stage gets through other code, and draws from a seed of its own for each micro-batch. So does a module before the
    blocks that only the first stage holds, if it may draw.

    Args:
        group: the ranks of the pipeline.
        device: whose random numbers are switched beside the CPU's.
        data_rank: of these ranks, which keeps them apart from the other pipelines.
        stages: of this rank.

    Attributes:
        batches: how many batches have begun: a part of every seed, which a checkpoint holds.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, data_rank: int, stages: Sequence[int]) -> None:
        self._group, self._device, self._data_rank, self._stages = group, device, data_rank, tuple(stages)
        self._numbers = _Generators(device)
        self.batches = 0
        self._evaluated = 0
        """Batches since then that ran forward alone."""
        self._common: dict[int, Any] = {}
        """Where further stages of this rank stand in what all stages draw."""
        self._others: list[Any] | None = None
        """Where the first stage of this rank stands in it, while another one runs."""
        self._place = ""
        """Batch, micro-batch and stage of the passage that runs, as a part of its seeds; empty outside of one."""
        self._turns = 0
        """How often the passage has begun to draw by itself."""
        self._left: Any = None
        """Where the passage left what all stages draw; None before its blocks."""
        self._held: Any = None
        """The same while a module runs that the stage holds besides its blocks."""

    def resume(self, batches: int) -> None:
        """Continues after a number of batches."""
        self.batches = batches

    def agree(self) -> None:
        """Gives every stage the first one's state."""
        box = [self._numbers.states()]
        dist.broadcast_object_list(box, group=self._group, group_src=0, device=self._device)
        self._numbers.set_states(box[0])

    def begin_batch(self, trains: bool = True) -> None:
        """Begins another batch, whose micro-batches follow.

        Args:
            trains: False for one that runs forward alone.
        """
        self._evaluated = 0 if trains else self._evaluated + 1
        self.batches += trains
        if len(self._stages) > 1:
            start = self._numbers.states()
            self._common = dict.fromkeys(self._stages[1:], start)

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """In this context random numbers are drawn that leave no trace."""
        before = self._numbers.states()
        try:
            yield
        finally:
            self._numbers.set_states(before)

    def begin_passage(self, stage: int, micro_batch: int) -> None:
        """Begins the run of a micro-batch through a stage."""
        own = self._common.get(stage)
        if own is not None:
            self._others = self._numbers.states()
            self._numbers.set_states(own)
        batch = f"{self.batches}.{self._evaluated}"
        self._place, self._turns = f"{torch.initial_seed()} {batch} {micro_batch} {stage} {self._data_rank}", 0

    def end_passage(self, stage: int) -> None:
        """Ends that run, which may have failed."""
        if self._held is not None:
            self.end_held()
        if self._left is not None:
            self._numbers.come_back(self._left)
        self._place, self._left = "", None
        if self._others is not None:
            self._common[stage] = self._numbers.states()
            self._numbers.set_states(self._others)
            self._others = None

    def enter_blocks(self) -> None:
        """Enters the blocks of a step: from here on the stage draws by itself."""
        if self._place and self._left is None:
            self._left = self._numbers.leave()
            self._seed()

    def begin_held(self) -> None:
        """Begins a module that the stage holds besides its blocks: it draws by itself."""
        if self._place and self._left is None and self._held is None:
            self._held = self._numbers.leave()
            self._seed()

    def end_held(self) -> None:
        """Ends the module: all stages draw the same again."""
        if self._held is not None:
            self._numbers.come_back(self._held)
            self._held = None

    def _seed(self) -> None:
        self._turns += 1
        digest = hashlib.blake2b(f"{self._place} {self._turns}".encode(), digest_size=8).digest()
        self._numbers.seed(int.from_bytes(digest, "little") >> 1)


def may_draw(module: nn.Module) -> bool:
    """False for a module of `NEVER_DRAW` alone, without hooks: random numbers need not be switched for it."""
    return any(
        type(part) not in NEVER_DRAW or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )


class _Generators:
    """The generators that code draws from if it names none: torch's, Python's and NumPy's.

    NumPy's state takes 60 µs to read and as long to write, so another generator is put in its place meanwhile.

    Args:
        device: whose generator there is beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = generators_of(device)
        self._spare: Any = None

    def states(self) -> list[Any]:
        """The states of all of them, NumPy's only if something has imported it."""
        numpy = sys.modules.get("numpy.random")
        return [None if numpy is None else numpy.get_state(), *self._quick_states()]

    def set_states(self, states: Sequence[Any]) -> None:
        """Continues from states."""
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and states[0] is not None:
            numpy.set_state(states[0])
        self._set_quick_states(states[1:])

    def leave(self) -> list[Any]:
        """Leaves the sequence that is drawn from, for `seed`; returns what `come_back` continues with."""
        numpy = sys.modules.get("numpy.random")
        generator = None
        if numpy is not None:
            generator = numpy.get_bit_generator()
            if self._spare is None:
                self._spare = numpy.MT19937(0)
            numpy.set_bit_generator(self._spare)
        return [generator, *self._quick_states()]

    def come_back(self, left: Sequence[Any]) -> None:
        """Continues where a sequence was left."""
        if left[0] is not None:
            sys.modules["numpy.random"].set_bit_generator(left[0])
        self._set_quick_states(left[1:])

    def seed(self, seed: int) -> None:
        """Begins a new sequence."""
        for generator in self._torch:
            generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(seed % 2**32)

    def _quick_states(self) -> list[Any]:
        return [random.getstate(), *[generator.get_state() for generator in self._torch]]

    def _set_quick_states(self, states: Sequence[Any]) -> None:
        random.setstate(states[0])
        for generator, state in zip(self._torch, states[1:], strict=True):
            generator.set_state(state)
