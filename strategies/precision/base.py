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

    Subclass it for a precision of your own and hand it to `Trainer(precision=...)`.
    """

    name: str = "32-true"
    converts_input: bool = False
    """True where `convert_input` has work to do."""
    forward_context: Callable[[], AbstractContextManager[Any]] | None = None
    """Returns the context of a forward pass; None if there is none, which costs nothing."""
    may_skip: bool = False
    """True if steps may be skipped: there is a gradient scaler, which looks for inf and nan."""
    form: str = ""
    """How layers of a module were changed by `convert_module`, beyond their dtype: two runs of it must agree on that.
    """
    scales_loss: bool = False
    """True where `scale_loss` has work to do: in a class that overrides it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.scales_loss = cls.scale_loss is not Precision.scale_loss

    def check_package(self) -> None:
        """Raises MissingExtraError if a package that it needs is missing; called once a strategy has taken it."""

    def check(self, device: torch.device) -> None:
        """Raises ConfigurationError where the device cannot run this precision."""

    def reset(self) -> None:
        """Drops what an earlier fit left behind."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Modules built in this context have the precision's parameter dtype from the start."""
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Gives parameters and buffers their dtype, and layers the form in which they compute, in place."""
        return restore_layers(module)

    def convert_for_shards(self, module: nn.Module) -> nn.Module:
        """Does what `convert_module` does, for a module whose parameters will be sharded (FSDP)."""
        return self.convert_module(module)

    def before_sharding(self, owner: nn.Module, name: str) -> None:
        """May give a parameter of such a module another form, once it has its values and before it is sharded."""

    def describe(self, modules: Sequence[nn.Module]) -> str:
        """What fit prints about the precision once modules are set up; empty for nothing."""
        return ""

    def convert_input(self, batch: T) -> T:
        """Gives the floating tensors of a batch their dtype."""
        return batch

    def register(self, optimizer: Optimizer) -> None:
        """Registers an optimizer that the plugin will step."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss that goes into backward."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Brings the gradients of the optimizer to their true scale; does nothing if they are."""

    def share_found_inf(self, optimizer: Optimizer, largest: Callable[[Tensor], None]) -> None:
        """Has a gradient scaler skip a step on all ranks of which one has found inf; nothing without a scaler.

        Args:
            optimizer: whose gradients have their true scale.
            largest: makes a number the largest of those that ranks have, in place; all of them call it.
        """

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps the optimizer, with the keyword arguments; returns False if the step was skipped."""
        if closure is None:
            optimizer.step(**kwargs)
        else:
            optimizer.step(closure, **kwargs)
        return True

    def end_step(self) -> None:
        """Ends the step of all optimizers of a window."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""


def restore_layers(module: nn.Module) -> nn.Module:
    """Restores, in place, the class that layers had before an earlier run changed their precision."""
    for part in module.modules():
        plain = vars(part).pop("_leyden_plain", None)
        if plain is not None:
            part.__class__, settings = plain
            for name in settings:
                vars(part).pop(name, None)
    return module


class DefaultDtype(AbstractContextManager[None]):
    """Makes a dtype torch's default inside the block, so that `torch.zeros(...)` in a step has it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.previous)
