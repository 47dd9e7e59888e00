"""Building modules without drawing their first weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_})
COMPUTED = frozenset({"constant_", "ones_", "zeros_", "eye_", "dirac_"})
IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


class EmptyInit(TorchFunctionMode):
    """In this context tensors are not filled at random: they hold whatever was in memory, until weights are loaded.

    Example:
        >>> from torch import nn
        >>> with EmptyInit():
        ...     layer = nn.Linear(2, 2)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_META:
            # Those of torch.nn.init that draw until the values fit leave a meta tensor alone.
            return True
        drawn = getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ not in COMPUTED
        if func in DRAWS or drawn:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
