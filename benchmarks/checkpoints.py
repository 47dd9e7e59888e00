"""Measures saving and loading a model with AdamW on one process: Leyden, torch.save, DCP and Accelerate.

    python benchmarks/checkpoints.py --gigabytes 0.2 1 4 --repeats 5

The size counts everything that is written: weights, and two moments for each. Every save is flushed to the disk: files
that a library leaves in the page cache are fsynced before the clock stops. A load runs in a new process, like a resume.
It fills an existing module and an optimizer without state, and ends when every byte is in them. It is measured with the
files in the page cache ("warm") and evicted from it ("cold"). The contestants take turns within a round, and each round
starts with a different one. The table shows medians over the rounds, ratios to the fastest of the others within a
round, and a contestant's peak memory beyond the tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash
from torch import nn
from torch.optim import AdamW

from leyden.accelerator.accelerator import Accelerator
from leyden.checkpoint.format.safefile import memory_of
from leyden.core.text import size_of

WIDTH = 1024
"""A block of two Linear layers, WIDTH to 4 * WIDTH and back, has 32 MiB of weights."""


def make(gigabytes: float) -> tuple[nn.Module, AdamW]:
    """Returns a model and an optimizer without state; with state, a checkpoint of both has about this many GB."""
    block = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    blocks = round(gigabytes * 1e9 / 3 / block)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)]
    model = nn.Sequential(nn.Linear(8, 8), *layers)
    return model, AdamW(model.parameters(), lr=1e-3)


def give_state(model: nn.Module, optimizer: AdamW) -> None:
    """Lets the optimizer step once, on random gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Contestant(ABC):
    """Saves and loads in the same way as a library's users. `prepare` is not timed."""

    name = ""

    def prepare(self, model: nn.Module, optimizer: AdamW) -> None:
        self.model, self.optimizer = model, optimizer

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> None: ...


class Leyden(Contestant):
    name = "leyden"

    def prepare(self, model: nn.Module, optimizer: AdamW) -> None:
        self.accelerator = Accelerator()
        self.accelerator.prepare(model, optimizer)

    def save(self, path: Path) -> None:
        self.accelerator.save_state(path)

    def load(self, path: Path) -> None:
        self.accelerator.load_state(path)


class TorchSave(Contestant):
    name = "torch.save"

    def save(self, path: Path) -> None:
        path.mkdir()
        with open(path / "all.pt", "wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        flush(path)

    def load(self, path: Path) -> None:
        state = torch.load(path / "all.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Dcp(Contestant):
    name = "DCP"
    no_dist = True

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer)
        # By default DCP fsyncs each file, but not the folder.
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path, no_dist=self.no_dist)
        flush(path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path, no_dist=self.no_dist)
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)


class Accelerate(Contestant):
    name = "accelerate"

    def prepare(self, model: nn.Module, optimizer: AdamW) -> None:
        import accelerate

        self.accelerator = accelerate.Accelerator(cpu=True)
        self.accelerator.prepare(model, optimizer)

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))
        flush(path)

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))


CONTESTANTS: tuple[type[Contestant], ...] = (Leyden, TorchSave, Dcp, Accelerate)


def flush(folder: Path) -> None:
    """Flushes every file of a folder, and the folder itself."""
    for path in [*files_of(folder), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def warm(folder: Path) -> None:
    """Reads every file into the page cache."""
    piece = memoryview(bytearray(2**20))
    for path in files_of(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def evict(folder: Path) -> None:
    """Drops every file of a folder from the page cache; the files must be flushed."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True)
class Sample:
    """The seconds that an action took, and its peak of resident bytes beyond its tensors."""

    seconds: float
    beyond: int


Samples: TypeAlias = dict[str, dict[str, list[Sample]]]
"""One sample per round, by contestant and by measurement."""


def measure(action: Callable[[], None], made: int) -> Sample:
    """Times an action, which leaves `made` bytes of new tensors in memory."""
    gc.collect()
    os.sync()
    with contextlib.suppress(OSError):
        # Resets VmHWM, the peak of resident memory, to the current size.
        Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        action()
        took = time.perf_counter() - began
    return Sample(took, max(0, resident("VmHWM") - before - made))


def resident(line: str) -> int:
    """Returns a line of /proc/self/status in bytes, or 0 if the file does not exist."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.partition(f"{line}:")[2].split()[0])


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Returns a digest of every weight and moment."""
    found = xxhash.xxh3_128()
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            found.update(memory_of(tensor.contiguous()))
    return found.hexdigest()


def touch(size: int) -> None:
    """Allocates this many bytes of memory, writes to them and frees them.

    A virtual machine may have returned its free memory to its host. The first contestant to allocate memory would then
    wait for the host, for ten times as long as a load takes.
    """
    piece = 256 * 2**20
    kept = [torch.empty(piece, dtype=torch.uint8).fill_(1) for _ in range(-(-size // piece))]
    del kept


def run(kinds: list[type[Contestant]], gigabytes: float, repeats: int, folder: Path) -> Samples:
    """Measures one size."""
    source, stepped = make(gigabytes)
    give_state(source, stepped)
    expected = digest(source, stepped)
    samples: Samples = {kind.name: {} for kind in kinds}
    trials = {kind.name: saved(kind, *stepped_once(0), folder / f"trial-{kind.name}")[0] for kind in kinds}
    for number in range(repeats):
        start = number % len(kinds)
        for kind in kinds[start:] + kinds[:start]:
            path, sample = saved(kind, source, stepped, folder / f"{number}-{kind.name}")
            samples[kind.name].setdefault("save", []).append(sample)
            for what in ("warm", "cold"):
                with multiprocessing.get_context("forkserver").Pool(1) as process:
                    arguments = (kind, trials[kind.name], path, what, gigabytes, expected)
                    samples[kind.name].setdefault(what, []).append(process.apply(load, arguments))
            shutil.rmtree(path)
    return samples


def stepped_once(gigabytes: float) -> tuple[nn.Module, AdamW]:
    """Returns a model, and its optimizer with state."""
    model, optimizer = make(gigabytes)
    give_state(model, optimizer)
    return model, optimizer


def saved(kind: type[Contestant], model: nn.Module, optimizer: AdamW, path: Path) -> tuple[Path, Sample]:
    """Saves to a folder; returns the folder and the sample."""
    saving = kind()
    saving.prepare(model, optimizer)
    return path, measure(lambda: saving.save(path), 0)


def load(kind: type[Contestant], trial: Path, path: Path, what: str, gigabytes: float, expected: str) -> Sample:
    """Loads a tiny checkpoint to import everything, then the measured one, and compares the result with the source."""
    torch.set_num_threads(1)
    for folder, size in ((trial, 0.0), (path, gigabytes)):
        model, optimizer = make(size)
        loading = kind()
        loading.prepare(model, optimizer)
        touch(round((4 + size) * 1e9) if size else 0)
        warm(folder) if what == "warm" else evict(folder)
        moments = sum(2 * parameter.nbytes for parameter in model.parameters())
        sample = measure(partial(loading.load, folder), moments)
    if digest(model, optimizer) != expected:
        raise RuntimeError(f"{kind.name} loaded other numbers than it saved")
    return sample


def report(samples: Samples, gigabytes: float) -> None:
    """Prints the table of one size."""
    print(f"\n{gigabytes:g} GB")
    columns = [f"{what}{unit}" for what in ("save", "warm", "cold") for unit in ("", " ratio", " memory")]
    print("".rjust(12), *(column.rjust(12) for column in columns))
    for name, own in samples.items():
        cells = []
        for what, mine in own.items():
            others = [other[what] for key, other in samples.items() if key != name]
            best = [min(sample.seconds for sample in theirs) for theirs in zip(*others, strict=True)]
            ratios = [sample.seconds / quickest for sample, quickest in zip(mine, best, strict=True)] if best else [1.0]
            cells += [
                f"{statistics.median(sample.seconds for sample in mine):.2f} s",
                f"{statistics.median(ratios):.2f}",
            ]
            cells.append(size_of(max(sample.beyond for sample in mine)))
        print(name.rjust(12), *(cell.rjust(12) for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in CONTESTANTS])
    parser.add_argument("--folder", type=Path, help="where to write; choose the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__"])
    kinds = [kind for kind in CONTESTANTS if not args.only or kind.name in args.only]
    for gigabytes in args.gigabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            report(run(kinds, gigabytes, args.repeats, Path(folder)), gigabytes)


if __name__ == "__main__":
    main()
