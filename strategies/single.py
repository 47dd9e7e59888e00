"""One process on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from leyden.core.errors import ConfigurationError, nearest
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "xla", "tpu")


def find_device(accelerator: str = "auto") -> torch.device:
    """Returns the first device of an accelerator's kind on this machine.

    Args:
        accelerator: "cpu", "gpu" (cuda, else mps), "cuda", "mps", or "auto" for the best available.

    Raises:
        ConfigurationError: if the name is unknown or the machine has no such device.
    """
    if accelerator not in ACCELERATORS:
        raise ConfigurationError(f"accelerator={accelerator!r} is not known. {nearest(accelerator, ACCELERATORS)}")
    if accelerator in ("xla", "tpu"):
        raise ConfigurationError(
            f"accelerator={accelerator!r} needs a strategy that runs on XLA. Use strategy='xla' or 'xla_fsdp'."
        )
    # device_count() asks the driver. is_available() would initialize CUDA, after which forked ranks could not use it.
    available = {"cuda": torch.cuda.device_count() > 0, "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "gpu" and not available["cuda"] and not available["mps"]:
        raise ConfigurationError(
            "accelerator='gpu', but torch finds no GPU on this machine. Use accelerator='auto' or 'cpu'."
        )
    if accelerator in ("auto", "gpu"):
        accelerator = next(kind for kind, is_available in available.items() if is_available)
    if not available[accelerator]:
        raise ConfigurationError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} finds no such device on this machine. Use "
            "accelerator='auto' or 'cpu'."
        )
    return torch.device("cpu") if accelerator == "cpu" else torch.device(accelerator, 0)


def with_index(device: torch.device | str) -> torch.device:
    """Returns the device with its index, as tensors report it. "cuda" without an index is the current device.

    Example:
        >>> with_index("mps"), with_index("cuda:1"), with_index("cpu")
        (device(type='mps', index=0), device(type='cuda', index=1), device(type='cpu'))
    """
    device = torch.device(device)
    if ":" in str(device) or device.type not in ("cuda", "mps"):
        return device
    used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device(device.type, torch.cuda.current_device() if used else 0)


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
