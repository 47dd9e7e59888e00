"""Shards are not saved by mistake: pickling one, or exporting a model of them, raises an error that names the call to
use.
"""

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

from leyden.strategies.errors import LeydenError

INSTEAD = (
    "With an Accelerator call state = accelerator.get_state_dict(model) on every rank, which gives whole tensors to "
    "all of them, or accelerator.save_model(model, folder). With a Trainer call trainer.save_checkpoint(path) on every "
    "rank, or state = trainer.strategy.full_state_dict(module), which gives whole tensors to rank 0. A single one: "
    "tensor.full_tensor(), on every rank."
)


class ShardPickleError(LeydenError):
    """A shard was about to be saved as if it were the whole tensor."""


def is_part(tensor: Any) -> bool:
    """True for a tensor of which this process has only a part, so that the whole needs the other ranks."""
    placements = getattr(tensor, "placements", ())
    return any(not placement.is_replicate() for placement in placements) and tensor.device_mesh.size() > 1


def guard_shards() -> None:
    """Makes pickle, and so torch.save, refuse tensors of which this process has only a part.

    It goes by the type, since state dicts, `.cpu()` and optimizers hand out ever new tensors.
    """
    from torch.distributed.tensor import DTensor

    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]


def _reduce(tensor: Any) -> Any:
    if not is_part(tensor):
        return tensor.__reduce_ex__(2)
    _remove_begun_file()
    raise ShardPickleError(
        f"this tensor of the shape {tuple(tensor.shape)} is sharded over the ranks, and pickling it (torch.save) would "
        f"write this rank's part alone. {INSTEAD}"
    )


def _remove_begun_file() -> None:
    """Deletes the empty file that torch.save opens before it pickles."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.save.__code__:
        frame = frame.f_back
    path = None if frame is None else frame.f_locals.get("f")
    if isinstance(path, (str, os.PathLike)):
        try:
            os.unlink(path)
        except OSError:
            # Windows keeps open files.
            return


def guard_exports(root: nn.Module) -> None:
    """Lets `save_pretrained` of the model, and of those in it, refuse to write shards.

    transformers and peft take the state from the model itself, and fail in the middle of writing, or write one rank's
    part. To gather it here would wait for ever, since scripts call `save_pretrained` on the main rank alone.
    """
    for module in root.modules():
        plain = getattr(type(module), "save_pretrained", None)
        if callable(plain) and "save_pretrained" not in vars(module):
            vars(module)["save_pretrained"] = types.MethodType(_whole_or_refused(plain), module)


def _whole_or_refused(plain: Callable[..., Any]) -> Callable[..., Any]:
    takes_state = "state_dict" in inspect.signature(plain).parameters

    @functools.wraps(plain)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            state = self.state_dict()
            part = next((name for name, tensor in state.items() if is_part(tensor)), None)
            if part is not None:
                raise ShardPickleError(
                    f"{type(self).__name__}.save_pretrained would write this rank's part of {part!r}, which is sharded "
                    "over the ranks. On every rank: state = accelerator.get_state_dict(model), or "
                    "trainer.strategy.full_state_dict(module); then save_pretrained(folder, state_dict=state, "
                    "is_main_process=accelerator.is_main_process). Where it takes no state_dict: "
                    "accelerator.save_model(model, folder)."
                )
            if takes_state:
                # One rank has the whole, in a form that safetensors does not take.
                from leyden.strategies.fsdp.sharding import whole

                kwargs["state_dict"] = {name: whole(tensor) for name, tensor in state.items()}
        return plain(self, *args, **kwargs)

    return save_pretrained
