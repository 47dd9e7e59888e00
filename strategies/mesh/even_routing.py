"""EvenRouting: traces mixtures of experts on a simulated rank, with tokens spread evenly over all experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map_only

INTEGERS = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
ops: Any = torch.ops
c10d: Any = dist.distributed_c10d


class EvenRouting(TorchDispatchMode):
    """A context in which routers choose every expert equally often: token after token, one expert after another.

    The sizes of what experts compute depend on which tokens chose them. So these choices have values while experts run
    in a step whose tensors have shapes only, and so has all that is computed from choices alone: an order, a count, a
    mask. The other ranks are taken to send the same numbers of rows as this one.

    Args:
        module: the model. Its modules of experts take hidden states, indices (T, k) and weights (T, k).
        experts: the number of experts in each module of experts, by its name.
    """

    def __init__(self, module: nn.Module, experts: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parts = [(module.get_submodule(name), count) for name, count in experts.items()]
        self._handles: list[Any] = []
        self._depth = 0
        """How many modules of experts are running."""

    def __enter__(self) -> EvenRouting:
        for part, count in self._parts:
            before, after = self._begin(count), lambda *_: self._end()
            self._handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(part.register_forward_hook(after, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        while self._handles:
            self._handles.pop().remove()

    def _begin(self, count: int) -> Callable[..., Any]:
        def choose(indices: Tensor) -> Tensor:
            if indices.dtype not in INTEGERS:
                return indices
            with unset_fake_temporarily():
                return torch.arange(indices.numel()).remainder(count).view(indices.shape)

        def begin(part: nn.Module, args: Any, kwargs: Any) -> Any:
            self._depth += 1
            return tree_map_only(FakeTensor, choose, (args, kwargs))

        return begin

    def _end(self) -> None:
        self._depth -= 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # Its operations arrive here later, with plain tensors.
            return NotImplemented
        kwargs = kwargs or {}
        if func is ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # It takes float32, but torch's computation of its shape does not.
            return func(*(_halved(arg) for arg in args[:2]), *args[2:], **kwargs).float()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        have_values = all(type(tensor) is Tensor and tensor.dtype in INTEGERS for tensor in tensors)
        counts = func.overloadpacket is ops.aten.arange and kwargs.get("dtype") is None
        if not (self._depth and have_values and (tensors or counts or kwargs.get("dtype") in INTEGERS)):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            if func is ops._c10d_functional.all_to_all_single.default:
                group = c10d._resolve_process_group(args[3])
                return torch.cat([args[0].chunk(group.size())[group.rank()]] * group.size())
            return func(*args, **kwargs)


def _halved(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16)
