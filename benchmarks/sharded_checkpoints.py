"""Measures saving and loading a model that FSDP shards over ranks: Leyden and DCP, in one interleaved run.

    python benchmarks/sharded_checkpoints.py --gigabytes 0.2 1 --ranks 2 --repeats 5

As in `benchmarks/checkpoints.py`, a checkpoint contains weights and AdamW's moments, every save is flushed to the disk,
a load ends when every byte is in the module and in the optimizer, ranks that load are new processes, and the memory was
touched before. The seconds are those of the slowest rank. Both load into the same modules: Leyden's `load_state` into
the modules that `prepare` returned, DCP into those that `fully_shard` returned.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import (
    Contestant,
    Dcp,
    Leyden,
    Sample,
    Samples,
    evict,
    give_state,
    make,
    measure,
    report,
    touch,
    warm,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from leyden.accelerator.accelerator import Accelerator
from leyden.checkpoint.format.safefile import memory_of


class ShardedLeyden(Leyden):
    def prepare(self, model: nn.Module, optimizer: AdamW) -> None:
        self.accelerator = Accelerator(cpu=True, strategy="fsdp")
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)


class ShardedDcp(Dcp):
    no_dist = False

    def prepare(self, model: nn.Module, optimizer: AdamW) -> None:
        for block in model.children():
            fully_shard(block)
        # Sharding replaces the parameters that the optimizer holds.
        self.model = fully_shard(model)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)


CONTESTANTS: tuple[type[Contestant], ...] = (ShardedLeyden, ShardedDcp)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Returns a digest of this rank's shards of every weight and moment."""
    import xxhash

    found = xxhash.xxh3_128()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            found.update(memory_of(local(tensor).contiguous()))
    return found.hexdigest()


def save(kind: type[Contestant], path: Path, gigabytes: float) -> tuple[Sample, str]:
    """Saves a tiny checkpoint to import everything, then the measured one; returns this rank's digest too."""
    for folder, size in ((path.with_suffix(".trial"), 0.0), (path, gigabytes)):
        torch.manual_seed(dist.get_rank())
        contestant = kind()
        contestant.prepare(*make(size))
        give_state(contestant.model, contestant.optimizer)
        dist.barrier()
        sample = measure(partial(contestant.save, folder), 0)
    return sample, digest(contestant.model, contestant.optimizer)


def load(kind: type[Contestant], path: Path, gigabytes: float, place: Callable[[Path], None]) -> tuple[Sample, str]:
    """Loads a tiny checkpoint to import everything, then the measured one; returns this rank's digest too."""
    for folder, size in ((path.with_suffix(".trial"), 0.0), (path, gigabytes)):
        contestant = kind()
        contestant.prepare(*make(size))
        touch(round((2 + 2 * size) * 1e9 / dist.get_world_size()) if size else 0)
        dist.barrier()
        place(folder)
        dist.barrier()
        moments = sum(2 * local(parameter).nbytes for parameter in contestant.model.parameters())
        sample = measure(partial(contestant.load, folder), moments)
    return sample, digest(contestant.model, contestant.optimizer)


def on_rank(
    rank: int, ranks: int, port: int, answers: Any, action: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Runs an action on one rank of a new process group, and sends its result back."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(io.StringIO()):
        answers.put((rank, action(*arguments)))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, action: Callable[..., Any], *arguments: Any) -> tuple[Sample, list[str]]:
    """Runs an action on ranks in new processes; returns the slowest rank's sample and all digests."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=on_rank, args=(rank, ranks, port, answers, action, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank failed: exit codes {[process.exitcode for process in processes]}")
    found = [answer for _, answer in sorted(answers.get() for _ in processes)]
    slowest = max(sample.seconds for sample, _ in found)
    return Sample(slowest, max(sample.beyond for sample, _ in found)), [own for _, own in found]


def run(gigabytes: float, ranks: int, repeats: int, folder: Path) -> Samples:
    """Measures one size."""
    samples: Samples = {kind.name: {"save": [], "warm": [], "cold": []} for kind in CONTESTANTS}
    for number in range(repeats):
        for kind in CONTESTANTS[:: -1 if number % 2 else 1]:
            path, own = folder / f"{number}-{kind.name}", samples[kind.name]
            sample, saved = on_ranks(ranks, save, kind, path, gigabytes)
            own["save"].append(sample)
            for what, place in (("warm", warm), ("cold", evict)):
                sample, loaded = on_ranks(ranks, load, kind, path, gigabytes, place)
                own[what].append(sample)
                if loaded != saved:
                    raise SystemExit(f"{kind.name} loaded other numbers than it saved")
            shutil.rmtree(path)
            shutil.rmtree(path.with_suffix(".trial"))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; choose the disk to measure")
    args = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__"])
    for gigabytes in args.gigabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            report(run(gigabytes, args.ranks, args.repeats, Path(folder)), gigabytes)


if __name__ == "__main__":
    main()
