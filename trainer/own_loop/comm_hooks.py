"""Communication hooks of DDP by their names: gradients in half precision, or as products of low rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.trainer.own_loop.plugins import DistributedDataParallelKwargs

HOOKS = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")
WRAPPERS = ("no", "fp16", "bf16")


def hook_of(given: DistributedDataParallelKwargs) -> Callable[[DistributedDataParallel], None] | None:
    """What registers the hook that the settings name on a wrapped model; None where they name none.

    Raises:
        ConfigurationError: if a name is unknown, or a wrapper goes with no power_sgd.
    """
    name, around = (str(getattr(value, "value", value)).lower() for value in (given.comm_hook, given.comm_wrapper))
    for value, known, argument in ((name, HOOKS, "comm_hook"), (around, WRAPPERS, "comm_wrapper")):
        if value not in known:
            raise ConfigurationError(
                f"DistributedDataParallelKwargs({argument}={value!r}) is not known. {nearest(value, known)}"
            )
    if around != "no" and "power_sgd" not in name:
        raise ConfigurationError(
            f"comm_wrapper={around!r} goes around a power_sgd hook: give comm_hook='power_sgd' too."
        )
    if name == "no":
        return None
    return lambda model: _register(model, name, around, given.comm_state_option)


def _register(model: DistributedDataParallel, name: str, around: str, options: dict[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    compressing: dict[str, Any] = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16}
    if name in compressing:
        model.register_comm_hook(None, compressing[name])
        return
    hook: Any = powerSGD_hook.powerSGD_hook if name == "power_sgd" else powerSGD_hook.batched_powerSGD_hook
    if around != "no":
        hook = (default_hooks.fp16_compress_wrapper if around == "fp16" else default_hooks.bf16_compress_wrapper)(hook)
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **options), hook)


def _bf16(state: Any, bucket: Any) -> Any:
    """torch's own, by another name: that one is refused without CUDA, though gloo sends bfloat16 well."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(state, bucket)


# DDP checks a hook's annotations, as classes and not as text.
_bf16.__annotations__["bucket"] = torch.distributed.GradBucket  # type: ignore[attr-defined]
_bf16.__annotations__["return"] = torch.futures.Future[torch.Tensor]
