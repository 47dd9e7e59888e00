"""A step that calls its own module, as in `self(batch)`: the root's parameters are gathered once, around the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


class StepHooks:
    """The forward hooks of a root, around its steps and around its own forward, but not around one within the other.

    torch's `register_fsdp_forward_method` runs the hooks around a method as well. When the method calls the module,
    they run twice: the second time they free the root's parameters, which backward then gathers again, and the block
    before is not prefetched (seen with torch 2.13).

    Args:
        root: a module that `fully_shard` has sharded.
    """

    def __init__(self, root: nn.Module) -> None:
        assert isinstance(root, FSDPModule)
        self._root = root
        self._state: Any = root._get_fsdp_state()
        self._in_step = False
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        before = root.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._state._pre_forward_hook_handle = before
        self._state._post_forward_hook_handle = root.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._in_step else self._state._pre_forward(module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self._in_step else self._state._post_forward(module, args, output)

    def around(self, step_fn: Callable[..., T]) -> Callable[..., T]:
        """A step function that gathers the root's parameters before it, and frees them as the root's forward would."""

        @functools.wraps(step_fn)
        def step(*args: Any, **kwargs: Any) -> T:
            args, kwargs = self._state._pre_forward(self._root, args, kwargs)
            self._in_step = True
            try:
                outputs = step_fn(*args, **kwargs)
            finally:
                self._in_step = False
            return self._state._post_forward(self._root, args, outputs)  # type: ignore[no-any-return]

        return step
