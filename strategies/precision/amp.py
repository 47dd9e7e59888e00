"""Mixed precision: float32 parameters, half-precision forward through autocast, a gradient scaler for float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from leyden.core.devices import lacks_bfloat16, name_of
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.core.saved_state import SavedState
from leyden.strategies.precision.base import Precision

SKIPS_IN_A_ROW = 40
"""Limit of consecutive skipped steps. From the default scale 2^16, 40 halvings end at 2^-24; more would not help."""


class MixedPrecision(Precision):
    """`16-mixed` and `bf16-mixed`.

    The scaler is a `torch.amp.GradScaler`. Reading back whether it found inf is the only device sync of a window.

    Args:
        dtype: "16" or "16-mixed" for float16 with a gradient scaler, "bf16" or "bf16-mixed" for bfloat16 without one.
        init_scale: initial scale of the gradient scaler.
        growth_factor: factor of the scale after `growth_interval` windows without inf or nan.
        backoff_factor: factor of the scale after a window with inf or nan, whose step is skipped.
        growth_interval: number of windows between two growths.
        scaler: your own GradScaler, instead of the four arguments above.
    """

    def __init__(
        self,
        dtype: Literal["16", "bf16", "16-mixed", "bf16-mixed"],
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        scaler: GradScaler | None = None,
    ) -> None:
        if dtype not in ("16", "bf16", "16-mixed", "bf16-mixed"):
            raise ConfigurationError(f"MixedPrecision(dtype={dtype!r}) is not valid. Use '16-mixed' or 'bf16-mixed'.")
        self.may_skip = dtype.startswith("16")
        if scaler is not None and not self.may_skip:
            raise ConfigurationError("bf16-mixed has the range of float32 and needs no scaler. Leave scaler out.")
        self.name = "16-mixed" if self.may_skip else "bf16-mixed"
        self.dtype = torch.float16 if self.may_skip else torch.bfloat16
        self.scaler = scaler
        self._given_state = None if scaler is None else scaler.state_dict()
        self._scaler_arguments = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        self.forward_context = self._autocast
        self._device_type = "cpu"
        self._stepped = False
        self._skips = 0
        self._registered: WeakSet[Optimizer] = WeakSet()
        self._unscaled: set[int] = set()
        self._done: set[int] = set()
        """Optimizers that stepped, or whose step was skipped, since the last update of the scale."""

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for spawned ranks, which create their own optimizers.
        return {**vars(self), "_registered": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _registered=WeakSet())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type, dtype=self.dtype)

    def use_autocast(self, make: Callable[[], torch.autocast]) -> None:
        """Replaces the autocast context of forward passes by the one that `make` returns."""
        self.forward_context = make

    def check(self, device: torch.device) -> None:
        if self.dtype == torch.bfloat16 and lacks_bfloat16(device):
            raise ConfigurationError(f"{name_of(device)} lacks bfloat16. Use precision='16-mixed' or '32-true'.")
        self._device_type = device.type
        if self.may_skip and self.scaler is None:
            self.scaler = GradScaler(device.type, **self._scaler_arguments)  # type: ignore[arg-type]

    def reset(self) -> None:
        self._skips = 0
        self._unscaled.clear()
        # An error after a manual step ends a fit without `end_step`.
        self._done.clear()
        if self._given_state is not None and self.scaler is not None:
            self.scaler.load_state_dict(self._given_state)
        elif self.may_skip:
            self.scaler = GradScaler(self._device_type, **self._scaler_arguments)  # type: ignore[arg-type]

    def register(self, optimizer: Optimizer) -> None:
        # A second fit may register the same optimizers again.
        if self.scaler is not None and optimizer not in self._registered:
            self._registered.add(optimizer)
            # The hook runs only if the scaler steps, so no second read-back is needed.
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        # A fused optimizer skips within its kernel, so its found_inf is read back here. The scaler reads the others'.
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped = found_inf is None or not bool(found_inf)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        # Clipping by hand and the step itself both call this, but the scaler unscales only once.
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        if id(optimizer) in self._done:
            # Another step of the same optimizer within one training_step. The scaler expects an update in between,
            # which would change the scale while other optimizers hold gradients at the old one. So its state of the
            # first step is kept under an unused key until the update.
            states = self.scaler._per_optimizer_states
            states[-len(states)] = states.pop(id(optimizer))
            self._done.discard(id(optimizer))
        self._unscaled.add(id(optimizer))
        self.scaler.unscale_(optimizer)

    def share_found_inf(self, optimizer: Optimizer, largest: Callable[[Tensor], None]) -> None:
        if self.scaler is None:
            return
        state = self.scaler._per_optimizer_states[id(optimizer)]
        found_inf: dict[torch.device, Tensor] = state["found_inf_per_device"]
        if not found_inf:
            # Without gradients on this rank, the scaler would refuse to step.
            scale = self.scaler._scale
            assert scale is not None
            found_inf[scale.device] = torch.zeros((), device=scale.device)
        for number in found_inf.values():
            largest(number)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if self.scaler is None:
            super().step(optimizer, closure, **kwargs)
            torch.clear_autocast_cache()
            return True
        if closure is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} re-evaluates the loss in its step, which a gradient scaler does not "
                "support. Use precision='bf16-mixed' or '32-true'."
            )
        self._stepped = False
        self.unscale(optimizer)
        self.scaler.step(optimizer, **kwargs)
        # Under manual optimization the step runs inside autocast, whose cached half-precision weights are now stale.
        torch.clear_autocast_cache()
        self._unscaled.discard(id(optimizer))
        self._done.add(id(optimizer))
        self._skips = 0 if self._stepped else self._skips + 1
        # Every optimizer's skip counts, but the scale is halved only once per window.
        if self._skips >= SKIPS_IN_A_ROW * max(1, len(self._registered)):
            raise LeydenError(
                f"The gradient scaler skipped {self._skips} steps in a row, since gradients contain inf or nan at "
                "every scale. Look for a nan in the loss (detect_anomaly=True), use precision='bf16-mixed', or pass "
                "MixedPrecision('16', init_scale=...) with an init_scale below "
                f"{self._scaler_arguments['init_scale']:g}."
            )
        return self._stepped

    def end_step(self) -> None:
        # One update covers all optimizers and steps, since their gradients had the same scale.
        if self.scaler is not None and (self._done or self._unscaled):
            self.scaler.update()
            self._done.clear()
            self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {}
        return {"scaler": self.scaler.state_dict(), "skips": self._skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is None or not state:
            return
        saved = SavedState(state, "precision")
        scaler, skips = saved.nested("scaler"), saved.integer("skips", least=0)
        scaler.number("scale", least=1e-300, most=1e300)
        scaler.number("growth_factor", least=1.0)
        scaler.number("backoff_factor", least=1e-300, most=1.0)
        scaler.integer("growth_interval", least=1)
        scaler.integer("_growth_tracker", least=0)
        self.scaler.load_state_dict(dict(scaler.entries))
        self._skips = skips
