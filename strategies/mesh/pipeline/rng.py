"""PipelineRNG: stages draw identical random numbers in shared code, and different ones in the layers that they hold."""

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
"""Layers whose forward draws no random numbers."""


class PipelineRNG:
    """Switches this rank's random generators (torch's, Python's and NumPy's) within a step.

    Every stage runs the code before the blocks (noise, augmentation, masks), which must draw the same numbers on all
    stages. This code draws from a shared sequence: all ranks of the pipeline start from the same state. From its first
    block on, each stage runs different code, and draws from its own sequence, seeded for each micro-batch. A module
    before the blocks that only the first stage holds also draws from the stage's own sequence.

    Args:
        group: the ranks of the pipeline.
        device: the device whose generator is switched along with the CPU's.
        data_rank: the data rank of this pipeline, a part of every seed: pipelines draw different numbers.
        stages: the stages of this rank.

    Attributes:
        batches: number of training batches begun, a part of every seed. Checkpoints hold it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, data_rank: int, stages: Sequence[int]) -> None:
        self._group, self._data_rank, self._stages = group, data_rank, tuple(stages)
        self._generators = _Generators(device)
        self.batches = 0
        self._eval_batches = 0
        """Evaluation batches since the last training batch."""
        self._shared_states: dict[int, Any] = {}
        """Positions in the shared sequence of this rank's stages, except the first, which uses the generators' own."""
        self._first_stage_states: list[Any] | None = None
        """Position of this rank's first stage in the shared sequence, while another stage runs."""
        self._seed_prefix = ""
        """Identifies batch, micro-batch, stage and data rank in the seeds of the running stage; empty outside one."""
        self._switches = 0
        """How often the running stage has switched to its own sequence. Each switch has a different seed."""
        self._suspended_at_blocks: Any = None
        """The shared sequence, suspended when the stage entered its blocks; None before that."""
        self._suspended_at_module: Any = None
        """The shared sequence, suspended while a module before the blocks runs."""

    def synchronize(self) -> None:
        """Copies the random states of the pipeline's first rank to every rank."""
        box = [self._generators.states()]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        self._generators.set_states(box[0])

    def resume_after(self, batches: int) -> None:
        """Continues the numbering after this many training batches."""
        self.batches = batches

    def begin_batch(self, trains: bool = True) -> None:
        """Begins a batch, whose micro-batches follow.

        Args:
            trains: False for a batch that only runs forward.
        """
        self._eval_batches = 0 if trains else self._eval_batches + 1
        self.batches += trains
        if len(self._stages) > 1:
            start = self._generators.states()
            self._shared_states = dict.fromkeys(self._stages[1:], start)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the random states at the end of this context."""
        before = self._generators.states()
        try:
            yield
        finally:
            self._generators.set_states(before)

    def begin_stage(self, stage: int, micro_batch: int) -> None:
        """Begins the run of a micro-batch through a stage, at the stage's position in the shared sequence."""
        states = self._shared_states.get(stage)
        if states is not None:
            self._first_stage_states = self._generators.states()
            self._generators.set_states(states)
        batch = f"{self.batches}.{self._eval_batches}"
        self._seed_prefix = f"{torch.initial_seed()} {batch} {micro_batch} {stage} {self._data_rank}"
        self._switches = 0

    def end_stage(self, stage: int) -> None:
        """Ends the run, which may have failed, and returns to the shared sequence."""
        self.exit_module()
        if self._suspended_at_blocks is not None:
            self._generators.resume(self._suspended_at_blocks)
        self._seed_prefix, self._suspended_at_blocks = "", None
        if self._first_stage_states is not None:
            self._shared_states[stage] = self._generators.states()
            self._generators.set_states(self._first_stage_states)
            self._first_stage_states = None

    def enter_blocks(self) -> None:
        """Switches to the stage's own sequence when it reaches the blocks. Later calls are no-ops."""
        if self._seed_prefix and self._suspended_at_blocks is None:
            self._suspended_at_blocks = self._generators.suspend()
            self._seed()

    def enter_module(self) -> None:
        """Switches to the stage's own sequence for a module before the blocks."""
        if self._seed_prefix and self._suspended_at_blocks is None and self._suspended_at_module is None:
            self._suspended_at_module = self._generators.suspend()
            self._seed()

    def exit_module(self) -> None:
        """Returns to the shared sequence after such a module."""
        if self._suspended_at_module is not None:
            self._generators.resume(self._suspended_at_module)
            self._suspended_at_module = None

    def _seed(self) -> None:
        self._switches += 1
        digest = hashlib.blake2b(f"{self._seed_prefix} {self._switches}".encode(), digest_size=8).digest()
        self._generators.seed(int.from_bytes(digest, "little") >> 1)


def may_draw(module: nn.Module) -> bool:
    """Returns False for a module made of `NEVER_DRAW` layers without hooks: its generators need no switching."""
    return any(
        type(part) not in NEVER_DRAW or part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )


class _Generators:
    """The global random generators: torch's, Python's and NumPy's.

    Reading NumPy's state takes 60 µs, and writing it as long. So `suspend` swaps NumPy's generator for a spare one.

    Args:
        device: the device whose generator is included along with the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = generators_of(device)
        self._spare: Any = None

    def states(self) -> list[Any]:
        """Returns the states of all generators; NumPy's only if NumPy is imported."""
        numpy = sys.modules.get("numpy.random")
        return [None if numpy is None else numpy.get_state(), *self._quick_states()]

    def set_states(self, states: Sequence[Any]) -> None:
        """Sets the states of all generators."""
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and states[0] is not None:
            numpy.set_state(states[0])
        self._set_quick_states(states[1:])

    def suspend(self) -> list[Any]:
        """Suspends the current sequence, so that `seed` can start another; returns the argument for `resume`."""
        numpy = sys.modules.get("numpy.random")
        generator = None
        if numpy is not None:
            generator = numpy.get_bit_generator()
            if self._spare is None:
                self._spare = numpy.MT19937(0)
            numpy.set_bit_generator(self._spare)
        return [generator, *self._quick_states()]

    def resume(self, suspended: Sequence[Any]) -> None:
        """Resumes a suspended sequence."""
        if suspended[0] is not None:
            sys.modules["numpy.random"].set_bit_generator(suspended[0])
        self._set_quick_states(suspended[1:])

    def seed(self, seed: int) -> None:
        """Starts a new sequence."""
        for generator in self._torch:
            generator.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(seed % 2**32)

    def _quick_states(self) -> list[Any]:
        """Returns the states of all generators except NumPy's."""
        return [random.getstate(), *[generator.get_state() for generator in self._torch]]

    def _set_quick_states(self, states: Sequence[Any]) -> None:
        random.setstate(states[0])
        for generator, state in zip(self._torch, states[1:], strict=True):
            generator.set_state(state)
