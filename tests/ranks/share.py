"""Measures the bytes that a rank reads and holds, and the collectives that it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from leyden.checkpoint.format import safefile

LOCAL = ("wait", "wrap_tensor")
"""Words in the names of operations beside the collectives that send nothing."""


class Peak(TorchDispatchMode):
    """Measures the most bytes held at once by tensors created inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu":
            storage = out.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._seen and not any(
                isinstance(arg, Tensor) and arg.untyped_storage()._cdata == key for arg in args
            ):
                self._seen.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, key, size)
        return out


class Messages(TorchDispatchMode):
    """Counts how often each collective runs inside it, whichever library calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor dispatches here again, with the tensors of this rank.
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional") and not any(word in func._opname for word in LOCAL):
            name = func._opname.strip("_").replace("_into_tensor", "").replace("_base", "").rstrip("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Counts the bytes read from safetensors files."""
    plain, count = safefile.CheckedFile._read_exactly, {"bytes": 0}

    def exactly(self: Any, part: Any, views: list[memoryview], offset: int) -> None:
        if self.path.suffix == ".safetensors":
            count["bytes"] += sum(map(len, views))
        plain(self, part, views, offset)

    safefile.CheckedFile._read_exactly = exactly  # type: ignore[method-assign]
    yield count
    safefile.CheckedFile._read_exactly = plain  # type: ignore[method-assign]
