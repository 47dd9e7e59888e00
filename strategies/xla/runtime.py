"""XLA's runtime in this process: its devices, which are chosen once, and their random state."""

from __future__ import annotations

import hashlib
import os
import sys

import torch

from leyden.core.devices import parse_devices
from leyden.core.errors import ConfigurationError

_last_state: int | None = None
"""XLA's random state when Leyden last read or set it."""


def is_used() -> bool:
    """Returns True if this process has XLA devices, without creating any."""
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())


def start(kind: str | None, wanted: int | list[int] | None) -> tuple[torch.device, int]:
    """Chooses devices, unless the process already uses XLA.

    Args:
        kind: "CPU" or "TPU"; None for the best available.
        wanted: number of devices, the index of one device in a list, or None for all devices.

    Returns:
        The device for tensors, and the number of physical devices behind it.

    Raises:
        ConfigurationError: if the devices do not exist, or the process already uses others.
    """
    import torch_xla
    from torch_xla import runtime

    was_used = is_used()
    _choose_kind(kind, was_used)
    if isinstance(wanted, int) and not was_used and runtime.device_type() == "CPU":
        # XLA simulates this number of devices on the CPU.
        os.environ.setdefault("CPU_NUM_DEVICES", str(wanted))
    count = runtime.global_runtime_device_count()
    if isinstance(wanted, int) and wanted not in (1, count):
        raise ConfigurationError(
            f"devices={wanted}, but XLA has {count} device(s) on this machine. Use devices='auto' for all of them, or "
            "devices=1."
        )
    index = wanted[0] if isinstance(wanted, list) else None
    if index is not None and index >= count:
        raise ConfigurationError(f"devices={wanted}: XLA has {count} device(s) on this machine, counted from 0.")
    single = isinstance(wanted, list) or wanted == 1 or count == 1
    is_locked = torch_xla._XLAC._xla_get_spmd_config_is_locked()
    if is_locked and runtime.is_spmd() == single:
        raise ConfigurationError(
            f"This process already uses XLA with {'all devices' if single else 'one device'}, and XLA cannot change "
            f"that. Run devices={'auto' if wanted is None else wanted!r} in a new process."
        )
    if not single and not runtime.is_spmd():
        runtime.use_spmd()
    device = torch_xla.device(index)
    if not is_locked:
        _check_autograd(device)
    _seed_unless_set(was_used)
    return device, 1 if single else count


def _choose_kind(kind: str | None, was_used: bool) -> None:
    from torch_xla import runtime

    if kind is None or kind == runtime.device_type():
        return
    if was_used:
        raise ConfigurationError(
            f"accelerator={kind.lower()!r}, but this process already uses XLA's {runtime.device_type()}. Start a new "
            "process."
        )
    runtime.set_device_type(kind)


def ranks_of_host(devices: object) -> int:
    """Returns this machine's number of ranks, one per device, without creating devices."""
    wanted = parse_devices(devices)
    if wanted is not None:
        return wanted if isinstance(wanted, int) else len(wanted)
    from torch_xla._internal import tpu

    return max(1, int(tpu.num_available_chips()))


def start_rank() -> torch.device:
    """Starts a rank's single device, after the process group has told the runtime its rank."""
    import torch_xla

    is_locked = torch_xla._XLAC._xla_get_spmd_config_is_locked()
    device: torch.device = torch_xla.device()
    if not is_locked:
        _check_autograd(device)
    _seed_unless_set(_last_state is not None)
    return device


def _check_autograd(device: torch.device) -> None:
    """Raises if autograd does not know the device. torch counts devices only in a process's first backward."""
    try:
        (torch.ones((), device=device, requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise ConfigurationError(
            "This process computed gradients before it used XLA, so torch does not recognize XLA's devices any more. "
            "Run on XLA first, or in a new process."
        ) from None


def sync(wait: bool = False) -> None:
    """Submits the recorded operations to the device.

    Args:
        wait: whether to wait until the device has executed them.
    """
    import torch_xla

    torch_xla.sync(wait=wait)
    if wait:
        from torch_xla.core import xla_model

        xla_model.wait_device_ops()


# random numbers -------------------------------------------------------------------------------------------------------
def follow_torch() -> None:
    """Seeds XLA's random generator from the state of torch's, without drawing a number.

    XLA does not follow `torch.manual_seed` automatically (tried, torch_xla 2.9).
    """
    import torch_xla

    global _last_state
    state = bytes(torch.get_rng_state().tolist())
    torch_xla.manual_seed(int.from_bytes(hashlib.blake2b(state, digest_size=4).digest(), "little") >> 1)
    _last_state = rng_state()


def _seed_unless_set(was_used: bool) -> None:
    """Seeds XLA's random generator at the start of a run, unless the user has set its state."""
    if not was_used or rng_state() == _last_state:
        follow_torch()


def leave_random() -> None:
    """Records XLA's random state at a run's end, so that the next run detects whether the user has set it since."""
    global _last_state
    _last_state = rng_state()


def rng_state() -> int:
    """Returns XLA's random state. The host knows it, so nothing waits for the device."""
    from torch_xla.core import xla_model

    return int(xla_model.get_rng_state())


def set_rng_state(state: int) -> None:
    """Sets XLA's random state to one returned by `rng_state`."""
    from torch_xla.core import xla_model

    xla_model.set_rng_state(state)
