"""The accumulation window that strategies receive, and the loss of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from leyden.core.errors import ConfigurationError, kind_of

StepOutput: TypeAlias = "Tensor | Mapping[str, Any]"


@dataclass(slots=True)
class Window:
    """One accumulation window: the batches that contribute to one optimizer step.

    The engine owns the window and passes it to strategies. Nothing else counts batches.

    Attributes:
        index: position of the current batch in the window, from 0.
        length: number of batches in the window. The last window of an epoch may be shorter.
        closes: True if the current batch is the window's last. Known before its forward pass.
        passed: number of the window's batches without a sample on any rank. `index` does not count them.
        is_open: True from the window's first batch until its step is done. No checkpoint can be written meanwhile.
        num_items: total item count of the window so far, if `training_step` returns `num_items`. None if losses are
            means, which are divided by the number of batches instead.
        first_items: item count of the window's first batch, averaged over the ranks (1 if it has no items). Backward
            divides by it (see `Strategy.loss_to_backward`).
        weight: factor for this rank's mean loss of the current batch: its sample count over the mean of all ranks.
        idle: True if some rank has no sample of the current global batch and calls `shadow_batch`. Equal on all ranks.
        alone: True if a pass may fail on one rank only. Passes then skip every optional collective, such as that of
            `num_items`.
        divisor: divisor of losses with `num_items` when ranks cannot exchange their counts. None means this rank's own
            count.
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
        """Sets the length of the next window. No-op while a window is open."""
        if not self.is_open:
            self.length = length

    def open(self, length: int, is_last: bool = False) -> None:
        """Begins a new window with its first batch.

        Args:
            length: number of batches in the window.
            is_last: True if no batch follows, which closes the window with this one.
        """
        self.index, self.length, self.is_open, self.passed = 0, length, True, 0
        self.closes = is_last or length == 1
        self.num_items = self.first_items = None

    def advance(self, is_last: bool) -> None:
        """Begins the next batch of the open window. `is_last` is the same as in `open`."""
        self.closes = is_last or self.index + self.passed == self.length - 1

    def pass_over(self) -> None:
        """Excludes the current batch, which has no sample on any rank, from the count. `end_batch` still ends it."""
        self.index -= 1
        self.passed += 1

    def end_batch(self) -> None:
        """Ends a batch, and the window if the batch closes it."""
        if self.closes:
            self.is_open, self.index = False, 0
        else:
            self.index += 1

    def begin_items(self, num_items: Tensor | float, mean: Tensor | float) -> None:
        """Counts the items of the first batch. `mean` is their mean over the ranks, the divisor for backward."""
        self.num_items, self.first_items = num_items, mean

    def add_items(self, num_items: Tensor | float) -> None:
        """Counts the items of a later batch."""
        self.num_items = self.num_items + num_items  # type: ignore[operator]

    def place(self, index: int, closes: bool, weight: float) -> None:
        """Sets a micro-batch's position in a window of micro-batches, whose length is known."""
        self.index, self.closes, self.weight = index, closes, weight

    def divide_by(self, divisor: float) -> None:
        """Sets `divisor`, which all ranks know without a collective."""
        self.divisor = divisor

    def close_here(self, closes: bool) -> None:
        """Sets `closes` for the current batch, for a custom loop that counts its own batches."""
        self.closes = closes

    def end_here(self) -> None:
        """Shortens the window so that the current batch is its last."""
        self.length = self.index + 1

    def close_early(self) -> None:
        """Closes the open window with the previous batch, since no further batch arrived."""
        self.index -= 1
        self.closes = True

    def abandon(self) -> None:
        """Drops the open window, none of whose batches was trained."""
        self.is_open = False

    def reset(self) -> None:
        """Drops the open window and its accumulated state."""
        self.is_open, self.index, self.closes = False, 0, True

    def weigh(self, weight: float, idle: bool) -> None:
        """Sets the current batch's `weight` and `idle` (see the attributes)."""
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
    """Returns the loss and num_items (or None) found in the output of `training_step`.

    Raises:
        ConfigurationError: if the output has no scalar loss with a gradient.
    """
    num_items = None
    if isinstance(outputs, Tensor):
        loss = outputs
    elif isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise ConfigurationError(
                f"training_step returned a dict with the keys {list(outputs)}, without 'loss'. Return "
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
            f"training_step returned a loss that is {kind_of(loss)}, not a tensor. Return it without float() or "
            ".item()."
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            "training_step returned a loss without a gradient. Compute it from the module's parameters, without "
            "torch.no_grad(), detach() or .item(), and keep at least one parameter trainable."
        )
    if loss.numel() != 1:
        raise ConfigurationError(
            f"training_step returned a loss of shape {tuple(loss.shape)}. Return a single number, such as loss.mean()."
        )
    if num_items is not None:
        _check_items(num_items)
    return loss, num_items


def zeroed(loss: Tensor) -> Tensor:
    """Returns a loss of 0 with the same graph, for a pass without effect. 0 * loss would be nan if the loss is."""
    return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


def _check_items(num_items: object) -> None:
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ConfigurationError(f"num_items has the shape {tuple(num_items.shape)}. Return a single number.")
    elif isinstance(num_items, bool) or not isinstance(num_items, (int, float)):
        raise ConfigurationError(f"num_items is {kind_of(num_items)}. Return a number, or a tensor with one element.")
