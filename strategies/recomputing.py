"""Activation checkpointing: modules recompute their activations in backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from leyden.core.devices import pins_memory


class OnHost(saved_tensors_hooks):
    """Keeps tensors saved for backward in host memory. Copies are queued on the device like any other work.

    Unlike torch's `save_on_cpu`, it supports the DTensors of a mesh.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    device = tensor.device
    if device.type == "cpu":
        return tensor
    if not pins_memory(device.type) or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return device, tensor.to("cpu")
    host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
    return device, host.copy_(tensor, non_blocking=True)


def _from_host(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


class Recomputed:
    """The forward pass of a module whose activations are recomputed in backward.

    It replaces the module's `forward` attribute. So the names of modules and parameters stay the same, torch.compile
    works (it fails with the composable `checkpoint`, tried), and hooks that gather parameters or split inputs run
    around it only once. The recomputation draws the same random numbers.

    Args:
        module: the module.
        offloads: whether to keep the inputs of the recomputation in host memory.
    """

    def __init__(self, module: nn.Module, offloads: bool = False) -> None:
        self.module, self.offloads = module, offloads
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """The `forward` previously set on this instance, or None if the class's is used."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.module).forward, self.module) if self.own is None else self.own
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not self.offloads:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # `checkpoint` handles the tensors saved inside, so only its inputs go to the host.
        with OnHost():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def recompute(modules: Iterable[nn.Module], offloads: bool = False) -> list[nn.Module]:
    """Makes modules recompute their activations in backward. Returns the modules that did not do so before.

    Args:
        modules: the modules.
        offloads: whether to keep their inputs in host memory.
    """
    changed = [module for module in modules if not isinstance(vars(module).get("forward"), Recomputed)]
    for module in changed:
        module.forward = Recomputed(module, offloads)  # type: ignore[method-assign]
    return changed


def keep(modules: Iterable[nn.Module]) -> None:
    """Undoes `recompute`."""
    for module in modules:
        recomputed = vars(module).get("forward")
        if isinstance(recomputed, Recomputed):
            del module.forward
            if recomputed.own is not None:
                module.forward = recomputed.own  # type: ignore[method-assign]
