"""DDP: every rank holds the whole model, and gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leyden.strategies.base import BackwardHooks, Window
from leyden.strategies.process_group import ProcessGroupStrategy

T = TypeVar("T")


class DDPStrategy(ProcessGroupStrategy):
    """torch's DistributedDataParallel.

    Args:
        **kwargs: those of `ProcessGroupStrategy`, and DistributedDataParallel's own.
    """

    name = "ddp"

    def __init__(self, find_unused_parameters: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ddp_arguments: dict[str, Any] = {"find_unused_parameters": find_unused_parameters}
        self.ddp: DistributedDataParallel | None = None

    def setup_step(self, step_fn: Callable[..., T], module: nn.Module) -> Callable[..., T]:
        if getattr(step_fn, "__name__", "") != "training_step":
            return step_fn
        self.ddp = DistributedDataParallel(_Stepped(module, step_fn), **self.ddp_arguments)
        return self.ddp

    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = window.closes
        return super().forward_backward(step_fn, batch, extra, window, hooks)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        assert self.ddp is not None
        return super().gradient_sync(True) if enabled else self.ddp.no_sync()

    def teardown(self) -> None:
        self.ddp = None
        super().teardown()


class _Stepped(nn.Module):
    """A module whose forward is its training step: what DDP wraps."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._step = step

    def forward(self, *args: Any) -> Any:
        return self._step(*args)


__all__: Sequence[str] = ["DDPStrategy"]
