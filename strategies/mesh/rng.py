"""TensorParallelRNG: a tp group draws identical random numbers for whole activations, different ones for split ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from leyden.core.devices import runtime_of, with_index
from leyden.core.errors import ConfigurationError


class TensorParallelRNG:
    """Switches this rank's random generators between a sequence shared by the tp group and a sequence of its own.

    The ranks of a tp group start a step with the same state, so a dropout on an activation that every rank holds whole
    drops the same elements everywhere. While activations are split (by heads, or along the sequence), each rank draws
    from its own seed, which is derived from the shared state. A forward that activation checkpointing reruns in
    backward therefore draws the same numbers again. If a rank draws nothing while activations are split, the shared
    state does not advance, and the epoch's sample order is that of a single process.

    Args:
        mesh: the `tp` dimension.
        device: the device whose generator is switched along with the CPU's.
        sequence: True if blocks start on split activations. A rerun block then cannot recover the shared state.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device, sequence: bool = False) -> None:
        self._mesh, self._device, self._sequence = mesh, device, sequence
        self._generators = generators_of(device)
        # torch.compile would trace into the switch, and break the graph at each of its lines.
        self.switch: Callable[[bool], None] = torch.compiler.disable(self._switch)  # type: ignore[no-untyped-call]
        """Switches the sequence; see `_switch`."""
        self._active = False
        self._suspended: list[torch.Tensor] | None = None
        """The shared states, suspended while this rank draws from its own sequence; None while it draws from them."""
        self._own_start: list[torch.Tensor] = []
        """The states at the start of this rank's own sequence."""
        self._rerun: object = None
        """The rerun of a block in which this rank began its own sequence; None in forward."""
        self._before_seed = torch.default_generator.get_state()
        """The CPU's shared state before the latest seed was drawn from it."""
        self._last_shared = self._before_seed
        """The CPU's shared state when the step last resumed it. If the present state differs, the step has drawn."""
        self._has_drawn = False
        """True once a switch has found that the step drew random numbers."""

    def synchronize(self) -> None:
        """Copies the random state of the group's first rank to every rank."""
        group = self._mesh.get_group()
        for generator in self._generators:
            state = generator.get_state().to(self._device)
            dist.broadcast(state, group=group, group_src=0)
            generator.set_state(state.cpu())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enables switching within this context, which spans a training step."""
        self._active, self._has_drawn = True, False
        self._last_shared = torch.default_generator.get_state()
        try:
            yield
        finally:
            self.switch(False)
            self._active = False

    def _switch(self, differ: bool) -> None:
        """Switches the sequence, when the ranks' activations begin to differ or become identical again.

        Args:
            differ: True switches to this rank's own sequence, False to the shared one.

        Raises:
            ConfigurationError: if backward reruns a block whose random numbers cannot be reproduced.
        """
        if self._active and self._sequence and self._has_drawn and torch._C._current_graph_task_id() != -1:
            raise ConfigurationError(
                "a block with dropout is rerun in backward, and under a plan with 'sequence' layers it would drop "
                "other elements than in forward. Set its dropout to 0, or leave out activation checkpointing or "
                "'sequence'."
            )
        if not self._active:
            return
        if self._rerun is not None and _current_rerun() is not self._rerun:
            # torch ends a rerun as soon as backward has what it needs, perhaps while this rank draws from its own
            # sequence, and restores the generators itself.
            self._suspended = self._rerun = None
        is_apart = self._suspended is not None
        if differ is is_apart:
            return
        if differ:
            self._before_seed = torch.default_generator.get_state()
            self._rerun = _current_rerun() if torch._C._current_graph_task_id() != -1 else None
            self._has_drawn |= not torch.equal(self._before_seed, self._last_shared)
            seed = int(torch.randint(2**62, ()))
            self._suspended = self._states()
            for generator in self._generators:
                generator.manual_seed(seed + self._mesh.get_local_rank())
            self._own_start = self._states()
        else:
            assert self._suspended is not None
            if all(map(torch.equal, self._states(), self._own_start)):
                # This rank drew nothing from its own sequence, so drawing the seed is undone.
                self._suspended[0] = self._before_seed
            else:
                self._has_drawn = True
            self._last_shared = self._suspended[0]
            for generator, state in zip(self._generators, self._suspended, strict=True):
                generator.set_state(state)
            self._suspended = self._rerun = None

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _current_rerun() -> object:
    """Returns an object that identifies the block which activation checkpointing reruns; None if it reruns none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns torch's default generators: the CPU's, and the device's if it is a GPU."""
    own = getattr(runtime_of(device), "default_generators", None)
    return [torch.default_generator] if own is None else [torch.default_generator, own[with_index(device).index]]
