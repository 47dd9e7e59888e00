"""Measures the cost of a large world for one rank: a 70B Llama shape on simulated ranks, split over tp 8 and sharded.

    python benchmarks/simulated_world.py --worlds 8,64,256,1024

Each world has a separate process, which simulates rank 0 with torch's fake process group, parameters on the meta
device, and MeshStrategy as in a fit. "set-up" covers the process group, the mesh and splitting the model; "memory" is
the process's memory beyond the model on the meta device. "share" is the rank's share of the weights, in fp32. For a
checkpoint, each rank describes its own parts ("describe", with the bytes that it sends to the others), and then plans
the files of all ranks from the messages ("plan"); this program derives the messages from the placements. "again" is the
total for the next save. Times are CPU seconds of this process. Needs transformers.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.shard_plan import ShardPlans
from leyden.checkpoint.shards import plan
from leyden.core.text import size_of
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.mesh.simulated import simulated

TP = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """The cost of one world for rank 0, in seconds and bytes."""

    ranks: int
    parameters: int
    setup: float
    memory: int
    share: int
    describe: float
    sent: int
    plan: float
    again: float
    written: int
    tensors: int


class Everyone(CheckpointRanks):
    """All ranks of a simulated world: each describes the same tensors as this rank, with its own offsets."""

    def __init__(self, layout: Layout, tensors: dict[str, Any]) -> None:
        super().__init__()
        self.layout, self.tensors = layout, tensors
        self.sent, self.described = 0, 0.0
        self.began = time.process_time()

    def gather(self, value: T) -> list[T]:
        self.described += time.process_time() - self.began
        self.sent += len(pickle.dumps(value))
        gathered = [self._of_rank(value, rank) for rank in range(self.layout.size)]
        self.began = time.process_time()
        return gathered

    def _of_rank(self, value: Any, rank: int) -> Any:
        if not isinstance(value, list):
            # Digests of tensors and of the cached plan; in this world they are the same on all ranks.
            return value
        coordinate = (rank // TP, rank % TP) if self.layout.dp_shard > 1 else (rank,)
        found = []
        for key, dtype, shape, _ in value:
            tensor = self.tensors[key]
            sizes, offsets = place(shape, tuple(tensor.device_mesh.shape), coordinate, tuple(tensor.placements))
            found.append((key, dtype, shape, ((tuple(offsets), tuple(sizes)),)))
        return found


@functools.cache
def place(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: Any) -> Any:
    """The sizes and offsets of a rank's part of a tensor."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(shape, mesh, coordinate, placements)


def llama(layers: int) -> nn.Module:
    """Builds Llama 3's 70B shape on the meta device, with this many of its 80 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def measure(world: int, layers: int) -> Cost:
    """Simulates rank 0 of a world and measures its cost."""
    model, layout = llama(layers), Layout(1, world // TP, TP)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before, began = resident(), time.process_time()
    with simulated(layout) as strategy:
        strategy.setup_modules([model])
        setup, memory = time.process_time() - began, resident() - before
        tensors: dict[str, Any] = dict(model.named_parameters())
        everyone = Everyone(layout, tensors)
        plans = ShardPlans()
        _, files = plan(tensors, "model", everyone, plans)
        planned, began = time.process_time() - everyone.began, time.process_time()
        described, sent = everyone.described, everyone.sent
        plan(tensors, "model", everyone, plans)
        again = time.process_time() - began
    mine = [tensor for file in files.values() for tensor in file.values()]
    return Cost(
        ranks=world,
        parameters=parameters,
        setup=setup,
        memory=memory,
        share=sum(t.to_local().numel() * t.element_size() for t in tensors.values()),
        describe=described,
        sent=sent,
        plan=planned,
        again=again,
        written=sum(t.numel() * t.element_size() for t in mine),
        tensors=len(mine),
    )


def resident() -> int:
    """Returns this process's peak memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


COLUMNS = ("ranks", "set-up", "memory", "share", "describe", "sent", "plan", "again", "written", "tensors")


def row(cost: Cost) -> list[str]:
    """Formats a cost as one cell for each of COLUMNS."""
    times = (cost.setup, cost.describe, cost.plan, cost.again)
    setup, describe, planned, again = (f"{seconds:.2f} s" for seconds in times)
    memory, share, sent, written = map(size_of, (cost.memory, cost.share, cost.sent, cost.written))
    return [str(cost.ranks), setup, memory, share, describe, sent, planned, again, written, str(cost.tensors)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="8,64,256,1024")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(measure(args.one, args.layers))))
        return
    print("  ".join(name.rjust(10) for name in COLUMNS))
    for world in args.worlds.split(","):
        command = [sys.executable, __file__, "--layers", str(args.layers), "--one", world]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        cost = Cost(**json.loads(done.stdout.splitlines()[-1]))
        print("  ".join(cell.rjust(10) for cell in row(cost)), flush=True)
    print(f"{cost.parameters:,} parameters, tp {TP}")


if __name__ == "__main__":
    main()
