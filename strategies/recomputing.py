"""Activation checkpointing: modules recompute their activations in backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

PINNED = ("cuda", "xpu")
"""Devices that copy to and from pinned memory of the host without waiting."""


class OnHost(saved_tensors_hooks):
    """Keeps what is saved for backward in the host's memory. A copy is queued like any other work of the device.

    torch's `save_on_cpu` does this too, but not with the DTensors of a mesh.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    device = tensor.device
    if device.type == "cpu":
        return tensor
    if device.type not in PINNED or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return device, tensor.to("cpu")
    kept = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
    return device, kept.copy_(tensor, non_blocking=True)


def _from_host(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, tensor = kept
    return tensor.to(device, non_blocking=True)


class Recomputed:
    """The forward pass of a module whose activations are recomputed in backward.

    It stands in the module as its attribute `forward`: the names of modules and parameters stay, torch.compile takes it
    (the composable `checkpoint` fails there, tried), and hooks that gather parameters or split inputs run around it,
    once. Random numbers are drawn again as they were.

    Args:
        module: whose forward pass it is.
        offloads: it keeps its inputs, from which it computes them again, in the host's memory.
    """

    def __init__(self, module: nn.Module, offloads: bool = False) -> None:
        self.module, self.offloads = module, offloads
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """A forward pass that somebody has given this very module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.module).forward, self.module) if self.own is None else self.own
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not self.offloads:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        # What is saved inside belongs to `checkpoint`: only its inputs go to the host.
        with OnHost():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def recompute(modules: Iterable[nn.Module], offloads: bool = False) -> list[nn.Module]:
    """Has modules recompute their activations in backward; returns those that did not do so before.

    Args:
        modules: which.
        offloads: they keep their inputs in the host's memory.
    """
    found = [module for module in modules if not isinstance(vars(module).get("forward"), Recomputed)]
    for module in found:
        module.forward = Recomputed(module, offloads)  # type: ignore[method-assign]
    return found


def keep(modules: Iterable[nn.Module]) -> None:
    """Undoes `recompute`."""
    for module in modules:
        recomputed = vars(module).get("forward")
        if isinstance(recomputed, Recomputed):
            del module.forward
            if recomputed.own is not None:
                module.forward = recomputed.own  # type: ignore[method-assign]
