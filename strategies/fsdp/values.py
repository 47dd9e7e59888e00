"""Fills tensors that are on the meta device, one group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError, kind_of
from leyden.strategies.fsdp.deferred import Deferred, Recipe

Slot: TypeAlias = "tuple[nn.Module, str]"
"""A module, and the name of one of its parameters or buffers."""


class Values:
    """The values of modules that were built on the meta device.

    Tensors built in `deferred.recording()` get the values of an eager build. The others are filled by their modules'
    `reset_parameters`, in the order in which they are sharded.
    """

    def __init__(self) -> None:
        self.deferred = Deferred()
        self._recipes: dict[tuple[int, str], Recipe] = {}

    def remember(self, root: nn.Module) -> None:
        """Records the recipe of each slot, because converting a module's dtype replaces its tensors."""
        for module in root.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                recipe = None if tensor is None else self.deferred.recipe(tensor)
                if recipe is not None:
                    self._recipes[id(module), name] = recipe

    def are_open(self, slot: Slot) -> bool:
        """Returns True if a slot's tensor was built without values, which are read later."""
        recipe = self._recipes.get((id(slot[0]), slot[1]))
        return recipe is not None and not self.deferred.is_filled(recipe)

    def fill(self, slots: Iterable[Slot]) -> None:
        """Allocates tensors on the CPU and fills them.

        Raises:
            ConfigurationError: if nothing provides the values of a tensor.
        """
        recorded: list[Slot] = []
        others: list[Slot] = []
        for slot in slots:
            (recorded if (id(slot[0]), slot[1]) in self._recipes else others).append(slot)
        values = self.deferred.values(self._recipes[id(module), name] for module, name in recorded)
        replace(recorded, lambda module, name: values[self._recipes[id(module), name]])
        self._reset(others)

    def _reset(self, slots: list[Slot]) -> None:
        """Fills tensors by `reset_parameters` of their modules."""
        for module in {id(module): module for module, _ in slots}.values():
            names = [name for owner, name in slots if owner is module]
            reset: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is None:
                raise ConfigurationError(
                    f"{names[0]!r} of {kind_of(module)} is on the meta device, and nothing provides its values: build "
                    "the module in configure_model or within `with trainer.init_module():`, or define "
                    "reset_parameters() on its class."
                )
            replace(
                [(module, name) for name in names],
                lambda module, name: torch.empty_like(getattr(module, name), device="cpu"),
            )
            reset()


def replace(slots: Iterable[Slot], make: Callable[[nn.Module, str], Tensor]) -> None:
    """Replaces the tensors at some slots by new ones of the same dtype. Tied tensors stay tied."""
    replacements: dict[int, Tensor] = {}
    for module, name in slots:
        old = getattr(module, name)
        new = replacements.get(id(old))
        if new is None:
            new = make(module, name).to(old.dtype)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            replacements[id(old)] = new
        (module._parameters if name in module._parameters else module._buffers)[name] = new  # type: ignore[assignment]
