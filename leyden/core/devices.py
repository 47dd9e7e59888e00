"""Devices: those that `accelerator=` and `devices=` name, and what torch can do on each type of device.

The only file that names a backend's peculiarities. Everything else asks by the functions below, so that every type of
device that torch knows takes the same lines: cuda, xpu, mps, and backends registered by a package, such as npu.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.core.errors import ConfigurationError, nearest

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "xpu", "xla", "tpu")
"""Names for `accelerator=`; the types of registered backends are names too."""
FORMS = "use a whole number from 1, a list of indices such as [0, 1] or '0,1', or 'auto'"
BLOCKING = ("cpu", "mps", "xla", "meta")
"""Types of devices without streams that torch exposes. Copies to and from them block."""
PINNING = ("cuda", "xpu")
"""Types of devices known to use page-locked host memory. Trying to allocate it would initialize them."""
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Environment variables that hide devices from a process."""


# devices of this machine ----------------------------------------------------------------------------------------------
def find_device(accelerator: str = "auto") -> torch.device:
    """Returns the first device of an accelerator's kind on this machine.

    Args:
        accelerator: "cpu"; a type of device such as "cuda", "mps", "xpu" or a registered backend's; "gpu" for whichever
            of these the machine has; or "auto" for the best available.

    Raises:
        ConfigurationError: if the name is unknown or the machine has no such device.
    """
    if accelerator in ("xla", "tpu"):
        raise ConfigurationError(
            f"accelerator={accelerator!r} needs a strategy that runs on XLA. Use strategy='xla' or 'xla_fsdp'."
        )
    if accelerator in ("auto", "gpu"):
        found = next(filter(_count, _present()), None)
        if found is None and accelerator == "gpu":
            raise ConfigurationError(
                "accelerator='gpu', but torch finds no GPU on this machine. Use accelerator='auto' or 'cpu'."
            )
        accelerator = found or "cpu"
    if accelerator == "cpu":
        return torch.device("cpu")
    if accelerator not in ACCELERATORS and runtime_of(accelerator) is None:
        names = (*ACCELERATORS, *_present())
        raise ConfigurationError(f"accelerator={accelerator!r} is not known. {nearest(accelerator, names)}")
    if not _count(accelerator):
        raise ConfigurationError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} finds no such device on this machine. Use "
            "accelerator='auto' or 'cpu'."
        )
    return torch.device(accelerator, 0)


def _present() -> list[str]:
    """Returns the types of accelerators that this torch may have devices of, the best first."""
    current = torch.accelerator.current_accelerator()
    return list(dict.fromkeys([*([] if current is None else [current.type]), "cuda", "mps"]))


def _count(kind: str) -> int:
    """Returns the number of devices of a type. Asks the driver only: a rank forked later can still use them.

    `is_available` would initialize CUDA.
    """
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return int(getattr(runtime_of(kind), "device_count", int)())


def shows_one(kind: str) -> bool:
    """Returns True if an environment variable leaves this process one device of a type, as some launchers do."""
    return any(name in os.environ for name in VISIBLE.get(kind, ())) and _count(kind) == 1


def with_index(device: torch.device | str) -> torch.device:
    """Returns the device with its index, as tensors report it. "cuda" without an index is the current device.

    Example:
        >>> with_index("mps"), with_index("cuda:1"), with_index("cpu")
        (device(type='mps', index=0), device(type='cuda', index=1), device(type='cpu'))
    """
    device = torch.device(device)
    if ":" in str(device) or device.type == "xla" or runtime_of(device) is None:
        return device
    return torch.device(device.type, current_index(device.type))


def find_devices(accelerator: str = "auto", devices: Any = "auto") -> list[torch.device]:
    """Returns the devices of this machine's ranks, one each.

    Args:
        accelerator: see `find_device`.
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
    available = max(1, _count(first.type))
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


# what torch can do on a type of device --------------------------------------------------------------------------------
def runtime_of(device: torch.device | str) -> Any:
    """Returns torch's module for a type of device, or None for the CPU and for types without one.

    `torch.cuda`, `torch.xpu` and the modules of registered backends share most names; `torch.mps` has some of them.
    """
    kind = device.type if isinstance(device, torch.device) else device
    if kind in ("cpu", "meta"):
        return None
    with contextlib.suppress(RuntimeError):
        return getattr(torch, torch.device(kind).type, None)
    return None


def types_in_use() -> list[str]:
    """Returns the types of accelerators that this process has used, or may have, if torch does not tell."""
    return [kind for kind in _present() if is_in_use(kind)]


def is_in_use(kind: str) -> bool:
    """Returns True if this process has initialized devices of a type, after which it cannot be forked."""
    runtime = runtime_of(kind)
    return bool(runtime.is_initialized()) if hasattr(runtime, "is_initialized") else _count(kind) > 0


def current_index(kind: str) -> int:
    """Returns the index of this process's current device of a type; 0 before it uses any."""
    runtime = runtime_of(kind)
    return int(runtime.current_device()) if hasattr(runtime, "current_device") and is_in_use(kind) else 0


def make_current(device: torch.device) -> None:
    """Makes a device the current one of its type. Until then, calls without a device argument use the first."""
    runtime = runtime_of(device)
    if hasattr(runtime, "set_device"):
        runtime.set_device(device)


def copies_aside(device: torch.device) -> bool:
    """Returns True if copies between this device and the host may run beside the host's own work."""
    return device.type not in BLOCKING


@functools.cache
def pins_memory(kind: str) -> bool:
    """Returns True if torch allocates page-locked host memory for a type of device, whose copies never block."""
    if kind in (*BLOCKING, *PINNING):
        return kind in PINNING
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def mark(device: torch.device) -> Any:
    """Returns an event at the end of the work queued so far on a device; `event.synchronize()` waits for it."""
    runtime = runtime_of(device)
    event = runtime.Event()
    event.record(runtime.current_stream(device))
    return event


def start_reading(values: Tensor) -> Callable[[], list[float]]:
    """Starts copying a vector to the host.

    On a GPU the copy is asynchronous: it runs after the work already queued on the stream, and does not block the host.

    Returns:
        A function that waits for the copy and returns the numbers.
    """
    if not copies_aside(values.device):
        return values.tolist  # type: ignore[no-any-return]
    # Pinned memory and an event make this a deliberate wait, which torch.cuda.set_sync_debug_mode does not report. It
    # reports only accidental syncs.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=pins_memory(values.device.type))
    host.copy_(values, non_blocking=True)
    copied = mark(values.device)

    def wait() -> list[float]:
        copied.synchronize()
        return host.tolist()  # type: ignore[no-any-return]

    return wait


def name_of(device: torch.device) -> str:
    """Returns the model of a GPU, as its driver names it; "" if unknown."""
    runtime = runtime_of(device)
    return str(runtime.get_device_name(device)) if hasattr(runtime, "get_device_name") else ""


def lacks_bfloat16(device: torch.device) -> bool:
    """Returns True if a device is known to have no bfloat16."""
    runtime = runtime_of(device)
    return hasattr(runtime, "is_bf16_supported") and not runtime.is_bf16_supported()


def used_memory(device: torch.device) -> tuple[int, int, int] | None:
    """Returns the bytes that torch uses on a GPU now and at the peak, and the GPU's total; None if unknown."""
    runtime = runtime_of(device)
    if not hasattr(runtime, "memory_allocated"):
        return None
    total = runtime.get_device_properties(device).total_memory
    return runtime.memory_allocated(device), runtime.max_memory_allocated(device), total


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak for `peak_memory`, where torch counts memory."""
    runtime = runtime_of(device)
    if hasattr(runtime, "reset_peak_memory_stats"):
        runtime.reset_peak_memory_stats(device)


def free_cached_memory() -> None:
    """Returns memory that torch caches to the devices in use."""
    for kind in types_in_use():
        if hasattr(runtime_of(kind), "empty_cache"):
            runtime_of(kind).empty_cache()


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes in use so far: allocated by torch on a GPU, of the process elsewhere; 0 if unknown."""
    runtime = runtime_of(device)
    if hasattr(runtime, "max_memory_allocated"):
        return int(runtime.max_memory_allocated(device))
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
