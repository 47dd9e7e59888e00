"""Mistakes that are easily made in one's own training loop, found where they are made: an error, or one warning, that names the fix."""

from __future__ import annotations

import builtins
import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.trainer.engine import debugging
from leyden.trainer.engine.prepared import PreparedOptimizer

if TYPE_CHECKING:
    from leyden.trainer.accelerator.accelerator import Accelerator

ADVICE = (
    "backward was called twice and no optimizer was prepared: optimizer = accelerator.prepare(optimizer), so that it steps at the "
    "ends of accumulation windows, with unscaled gradients; or step and clear your own under `if accelerator.sync_gradients`."
)


class Mistakes:
    """The checks of an Accelerator, each made once at its place.

    Args:
        accelerator: whose models and optimizers.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._checked: set[int] = set()
        self._backwards = 0
        self._told: set[str] = set()
        self._versions: list[int] | None = None
        """Of the trained parameters, how often each had been changed when the first window began."""

    def in_pass(self) -> None:
        """At the start of a pass over a loader."""
        self._check_devices()

    def in_accumulate(self, models: tuple[Any, ...]) -> None:
        """In `accumulate(model)`."""
        accelerator = self._accelerator
        for model in models:
            if id(model) in self._checked or not isinstance(model, nn.Module):
                continue
            if not any(model is known for known in (*accelerator.prepared_models, *accelerator.bare_models)):
                raise ConfigurationError(
                    f"accumulate was given {kind_of(model)} that is not prepared: model = accelerator.prepare(model), and "
                    "use what it returns."
                )
            if accelerator.num_processes > 1 and not any(model is known for known in accelerator.prepared_models):
                raise ConfigurationError(
                    f"accumulate was given the {type(model).__name__} that was handed to prepare, not what came back: on several "
                    "ranks its gradients would not be exchanged. Write model = accelerator.prepare(model)."
                )
            self._checked.add(id(model))

    def in_backward(self) -> None:
        """In `backward`: a model must be prepared, and an optimizer too, or be stepped at the ends of windows alone."""
        self._backwards += 1
        accelerator = self._accelerator
        if not accelerator.prepared_models:
            if self._backwards <= 2:
                self._warn_or_raise(
                    "backward was called and no model was prepared: model, optimizer = accelerator.prepare(model, optimizer)."
                )
        elif not accelerator.prepared_optimizers:
            self._with_own_optimizer()

    def _with_own_optimizer(self) -> None:
        """No optimizer is prepared: the loop may step its own, under `if accelerator.sync_gradients`."""
        accelerator, text = self._accelerator, ADVICE
        accumulates = accelerator.gradient_accumulation_steps > 1
        if self._backwards < 2 and not accumulates:
            return
        may_step_own = not accelerator.strategy.drives_one and not accelerator.precision.may_skip
        if accumulates and accelerator.window.is_open and may_step_own:
            self._in_own_window()
        elif self._backwards == 2:
            if accelerator.precision.may_skip or accumulates:
                raise ConfigurationError(text)
            warnings.warn(text, stacklevel=5)

    def _in_own_window(self) -> None:
        """In the first window: weights and gradients must be left alone until it closes."""
        accelerator = self._accelerator
        if self._backwards > 1 and self._versions is None:
            return
        trained = [p for model in accelerator.bare_models for p in model.parameters() if p.requires_grad]
        if self._backwards == 1:
            self._versions = [parameter._version for parameter in trained]
        elif accelerator.window.index > 0:
            if [parameter._version for parameter in trained] != self._versions:
                raise ConfigurationError(f"weights changed inside of an accumulation window: {ADVICE}")
            if accelerator.strategy.replicates and all(parameter.grad is None for parameter in trained):
                raise ConfigurationError(f"gradients were cleared inside of an accumulation window: {ADVICE}")
            if accelerator.window.closes:
                self._versions = None

    def in_step(self, prepared: PreparedOptimizer) -> None:
        """At an optimizer's first step: its parameters must be those of a model that was prepared."""
        if id(prepared) in self._checked:
            return
        self._checked.add(id(prepared))
        accelerator = self._accelerator
        known = {id(p) for model in accelerator.bare_models for p in model.parameters()}
        own = [p for group in accelerator.strategy.parameter_groups(prepared.optimizer) for p in group]
        foreign = [p for p in own if id(p) not in known]
        name = type(prepared.optimizer).__name__
        if own and len(foreign) == len(own):
            self._warn_or_raise(
                f"{name} holds no parameter of a prepared model: prepare the model that it was made of, or make it of the "
                "parameters of the model that is trained."
            )
        elif foreign:
            self._warn_or_raise(
                f"{name} holds {len(foreign)} of {len(own)} parameters that belong to no prepared model: prepare their model too, or "
                "they are trained apart on each rank."
            )

    def _warn_or_raise(self, text: str) -> None:
        """A warning on one process in plain float32, where it makes no difference; an error elsewhere, where it is wrong."""
        accelerator = self._accelerator
        if accelerator.num_processes > 1 or accelerator.precision.name != "32-true" or accelerator.device.type != "cpu":
            raise ConfigurationError(text)
        warnings.warn(text, stacklevel=5)

    def _check_devices(self) -> None:
        accelerator = self._accelerator
        if not accelerator.device_placement:
            return
        for model in accelerator.bare_models:
            first = next(model.parameters(), None)
            if first is not None and first.device != accelerator.device and first.device.type != "cpu":
                raise ConfigurationError(
                    f"{type(model).__name__} was moved to {first.device} after prepare, and batches come on {accelerator.device}: "
                    "leave out .to(...), or give Accelerator(device_placement=False)."
                )


def begin(accelerator: Accelerator) -> None:
    """At the start of a run: debug mode says what each rank is; beyond rank 0 the first print is followed by a hint."""
    if debugging.is_debugging():
        debugging.begin(accelerator, accelerator.gradient_accumulation_steps)
    if accelerator.num_processes > 1 and accelerator.local_process_index == 1:
        _hint_once()


def _hint_once() -> None:
    """The first `print` of a rank that is not the main one is followed by a hint; from then on print is as it was."""
    plain = builtins.print

    def print_and_hint(*args: Any, **kwargs: Any) -> None:
        builtins.print = plain
        plain(*args, **kwargs)
        if kwargs.get("file") in (None, sys.stdout):
            plain(
                "leyden: this was printed by every rank; accelerator.print(...) prints once (this hint comes once).",
                file=sys.stderr,
                flush=True,
            )

    if getattr(plain, "__name__", "") == "print":
        builtins.print = print_and_hint
