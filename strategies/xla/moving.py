"""Moves parameters between the host and an XLA device: they stay the same objects, and all move in one transfer."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from leyden.strategies.batch import map_tensors
from leyden.strategies.errors import ConfigurationError

T = TypeVar("T")


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


def on_host(tree: T) -> T:
    """Returns any nested structure with its XLA tensors on the host, moved in one transfer; tied tensors stay tied.

    Sharded tensors are gathered.
    """
    found: dict[int, Tensor] = {}
    map_tensors(tree, lambda tensor: found.setdefault(number(tensor), tensor) if _is_xla(tensor) else tensor)
    if not found:
        return tree
    import torch_xla

    whole = torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in found.values()])
    hosted = dict(zip(found, whole, strict=True))
    return map_tensors(tree, lambda tensor: hosted[number(tensor)] if _is_xla(tensor) else tensor)


def _is_xla(tensor: Tensor) -> bool:
    return tensor.device.type == "xla"


def number(tensor: Tensor) -> int:
    """XLA's own number of a tensor: those that share it are one, though Python sees several objects. There is no
    address.
    """
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))
