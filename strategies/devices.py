"""Which devices of this machine a run uses, by `devices=` and `accelerator=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.single import find_device

FORMS = "use a whole number from 1, a list of indices as [0, 1] or '0,1', or 'auto'"


def find_devices(accelerator: str = "auto", devices: Any = "auto") -> list[torch.device]:
    """The devices that the ranks of this machine run on, one each.

    Args:
        accelerator: "cpu", "gpu", "cuda", "mps", or "auto" for the best there is.
        devices: how many; -1 or "auto" for all GPUs there are, and one CPU; a list of indices, or one as text ("0,1").
            Text without a comma is a number, with one a list of indices. On the CPU only the length of a list counts.

    Raises:
        ConfigurationError: if the machine does not have them.

    Example:
        >>> find_devices("cpu", 2)
        [device(type='cpu'), device(type='cpu')]
    """
    wanted = parse_devices(devices)
    first = find_device(accelerator)
    there = 1 if first.type != "cuda" else torch.cuda.device_count()
    if wanted is None:
        wanted = there
    if first.type == "cpu":
        return [first] * (wanted if isinstance(wanted, int) else len(wanted))
    indices = list(range(wanted)) if isinstance(wanted, int) else wanted
    missing = [index for index in indices if index >= there]
    if missing and first.type == "mps":
        raise ConfigurationError(f"devices={devices!r}: MPS has one device. Use accelerator='cpu' for several ranks.")
    if missing:
        raise ConfigurationError(
            f"devices={devices!r}: there is no {first.type}:{missing[0]}, this machine has {there} "
            f"GPU{'s' if there > 1 else ''}."
        )
    return [torch.device(first.type, index) for index in indices]


def parse_devices(devices: Any) -> int | list[int] | None:
    """Parses `devices=`, whatever the machine: a number, indices, or None for all devices.

    Raises:
        ConfigurationError: if it is none of these.

    Example:
        >>> parse_devices("0,1"), parse_devices("2"), parse_devices(-1)
        ([0, 1], 2, None)
    """
    wrong = ConfigurationError(f"devices={devices!r}: {FORMS}.")
    if devices is None or (not isinstance(devices, (list, tuple)) and devices in ("auto", -1, "-1")):
        return None
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if not parts or not all(part.isdigit() for part in parts):
            raise wrong
        devices = [int(part) for part in parts] if "," in devices else int(parts[0])
    if isinstance(devices, Sequence):
        return _indices(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise wrong
    return devices


def _indices(devices: Sequence[Any]) -> list[int]:
    if not devices:
        raise ConfigurationError("devices=[] names no device: use devices=1, or 'auto'.")
    if not all(type(index) is int and index >= 0 for index in devices):
        raise ConfigurationError(f"devices={devices!r}: {FORMS}.")
    if len(set(devices)) < len(devices):
        raise ConfigurationError(f"devices={devices!r} names a device twice: give each once.")
    return list(devices)
