"""A stand-in for a GPU: a device whose values cannot be read, and a recorder of synchronous copies to it.

Tensors on torch's device `meta` have no values. `.item()`, a comparison in an `if`, `.cpu()` and everything else that
would wait for a GPU fails on them, and gloo rejects them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leyden import Callback, Trainer

SILENT = torch.device("meta")
MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


class WaitRecorder(TorchFunctionMode):
    """Records operations that wait for a GPU without reading from it: synchronous copies to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.recording = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.recording:
            to_device = any(is_silent(value) for value in (*args[1:], *kwargs.values()))
            from_host = isinstance(args[0], Tensor) and args[0].device.type == "cpu" if args else False
            if (function in MAKERS and to_device) or (
                function is Tensor.to and to_device and from_host and not kwargs.get("non_blocking")
            ):
                self.found.append(f"{function.__name__}{args}")
        return function(*args, **kwargs)


def is_silent(value: object) -> bool:
    return (isinstance(value, torch.device) and value == SILENT) or value == SILENT.type


class RecordDuringTraining(Callback):
    """Records from the first batch to the end of training: setup may wait."""

    def __init__(self, waits: WaitRecorder) -> None:
        self.waits = waits

    def on_train_batch_start(self, *_: Any) -> None:
        self.waits.recording = True

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.waits.recording = False
