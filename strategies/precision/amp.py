"""Mixed precision: float32 parameters, half-precision forward by autocast, a gradient scaler for float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.strategies.precision.base import Precision
from leyden.strategies.saved_state import SavedState

SKIPS_IN_A_ROW = 40
"""From the default scale of 2^16 this many halvings end at 2^-24: no gradient is left to find by halving on."""


class MixedPrecision(Precision):
    """`16-mixed` and `bf16-mixed`.

    Args:
        dtype: "16" for float16 with a gradient scaler, "bf16" for bfloat16 without one.
        init_scale: first scale of the gradient scaler.
        growth_factor: by which the scale grows after `growth_interval` windows without inf or nan.
        backoff_factor: by which it shrinks after a window with one; that window's step is skipped.
        growth_interval: number of windows between two growths.
        scaler: a GradScaler of your own, in place of the four arguments above.

    The scaler is `torch.amp.GradScaler`; reading back whether it found inf is the one device sync of a window.
    """

    def __init__(
        self,
        dtype: Literal["16", "bf16"],
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        scaler: GradScaler | None = None,
    ) -> None:
        if dtype not in ("16", "bf16"):
            raise ConfigurationError(f"MixedPrecision(dtype={dtype!r}): use '16' or 'bf16'.")
        if scaler is not None and dtype == "bf16":
            raise ConfigurationError("bf16-mixed has the range of float32 and needs no scaler: leave scaler out.")
        self.name = f"{dtype}-mixed"
        self.dtype = torch.float16 if dtype == "16" else torch.bfloat16
        self.may_skip = dtype == "16"
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
        # Pickled for ranks that are spawned, whose optimizers are made there.
        return {**vars(self), "_registered": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _registered=WeakSet())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type, dtype=self.dtype)

    def use_autocast(self, make: Callable[[], torch.autocast]) -> None:
        """Takes other settings of autocast than its own, for the forward passes of a run."""
        self.forward_context = make

    def check(self, device: torch.device) -> None:
        if device.type == "cuda" and self.dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
            raise ConfigurationError(
                f"{torch.cuda.get_device_name(device)} has no bfloat16: use precision='16-mixed' or '32-true'."
            )
        self._device_type = device.type
        if self.may_skip and self.scaler is None:
            self.scaler = GradScaler(device.type, **self._scaler_arguments)  # type: ignore[arg-type]

    def reset(self) -> None:
        self._skips = 0
        self._unscaled.clear()
        if self._given_state is not None and self.scaler is not None:
            self.scaler.load_state_dict(self._given_state)
        elif self.may_skip:
            self.scaler = GradScaler(self._device_type, **self._scaler_arguments)  # type: ignore[arg-type]

    def register(self, optimizer: Optimizer) -> None:
        # A fit that continues registers its optimizers again.
        if self.scaler is not None and optimizer not in self._registered:
            self._registered.add(optimizer)
            # The hook runs only if the scaler really steps: no second read-back is needed to learn that.
            optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        # A fused optimizer skips in its kernel, by what the scaler found: read here as the scaler does for the others.
        found = getattr(optimizer, "found_inf", None)
        self._stepped = found is None or not bool(found)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        # Clipping by hand and the step itself both ask for it, and the scaler refuses the second time.
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        if id(optimizer) in self._done:
            # A further step within one training_step. The scaler would want an update in between, which changes the
            # scale while other optimizers hold gradients of the old one; so what it noted is put aside until the
            # update.
            noted = self.scaler._per_optimizer_states
            noted[-len(noted)] = noted.pop(id(optimizer))
            self._done.discard(id(optimizer))
        self._unscaled.add(id(optimizer))
        self.scaler.unscale_(optimizer)

    def share_found_inf(self, optimizer: Optimizer, largest: Callable[[Tensor], None]) -> None:
        if self.scaler is None:
            return
        found: dict[torch.device, Tensor] = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:
            # This rank has no gradients: the scaler would not step.
            scale = self.scaler._scale
            assert scale is not None
            found[scale.device] = torch.zeros((), device=scale.device)
        for number in found.values():
            largest(number)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if self.scaler is None:
            super().step(optimizer, closure, **kwargs)
            torch.clear_autocast_cache()
            return True
        if closure is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} evaluates the loss again in its step, which a gradient scaler cannot "
                "follow: use precision='bf16-mixed' or '32-true'."
            )
        self._stepped = False
        self.unscale(optimizer)
        self.scaler.step(optimizer, **kwargs)
        # In manual optimisation the step is made inside autocast, whose half-precision copies of the weights are stale
        # now.
        torch.clear_autocast_cache()
        self._unscaled.discard(id(optimizer))
        self._done.add(id(optimizer))
        self._skips = 0 if self._stepped else self._skips + 1
        # Each optimizer of a window counts, and the scale is halved once.
        if self._skips >= SKIPS_IN_A_ROW * max(1, len(self._registered)):
            raise LeydenError(
                f"the gradient scaler has skipped {self._skips} steps in a row, since the gradients hold inf or nan at "
                "every scale. Look for a nan in the loss (detect_anomaly=True), use precision='bf16-mixed', or give "
                "MixedPrecision('16', init_scale=...) a smaller init_scale than "
                f"{self._scaler_arguments['init_scale']:g}."
            )
        return self._stepped

    def end_step(self) -> None:
        # One update for all optimizers and all their steps: their gradients were scaled alike.
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
