"""Moving tensors between the host and an XLA device. Parameters remain the same objects."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError
from leyden.core.tree import map_tensors

T = TypeVar("T")


def bring(module: nn.Module, device: torch.device) -> None:
    """Moves a module's tensors in place.

    `Module.to` creates new Parameter objects on XLA, one per name (tried, torch 2.9): tied weights would be separated,
    and an existing optimizer would step the old objects. So each parameter is moved once and swapped with its copy.

    Raises:
        ConfigurationError: if a weak reference to a parameter exists, since torch cannot swap it then.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ConfigurationError(
                f"The parameter {name!r} is on the meta device and has no values. Build the module on the CPU."
            )
        if parameter.device != device:
            _move(name, parameter, device)
    moved_buffers: dict[int, Tensor] = {}
    for part in module.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[key] = moved_buffers.setdefault(id(buffer), buffer.to(device))


def _move(name: str, parameter: nn.Parameter, device: torch.device) -> None:
    """Moves a parameter and its gradient by swapping it with a copy on the device."""
    copy = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        copy.grad = parameter.grad.to(device)
    # The swap also exchanges attributes set by the user, so the copy needs them.
    vars(copy).update(vars(parameter))
    try:
        torch.utils.swap_tensors(parameter, copy)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ConfigurationError(
            f"The parameter {name!r} cannot be moved to {device}, since another object references it. Build a new "
            f"module, or build it in configure_model. The error was: {error}"
        ) from error


def on_host(tree: T) -> T:
    """Returns a nested structure with its XLA tensors copied to the host, in one transfer.

    Tied tensors remain tied, and sharded tensors are gathered.
    """
    on_device: dict[int, Tensor] = {}
    map_tensors(tree, lambda tensor: on_device.setdefault(number(tensor), tensor) if _is_xla(tensor) else tensor)
    if not on_device:
        return tree
    import torch_xla

    copies = torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in on_device.values()])
    hosted = dict(zip(on_device, copies, strict=True))
    return map_tensors(tree, lambda tensor: hosted[number(tensor)] if _is_xla(tensor) else tensor)


def _is_xla(tensor: Tensor) -> bool:
    return tensor.device.type == "xla"


def number(tensor: Tensor) -> int:
    """Returns XLA's id of a tensor, which identifies it across Python objects. XLA tensors have no address."""
    import torch_xla

    return int(torch_xla._XLAC._xla_get_tensor_id(tensor))
