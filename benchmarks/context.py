"""Measures context parallelism: steps per second beside a hand-written loop, and memory beside one process.

    python benchmarks/context.py --ranks 2 --repeats 5 --steps 10                     # speed, at length 2,048
    python benchmarks/context.py --ranks 4 --repeats 0 --peak-length 8192             # memory only

A GPT of 4 blocks in float32 on a batch of one sequence, AdamW, CPU, gloo, one thread per rank. Every contestant but
"one process" shards the model by FSDP over the ranks, and gives each of them a part of the sequence. The loop by hand
cuts the sequence and attends as Leyden does: "gather" collects keys and values, again in backward; "ulysses" exchanges
positions for heads. All run in the same processes, one after the other in each round. The table shows each contestant's
median steps per second, the median over the rounds of Leyden's speed divided by the loop's, and the largest number of
bytes that rank 0's tensors held at one time in steps of length `--peak-length`, parameters and states of the
optimizer included.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import Run, Timed, leyden, on_ranks, peak_of, rounds, row
from split_gpt import Block
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from leyden import TrainModule
from leyden.strategies import MeshStrategy, sequence_positions

TOKENS = 60


class LongGPT(TrainModule):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.places(sequence_positions(tokens.shape[1]) if positions is None else positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        return F.cross_entropy(self(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(*batch), "num_items": batch[1].numel()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def texts(length: int, steps: int) -> Timed:
    """Returns a sequence of random tokens, with the labels of a model that copies."""
    ids = torch.randint(TOKENS, (length,))
    return Timed([(ids, ids)], steps, warm_up=2)


def build(data: Timed, width: int) -> LongGPT:
    torch.manual_seed(0)
    return LongGPT(len(data.samples[0][0]), width)


# by hand --------------------------------------------------------------------------------------------------------------
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: Tensor) -> Tensor:
        return in_order(pair)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        chunks = gradient.chunk(2 * dist.get_world_size(), -2)
        parts = [torch.cat([chunks[r], chunks[-1 - r]], -2) for r in range(dist.get_world_size())]
        own: Tensor = collectives.reduce_scatter_tensor(torch.stack(parts), "sum", 0, dist.group.WORLD)[0]
        return own


def in_order(pair: Tensor) -> Tensor:
    """Returns the keys and values of the whole sequence, of which each rank has two chunks."""
    parts = collectives.all_gather_tensor(pair[None], 0, dist.group.WORLD)
    heads, tails = parts.chunk(2, -2)
    return torch.cat([*heads, *tails.flip(0)], -2)


def gather_by_hand(length: int) -> Callable[..., Tensor]:
    chunk = length // (2 * dist.get_world_size())
    begins = dist.get_rank() * chunk, length - (dist.get_rank() + 1) * chunk
    rows = 256
    triangle = torch.full((rows, length + rows), -torch.inf).triu(length + 1)

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        own = torch.stack([key, value])
        whole: list[Tensor] = [Gather.apply(own)]  # type: ignore[no-untyped-call]
        storage, packed = whole[0].untyped_storage().data_ptr(), 0

        def pack(tensor: Tensor) -> Any:
            nonlocal packed
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            packed += 1
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(kept: Any) -> Tensor:
            nonlocal packed
            if isinstance(kept, Tensor):
                return kept
            if not whole:
                whole.append(in_order(own.detach()))
            tensor, packed = whole[0].as_strided(*kept), packed - 1
            if not packed:
                whole.clear()
            return tensor

        outputs = []
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            keys, values = whole[0]
            for part, begin in zip(query.chunk(2, -2), begins, strict=True):
                for piece, first in zip(part.split(rows, -2), range(begin, begin + chunk, rows), strict=True):
                    last = first + piece.shape[-2]
                    outputs.append(
                        F.scaled_dot_product_attention(
                            piece,
                            keys[..., :last, :],
                            values[..., :last, :],
                            triangle[: last - first, length - first : length - first + last],
                        )
                    )
            del keys, values
        whole.clear()
        return torch.cat(outputs, -2)

    return attend


def ulysses_by_hand(length: int) -> Callable[..., Tensor]:
    world = dist.get_world_size()

    def exchange(parts: Tensor) -> Tensor:
        received: Tensor = collectives.all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
        return received

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        packed = torch.stack([query, key, value])
        received = exchange(torch.stack(packed.chunk(world, -3)))
        output = F.scaled_dot_product_attention(*torch.cat(received.unbind(), -2), is_causal=True)
        return torch.cat(exchange(torch.stack(output.chunk(world, -2))).unbind(), -3)

    return attend


class Hooked:
    """Replaces the attention of the blocks, which call it by its name."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self._attend, self._own = attend, F.scaled_dot_product_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        with self.off():
            return self._attend(query, key, value, is_causal)

    @contextlib.contextmanager
    def off(self) -> Any:
        F.scaled_dot_product_attention = self._own
        try:
            yield
        finally:
            F.scaled_dot_product_attention = self  # type: ignore[assignment]


def by_hand(width: int, data: Timed, method: str) -> None:
    """Runs a hand-written loop on this rank's part of each sequence."""
    length, rank, world = len(data.samples[0][0]), dist.get_rank(), dist.get_world_size()
    module = build(data, width)
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    chunks = torch.arange(length).chunk(2 * world)
    if method == "gather":
        positions, attend = torch.cat([chunks[rank], chunks[-1 - rank]]), gather_by_hand(length)
    else:
        positions, attend = torch.arange(length).chunk(world)[rank], ulysses_by_hand(length)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = Hooked(attend)  # type: ignore[assignment]
    try:
        for tokens, labels in DataLoader(data, 1):
            optimizer.zero_grad()
            loss = module.loss(tokens[:, positions], labels[:, positions], positions)
            total = loss.detach().clone()
            dist.all_reduce(total)
            (loss * world / labels.numel()).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    finally:
        F.scaled_dot_product_attention = own


def worker(args: argparse.Namespace) -> None:
    """Runs every contestant in turn, repeatedly, on one rank."""
    runs: dict[str, Run] = {}
    for method in ("gather", "ulysses"):
        options: Any = {"dp_shard": 1, "cp": args.ranks, "cp_method": method, "sequence_dims": {0: 1, 1: 1}}
        runs[f"{method} by hand"] = lambda data, method=method: by_hand(args.width, data, method)  # type: ignore[misc]
        runs[f"{method} leyden"] = lambda data, options=options: leyden(  # type: ignore[misc]
            build(data, args.width), data, MeshStrategy(**options)
        )
    found = rounds(runs, lambda name: texts(args.length, args.steps), args.repeats)
    single = 0
    if dist.get_rank() == 0:
        data = texts(args.peak_length, 0)
        single = peak_of(lambda data: leyden(build(data, args.width), data, "single_device"), data)
    dist.barrier()
    peaks = {name: peak_of(run, texts(args.peak_length, 0)) for name, run in runs.items()}
    if dist.get_rank() == 0:
        print(f"one process      peak {single / 2**20:8.2f} MiB")
        for name, most in peaks.items():
            print(f"{row(name, found, peaks)}   peak × {most * args.ranks / single:.3f} / cp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--peak-length", type=int, default=8192)
    parser.add_argument("--width", type=int, default=64)
    on_ranks(parser, worker)


if __name__ == "__main__":
    main()
