"""Detection of common mistakes in a custom training loop: each raises an error or warns once, and names the fix."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.rank_zero import inform, to_stderr, warn
from leyden.trainer.engine.prepared import PreparedOptimizer

if TYPE_CHECKING:
    from leyden.accelerator.loop.stepping import Stepping
    from leyden.strategies.ranks import Ranks

ADVICE = (
    "backward was called twice, but no optimizer was prepared. Write optimizer = accelerator.prepare(optimizer), so "
    "that it steps with unscaled gradients when accumulation windows close; or step and clear your own optimizer under "
    "`if accelerator.sync_gradients`."
)


class Mistakes:
    """Checks a custom training loop for common mistakes; `places` if batches are moved to the device."""

    def __init__(self, stepping: Stepping, places: bool) -> None:
        self._stepping = stepping
        self._places = places
        self._checked: set[int] = set()
        self._backwards = 0
        self._versions: list[int] | None = None
        """Version counter of each trained parameter at the start of the first window; None outside it."""

    def in_pass(self) -> None:
        """At the start of a pass over a loader, checks that models are on the device of the batches."""
        stepping = self._stepping
        if not self._places:
            return
        for model in stepping.bare_models:
            first = next(model.parameters(), None)
            if first is not None and first.device != stepping.device and first.device.type != "cpu":
                raise ConfigurationError(
                    f"{type(model).__name__} was moved to {first.device} after prepare, but batches are moved to "
                    f"{stepping.device}. Remove .to(...), or use Accelerator(device_placement=False)."
                )

    def in_accumulate(self, models: Sequence[Any]) -> None:
        """In `accumulate(model)`, checks that the model is the one that `prepare` returned."""
        stepping = self._stepping
        for model in models:
            if id(model) in self._checked or not isinstance(model, nn.Module):
                continue
            if not any(model is known for known in (*stepping.prepared_models, *stepping.bare_models)):
                raise ConfigurationError(
                    f"accumulate got {kind_of(model)} that is not prepared. Write model = accelerator.prepare(model), "
                    "and use the returned model."
                )
            if stepping.strategy.ranks.world_size > 1 and not any(model is known for known in stepping.prepared_models):
                raise ConfigurationError(
                    f"accumulate got the original {type(model).__name__} instead of the prepared one, whose gradients "
                    "are synchronized across ranks. Write model = accelerator.prepare(model)."
                )
            self._checked.add(id(model))

    def in_unprepared_backward(self) -> None:
        """In `backward` with no prepared model or optimizer: an optimizer may step itself as windows close."""
        self._backwards += 1
        stepping = self._stepping
        if not stepping.prepared_models:
            if self._backwards <= 2:
                self._warn_or_raise(
                    "backward was called, but no model was prepared. Write model, optimizer = "
                    "accelerator.prepare(model, optimizer)."
                )
        else:
            self._check_unprepared_optimizer()

    def _check_unprepared_optimizer(self) -> None:
        """Checks a loop without a prepared optimizer, which may step its own under `if accelerator.sync_gradients`."""
        stepping = self._stepping
        accumulates = stepping.accumulation.num_steps > 1
        if self._backwards < 2 and not accumulates:
            return
        may_step_own = not stepping.strategy.drives_one and not stepping.precision.may_skip
        if accumulates and stepping.window.is_open and may_step_own:
            self._check_first_window()
        elif self._backwards == 2:
            if stepping.precision.may_skip or accumulates:
                raise ConfigurationError(ADVICE)
            warn(ADVICE)

    def _check_first_window(self) -> None:
        """Checks that the first window leaves weights and gradients unchanged until it closes."""
        stepping = self._stepping
        if self._backwards > 1 and self._versions is None:
            return
        trained = [p for model in stepping.bare_models for p in model.parameters() if p.requires_grad]
        if self._backwards == 1:
            self._versions = [parameter._version for parameter in trained]
        elif stepping.window.index > 0:
            if [parameter._version for parameter in trained] != self._versions:
                raise ConfigurationError(f"weights changed inside an accumulation window: {ADVICE}")
            if stepping.strategy.replicates and all(parameter.grad is None for parameter in trained):
                raise ConfigurationError(f"gradients were cleared inside an accumulation window: {ADVICE}")
            if stepping.window.closes:
                self._versions = None

    def in_step(self, prepared: PreparedOptimizer) -> None:
        """In an optimizer's first step, checks that its parameters belong to a prepared model."""
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
                f"{name} holds no parameter of a prepared model. Prepare the model whose parameters it holds, or "
                "create it from the parameters of the model that you train."
            )
        elif foreign:
            self._warn_or_raise(
                f"{len(foreign)} of {name}'s {len(own)} parameters belong to no prepared model. Prepare their model "
                "too, or each rank trains its own version of them."
            )

    def _warn_or_raise(self, text: str) -> None:
        """Warns on a single CPU process in float32, where the numbers stay right; raises in all other cases."""
        stepping = self._stepping
        if (
            stepping.strategy.ranks.world_size > 1
            or stepping.precision.name != "32-true"
            or stepping.device.type != "cpu"
        ):
            raise ConfigurationError(text)
        warn(text)


def hint_at_first_print(ranks: Ranks) -> None:
    """Adds a hint to the first `print` of the second rank of each machine, then restores `print`."""
    if ranks.world_size == 1 or ranks.local_rank != 1:
        return
    plain = builtins.print

    def print_and_hint(*args: Any, **kwargs: Any) -> None:
        builtins.print = plain
        plain(*args, **kwargs)
        if kwargs.get("file") in (None, sys.stdout):
            text = "leyden: every rank printed this. accelerator.print(...) prints once. (This hint appears once.)"
            inform(text, to_stderr, every_rank=True)

    if getattr(plain, "__name__", "") == "print":
        builtins.print = print_and_hint
