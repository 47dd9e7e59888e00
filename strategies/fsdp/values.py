"""Where tensors on the meta device get their values from, when it is their group's turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.fsdp.deferred import Deferred, Recipe

Slot: TypeAlias = "tuple[nn.Module, str]"
"""A module, and the name of a parameter or buffer of it."""


class Values:
    """The values of modules that were built on the meta device.

    Those built in the strategy's own context hold what a plain build would have given them. Others are filled by their
    modules' `reset_parameters`, in the order in which they are sharded.
    """

    def __init__(self) -> None:
        self.deferred = Deferred()
        self._recipes: dict[tuple[int, str], Recipe] = {}

    def remember(self, root: nn.Module) -> None:
        """Notes which tensor is which: converting a module's dtype makes new ones."""
        for module in root.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                recipe = None if tensor is None else self.deferred.recipe(tensor)
                if recipe is not None:
                    self._recipes[id(module), name] = recipe

    def fill(self, slots: Iterable[Slot]) -> None:
        """Gives tensors memory on the CPU, and their values.

        Raises:
            ConfigurationError: if the values of one are not known.
        """
        known: list[Slot] = []
        others: list[Slot] = []
        for slot in slots:
            (known if (id(slot[0]), slot[1]) in self._recipes else others).append(slot)
        made = self.deferred.values(self._recipes[id(module), name] for module, name in known)
        replace(known, lambda module, name: made[self._recipes[id(module), name]])
        self._reset(others)

    def _reset(self, slots: list[Slot]) -> None:
        for module in {id(module): module for module, _ in slots}.values():
            names = [name for owner, name in slots if owner is module]
            reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is None:
                raise ConfigurationError(
                    f"{names[0]!r} of {kind_of(module)} is on the meta device, and nothing gives its values: build the "
                    "module in configure_model or within `with trainer.init_module():`, or give its class a "
                    "reset_parameters()."
                )
            replace([(module, name) for name in names], lambda module, name: _memory(getattr(module, name)))
            reset()


def replace(slots: Iterable[Slot], make: Callable[[nn.Module, str], Tensor]) -> None:
    """Puts other tensors into modules, of the same dtype; what was tied stays tied."""
    done: dict[int, Tensor] = {}
    for module, name in slots:
        old = getattr(module, name)
        new = done.get(id(old))
        if new is None:
            new = make(module, name).to(old.dtype)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            done[id(old)] = new
        (module._parameters if name in module._parameters else module._buffers)[name] = new  # type: ignore[assignment]


def _memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")
