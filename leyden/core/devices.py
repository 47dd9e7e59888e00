"""Resolves `devices=` and `accelerator=` to devices of this machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from leyden.core.errors import ConfigurationError, nearest

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "xla", "tpu")
FORMS = "use a whole number from 1, a list of indices such as [0, 1] or '0,1', or 'auto'"


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


def find_devices(accelerator: str = "auto", devices: Any = "auto") -> list[torch.device]:
    """Returns the devices of this machine's ranks, one each.

    Args:
        accelerator: "cpu", "gpu", "cuda", "mps", or "auto" for the best available.
        devices: the number of devices; -1 or "auto" for all GPUs, or for one CPU; or a list of indices. Text with a
            comma ("0,1") is a list of indices, other text a number. On the CPU only the length of a list matters.

    Raises:
        ConfigurationError: if the machine does not have these devices.

    Example:
        >>> find_devices("cpu", 2)
        [device(type='cpu'), device(type='cpu')]
    """
    wanted = parse_devices(devices)
    first = find_device(accelerator)
    available = 1 if first.type != "cuda" else torch.cuda.device_count()
    if wanted is None:
        wanted = available
    if first.type == "cpu":
        return [first] * (wanted if isinstance(wanted, int) else len(wanted))
    indices = list(range(wanted)) if isinstance(wanted, int) else wanted
    missing = [index for index in indices if index >= available]
    if missing and first.type == "mps":
        raise ConfigurationError(f"devices={devices!r}: MPS has one device. Use accelerator='cpu' for several ranks.")
    if missing:
        raise ConfigurationError(
            f"devices={devices!r}: there is no {first.type}:{missing[0]}, this machine has {available} "
            f"GPU{'s' if available > 1 else ''}."
        )
    return [torch.device(first.type, index) for index in indices]


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes in use so far: allocated by torch on CUDA, of the process elsewhere; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux. A new process inherits ru_maxrss, below, from the one that started it.
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    try:
        import resource
    except ImportError:
        # Windows has no `resource` module.
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In kilobytes on Linux, in bytes on macOS.
    return used if sys.platform == "darwin" else used * 1024


def parse_devices(devices: Any) -> int | list[int] | None:
    """Parses `devices=` into a number, a list of indices, or None for all devices. Does not look at the machine.

    Raises:
        ConfigurationError: if it is none of these.

    Example:
        >>> parse_devices("0,1"), parse_devices("2"), parse_devices(-1)
        ([0, 1], 2, None)
    """
    invalid = ConfigurationError(f"devices={devices!r}: {FORMS}.")
    if devices is None or (not isinstance(devices, (list, tuple)) and devices in ("auto", -1, "-1")):
        return None
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if not parts or not all(part.isdigit() for part in parts):
            raise invalid
        devices = [int(part) for part in parts] if "," in devices else int(parts[0])
    if isinstance(devices, Sequence):
        return _indices(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise invalid
    return devices


def _indices(devices: Sequence[Any]) -> list[int]:
    if not devices:
        raise ConfigurationError("devices=[] names no device. Use devices=1, or 'auto'.")
    if not all(type(index) is int and index >= 0 for index in devices):
        raise ConfigurationError(f"devices={devices!r}: {FORMS}.")
    if len(set(devices)) < len(devices):
        raise ConfigurationError(f"devices={devices!r} names a device twice. List each device once.")
    return list(devices)
