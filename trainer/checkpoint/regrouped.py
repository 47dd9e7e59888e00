"""The state that each rank has of its own, redistributed to the number of ranks there are now.

The place in the data is counted in samples of the whole order, so every rank takes it from rank 0. What was summed up is merged
by the way in which it is reduced over ranks: the first rank continues with the whole, the others with nothing, or with a value
that changes nothing. Random numbers continue exactly where there are as many ranks as there were. Else rank 0 continues with its
own, from which the order of samples is drawn, and the others are seeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leyden.strategies.base import Strategy
from leyden.trainer.checkpoint.peers import Peers
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.data.rng import seeded_state
from leyden.trainer.format.safefile import memory_of
from leyden.trainer.format.tensors import is_sharded
from leyden.trainer.logging.metric_states import blank_metric_states, merged_metric_states


def saved_ranks(reader: CheckpointReader) -> int:
    """How many ranks, of those that see different samples, wrote a checkpoint; 0 where it holds weights alone."""
    count = 0
    while reader.has(f"rank-{count}"):
        count += 1
    return count


def read_rank(reader: CheckpointReader, strategy: Strategy, module: nn.Module, like: Any = None) -> dict[str, Any]:
    """The state of this rank.

    Args:
        reader: of a checkpoint with the state of ranks.
        strategy: tells which rank this is, and how many there are.
        module: its metrics tell how they are reduced.
        like: live state, whose classes are used for those saved.
    """
    rank, saved = strategy.data_rank, saved_ranks(reader)
    if saved == strategy.data_size:
        own: dict[str, Any] = reader.state(f"rank-{rank}", like=like)
        return own
    # Only the first has to see what the others had summed up.
    states = [reader.state(f"rank-{number}", like=like) for number in (range(saved) if rank == 0 else range(1))]
    first = states[0]
    step, metrics = reader.progress()["global_step"], list(module.named_modules())
    return {
        **first,
        "logs": merged_logs([state["logs"] for state in states], empty=rank > 0),
        "metrics": merged_metric_states(metrics, [state["metrics"] for state in states])
        if rank == 0
        else blank_metric_states(metrics, first["metrics"]),
        "buffers": {},
        "rng": first["rng"] if rank == 0 else seeded_state(rank_seed(first.get("seed", 0), step, rank)),
    }


def own_buffers(module: nn.Module, ranks: Peers) -> dict[str, Tensor]:
    """The module's buffers in which this rank differs from rank 0, whose are those of the checkpoint.

    So it is with the statistics of batch norm, to which each rank adds its own batches.
    """
    if ranks.size == 1:
        return {}
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {
        name: value
        for name, value in module.state_dict().items()
        if name not in known and isinstance(value, Tensor) and value.layout is torch.strided and not is_sharded(value)
    }
    digests = {name: _digest(value) for name, value in buffers.items()}
    first = ranks.gather(digests)[0]
    return {name: value for name, value in buffers.items() if digests[name] != first.get(name)}


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(memory_of(tensor.detach().cpu().contiguous())).digest()


@torch.no_grad()
def load_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Gives a rank back what `own_buffers` found."""
    state = module.state_dict() if buffers else {}
    for name, value in buffers.items():
        if name in state:
            state[name].copy_(value)


def rank_seed(seed: int, step: int, rank: int) -> int:
    """The seed of a rank that has no random numbers of its own to continue with."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:4], "little")


def merged_logs(states: list[dict[str, Any]], empty: bool) -> dict[str, Any]:
    """The sums of logged values of all ranks as those of one; `empty` for a rank beside that one."""
    entries: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for state in states:
        for entry in state["entries"]:
            entries.setdefault((entry["event"], entry["name"]), []).append(entry)
    return {**states[0], "entries": [_merged_entry(found, empty) for found in entries.values()]}


def _merged_entry(found: list[dict[str, Any]], empty: bool) -> dict[str, Any]:
    first, reduction = found[0], found[0]["reduce_fx"]
    totals = [entry["total"] for entry in found if entry["total"] is not None]
    if reduction in ("max", "min"):
        # The same value again changes neither.
        return {**first, "total": _extreme(totals, reduction)}
    if empty:
        total = None if not totals else totals[0] * 0
        return {**first, "total": total, "weight": 0.0, "values": [], "result": None}
    values = [value for entry in found for value in entry["values"]]
    weight = sum(entry["weight"] for entry in found)
    return {**first, "total": sum(totals[1:], totals[0]) if totals else None, "weight": weight, "values": values}


def _extreme(totals: list[Any], reduction: str) -> Any:
    if not totals:
        return None
    stacked = torch.stack([torch.as_tensor(total, dtype=torch.float64) for total in totals])
    extreme = stacked.max() if reduction == "max" else stacked.min()
    return extreme if any(isinstance(total, Tensor) for total in totals) else float(extreme)
