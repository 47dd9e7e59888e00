"""Steps that call their own module, as in `self(batch)`: the root's parameters are gathered once, around the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

T = TypeVar("T")


class StepHooks:
    """FSDP's forward hooks of a root, run around its steps and its forward, but not around a forward within a step.

    torch's `register_fsdp_forward_method` runs the hooks around a method too. If the method calls the module, the hooks
    run twice. The inner run frees the root's parameters, so backward gathers them again and does not prefetch the
    previous block (observed with torch 2.13).

    Args:
        root: a module sharded by `fully_shard`.
    """

    def __init__(self, root: nn.Module) -> None:
        assert isinstance(root, FSDPModule)
        self._root = root
        state: Any = root._get_fsdp_state()
        self._state, self._in_step = state, False
        self._before, self._after = state._pre_forward, state._post_forward
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        state._pre_forward_hook_handle = root.register_forward_pre_hook(
            self._before_forward, prepend=True, with_kwargs=True
        )
        state._post_forward_hook_handle = root.register_forward_hook(self._after_forward)
        # Methods registered by `register_fsdp_forward_method` call these.
        state._pre_forward, state._post_forward = self._before_step, self._after_step
        self._enter, state._root_pre_forward = state._root_pre_forward, self._enter_root

    def around(self, step_fn: Callable[..., T]) -> Callable[..., T]:
        """Wraps a step function: gathers the root's parameters before it, and frees them as the root's forward does."""
        # torch registers a method by name. The attribute is removed again, so the module does not change.
        self._root.__dict__["_leyden_step"] = step_fn
        register_fsdp_forward_method(self._root, "_leyden_step")
        step: Callable[..., T] = self._root.__dict__.pop("_leyden_step")
        return step

    def remove(self) -> None:
        """Restores torch's hooks, for the next run."""
        self._state._pre_forward, self._state._post_forward = self._before, self._after
        self._state._root_pre_forward = self._enter
        self._in_step = False

    def _enter_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # On a GPU torch moves the arguments to it. They are there already, and it would rebuild the batch from plain
        # tuples, or from calls of its classes with pairs, which a defaultdict refuses.
        self._enter(module, (), {})
        return args, kwargs

    def _before_step(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._in_step = True
        return self._before(module, args, kwargs)

    def _after_step(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        self._in_step = False
        return self._after(module, args, outputs)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._in_step else self._before(module, args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self._in_step else self._after(module, args, output)
