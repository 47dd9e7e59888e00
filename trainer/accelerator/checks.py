"""Common mistakes in a user's own training loop: each raises an error, or warns once, and names the fix."""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.trainer.engine.prepared import PreparedOptimizer

if TYPE_CHECKING:
    from leyden.trainer.accelerator.ranks import PartialState
    from leyden.trainer.accelerator.stepping import Stepping

ADVICE = (
    "backward was called twice and no optimizer was prepared: optimizer = accelerator.prepare(optimizer), so that it "
    "steps at the ends of accumulation windows, with unscaled gradients; or step and clear your own under "
    "`if accelerator.sync_gradients`."
)


class Mistakes:
    """Checks a user's own loop for common mistakes.

    Args:
        stepping: has the models and optimizers.
        places: batches come on the device, so models must stay there.
    """

    def __init__(self, stepping: Stepping, places: bool) -> None:
        self._stepping = stepping
        self._places = places
        self._checked: set[int] = set()
        self._backwards = 0
        self._versions: list[int] | None = None
        """How often each trained parameter had been changed when the first window began."""

    def in_pass(self) -> None:
        """At the start of a pass over a loader: models must be where batches come."""
        stepping = self._stepping
        if not self._places:
            return
        for model in stepping.bare_models:
            first = next(model.parameters(), None)
            if first is not None and first.device != stepping.device and first.device.type != "cpu":
                raise ConfigurationError(
                    f"{type(model).__name__} was moved to {first.device} after prepare, and batches come on "
                    f"{stepping.device}: leave out .to(...), or give Accelerator(device_placement=False)."
                )

    def in_accumulate(self, models: Sequence[Any]) -> None:
        """In `accumulate(model)`: the model must be what `prepare` returned."""
        stepping = self._stepping
        for model in models:
            if id(model) in self._checked or not isinstance(model, nn.Module):
                continue
            if not any(model is known for known in (*stepping.prepared_models, *stepping.bare_models)):
                raise ConfigurationError(
                    f"accumulate was given {kind_of(model)} that is not prepared: model = accelerator.prepare(model), "
                    "and use what it returns."
                )
            if stepping.strategy.ranks.world_size > 1 and not any(model is known for known in stepping.prepared_models):
                raise ConfigurationError(
                    f"accumulate was given the {type(model).__name__} that was handed to prepare, not what came back: "
                    "on several ranks its gradients would not be exchanged. Write model = accelerator.prepare(model)."
                )
            self._checked.add(id(model))

    def in_backward(self) -> None:
        """In `backward`: a model must be prepared, and an optimizer too, or be stepped at the ends of windows alone."""
        self._backwards += 1
        stepping = self._stepping
        if not stepping.prepared_models:
            if self._backwards <= 2:
                self._warn_or_raise(
                    "backward was called and no model was prepared: model, optimizer = accelerator.prepare(model, "
                    "optimizer)."
                )
        elif not stepping.prepared_optimizers:
            self._with_own_optimizer()

    def _with_own_optimizer(self) -> None:
        """No optimizer is prepared: the loop may step its own, under `if accelerator.sync_gradients`."""
        stepping, text = self._stepping, ADVICE
        accumulates = stepping.accumulation.num_steps > 1
        if self._backwards < 2 and not accumulates:
            return
        may_step_own = not stepping.strategy.drives_one and not stepping.precision.may_skip
        if accumulates and stepping.window.is_open and may_step_own:
            self._in_own_window()
        elif self._backwards == 2:
            if stepping.precision.may_skip or accumulates:
                raise ConfigurationError(text)
            warnings.warn(text, stacklevel=5)

    def _in_own_window(self) -> None:
        """In the first window: weights and gradients must be left alone until it closes."""
        stepping = self._stepping
        if self._backwards > 1 and self._versions is None:
            return
        trained = [p for model in stepping.bare_models for p in model.parameters() if p.requires_grad]
        if self._backwards == 1:
            self._versions = [parameter._version for parameter in trained]
        elif stepping.window.index > 0:
            if [parameter._version for parameter in trained] != self._versions:
                raise ConfigurationError(f"weights changed inside of an accumulation window: {ADVICE}")
            if stepping.strategy.replicates and all(parameter.grad is None for parameter in trained):
                raise ConfigurationError(f"gradients were cleared inside of an accumulation window: {ADVICE}")
            if stepping.window.closes:
                self._versions = None

    def in_step(self, prepared: PreparedOptimizer) -> None:
        """At an optimizer's first step: its parameters must be those of a model that was prepared."""
        if id(prepared) in self._checked:
            return
        self._checked.add(id(prepared))
        stepping = self._stepping
        known = {id(p) for model in stepping.bare_models for p in model.parameters()}
        own = [p for group in stepping.strategy.master_weights.groups(prepared.optimizer) for p in group]
        foreign = [p for p in own if id(p) not in known]
        name = type(prepared.optimizer).__name__
        if own and len(foreign) == len(own):
            self._warn_or_raise(
                f"{name} holds no parameter of a prepared model: prepare the model that it was made of, or make it of "
                "the parameters of the model that is trained."
            )
        elif foreign:
            self._warn_or_raise(
                f"{name} holds {len(foreign)} of {len(own)} parameters that belong to no prepared model: prepare their "
                "model too, or they are trained apart on each rank."
            )

    def _warn_or_raise(self, text: str) -> None:
        """Warns on one process in plain float32, where numbers stay right, and raises elsewhere."""
        stepping = self._stepping
        if (
            stepping.strategy.ranks.world_size > 1
            or stepping.precision.name != "32-true"
            or stepping.device.type != "cpu"
        ):
            raise ConfigurationError(text)
        warnings.warn(text, stacklevel=5)


def hint_at_first_print(state: PartialState) -> None:
    """Adds a hint to the first `print` of the second rank on a machine, and restores `print`."""
    if state.num_processes == 1 or state.local_process_index != 1:
        return
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
