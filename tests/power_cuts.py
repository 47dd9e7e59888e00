"""Simulates power cuts while a run saves, for test_power_cuts.py and for the figures in benchmarks/RESULTS.md.

    python tests/power_cuts.py [SCENARIO …] [--random 40]

A program trains and saves under strace, which records every operation on its folder. A disk may lose operations that
were not flushed, and may write them in any order: a change to a folder's entries is durable once that folder is
fsynced, and bytes of a file once that file is. For a cut after each operation, this builds possible states of the disk
by leaving out some unflushed operations, and checks which checkpoint a run would resume from. Pillai et al. found bugs
in databases and version control systems this way: "All File Systems Are Not Created Equal", OSDI 2014.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import recorded_disk
import torch
from recorded_disk import ROOT, Committed, Data, Entries, Inode, Operation, Record, Sync, mark
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint import writer
from leyden.checkpoint.folder import newest
from leyden.checkpoint.writer import CheckpointWriter

STEPS = 3


class Net(TrainModule):
    """Has few weights, so that a checkpoint takes a few kilobytes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.1)


class SavesInPlace(Callback):
    """Overwrites one checkpoint with the next."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "only"

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.path)


class MarkingWriter(CheckpointWriter):
    """Marks in the record when a checkpoint is reported as saved."""

    def commit(self, **facts: Any) -> Path:
        path = super().commit(**facts)
        mark(facts["progress"]["global_step"])
        return path


SCENARIOS: dict[str, Callable[[Path], Callback]] = {
    "one kept": lambda run: ModelCheckpoint(run, every_n_train_steps=1, save_top_k=1),
    "kept and linked": lambda run: ModelCheckpoint(run, every_n_train_steps=1, save_top_k=1, save_last="link"),
    "asynchronous": lambda run: ModelCheckpoint(run, every_n_train_steps=1, save_top_k=1, asynchronous=True),
    "in place": SavesInPlace,
}


def train(scenario: str, folder: Path, **arguments: Any) -> dict[str, Tensor]:
    """Trains in the existing `folder` and saves every step below `folder/run`; returns the weights."""
    torch.manual_seed(0)
    module, samples, callback = Net(), torch.randn(4 * STEPS, 4), SCENARIOS[scenario](folder / "run")
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=isinstance(callback, ModelCheckpoint),
        max_epochs=1,
        callbacks=[callback],
    )
    trainer.fit(module, torch.utils.data.DataLoader(samples, 4, shuffle=True), **arguments)
    return dict(module.state_dict())


def record(scenario: str, folder: Path) -> Record:
    """Runs a scenario in the empty `folder` under strace."""
    return recorded_disk.record([sys.executable, __file__, "--train-in", str(folder), scenario], folder)


Form: TypeAlias = Literal["whole", "half", "zeros"]


@dataclass
class State:
    """Files, folders (None) and links (a string) by path."""

    paths: dict[str, bytes | str | None]

    def key(self) -> frozenset[tuple[str, bytes | str | None]]:
        return frozenset(self.paths.items())

    def write(self, folder: Path) -> None:
        """Writes the state into a new folder."""
        folder.mkdir()
        for path, content in sorted(self.paths.items()):
            place = folder / path
            if content is None:
                place.mkdir()
            elif isinstance(content, str):
                place.symlink_to(content)
            else:
                place.write_bytes(content)


def state_of(record: Record, chosen: dict[int, Form]) -> State:
    """Returns the state of the disk after the operations with the chosen numbers; data may be written in part."""
    entries: dict[Inode, dict[str, Inode]] = {}
    contents: dict[Inode, bytearray] = {}
    for number in sorted(chosen):
        operation, form = record.operations[number], chosen[number]
        if isinstance(operation, Entries):
            own = entries.setdefault(operation.folder, {})
            for name, inode in operation.names.items():
                own.pop(name, None)
                if inode is not None:
                    own[name] = inode
        elif isinstance(operation, Data):
            content = operation.content
            if form == "half":
                content = content[: len(content) // 2]
            elif form == "zeros":
                content = bytes(len(content))
            file = contents.setdefault(operation.file, bytearray())
            file.extend(bytes(max(0, operation.offset + len(content) - len(file))))
            file[operation.offset : operation.offset + len(content)] = content
    paths: dict[str, bytes | str | None] = {}

    def walk(folder: Inode, prefix: str) -> None:
        for name, inode in entries.get(folder, {}).items():
            kind = record.kinds[inode]
            path = prefix + name
            if kind == "folder":
                paths[path] = None
                walk(inode, f"{path}/")
            else:
                paths[path] = bytes(contents.get(inode, b"")) if kind == "file" else kind

    walk(ROOT, "")
    return State(paths)


@dataclass(frozen=True)
class Cut:
    """A power cut.

    Attributes:
        after: the number of operations before the cut.
        durable: those that were flushed before the cut.
        pending: those that were not; the disk may hold any of them.
        safe: the step of the last checkpoint that was reported as saved; 0 for none.
    """

    after: int
    durable: tuple[int, ...]
    pending: tuple[int, ...]
    safe: int


def cuts(record: Record, without: int | None = None) -> Iterator[Cut]:
    """Yields a cut after each operation; `without` is the number of an fsync to leave out."""
    durable: set[int] = set()
    pending: list[int] = []
    safe = 0
    for number, operation in enumerate(record.operations):
        if isinstance(operation, Sync):
            if number == without:
                continue
            flushed = [each for each in pending if _inode(record.operations[each]) == operation.inode]
            durable.update(flushed)
            pending = [each for each in pending if each not in durable]
        elif isinstance(operation, Committed):
            safe = operation.step
        else:
            pending.append(number)
        yield Cut(number + 1, tuple(sorted(durable)), tuple(pending), safe)


def _inode(operation: Operation) -> Inode | None:
    if isinstance(operation, Entries):
        return operation.folder
    return operation.file if isinstance(operation, Data) else None


def choices(record: Record, cut: Cut, at_random: int, generator: random.Random) -> Iterator[dict[int, Form]]:
    """Yields sets of operations that the disk may hold: of the pending ones none, all, one, all but one, and random."""
    base: dict[int, Form] = dict.fromkeys(cut.durable, "whole")
    full: dict[int, Form] = {**base, **dict.fromkeys(cut.pending, "whole")}
    yield base
    yield full
    forms: tuple[Form, ...] = ("half", "zeros")
    for number in cut.pending:
        yield {**base, number: "whole"}
        yield {each: form for each, form in full.items() if each != number}
        if isinstance(record.operations[number], Data):
            yield from ({**full, number: form} for form in forms)
    if len(cut.pending) <= 6:
        for count in range(2, len(cut.pending)):
            for some in itertools.combinations(cut.pending, count):
                yield {**base, **dict.fromkeys(some, "whole")}
        return
    for _ in range(at_random):
        share = generator.random()
        some = tuple(number for number in cut.pending if generator.random() < share)
        yield {**base, **{number: generator.choice(("whole", "whole", *forms)) for number in some}}


class Playback:
    """Checks states of the disk.

    Attributes:
        tried: the number of different states that were checked.
        problems: what is wrong with some of them.
    """

    def __init__(self, record: Record, folder: Path) -> None:
        self.record = record
        self.problems: list[str] = []
        self._folder = folder
        self._outcomes: dict[frozenset[Any], int | str] = {}
        self._saved = self._checkpoints()

    @property
    def tried(self) -> int:
        return len(self._outcomes)

    def run(self, at_random: int, *, without: int | None = None, step: int | None = None) -> None:
        """Checks the states after a cut at each operation.

        Args:
            at_random: the number of random states per cut, in addition to the systematic ones.
            without: leave out the fsync with this number, and stop at the first problem.
            step: check only cuts within the save of this step.
        """
        generator = random.Random(0)
        for cut in cuts(self.record, without):
            if (without is not None and cut.after <= without) or (step is not None and cut.safe != step - 1):
                continue
            for chosen in choices(self.record, cut, at_random, generator):
                problem = self._problem(cut, state_of(self.record, chosen))
                if problem is not None:
                    self.problems.append(f"after operation {cut.after}: {problem}")
                    if without is not None:
                        return
                    # One problem per cut is enough.
                    break

    def resume(self, scenario: str, count: int) -> list[dict[str, Tensor]]:
        """Resumes the program on `count` random states; returns the final weights of each run."""
        generator = random.Random(0)
        found = []
        for cut in generator.choices(list(cuts(self.record)), k=count):
            place = self._folder / "disk"
            state_of(self.record, generator.choice(list(choices(self.record, cut, 5, generator)))).write(place)
            found.append(train(scenario, place, ckpt_path="auto"))
            shutil.rmtree(place)
        return found

    def _problem(self, cut: Cut, state: State) -> str | None:
        key = state.key()
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(state)
        found = self._outcomes[key]
        if isinstance(found, str):
            return found
        if not cut.safe <= found <= cut.safe + 1:
            return f"a run resumes from step {found}, though step {cut.safe} was reported as saved"
        return None

    def _outcome(self, state: State) -> int | str:
        """Returns the step that a run would resume from (0 for none), or a problem."""
        place = self._folder / "disk"
        try:
            state.write(place)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = newest(place / "run")
            if caught:
                return str(caught[0].message)
            if found is None:
                return 0
            files = {path.name: path.read_bytes() for path in found.iterdir()}
        finally:
            shutil.rmtree(place, ignore_errors=True)
        same = [step for step, saved in self._saved.items() if saved == files]
        return same[0] if same else f"{found.name} equals none of the saved checkpoints"

    def _checkpoints(self) -> dict[int, dict[str, bytes]]:
        """Returns the files of each checkpoint, as they were when it was committed."""
        saved: dict[int, dict[str, bytes]] = {}
        for number, operation in enumerate(self.record.operations):
            if isinstance(operation, Committed):
                place = self._folder / "saved"
                state_of(self.record, dict.fromkeys(range(number), "whole")).write(place)
                found = newest(place / "run")
                assert found is not None
                saved[operation.step] = {path.name: path.read_bytes() for path in found.iterdir()}
                shutil.rmtree(place)
        return saved


def fsyncs(record: Record, step: int) -> list[int]:
    """Returns the numbers of the fsyncs from the commit of the step before to that of `step`."""
    ends = [number for number, each in enumerate(record.operations) if isinstance(each, Committed)]
    marks = {record.operations[number].step: number for number in ends}  # type: ignore[union-attr]
    begin = marks.get(step - 1, 0)
    return [n for n in range(begin, marks[step]) if isinstance(record.operations[n], Sync)]


def name_of(record: Record, number: int) -> str:
    """Returns the names that the fsynced inode has had."""
    inode = record.operations[number].inode  # type: ignore[union-attr]
    names = {
        re.sub(r"\.(tmp|old|del)-.*", r".\1", name)
        for each in record.operations
        if isinstance(each, Entries)
        for name, target in each.names.items()
        if target == inode
    }
    return " or ".join(sorted(names)) or "the root"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--random", type=int, default=40, help="random states per cut")
    parser.add_argument("--train-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train_in is not None:
        writer.CheckpointWriter = MarkingWriter  # type: ignore[misc]
        train(args.scenarios[0], args.train_in)
        return
    for scenario in args.scenarios:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "recorded").mkdir()
            recorded = record(scenario, Path(folder) / "recorded")
            playback = Playback(recorded, Path(folder))
            playback.run(args.random)
            print(f"{scenario}: {len(recorded.operations)} operations, {playback.tried} states, ", end="")
            print(f"{len(playback.problems)} wrong", flush=True)
            for problem in dict.fromkeys(playback.problems):
                print(f"  {problem}")
            for number in fsyncs(recorded, 2):
                without = Playback(recorded, Path(folder))
                without.run(args.random, without=number)
                problem = without.problems[0] if without.problems else f"{without.tried} states, NOT FOUND"
                print(f"  without the fsync of {name_of(recorded, number)}: {problem}", flush=True)


if __name__ == "__main__":
    main()
