"""The accumulation window that strategies receive, and the loss that a training step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError, kind_of

StepOutput: TypeAlias = "Tensor | Mapping[str, Any]"


@dataclass(slots=True)
class Window:
    """One accumulation window: the batches whose gradients make one optimizer step.

    The engine owns it and passes it to strategies, so nothing else counts batches.

    Attributes:
        index: position of the current batch in the window, from 0.
        length: number of batches in the window; the last window of an epoch may be shorter than the others.
        closes: the current batch is the window's last. Known before its forward pass.
        passed: batches of the window of which no rank had a sample; `index` does not count them.
        is_open: a batch of the window has begun and its step is not done: no checkpoint can be written now.
        num_items: what the losses of this window are divided by, where `training_step` returns `num_items`; None
            where the loss is a mean, and the number of batches divides it.
        first_items: `num_items` of the window's first batch, the mean over ranks (1 where it has none), by which
            backward divides (see `Strategy.loss_to_backward`).
        weight: what this rank's mean loss of the current batch is multiplied by: its samples over the mean of all
            ranks.
        idle: some rank has no sample of the current global batch, and calls `shadow_batch`. All ranks know of it.
        alone: a pass may fail on one rank alone, so that passes exchange no more than they must: no `num_items`.
        divisor: what backward divides losses with `num_items` by, where ranks cannot ask each other; None for this
            rank's own number.
    """

    index: int = 0
    length: int = 1
    closes: bool = True
    is_open: bool = False
    num_items: Tensor | float | None = None
    first_items: Tensor | float | None = None
    weight: float = 1.0
    idle: bool = False
    passed: int = 0
    alone: bool = False
    divisor: float | None = None

    def plan(self, length: int) -> None:
        """Sets the length of the next window; an open one keeps its own."""
        if not self.is_open:
            self.length = length

    def open(self, length: int, is_last: bool = False) -> None:
        """Begins a new window with its first batch.

        Args:
            length: batches in the window.
            is_last: no batch follows, so that the window closes with this one.
        """
        self.index, self.length, self.is_open, self.passed = 0, length, True, 0
        self.closes = is_last or length == 1
        self.num_items = self.first_items = None

    def advance(self, is_last: bool) -> None:
        """Begins the next batch of the open window; `is_last` as of `open`."""
        self.closes = is_last or self.index + self.passed == self.length - 1

    def pass_over(self) -> None:
        """Takes the current batch out of the window, of which no rank has a sample; `end_batch` ends it."""
        self.index -= 1
        self.passed += 1

    def end_batch(self) -> None:
        """Ends a batch, and the window if the batch closes it."""
        if self.closes:
            self.is_open, self.index = False, 0
        else:
            self.index += 1

    def begin_items(self, num_items: Tensor | float, mean: Tensor | float) -> None:
        """Counts the items of the first batch; `mean`, their mean over the ranks, is what backward divides by."""
        self.num_items, self.first_items = num_items, mean

    def add_items(self, num_items: Tensor | float) -> None:
        """Counts the items of a further batch."""
        self.num_items = self.num_items + num_items  # type: ignore[operator]

    def place(self, index: int, closes: bool, weight: float) -> None:
        """Puts a micro-batch at its place in a window of micro-batches, whose length is known."""
        self.index, self.closes, self.weight = index, closes, weight

    def divide_by(self, divisor: float) -> None:
        """Sets `divisor`, which all ranks know without asking each other."""
        self.divisor = divisor

    def close_here(self, closes: bool) -> None:
        """Lets a loop that counts its batches itself decide whether the window closes with the current one."""
        self.closes = closes

    def end_here(self) -> None:
        """Cuts the length to the batches that the window has had: the current one is its last."""
        self.length = self.index + 1

    def close_early(self) -> None:
        """Closes the open window with the batch that ended last: no other came."""
        self.index -= 1
        self.closes = True

    def abandon(self) -> None:
        """Drops the open window, of which no batch was trained."""
        self.is_open = False

    def reset(self) -> None:
        """Drops the open window and what was accumulated in it: the next batch stands by itself."""
        self.is_open, self.index, self.closes = False, 0, True

    def weigh(self, weight: float, idle: bool) -> None:
        """Sets how much the current batch counts among the ranks (see the attributes)."""
        self.weight, self.idle = weight, idle


class BackwardHooks(Protocol):
    """The hooks that a strategy calls around backward. Empty tuples and None cost nothing."""

    @property
    def on_before_backward(self) -> Sequence[Callable[[Tensor], Any]]: ...
    @property
    def on_after_backward(self) -> Sequence[Callable[[], Any]]: ...
    @property
    def backward(self) -> Callable[[Tensor], Any] | None: ...


def read_loss(outputs: StepOutput) -> tuple[Tensor, Tensor | float | None]:
    """Takes loss and num_items from what `training_step` returned.

    Raises:
        ConfigurationError: if there is no scalar loss with a gradient in it.
    """
    num_items = None
    if isinstance(outputs, Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise ConfigurationError(
                f"training_step returned a dict with the keys {list(outputs)}, and none is 'loss'. Return "
                "{'loss': loss, ...}, or set automatic_optimization = False and call manual_backward yourself."
            )
        loss, num_items = outputs["loss"], outputs.get("num_items")
    else:
        raise ConfigurationError(
            f"training_step returned {kind_of(outputs)}, not a loss. Return a scalar tensor or a dict with the key "
            "'loss', or set automatic_optimization = False and call manual_backward yourself."
        )
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"the loss that training_step returned is {kind_of(loss)}, not a tensor: return it before any float() or "
            ".item()."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "the loss that training_step returned has no gradient. Compute it from the module's parameters, without "
            "torch.no_grad(), detach() or .item() on the way, and leave at least one parameter trainable."
        )
    if loss.numel() != 1:
        raise ConfigurationError(
            f"the loss that training_step returned has the shape {tuple(loss.shape)}: return one number, as "
            "loss.mean()."
        )
    if num_items is not None:
        _check_items(num_items)
    return loss, num_items


def zeroed(loss: Tensor) -> Tensor:
    """A loss of 0 with the same graph, for a pass that counts for nothing: 0 * loss is nan where the loss is."""
    return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def _check_items(num_items: object) -> None:
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ConfigurationError(f"num_items has the shape {tuple(num_items.shape)}: return one number.")
    elif isinstance(num_items, bool) or not isinstance(num_items, (int, float)):
        raise ConfigurationError(f"num_items is {kind_of(num_items)}: return a number, or a tensor of one.")
