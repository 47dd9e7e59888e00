"""Precision: the dtypes of parameters, inputs and the forward pass. The base class is plain float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

T = TypeVar("T")


class Precision:
    """Plain float32 (`32-true`), and the contract of every other precision.

    For a custom precision, pass an instance of a subclass to `Trainer(precision=...)`.
    """

    name: str = "32-true"
    converts_input: bool = False
    """True if `convert_input` is not a no-op."""
    forward_context: Callable[[], AbstractContextManager[Any]] | None = None
    """Returns the context of a forward pass. None means no context, which costs nothing."""
    may_skip: bool = False
    """True if steps may be skipped, because a gradient scaler checks for inf and nan."""
    form: str = ""
    """Describes how `convert_module` changes layers beyond their dtype. Two runs of a module must agree on it."""
    scales_loss: bool = False
    """True if the class overrides `scale_loss`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.scales_loss = cls.scale_loss is not Precision.scale_loss

    def check_package(self) -> None:
        """Raises MissingExtraError if a required package is missing. Called after a strategy accepts the plugin."""

    def check(self, device: torch.device) -> None:
        """Raises ConfigurationError if the device does not support this precision."""

    def reset(self) -> None:
        """Drops the state of an earlier fit."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Returns a context in which modules are built with the precision's parameter dtype."""
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts parameters and buffers to their dtype, and layers to their compute form, in place."""
        return restore_layers(module)

    def convert_for_shards(self, module: nn.Module) -> nn.Module:
        """Like `convert_module`, for a module whose parameters will be sharded (FSDP)."""
        return self.convert_module(module)

    def before_sharding(self, owner: nn.Module, name: str) -> None:
        """Replaces a parameter, if needed, after it is initialized or loaded and before it is sharded."""

    def describe(self, modules: Sequence[nn.Module]) -> str:
        """Returns a line about the precision that fit prints once modules are set up; empty to print nothing."""
        return ""

    def convert_input(self, batch: T) -> T:
        """Converts the floating-point tensors of a batch to their dtype."""
        return batch

    def register(self, optimizer: Optimizer) -> None:
        """Registers an optimizer that the plugin will step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss to run backward on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscales the optimizer's gradients. No-op if they are already unscaled."""

    def share_found_inf(self, optimizer: Optimizer, largest: Callable[[Tensor], None]) -> None:
        """Makes a gradient scaler skip the step on all ranks if any rank found inf. No-op without a scaler.

        Args:
            optimizer: an optimizer whose gradients are unscaled.
            largest: function that reduces a number to its maximum over the ranks, in place. All ranks call it.
        """

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps the optimizer with the keyword arguments. Returns False if the step was skipped."""
        if closure is None:
            optimizer.step(**kwargs)
        else:
            optimizer.step(closure, **kwargs)
        return True

    def end_step(self) -> None:
        """Ends the window's step, after all its optimizers."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state returned by `state_dict`."""


def restore_layers(module: nn.Module) -> nn.Module:
    """Restores, in place, the original class of layers that an earlier run converted."""
    for part in module.modules():
        plain = vars(part).pop("_leyden_plain", None)
        if plain is not None:
            part.__class__, settings = plain
            for name in settings:
                vars(part).pop(name, None)
    return module


class DefaultDtype(AbstractContextManager[None]):
    """Sets torch's default dtype within the block, so that `torch.zeros(...)` in a step uses it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.previous)
