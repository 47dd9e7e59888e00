"""Moves parameters between the host and an XLA device: they stay the same objects, and all move in one transfer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError


def bring(module: nn.Module, device: torch.device) -> None:
    """Moves a module's tensors in place.

    `Module.to` gives an XLA module new Parameter objects, one for each name (tried, torch 2.9): tied weights would come
    apart, and an optimizer that was made before would step the old ones. So each tensor is moved once, and changes
    places with the new one.

    Raises:
        ConfigurationError: if something holds a weak reference to a parameter, which torch then cannot exchange.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ConfigurationError(
                f"the parameter {name!r} is on the meta device and has no values. Build the module on the CPU."
            )
        if parameter.device == device:
            continue
        moved = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            moved.grad = parameter.grad.to(device)
        # The user's own attributes stay with the object, too: the exchange takes them along.
        vars(moved).update(vars(parameter))
        try:
            torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConfigurationError(
                f"the parameter {name!r} cannot be moved to {device}, since something else holds on to its memory. "
                f"Build the module anew, or in configure_model. The error was: {error}"
            ) from error
    moved_buffers: dict[int, Tensor] = {}
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[key] = moved_buffers.setdefault(id(buffer), buffer.to(device))


def on_host(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with its XLA tensors on the host, moved in one transfer; tied tensors stay tied.

    Sharded tensors are gathered.
    """
    [state] = trees_on_host([dict(named)])
    return state  # type: ignore[no-any-return]


def trees_on_host(trees: list[Any]) -> list[Any]:
    """The same for trees of dicts, lists and tuples."""
    found: dict[int, Tensor] = {}
    for tensor in _tensors(trees):
        found.setdefault(number(tensor), tensor)
    if not found:
        return trees
    import torch_xla

    whole = torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in found.values()])
    hosted = dict(zip(found, whole, strict=True))
    return [_replaced(tree, hosted) for tree in trees]


def _tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        if tree.device.type == "xla":
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _replaced(tree: Any, hosted: Mapping[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return hosted[number(tree)] if tree.device.type == "xla" else tree
    if type(tree) is dict:
        return {key: _replaced(value, hosted) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(value, hosted) for value in tree)
    return tree


def number(tensor: Tensor) -> int:
    """XLA's own number of a tensor: those that share it are one, though Python sees several objects. There is no
    address.
    """
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))
