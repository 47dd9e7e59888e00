"""Kills runs with SIGKILL at random, resumes them, and compares their ends with those of runs that were left alone.

    python benchmarks/faults.py --kills 1000 [--seed 0] [--only "ddp 2"] [--in-place]

One process, DDP 2 and FSDP 2 over gloo, each with synchronous and with asynchronous saves. A kill falls at a random
time, at a call that changes files, or at one of a run that resumes; it takes the whole job, the process that launched
it, or one rank. What counts: runs whose weights, optimizer, counters or CSV log differ from those of a run without a
kill; runs that could not go on, as they found a damaged checkpoint or raised; temporary files that the last run left
behind; processes that a kill left running. `--in-place` writes checkpoints where they stay, without a temporary folder
and a rename, which this must find out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback, CSVLogger, ModelCheckpoint
from leyden.strategies import DDPStrategy, FSDPStrategy
from leyden.trainer.checkpoint.folder import newest
from leyden.trainer.checkpoint.reader import CheckpointReader
from leyden.trainer.checkpoint.writer import CheckpointWriter
from leyden.trainer.format import staging

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp 2": lambda: DDPStrategy(start_method="fork"),
    "fsdp 2": lambda: FSDPStrategy(start_method="fork"),
}
COUNTS = ("kills", "runs", "differences", "stuck", "behind", "orphans")
"""What is printed of each kind of run. All but the first two are defects."""
LONGEST = 300
"""Seconds after which a run hangs."""
PATIENCE = 30
"""Seconds after which a process that still runs was left behind."""


class Net(TrainModule):
    """Dropout and batch norm, so that random numbers and buffers count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@dataclass(frozen=True)
class Point:
    """Where a process kills itself: at so many calls that change files, in the launching process (None) or a rank."""

    rank: int | None
    call: int


class Fate(Callback):
    """Counts the calls of this process that change files, and kills it at its point."""

    _CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree")

    def __init__(self, point: Point | None) -> None:
        self._point = point
        self._rank: int | None = None
        self.calls = 0
        fsync = os.fsync

        def flush(descriptor: int) -> None:
            self._met()
            fsync(descriptor)

        os.fsync = flush
        sys.addaudithook(self._audit)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._rank = trainer.global_rank

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and any(mark in arguments[1] for mark in "wxa+")
        if writes or event in self._CHANGES:
            self._met()

    def _met(self) -> None:
        self.calls += 1
        if self._point == Point(self._rank, self.calls):
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, strategy: str, asynchronous: bool, point: Point | None) -> int:
    """Trains from the newest checkpoint on; returns the number of rank 0's calls that change files."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    ranks = 1 if strategy == "single" else 2
    fate = Fate(point)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=STRATEGIES[strategy](),
        default_root_dir=folder,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        max_epochs=3,
        callbacks=[
            fate,
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_top_k=2, asynchronous=asynchronous),
        ],
    )
    loader = torch.utils.data.DataLoader(data, 8 // ranks, shuffle=True)
    trainer.fit(Net(), loader, torch.utils.data.DataLoader(data, 8), ckpt_path="auto")
    return fate.calls


def ending(folder: Path) -> dict[str, Any]:
    """Returns what a finished run has left: the weights, the optimizer, counters and the log."""
    last = newest(folder / "checkpoints", strict=True)
    if last is None:
        return {}
    reader = CheckpointReader(last)
    counters = {name: value for name, value in reader.progress().items() if not name.startswith("seconds")}
    # A run that was killed before its first save has a log of its own.
    log = max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    return {
        "name": last.name,
        "weights": reader.model(),
        "optimizers": reader.optimizers(),
        "counters": counters,
        "log": log.read_text(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# Processes. All descend from this one, which adopts those that lose their parent.


def adopt_orphans() -> None:
    if sys.platform != "linux":
        raise SystemExit("the kills are counted by /proc and prctl, which only Linux has")
    # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(36, 1)


def below(pid: int) -> list[int]:
    """Returns the processes that descend from one."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in below(child)]


def launch(work: Callable[[], None], log: Path) -> int:
    """Runs the work in a forked process, whose output goes to a file; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(log, "ab", 0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message="skipping a damaged")
            tempfile.tempdir = str(log.parent / "tmp")
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def reap(job: int) -> tuple[int, int]:
    """Waits for a job and all that it has started; returns its exit code, and how many had to be killed."""
    code, left, until = 0, 0, time.monotonic() + LONGEST
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, left
        if pid == job:
            code = os.waitstatus_to_exitcode(status)
            until = time.monotonic() + PATIENCE
        elif pid == 0:
            if time.monotonic() > until:
                for each in below(os.getpid()):
                    left += 1
                    os.kill(each, signal.SIGKILL)
                until = time.monotonic() + PATIENCE
            time.sleep(0.005)


class Trial:
    """Kills runs of one kind, in folders of their own.

    Attributes:
        counts: by the names of `COUNTS`.
        notes: what was wrong with a run.
    """

    def __init__(self, strategy: str, asynchronous: bool, root: Path, rng: random.Random) -> None:
        self._strategy, self._asynchronous, self._root, self._rng = strategy, asynchronous, root, rng
        self._ranks = (0,) if strategy == "single" else (0, 1)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.notes: list[str] = []
        folder = self._folder("straight")
        began = time.monotonic()
        code, _ = reap(launch(lambda: self._count(folder), folder / "output"))
        if code:
            raise SystemExit((folder / "output").read_text())
        self._seconds = time.monotonic() - began
        self._calls = int((folder / "calls").read_text())
        self._whole = ending(folder)

    def _folder(self, name: str) -> Path:
        folder = self._root / name
        (folder / "tmp").mkdir(parents=True)
        return folder

    def _count(self, folder: Path) -> None:
        calls = train(folder, self._strategy, self._asynchronous, None)
        (folder / "calls").write_text(str(calls or 300))

    def run(self) -> None:
        """One run that is killed up to three times, and then left alone."""
        folder = self._folder(f"{self.counts['runs']}")
        self.counts["runs"] += 1
        for number in range(self._rng.choice((1, 1, 2, 3))):
            if not self._killed(folder, resumes=number > 0):
                break
        code, orphans = reap(launch(lambda: self._train(folder, None), folder / "output"))
        self.counts["orphans"] += orphans
        problem = f"ended with {code}" if code else ""
        if code:
            self.counts["stuck"] += 1
        else:
            if not same(ending(folder), self._whole):
                self.counts["differences"] += 1
                problem = "differs"
            left = [path.name for path in (folder / "checkpoints").iterdir() if staging.is_staging(path.name)]
            left += [path.name for path in (folder / "tmp").iterdir()]
            if left:
                self.counts["behind"] += 1
                problem = f"{problem} left {left}"
        if problem:
            self.notes.append(f"{folder.name}: {problem}: {(folder / 'output').read_text()[-1500:]}")
        shutil.rmtree(folder)

    def _train(self, folder: Path, point: Point | None) -> None:
        train(folder, self._strategy, self._asynchronous, point)

    def _killed(self, folder: Path, resumes: bool) -> bool:
        """Runs until a kill; returns False if the run came to its end before it."""
        point = None
        if self._rng.random() < 0.6:
            # A run that resumes reads, clears and moves in its first calls.
            most = 12 if resumes and self._rng.random() < 0.7 else self._calls
            point = Point(self._rng.choice(self._ranks), self._rng.randrange(1, most + 1))
        job = launch(lambda: self._train(folder, point), folder / "output")
        if point is None:
            time.sleep(self._rng.random() * self._seconds)
            everyone = [job, *below(job)]
            for each in everyone if self._rng.random() < 0.5 else [self._rng.choice(everyone)]:
                try:
                    os.kill(each, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        code, orphans = reap(job)
        self.counts["orphans"] += orphans
        self.counts["kills"] += code != 0
        return code != 0


def write_in_place() -> None:
    """Breaks saving: a checkpoint is written where it stays, over what is there."""

    def begin(self: CheckpointWriter) -> Path:
        self._target.mkdir(parents=True, exist_ok=True)
        for path in self._target.iterdir():
            path.unlink()
        return self._target

    CheckpointWriter._begin = begin  # type: ignore[method-assign]
    CheckpointWriter._place = lambda self, anew: self._target  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=STRATEGIES)
    parser.add_argument("--in-place", action="store_true")
    args = parser.parse_args()
    adopt_orphans()
    torch.set_num_threads(1)
    # The first optimizer imports 800 modules of torch: once for all, before the forks.
    torch.optim.AdamW([torch.zeros(1)])
    # A rank's last collection would copy every page that it shares with this process: seconds for each run.
    gc.collect()
    gc.freeze()
    if args.in_place:
        write_in_place()
    kinds = [(name, beside) for name in STRATEGIES if args.only in (None, name) for beside in (False, True)]
    rng = random.Random(args.seed)
    bad = 0
    print("run".ljust(24), *(title.rjust(12) for title in COUNTS))
    for strategy, asynchronous in kinds:
        with tempfile.TemporaryDirectory() as root:
            trial = Trial(strategy, asynchronous, Path(root), rng)
            counts = trial.counts
            while counts["kills"] < args.kills / len(kinds):
                trial.run()
        name = f"{strategy}{', asynchronous' if asynchronous else ''}"
        print(name.ljust(24), *(str(counts[title]).rjust(12) for title in COUNTS), flush=True)
        print(*trial.notes[:5], sep="\n", end="\n" if trial.notes else "")
        bad += sum(counts[title] for title in COUNTS[2:])
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
