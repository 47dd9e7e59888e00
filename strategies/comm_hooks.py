"""How DDP sends gradients: torch's communication hooks, by name or as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leyden.strategies.errors import ConfigurationError, nearest

NAMES = ("fp16", "bf16", "powersgd")


def find_comm_hook(
    hook: str | Callable[..., Any] | None, state: Any = None, wrapper: Callable[..., Any] | None = None
) -> tuple[Any, Callable[..., Any]] | None:
    """The state and the hook for `register_comm_hook`, or None where gradients are sent as they are.

    Args:
        hook: a name of `NAMES`, or a hook.
        state: handed to the hook; PowerSGD's own (rank 1, from step 1000 on) if left out.
        wrapper: takes a hook and gives one.

    Raises:
        ConfigurationError: for an unknown name, or a state or wrapper without a hook.
    """
    if hook is None:
        if state is not None or wrapper is not None:
            raise ConfigurationError("ddp_comm_state and ddp_comm_wrapper belong to a ddp_comm_hook: give one.")
        return None
    if isinstance(hook, str):
        if hook not in NAMES:
            raise ConfigurationError(f"ddp_comm_hook={hook!r} is not known. {nearest(hook, NAMES)}")
        hook = _named(hook)
        if state is None and hook is _power_sgd:
            state = _PowerSGD()
    return state, _bare(wrapper(hook) if wrapper is not None else hook)


def _named(name: str) -> Callable[..., Any]:
    # Imported here: DDP without a hook has no use for them.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook, "powersgd": _power_sgd}[
        name
    ]


def _bare(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook without name and annotations.

    torch refuses annotations that are strings, and its own bfloat16 hook over gloo, where it works.
    """

    def send(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    send.__annotations__ = {}
    return send


def _power_sgd(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    return powerSGD_hook(state.own if isinstance(state, _PowerSGD) else state, bucket)


class _PowerSGD:
    """PowerSGD's state, made at the first gradient: it needs the process group."""

    def __init__(self) -> None:
        self._own: Any = None

    @property
    def own(self) -> Any:
        if self._own is None:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

            self._own = PowerSGDState(process_group=None, matrix_approximation_rank=1)
        return self._own
