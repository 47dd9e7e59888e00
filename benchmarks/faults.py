"""Kills runs with SIGKILL at random, resumes them, and compares their final states with those of undisturbed runs.

    python benchmarks/faults.py --kills 1000 [--seed 0] [--only "ddp 2" "fsdp 2"] [--in-place] [--folder /tmp]
    python benchmarks/faults.py --kills 120 --model pretraining      a language model on a shuffled and packed stream
    python benchmarks/faults.py --kills 120 --model adapters         LoRA, with checkpoints of the adapters alone

Covers one process, DDP 2 and FSDP 2 over gloo, each with synchronous and with asynchronous saves. A run is a chain of
starts: each start resumes the state that the previous one left, and is killed in turn, until one completes. A kill
happens at a random time within the remaining work, at a call that changes files, or at one of the first such calls of a
start that resumes. It hits the whole job, the process that launched it, or one rank. Every start is forked from this
process, which has already imported everything.

Counted as defects: runs whose weights, optimizers, random states, counters or CSV log differ from those of a run
without a kill; starts that found a damaged checkpoint, or raised an error although no process was killed; temporary
files that the last start left behind; processes that kept running after a kill. `--in-place` breaks saving on purpose:
it writes checkpoints in place, without a temporary folder and a rename, which this program must detect.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import mmap
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leyden import Trainer, TrainModule, seed_everything
from leyden.callbacks import CSVLogger, ModelCheckpoint
from leyden.checkpoint.folder import all_checkpoints, newest
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.manifest import read_manifest
from leyden.checkpoint.owners import rank_file, saved_data_ranks
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.launch import functions
from leyden.launch.processes import started
from leyden.strategies import DDPStrategy, FSDPStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp 2": lambda: DDPStrategy(start_method="fork"),
    "fsdp 2": lambda: FSDPStrategy(start_method="fork"),
}
DEFECTS = ("differences", "stuck", "behind", "orphans")
COUNTS = ("kills", "starts", "runs", *DEFECTS)
"""The columns that are printed for each kind of run."""
MOST_KILLS = 12
"""Maximum number of kills per run; the next start is left alone."""
DAMAGED = re.compile("CheckpointError|skipping a damaged")
"""Matches the output of a start that found a damaged checkpoint."""
LONGEST = 300
"""Seconds after which a run counts as hung."""
PATIENCE = 30
"""Seconds after the end of a job until a process that still runs counts as an orphan."""
SHORT = 0.5
"""Seconds that ranks have to exit on their own after a peer was killed, in 19 of 20 starts. The others use the default
of 10, since ranks first ask each other for the reason, which takes 7 s."""


class Net(TrainModule):
    """A module with dropout and batch norm, so that random states and buffers matter."""

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
    """The point at which a process kills itself: its n-th call that changes files. `Board` numbers the processes."""

    process: int
    call: int


class Board:
    """Memory shared by a job's processes: how many calls of each changed files, and whether one killed itself.

    Processes are numbered by rank; the launching process, if it is not a rank itself, comes last.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._words = memoryview(mmap.mmap(-1, 8 * (ranks + 2))).cast("Q")

    def clear(self) -> None:
        for number in range(len(self._words)):
            self._words[number] = 0

    @property
    def killed(self) -> bool:
        return bool(self._words[0])

    @property
    def calls(self) -> list[int]:
        return list(self._words[1:])

    def note_kill(self) -> None:
        self._words[0] = 1

    def count(self) -> Point:
        """Counts a call of this process, and returns the call's point."""
        process = 0 if self.ranks == 1 else int(os.environ.get("RANK", self.ranks))
        # Two threads of an asynchronous save may count two calls as one. Every point of a kill remains possible.
        self._words[1 + process] += 1
        return Point(process, self._words[1 + process])


class Fate:
    """Counts calls that change files, in this process and its forks, and kills the process that reaches the point.

    Args:
        board: the board that counts the calls.
        point: the point at which a process is killed; None to kill none.
    """

    _CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "shutil.rmtree")

    def __init__(self, board: Board, point: Point | None) -> None:
        self._board, self._point = board, point
        fsync = os.fsync

        def flush(descriptor: int) -> None:
            self._met()
            fsync(descriptor)

        os.fsync = flush
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and any(mark in arguments[1] for mark in "wxa+")
        if writes or event in self._CHANGES:
            self._met()

    def _met(self) -> None:
        if self._board.count() == self._point:
            self._board.note_kill()
            os.kill(os.getpid(), signal.SIGKILL)


def net() -> tuple[TrainModule, Any, Any]:
    """Returns a small net, its data, and the data to validate on."""
    data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    return Net(), data, data


def language_model() -> Any:
    """Returns a small language model with dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, attention_dropout=0.2, **sizes))


def documents() -> list[dict[str, list[int]]]:
    return [{"input_ids": torch.randint(1, 32, (length,)).tolist()} for length in torch.randint(2, 12, (160,)).tolist()]


def texts_of(shards: list[Any]) -> Iterator[Any]:
    for shard in shards:
        yield from shard


def pretraining() -> tuple[TrainModule, Any, Any]:
    """Returns a small language model, a shuffled and packed stream of `datasets`, and rows to validate on."""
    from datasets import IterableDataset

    from leyden.hf import HFModule, PackedDataset, PackedStream, ShuffledStream

    module, texts = HFModule(language_model(), lr=0.02, scheduler=None), documents()
    shards = [texts[start : start + 20] for start in range(0, len(texts), 20)]
    stream = IterableDataset.from_generator(texts_of, gen_kwargs={"shards": shards})
    shuffled = ShuffledStream(stream.shuffle(seed=0, buffer_size=1), buffer_size=24)
    return module, PackedStream(shuffled, length=16, buffer_size=32), PackedDataset(texts[:80], 16)


def adapters() -> tuple[TrainModule, Any, Any]:
    """Returns a small language model under LoRA, and a packed mixture of documents, also to validate on."""
    from leyden.hf import HFModule, MixedDataset, PackedDataset

    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2}
    module, texts = HFModule(language_model(), lr=0.02, peft_config=config), documents()
    sources = {"a": PackedDataset(texts[:80], 16), "b": PackedDataset(texts[80:], 16)}
    mixed = MixedDataset(sources, {"a": 1, "b": 2}, block_size=6, length=48)
    return module, mixed, mixed


MODELS: dict[str, Callable[[], tuple[TrainModule, Any, Any]]] = {
    "net": net,
    "pretraining": pretraining,
    "adapters": adapters,
}


def train(
    folder: Path, model: str, strategy: str, asynchronous: bool, board: Board, point: Point | None, patience: float
) -> None:
    """Trains from the newest checkpoint on."""
    functions.PATIENCE = patience
    Fate(board, point)
    # Seeds Python's random numbers too: a checkpoint contains their state, which would differ in each fork.
    seed_everything(0)
    module, data, validation = MODELS[model]()
    options: dict[str, Any] = {"asynchronous": asynchronous, "trainable_only": model == "adapters"}
    trainer = Trainer(
        accelerator="cpu",
        devices=board.ranks,
        strategy=STRATEGIES[strategy](),
        default_root_dir=folder,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        max_epochs=3,
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_top_k=2, **options)],
    )
    loader = torch.utils.data.DataLoader(data, 8 // board.ranks, shuffle=model == "net")
    trainer.fit(module, loader, torch.utils.data.DataLoader(validation, 8), ckpt_path="auto")


def ending(folder: Path) -> dict[str, Any]:
    """Returns the final state of a finished run: weights, optimizer, random states, counters and the log."""
    last = newest(folder / "checkpoints", strict=True)
    if last is None:
        return {}
    reader = CheckpointReader(last)
    counters = {name: value for name, value in reader.progress().items() if not name.startswith("seconds")}
    # A run that was killed before its first save has a separate log.
    log = max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime_ns)
    return {
        "name": last.name,
        "weights": reader.model(),
        "optimizers": reader.optimizers(),
        "ranks": [reader.state(rank_file(rank)) for rank in range(len(saved_data_ranks(reader)))],
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


# Processes. All are descendants of this one, which adopts those whose parent dies.


def adopt_orphans() -> None:
    if sys.platform != "linux":
        raise SystemExit("this benchmark needs /proc and prctl, which only Linux has")
    # PR_SET_CHILD_SUBREAPER
    ctypes.CDLL(None).prctl(36, 1)


def below(pid: int) -> list[int]:
    """Returns all descendants of a process."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in below(child)]


def launch(work: Callable[[], None], log: Path) -> int:
    """Runs the work in a forked process, with its output in a file; returns its process id."""
    # Opened before the fork, since the process may be killed immediately.
    with open(log, "wb", 0) as file:
        child = os.fork()
        if child == 0:
            code = 1
            try:
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
    """Waits for a job and all its descendants; returns its exit code, and the number of processes killed as orphans."""
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
    """Kills runs of one kind, each in a separate folder.

    Attributes:
        counts: the counts, by the names in `COUNTS`.
        notes: descriptions of the defects that were found.
    """

    def __init__(self, model: str, strategy: str, asynchronous: bool, root: Path, rng: random.Random) -> None:
        self._model = model
        self._strategy, self._asynchronous, self._root, self._rng = strategy, asynchronous, root, rng
        self._board = Board(1 if strategy == "single" else 2)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.notes: list[str] = []
        folder = self._folder("straight")
        began = time.monotonic()
        code, _ = reap(self._start(folder, None))
        if code:
            raise SystemExit((folder / "output").read_text())
        self._seconds = time.monotonic() - began
        self._calls = self._board.calls
        self._steps = self._step(folder)
        self._whole = ending(folder)

    def _folder(self, name: str) -> Path:
        folder = self._root / name
        (folder / "tmp").mkdir(parents=True)
        return folder

    def run(self) -> None:
        """Runs a chain of starts, each resuming from the previous one and killed in turn, until one completes."""
        folder = self._folder(str(self.counts["runs"]))
        self.counts["runs"] += 1
        for number in range(MOST_KILLS):
            code = self._killed(folder, resumes=number > 0)
            if code is not None:
                break
        else:
            code = self._wait(self._start(folder, None))
        output = (folder / "output").read_text()
        problem = ""
        if code or DAMAGED.search(output):
            self.counts["stuck"] += 1
            problem = f"ended with {code}"
        elif not same(ending(folder), self._whole):
            self.counts["differences"] += 1
            problem = "differs"
        left = [path.name for path in (folder / "checkpoints").glob("*") if staging.is_staging(path.name)]
        left += [path.name for path in (folder / "tmp").iterdir()]
        # A stuck start may leave files that the next start would remove.
        if left and not code:
            self.counts["behind"] += 1
            problem = f"{problem} left {left}"
        if problem:
            self.notes.append(f"{folder.name}: {problem}: {output[-1500:]}")
        shutil.rmtree(folder)

    def _start(self, folder: Path, point: Point | None) -> int:
        self.counts["starts"] += 1
        self._board.clear()
        patience = functions.PATIENCE if self._rng.random() < 0.05 else SHORT
        work = partial(train, folder, self._model, self._strategy, self._asynchronous, self._board, point, patience)
        return launch(work, folder / "output")

    def _wait(self, job: int) -> int:
        code, orphans = reap(job)
        self.counts["orphans"] += orphans
        if orphans:
            self.notes.append(f"{orphans} processes ran on for {PATIENCE} s, the job having ended with {code}")
        return code

    def _killed(self, folder: Path, resumes: bool) -> int | None:
        """Starts a run and kills it; returns its exit code if it ended before the kill or found damage, else None."""
        left = 1 - self._step(folder) / self._steps
        point = self._point(left, resumes) if self._rng.random() < 0.6 else None
        job = self._start(folder, point)
        was_killed = False
        if point is None:
            # The remaining work plus the start-up time, which is part of the undisturbed run's seconds too.
            time.sleep(self._rng.random() * self._seconds * (0.1 + 0.9 * left))
            everyone = [pid for pid in (job, *below(job)) if started(pid) != "gone"]
            chosen = everyone if self._rng.random() < 0.5 else self._rng.sample(everyone, min(1, len(everyone)))
            for pid in chosen:
                was_killed = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        code = self._wait(job)
        was_killed = code != 0 and (was_killed or self._board.killed)
        self.counts["kills"] += was_killed
        return None if was_killed and not DAMAGED.search((folder / "output").read_text()) else code

    def _point(self, left: float, resumes: bool) -> Point:
        """Chooses a call in the remaining work; often one of the first, with which a start cleans up."""
        process = self._rng.choice([number for number, calls in enumerate(self._calls) if calls])
        most = max(12, round(self._calls[process] * left))
        return Point(process, self._rng.randint(1, 12 if resumes and self._rng.random() < 0.4 else most))

    def _step(self, folder: Path) -> int:
        """Returns the step of the newest checkpoint; 0 if there is none."""
        kept = all_checkpoints(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
        return int(read_manifest(kept[-1]).progress["global_step"]) if kept else 0


def write_in_place() -> None:
    """Breaks saving on purpose: checkpoints are written in place, over existing files."""

    def begin(self: CheckpointWriter) -> Path:
        self._target.mkdir(parents=True, exist_ok=True)
        for path in self._target.iterdir():
            path.unlink()
        return self._target

    CheckpointWriter._create_folder = begin  # type: ignore[method-assign]
    CheckpointWriter._move_into_place = lambda self, same_name: self._target  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=STRATEGIES, nargs="+", default=list(STRATEGIES))
    parser.add_argument("--model", choices=MODELS, default="net")
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to train; by default in memory, as kills need no disk")
    args = parser.parse_args()
    adopt_orphans()
    torch.set_num_threads(1)
    # The first optimizer imports 800 modules of torch. This does it once, before the forks.
    torch.optim.AdamW([torch.zeros(1)])
    if args.model != "net":
        # So does each library.
        MODELS[args.model]()
    # A rank's last garbage collection would copy every page shared with this process, which takes seconds per run.
    gc.collect()
    gc.freeze()
    if args.in_place:
        write_in_place()
    memory = Path("/dev/shm")
    place = args.folder or (memory if memory.is_dir() else None)
    kinds = [(name, asynchronous) for name in args.only for asynchronous in (False, True)]
    rng = random.Random(args.seed)
    bad = 0
    print("run".ljust(24), *(title.rjust(12) for title in (*COUNTS, "s per kill")))
    for strategy, asynchronous in kinds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=place) as root:
            trial = Trial(args.model, strategy, asynchronous, Path(root), rng)
            counts = trial.counts
            while counts["kills"] < args.kills / len(kinds):
                trial.run()
        seconds = (time.monotonic() - began) / counts["kills"]
        name = f"{strategy}{', asynchronous' if asynchronous else ''}"
        cells = [*(str(counts[title]) for title in COUNTS), f"{seconds:.2f}"]
        print(name.ljust(24), *(cell.rjust(12) for cell in cells), flush=True)
        print(*trial.notes[:5], sep="\n", end="\n" if trial.notes else "")
        bad += sum(counts[title] for title in DEFECTS)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
