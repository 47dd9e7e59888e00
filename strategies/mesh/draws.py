"""Draws: random numbers that are equal on the ranks of a tp group where activations are, and differ elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from leyden.strategies.errors import ConfigurationError


class Draws:
    """Switches this rank's random numbers within a step.

    Ranks of a tp group begin a step with the same state, so a dropout of what every rank has whole drops the same.
    Where each rank has a part (of the heads, of the sequence), it continues from a seed of its own, drawn from the
    common state: so a forward that is run again in backward, by activation checkpointing, drops the same again. Where
    nothing is drawn meanwhile, the common state does not advance, and an epoch's order is that of one process.

    Args:
        mesh: the `tp` dimension.
        device: whose random numbers are switched beside the CPU's.
        sequence: blocks begin where activations differ, so a block that is run again does not know the common state.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, sequence: bool = False) -> None:
        self._mesh, self._device, self._sequence = mesh, device, sequence
        self._generators = generators_of(device)
        self._active = False
        self._alike: list[torch.Tensor] | None = None
        self._apart: list[torch.Tensor] = []
        self._undrawn = torch.default_generator.get_state()
        self._common = self._undrawn
        self._has_drawn = False

    def agree(self) -> None:
        """Gives every rank of the tp group the first one's state, as if there were one process."""
        group = self._mesh.get_group()
        for generator in self._generators:
            state = generator.get_state().to(self._device)
            dist.broadcast(state, group=group, group_src=0)
            generator.set_state(state.cpu())

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this context, of a training step, random numbers are switched."""
        self._active, self._has_drawn = True, False
        self._common = torch.default_generator.get_state()
        try:
            yield
        finally:
            self.switch(False)
            self._active = False

    def switch(self, differ: bool) -> None:
        """Switches where the ranks' activations begin to differ, or are equal again.

        Raises:
            ConfigurationError: where a block is run again in backward whose random numbers cannot be repeated.
        """
        if self._active and self._sequence and self._has_drawn and _in_backward():
            raise ConfigurationError(
                "a block with dropout is run again in backward, and under a plan with 'sequence' layers it would drop "
                "others than in forward: set its dropout to 0, or leave out activation checkpointing or 'sequence'."
            )
        if not self._active or differ is (self._alike is not None):
            return
        if differ:
            self._undrawn = torch.default_generator.get_state()
            self._has_drawn |= not torch.equal(self._undrawn, self._common)
            seed = int(torch.randint(2**62, ()))
            self._alike = self._states()
            for generator in self._generators:
                generator.manual_seed(seed + self._mesh.get_local_rank())
            self._apart = self._states()
        else:
            assert self._alike is not None
            if all(map(torch.equal, self._states(), self._apart)):
                self._alike[0] = self._undrawn
            else:
                self._has_drawn = True
            self._common = self._alike[0]
            for generator, state in zip(self._generators, self._alike, strict=True):
                generator.set_state(state)
            self._alike = None

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _in_backward() -> bool:
    """True within a backward pass, in which activation checkpointing runs a forward again."""
    return torch._C._current_graph_task_id() != -1


def generators_of(device: torch.device) -> list[torch.Generator]:
    """torch's generators that code draws from if it names none: the CPU's, and a GPU's own."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = device.index if device.index is not None else torch.cuda.current_device()
    return [torch.default_generator, torch.cuda.default_generators[index]]
