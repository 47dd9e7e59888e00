"""DDP communication hooks of torch, by name or as functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from leyden.core.errors import ConfigurationError, nearest

NAMES = ("fp16", "bf16", "powersgd")


def find_comm_hook(
    hook: str | Callable[..., Any] | None, state: Any = None, wrapper: Callable[..., Any] | None = None
) -> tuple[Any, Callable[..., Any]] | None:
    """Returns the state and the hook for `register_comm_hook`, or None for torch's default all-reduce.

    Args:
        hook: a name from `NAMES`, or a hook.
        state: state passed to the hook. Default for PowerSGD: a PowerSGDState of rank 1, which starts at step 1000.
        wrapper: function that wraps the hook.

    Raises:
        ConfigurationError: for an unknown name, or a state or wrapper without a hook.
    """
    if hook is None:
        if state is not None or wrapper is not None:
            raise ConfigurationError("ddp_comm_state and ddp_comm_wrapper need a ddp_comm_hook. Pass one.")
        return None
    if isinstance(hook, str):
        if hook not in NAMES:
            raise ConfigurationError(f"ddp_comm_hook={hook!r} is not known. {nearest(hook, NAMES)}")
        hook = _hook_of_name(hook)
        if state is None and hook is _power_sgd:
            state = _LazyPowerSGDState()
    return state, _Unannotated(hook, wrapper)


def _hook_of_name(name: str) -> Callable[..., Any]:
    # Imported lazily, since DDP without a hook does not need the module.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook, "powersgd": _power_sgd}[
        name
    ]


class _Unannotated:
    """A hook under another name and without its annotations, which can be pickled for spawned ranks.

    torch rejects annotations that are strings. It also rejects its own bfloat16 hook, by name, over gloo, where it
    works.

    Args:
        hook: the hook.
        wrapper: function that wraps the hook, or None. A copy calls it again: functions that torch's wrappers return
            cannot be pickled.
    """

    def __init__(self, hook: Callable[..., Any], wrapper: Callable[..., Any] | None) -> None:
        self._hook, self._wrapper = hook, wrapper
        self._wrapped = hook if wrapper is None else wrapper(hook)
        # torch logs the names of a hook.
        self.__name__ = self.__qualname__ = "hook"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._hook, self._wrapper)

    def __call__(self, state: Any, bucket: Any) -> Any:
        return self._wrapped(state, bucket)


_Unannotated.__call__.__annotations__.clear()


def _power_sgd(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    return powerSGD_hook(state.state if isinstance(state, _LazyPowerSGDState) else state, bucket)


class _LazyPowerSGDState:
    """PowerSGD's state, created at the first gradient, since it needs the process group."""

    @functools.cached_property
    def state(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        return PowerSGDState(process_group=None, matrix_approximation_rank=1)
