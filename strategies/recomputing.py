"""Activation checkpointing: modules recompute their activations in backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed:
    """The forward pass of a module whose activations are recomputed in backward.

    It stands in the module as its attribute `forward`: the names of modules and parameters stay, torch.compile takes it
    (the composable `checkpoint` fails there, tried), and hooks that gather parameters or split inputs run around it,
    once. Random numbers are drawn again as they were.

    Args:
        module: whose forward pass it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """A forward pass that somebody has given this very module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.module).forward, self.module) if self.own is None else self.own
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def recompute(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Has modules recompute their activations in backward; returns those that did not do so before."""
    found = [module for module in modules if not isinstance(vars(module).get("forward"), Recomputed)]
    for module in found:
        module.forward = Recomputed(module)  # type: ignore[method-assign]
    return found


def keep(modules: Iterable[nn.Module]) -> None:
    """Undoes `recompute`."""
    for module in modules:
        recomputed = vars(module).get("forward")
        if isinstance(recomputed, Recomputed):
            del module.forward
            if recomputed.own is not None:
                module.forward = recomputed.own  # type: ignore[method-assign]
