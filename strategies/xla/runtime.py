"""XLA's runtime in this process: which devices it has, and their random numbers. Both are chosen once."""

from __future__ import annotations

import hashlib
import os
import sys

import torch

from leyden.strategies.devices import parse_devices
from leyden.strategies.errors import ConfigurationError

_left: int | None = None
"""Where XLA's random numbers stood when Leyden last read or set them."""


def is_used() -> bool:
    """True if this process has XLA devices; asks without making any."""
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())


def start(kind: str | None, wanted: int | list[int] | None) -> tuple[torch.device, int]:
    """Chooses devices, where the process has none yet.

    Args:
        kind: "CPU" or "TPU"; None for the best there is.
        wanted: how many, one by its index, or None for all.

    Returns:
        The device that tensors go to, and how many there are behind it.

    Raises:
        ConfigurationError: if they are not there, or the process has begun with others.
    """
    import torch_xla
    from torch_xla import runtime

    was_used = is_used()
    _choose_kind(kind, was_used)
    if isinstance(wanted, int) and not was_used and runtime.device_type() == "CPU":
        # XLA's CPU is as many devices as this says.
        os.environ.setdefault("CPU_NUM_DEVICES", str(wanted))
    count = runtime.global_runtime_device_count()
    if isinstance(wanted, int) and wanted not in (1, count):
        raise ConfigurationError(
            f"devices={wanted}, and XLA has {count} here: use devices='auto' for all of them, or devices=1."
        )
    index = wanted[0] if isinstance(wanted, list) else None
    if index is not None and index >= count:
        raise ConfigurationError(f"devices={wanted}: XLA has {count} devices here, counted from 0.")
    one = isinstance(wanted, list) or wanted == 1 or count == 1
    has_begun = torch_xla._XLAC._xla_get_spmd_config_is_locked()
    if has_begun and runtime.is_spmd() == one:
        raise ConfigurationError(
            f"this process has begun to use XLA with {'all devices' if one else 'one device'}, and cannot change: run "
            f"devices={'auto' if wanted is None else wanted!r} in a new one."
        )
    if not one and not runtime.is_spmd():
        runtime.use_spmd()
    device = torch_xla.device(index)
    if not has_begun:
        _check_autograd(device)
    _begin_random(was_used)
    return device, 1 if one else count


def _choose_kind(kind: str | None, was_used: bool) -> None:
    from torch_xla import runtime

    if kind is None or kind == runtime.device_type():
        return
    if was_used:
        raise ConfigurationError(
            f"accelerator={kind.lower()!r}, and this process uses XLA's {runtime.device_type()} already: start a "
            "new one."
        )
    runtime.set_device_type(kind)


def ranks_of_host(devices: object) -> int:
    """How many ranks this machine has where each device has one; asks without making any."""
    wanted = parse_devices(devices)
    if wanted is not None:
        return wanted if isinstance(wanted, int) else len(wanted)
    from torch_xla._internal import tpu

    return max(1, int(tpu.num_available_chips()))


def start_rank() -> torch.device:
    """Starts the one device of a rank, once the process group has given the runtime its place."""
    import torch_xla

    has_begun = torch_xla._XLAC._xla_get_spmd_config_is_locked()
    device: torch.device = torch_xla.device()
    if not has_begun:
        _check_autograd(device)
    _begin_random(_left is not None)
    return device


def _check_autograd(device: torch.device) -> None:
    """torch counts the devices that gradients are computed on once, in the first backward of a process."""
    try:
        (torch.ones((), device=device, requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise ConfigurationError(
            "this process has computed gradients before XLA was used, and torch does not see its devices any more: run "
            "on XLA first, or in a new process."
        ) from None


def sync(wait: bool = False) -> None:
    """Submits the collected operations to the device.

    Args:
        wait: until they are done.
    """
    import torch_xla

    torch_xla.sync(wait=wait)
    if wait:
        from torch_xla.core import xla_model

        xla_model.wait_device_ops()


# random numbers -------------------------------------------------------------------------------------------------------
def follow_torch() -> None:
    """Seeds XLA's random numbers from the state of torch's, without drawing one.

    They do not follow `torch.manual_seed` by themselves (tried, torch_xla 2.9).
    """
    import torch_xla

    global _left
    state = bytes(torch.get_rng_state().tolist())
    torch_xla.manual_seed(int.from_bytes(hashlib.blake2b(state, digest_size=4).digest(), "little") >> 1)
    _left = rng_state()


def _begin_random(was_used: bool) -> None:
    """Seeds XLA's random numbers at the start of a run, unless the user has set them."""
    if not was_used or rng_state() == _left:
        follow_torch()


def leave_random() -> None:
    """Notes the state of XLA's random numbers at a run's end, so that the next run sees whether they were set since."""
    global _left
    _left = rng_state()


def rng_state() -> int:
    """Returns the state of XLA's random numbers, which is known on the host."""
    from torch_xla.core import xla_model

    return int(xla_model.get_rng_state())


def set_rng_state(state: int) -> None:
    """Sets XLA's random numbers to the state that `rng_state` returned."""
    from torch_xla.core import xla_model

    xla_model.set_rng_state(state)
