"""Measures GPT-2 (124M, bf16-mixed) in Leyden and in a hand-written loop: speed, synchronizations, saves and memory.

    python benchmarks/gpt2.py         # a GPU
    python benchmarks/gpt2.py --width 64 --depth 2 --length 32 --vocabulary 64 --steps 3 --rounds 1     # a CPU

Both loops read the same random tokens from a DataLoader, and train the same module with AdamW: CharacterGPT of
examples/lm.py in GPT-2's size, its head tied to its embedding. They take turns in rounds, and the clock is read when
the device has finished its work. `tests/gpu/test_figures.py` runs these functions too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from character_gpt import Clock, Windows, character_gpt, now
from peak import Peak
from stalls import Measuring, Steps, contestants
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import CSVLogger
from leyden.cli.estimate.estimate import memory
from leyden.cli.estimate.layouts import Training
from leyden.cli.estimate.traced_step import TracedBatch
from leyden.core.text import size_of
from leyden.strategies.mesh.layout import Layout

PRECISION = "bf16-mixed"
SAVES = ["leyden, asynchronous", "torch.save"]
"""The saves whose stall is measured beside Leyden's synchronous one."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the model and of a measurement. The defaults are GPT-2 (124M).

    Attributes:
        device: "cpu" or "cuda".
        steps: measured steps of each round.
        warm_up: steps before them.
    """

    device: str = "cuda"
    vocabulary: int = 50257
    width: int = 768
    heads: int = 12
    depth: int = 12
    length: int = 1024
    batch_size: int = 8
    steps: int = 20
    warm_up: int = 5
    rounds: int = 3

    def model(self) -> Any:
        """Returns a new module on the CPU."""
        torch.manual_seed(0)
        alphabet = "".join(map(chr, range(self.vocabulary)))
        model = character_gpt()(alphabet, self.length, self.width, self.heads, self.depth, lr=1e-4)
        nn.init.normal_(model.characters.weight, std=0.02)
        model.head.weight = model.characters.weight
        return model

    def loader(self, steps: int) -> DataLoader[Tensor]:
        data = Windows(steps * self.batch_size, self.length, self.vocabulary)
        return DataLoader(data, self.batch_size, pin_memory=self.device == "cuda")

    def tokens_per_second(self, seconds: float) -> float:
        return self.steps * self.batch_size * self.length / seconds

    def fit(self, model: Any, steps: int, *callbacks: Callback, **arguments: Any) -> Trainer:
        """Trains a module for some steps, by default with nothing around the loop."""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            settings = {"barebones": True, "precision": PRECISION, "default_root_dir": folder, **arguments}
            trainer = Trainer(accelerator=self.device, devices=1, max_epochs=1, callbacks=list(callbacks), **settings)
            trainer.fit(model, self.loader(steps))
        return trainer


# tokens per second ----------------------------------------------------------------------------------------------------
def speeds(size: Size, backend: str | None) -> dict[str, list[float]]:
    """Returns the tokens per second of Leyden and of the loop by hand, in each round.

    Args:
        size: of the model and the measurement.
        backend: the backend of torch.compile; None for eager.
    """
    compiled, plain = size.model(), size.model().to(size.device)
    step = plain.loss
    if backend is not None:
        compiled, step = torch.compile(compiled, backend=backend), torch.compile(step, backend=backend)
    found: dict[str, list[float]] = {"Leyden": [], "by hand": []}
    for _ in range(size.rounds):
        clock = Clock(size.warm_up)
        size.fit(compiled, size.warm_up + size.steps, clock)
        found["Leyden"].append(size.tokens_per_second(clock.seconds))
        found["by hand"].append(size.tokens_per_second(run_by_hand(size, plain, step)))
    return found


def run_by_hand(size: Size, model: Any, step: Callable[[Tensor], Tensor]) -> float:
    """Trains by hand; returns the seconds of the measured steps."""
    optimizer = model.configure_optimizers()
    start = 0.0
    for index, ids in enumerate(size.loader(size.warm_up + size.steps)):
        if index == size.warm_up:
            start = now()
        optimizer.zero_grad()
        with torch.autocast(size.device, torch.bfloat16):
            loss = step(ids.to(size.device, non_blocking=True))
        loss.backward()
        optimizer.step()
    return now() - start


def median_ratio(found: dict[str, list[float]]) -> float:
    """Returns the median over the rounds of Leyden's speed by that of the loop by hand."""
    return statistics.median(own / plain for own, plain in zip(found["Leyden"], found["by hand"], strict=True))


# synchronizations -----------------------------------------------------------------------------------------------------
SYNC = "called a synchronizing"
"""Words of torch's warning."""


@contextlib.contextmanager
def recorded_syncs() -> Iterator[Counter[str]]:
    """Counts torch's warnings about synchronization, by the line outside of torch that caused it."""
    found: Counter[str] = Counter()

    def record(message: Warning | str, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if SYNC in str(message):
            found[_line()] += 1

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{SYNC}")
        warnings.showwarning = record
        yield found


def _line() -> str:
    """Returns the innermost line outside of torch, this file and the module `warnings`."""
    skipped = (str(Path(torch.__file__).parent), __file__, warnings.__file__, "<")
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


class WarnOnSync(Callback):
    """Logs the loss of each step; after the warm-up, makes torch warn about synchronization until the last batch."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warm_up:
            _set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, *rest: Any) -> None:
        module.log("loss", outputs["loss"] if isinstance(outputs, dict) else outputs, prog_bar=True)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def syncs(size: Size, model: Any) -> Counter[str]:
    """Counts the synchronizations of a fit after its warm-up, with the loss of each step on a bar and in a CSV file."""
    with recorded_syncs() as found, tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        size.fit(
            model,
            size.warm_up + size.steps,
            WarnOnSync(size.warm_up),
            barebones=False,
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_checkpointing=False,
        )
    return found


# saves and memory -----------------------------------------------------------------------------------------------------
def stalls(size: Size, folder: Path) -> dict[str, list[float]]:
    """Returns the seconds by which each kind of save delays training, in each round."""
    measuring = Measuring(
        lambda trainer, module: Steps(contestants(trainer, module, SAVES), folder, size.rounds, size.steps)
    )
    steps = (size.rounds + 1) * (len(SAVES) + 1) * 2 * size.steps
    size.fit(
        size.model(),
        steps,
        measuring,
        barebones=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    assert measuring.steps is not None
    return measuring.steps.stalls


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes of an eager fit.

    Attributes:
        measured: the peak: on a GPU as torch's allocator counts it, on a CPU of the tensors that the fit creates.
        estimated: `leyden estimate`, without activations.
        activations: what `leyden estimate` adds for a batch, or why it adds nothing.
    """

    measured: int
    estimated: int
    activations: int | str


def peaks(size: Size) -> Peaks:
    """Compares the peak memory of an eager fit with `leyden estimate`."""
    batch = TracedBatch(next(iter(size.loader(1))), "")
    estimated = memory(size.model(), "single_device", 1, PRECISION, "adamw").total
    [row] = Training(size.model(), None, batch).on(Layout(1, 1, 1), PRECISION)
    activations = row.step.activations if row.step is not None else "; ".join(row.notes)
    gc.collect()
    if size.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        size.fit(size.model(), 3)
        return Peaks(torch.cuda.max_memory_allocated() - before, estimated, activations)
    with Peak() as peak:
        size.fit(size.model(), 3)
    return Peaks(peak.most, estimated, activations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Size)[1:]:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    options = vars(parser.parse_args())
    backend = options.pop("backend")
    size = Size(**options)
    for name, chosen in (("eager", None), (backend, backend)):
        found = speeds(size, chosen)
        for contestant, values in found.items():
            print(f"{name:<10} {contestant:<22} {statistics.median(values):12,.0f} tokens/s")
        print(f"{name:<10} {'ratio':<22} {median_ratio(found):12.3f}", flush=True)
    lines = syncs(size, size.model())
    print(f"{lines.total() if size.device == 'cuda' else 'no'} synchronizations in {size.steps} steps")
    for line, count in lines.most_common():
        print(f"{'':<10} {count} × {line}")
    with tempfile.TemporaryDirectory() as folder:
        for name, seconds in stalls(size, Path(folder)).items():
            print(f"{'stall':<10} {name:<22} {1000 * statistics.median(seconds):12,.0f} ms", flush=True)
    peak = peaks(size)
    for field in fields(peak):
        value = getattr(peak, field.name)
        print(f"{'memory':<10} {field.name:<22} {value if isinstance(value, str) else size_of(value):>12}")


if __name__ == "__main__":
    main()
