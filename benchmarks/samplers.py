"""Measures what drawing indices costs: a whole plain iteration, and one rank's share of each global batch.

    python benchmarks/samplers.py --ranks 2 4096

Repeats are interleaved, and the table shows medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from leyden import SeekableShuffle
from leyden.data.sharding import Order, RankBatches

SAMPLERS: dict[str, Callable[[int], Sampler[int]]] = {
    "RandomSampler": lambda count: RandomSampler(range(count)),
    "SeekableShuffle": SeekableShuffle,
}


def share(sampler: Sampler[int], ranks: int, batch_size: int) -> Iterator[Any]:
    """Returns the last rank's share of each global batch."""
    return iter(RankBatches(Order(sampler, lambda state: state), ranks - 1, ranks, batch_size))


def microseconds(items: Iterator[Any], count: int) -> float:
    """Returns the processor time that one of the next `count` items takes."""
    start = time.thread_time()
    for _ in itertools.islice(items, count):
        pass
    return (time.thread_time() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4096])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    times: dict[tuple[str, str], list[float]] = {}
    for _, (name, make) in itertools.product(range(args.repeats), SAMPLERS.items()):
        sampler = make(args.samples)
        times.setdefault((name, "a sample, plain loop"), []).append(microseconds(iter(sampler), args.samples))
        for ranks in args.ranks:
            batches = share(sampler, ranks, args.batch_size)
            next(batches)  # draws the permutation
            times.setdefault((name, f"a batch on one of {ranks} ranks"), []).append(microseconds(batches, 100))
    for (name, what), found in times.items():
        print(f"{name:16} {what:30} {statistics.median(found):8.2f} µs  (fastest {min(found):.2f})")


if __name__ == "__main__":
    main()
