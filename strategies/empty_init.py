"""Building modules without drawing their first weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_})


class EmptyInit(TorchFunctionMode):
    """Within it tensors are not filled at random: they hold what was in memory, until weights are loaded.

    Example:
        >>> from torch import nn
        >>> with EmptyInit():
        ...     layer = nn.Linear(2, 2)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in DRAWS else func(*args, **(kwargs or {}))
