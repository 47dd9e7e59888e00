"""Guards against saving shards by mistake: pickling one, or exporting a sharded model, raises an error with the fix."""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leyden.core.errors import LeydenError

INSTEAD = (
    "On every rank, call state = accelerator.get_state_dict(model) or accelerator.save_model(model, folder) with an "
    "Accelerator, and trainer.save_checkpoint(path) or state = trainer.strategy.full_state_dict(module) with a "
    "Trainer. For a single tensor, call tensor.full_tensor()."
)


class ShardPickleError(LeydenError):
    """Raised when a shard would be saved as if it were the full tensor."""


def is_part(tensor: Any) -> bool:
    """Returns True if this rank holds only a part of a tensor."""
    placements = getattr(tensor, "placements", ())
    return any(not placement.is_replicate() for placement in placements) and tensor.device_mesh.size() > 1


def guard_shards() -> None:
    """Makes pickle, and so torch.save, refuse tensors of which this rank holds only a part.

    The guard covers the DTensor type, because state dicts, `.cpu()` and optimizers keep creating new tensors.
    """
    from torch.distributed.tensor import DTensor

    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]


def _reduce(tensor: Any) -> Any:
    if not is_part(tensor):
        return tensor.__reduce_ex__(2)
    _remove_partial_file()
    raise ShardPickleError(
        f"this tensor of shape {tuple(tensor.shape)} is sharded over the ranks, and pickling it (torch.save) would "
        f"write only this rank's part. {INSTEAD}"
    )


def _remove_partial_file() -> None:
    """Deletes the empty file that torch.save opens before it pickles."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.save.__code__:
        frame = frame.f_back
    path = None if frame is None else frame.f_locals.get("f")
    if isinstance(path, (str, os.PathLike)):
        try:
            os.unlink(path)
        except OSError:
            # Windows does not delete open files.
            return


def guard_exports(root: nn.Module) -> None:
    """Makes `save_pretrained` of a model and its submodules refuse to write shards.

    transformers and peft read the model's own state dict, and then either fail halfway through the file or write one
    rank's part. Gathering the state there would deadlock, because scripts call `save_pretrained` on the main rank only.
    A module with a true `gathers_shards` is left as it is: its method gathers, and all ranks call it.
    """
    for module in root.modules():
        plain = getattr(type(module), "save_pretrained", None)
        gathers = getattr(module, "gathers_shards", False)
        if callable(plain) and not gathers and "save_pretrained" not in vars(module):
            vars(module)["save_pretrained"] = types.MethodType(_guarded(plain), module)


def _guarded(plain: Callable[..., Any]) -> Callable[..., Any]:
    takes_state = "state_dict" in inspect.signature(plain).parameters

    @functools.wraps(plain)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            state = self.state_dict()
            part = next((name for name, tensor in state.items() if is_part(tensor)), None)
            if part is not None:
                raise ShardPickleError(
                    f"{type(self).__name__}.save_pretrained would write only this rank's part of {part!r}, which is "
                    "sharded over the ranks. On every rank, call state = accelerator.get_state_dict(model) or "
                    "trainer.strategy.full_state_dict(module), then save_pretrained(folder, state_dict=state, "
                    "is_main_process=accelerator.is_main_process). If it takes no state_dict, use "
                    "accelerator.save_model(model, folder)."
                )
            if takes_state:
                # The tensors are whole on this rank, but still DTensors, which safetensors does not accept.
                from leyden.strategies.fsdp.sharding import whole

                kwargs["state_dict"] = {name: whole(tensor) for name, tensor in state.items()}
        return plain(self, *args, **kwargs)

    return save_pretrained
