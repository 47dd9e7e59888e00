"""Shards are not saved by mistake: pickling one raises an error that names the call to use."""

from __future__ import annotations

import copyreg
from typing import Any

from torch.distributed.tensor import DTensor

from leyden.strategies.errors import LeydenError


class ShardPickleError(LeydenError):
    """A shard was about to be saved as if it were the whole tensor."""


def guard_shards() -> None:
    """From here on pickle, and so torch.save, refuses tensors of which this process has only a part.

    It goes by the type, since state dicts, `.cpu()` and optimizers hand out ever new tensors.
    """
    copyreg.pickle(DTensor, _reduce)  # type: ignore[arg-type]


def _reduce(tensor: DTensor) -> Any:
    if not any(placement.is_shard() for placement in tensor.placements) or tensor.device_mesh.size() == 1:
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    raise ShardPickleError(
        f"this tensor of the shape {tuple(tensor.shape)} is sharded over the ranks, and pickling it (torch.save) would write this "
        "rank's part alone. Call trainer.save_checkpoint(path) on every rank; or state = "
        "trainer.strategy.full_state_dict(module) on every rank, which gives whole tensors to rank 0; or tensor.full_tensor()."
    )
