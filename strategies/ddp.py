"""DDP: every rank holds the whole model, and gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from leyden.strategies.base import BackwardHooks, Window, read_loss
from leyden.strategies.process_group import ProcessGroupStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self.wrapped: list[DistributedDataParallel] = []
        """The modules that a loop of one's own calls."""

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

    def skip_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        assert self.ddp is not None
        self.ddp.require_backward_grad_sync = window.closes
        if self._graph_matters and filler is not None:
            # Which parameters a batch uses is a part of what DDP exchanges.
            loss, _ = read_loss(self.forward(step_fn, filler, extra))
            zero = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        else:
            zero = self.ddp(_SKIP)
        self.skip_items(window)
        self.precision.scale_loss(zero).backward()  # type: ignore[no-untyped-call]

    @property
    def _graph_matters(self) -> bool:
        arguments = self.ddp_arguments
        return bool(arguments.get("find_unused_parameters") or arguments.get("static_graph"))

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        wrapped = [self.ddp] if self.ddp is not None else self.wrapped
        return super().gradient_sync(True) if enabled else _without_sync(wrapped)

    # a loop of one's own ----------------------------------------------------------------------------------------------
    def wrap_forward(self, module: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        wrapped = WrappedModule(module, **self.ddp_arguments)
        self.wrapped.append(wrapped)
        return wrapped

    def forget_wrapped(self) -> None:
        for wrapped in self.wrapped:
            # The user's script may hold on to the wrapper, and its reducer to the process group.
            vars(wrapped).pop("reducer", None)
            vars(wrapped).pop("logger", None)
        self.wrapped = []

    @contextmanager
    def sync_in_backward(self, module: nn.Module) -> Iterator[None]:
        if not isinstance(module, DistributedDataParallel):
            yield
            return
        before = module.require_backward_grad_sync, module.require_forward_param_sync
        module.require_backward_grad_sync = module.require_forward_param_sync = True
        # What forward would have done, had it been run with sync.
        module.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            module.require_backward_grad_sync, module.require_forward_param_sync = before

    def joining(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        from torch.distributed.algorithms.join import Join

        wrapped: list[Any] = [module for module in modules if isinstance(module, DistributedDataParallel)]
        return Join(wrapped) if wrapped else super().joining(modules)

    def teardown(self) -> None:
        self.ddp = None
        self.forget_wrapped()
        super().teardown()


class WrappedModule(DistributedDataParallel):
    """DDP around a module, whose attributes can be asked for as if there were no wrapper."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
        if callable(value) and torch.is_grad_enabled() and name not in WITHOUT_GRADIENTS:
            raise AttributeError(
                f"{name} of a model on several ranks was asked for, and a loss that is computed by it would not be exchanged: call "
                f"the model itself, or accelerator.unwrap_model(model).{name} where no gradient is wanted."
            ) from None
        return value


WITHOUT_GRADIENTS = ("save_pretrained", "push_to_hub", "generate", "config")
"""Methods of transformers' models that train nothing."""


@contextmanager
def _without_sync(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in wrapped:
            stack.enter_context(module.no_sync())
        yield


class _Stepped(nn.Module):
    """A module whose forward is its training step: what DDP wraps."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._step = step

    def forward(self, *args: Any) -> Any:
        if args == (_SKIP,):
            trainable = (p for p in self.module.parameters() if p.requires_grad)
            return _Zero.apply(*trainable)  # type: ignore[no-untyped-call]
        return self._step(*args)


_SKIP = "a rank without a sample"


class _Zero(torch.autograd.Function):
    """A loss of 0 that gives every parameter a gradient of exactly 0, so that each of DDP's buckets is sent."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


__all__: Sequence[str] = ["DDPStrategy"]
