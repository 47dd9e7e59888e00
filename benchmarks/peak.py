"""The memory of a rank's tensors, counted by storage."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Records the largest number of bytes held at one time by tensors that are created inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # The call is dispatched again with this rank's local tensors.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor) and made.device.type == "cpu":
                self._note(made)
        return out

    def _note(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key, size)
