"""Building modules without random initialization."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_})
COMPUTED = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_"})
IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class EmptyInit(TorchFunctionMode):
    """A context that skips random initialization. Tensors keep uninitialized memory until weights are loaded.

    Example:
        >>> from torch import nn
        >>> with EmptyInit():
        ...     layer = nn.Linear(2, 2)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_META:
            # Functions of torch.nn.init that redraw until all values are valid skip meta tensors.
            return True
        draws = getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ not in COMPUTED
        if func in DRAWS or draws:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
