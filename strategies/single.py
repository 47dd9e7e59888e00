"""One process on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from leyden.core.devices import with_index
from leyden.core.errors import ConfigurationError
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks


class SingleDeviceStrategy(Strategy):
    """The model on one device: cpu, cuda or mps.

    Args:
        device: a torch device or its name.
        precision: precision of parameters, inputs and the forward pass. Default: 32-true.

    Example:
        >>> SingleDeviceStrategy("cpu").root_device
        device(type='cpu')
    """

    name = "single_device"

    def __init__(self, device: torch.device | str = "cpu", precision: Precision | None = None) -> None:
        super().__init__(precision, Ranks(with_index(device)))

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        for module in modules:
            for name, tensor in module.named_parameters():
                if tensor.is_meta:
                    raise ConfigurationError(
                        f"The parameter {name!r} is on the meta device and has no values. Build the module on a real "
                        "device, or use a sharding strategy and build it in configure_model."
                    )
        return super().setup_modules(modules)
