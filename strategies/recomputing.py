"""Activation checkpointing: modules recompute their activations in backward instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from leyden.core.devices import pins_memory
from leyden.core.errors import ConfigurationError

T = TypeVar("T")
TOP_K, ARG_MAX = (torch.topk, Tensor.topk), (torch.argmax, Tensor.argmax)
KEEPS = "_leyden_keeps"
"""Marks modules whose forward calls `kept`."""


class OnHost(saved_tensors_hooks):
    """Keeps tensors saved for backward in host memory. Copies are queued on the device like any other work.

    Unlike torch's `save_on_cpu`, it supports the DTensors of a mesh.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    device = tensor.device
    if device.type == "cpu":
        return tensor
    if not pins_memory(device.type) or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return device, tensor.to("cpu")
    host = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
    return device, host.copy_(tensor, non_blocking=True)


def _from_host(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


# results that a recomputation takes from the forward pass -------------------------------------------------------------
class _Pass(TorchFunctionMode):
    """A forward pass, or its recomputation, of code that calls `kept` and chooses by `topk` and `argmax`.

    The recomputation chooses what the forward pass chose, even if its scores were to differ.
    """

    def __init__(self, values: list[tuple[Any, int]], recomputes: bool) -> None:
        super().__init__()
        self._values, self._recomputes, self._next = values, recomputes, 0

    def __enter__(self) -> _Pass:
        self._next = 0
        _passes.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _passes.remove(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ARG_MAX:
            return self.keep(lambda: func(*args, **kwargs))
        if func in TOP_K and "out" not in kwargs:
            return self._top_k(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _top_k(self, func: Any, input: Tensor, *args: Any, **options: Any) -> Any:
        index = self.keep(lambda: func(input.detach(), *args, **options).indices)
        dim = args[1] if len(args) > 1 else options.get("dim", -1)
        return torch.return_types.topk((input.gather(dim, index), index))

    def keep(self, compute: Callable[[], T]) -> T:
        """Returns what `compute` returns, or in a recomputation what it has returned in the forward pass."""
        if not self._recomputes:
            value: Any = compute()
            is_tensor = isinstance(value, Tensor)
            self._values.append((value.detach(), value._version) if is_tensor else (value, 0))
            return value  # type: ignore[no-any-return]
        value, version = self._values[self._next]
        self._next += 1
        if not isinstance(value, Tensor):
            return value  # type: ignore[no-any-return]
        if value._version != version:
            raise ConfigurationError(
                "activation checkpointing keeps a router's choices and what a module of experts returned, and code has "
                "changed one of these tensors in place. Write x = x * y in place of x *= y."
            )
        return value.detach()  # type: ignore[return-value]


_passes: list[_Pass] = []
"""Those that run, from the outermost. Process-wide, since backward may recompute in another thread."""


def kept(compute: Callable[[], T]) -> T:
    """Returns what `compute` returns, or in a recomputation what it has returned in the forward pass.

    The value stays in memory between the two. A module that calls this has the mark `KEEPS`.
    """
    for own in _passes:
        compute = functools.partial(own.keep, compute)
    return compute()


def passes() -> tuple[_Pass, _Pass]:
    """Returns the contexts of a forward pass and its recomputation, as the `context_fn` of torch's `checkpoint`."""
    values: list[tuple[Any, int]] = []
    return _Pass(values, False), _Pass(values, True)


def keep_in_checkpoints(root: nn.Module) -> None:
    """Lets the gradient checkpointing of `transformers` keep what `kept` is to keep. Reentrant checkpoints cannot."""
    for module in root.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if not isinstance(function, functools.partial) or function.func is not checkpoint:
            continue
        if function.keywords.get("use_reentrant") is False and "context_fn" not in function.keywords:
            vars(module)["_gradient_checkpointing_func"] = functools.partial(function, context_fn=passes)


class Recomputed:
    """The forward pass of a module whose activations are recomputed in backward.

    It replaces the module's `forward` attribute. So the names of modules and parameters stay the same, torch.compile
    works (it fails with the composable `checkpoint`, tried), and hooks that gather parameters or split inputs run
    around it only once. The recomputation draws the same random numbers.

    Args:
        module: the module.
        offloads: whether to keep the inputs of the recomputation in host memory.
    """

    def __init__(self, module: nn.Module, offloads: bool = False) -> None:
        self.module, self.offloads = module, offloads
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """The `forward` previously set on this instance, or None if the class's is used."""
        keeps = any(KEEPS in vars(part) for part in module.modules())
        # Only where it is needed, since torch.compile traces it.
        self.options: dict[str, Any] = {"context_fn": passes} if keeps else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(self.module).forward, self.module) if self.own is None else self.own
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not self.offloads:
            return checkpoint(forward, *args, use_reentrant=False, **self.options, **kwargs)
        # `checkpoint` handles the tensors saved inside, so only its inputs go to the host.
        with OnHost():
            return checkpoint(forward, *args, use_reentrant=False, **self.options, **kwargs)


def recompute(modules: Iterable[nn.Module], offloads: bool = False) -> list[nn.Module]:
    """Makes modules recompute their activations in backward. Returns the modules that did not do so before.

    Args:
        modules: the modules.
        offloads: whether to keep their inputs in host memory.
    """
    changed = [module for module in modules if not isinstance(vars(module).get("forward"), Recomputed)]
    for module in changed:
        module.forward = Recomputed(module, offloads)  # type: ignore[method-assign]
    return changed


def keep(modules: Iterable[nn.Module]) -> None:
    """Undoes `recompute`."""
    for module in modules:
        recomputed = vars(module).get("forward")
        if isinstance(recomputed, Recomputed):
            del module.forward
            if recomputed.own is not None:
                module.forward = recomputed.own  # type: ignore[method-assign]
