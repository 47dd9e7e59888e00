"""Measures a trainer's cost per step: a tiny MLP in a raw loop, in Leyden, and in its installed rivals.

    python benchmarks/overhead.py --repeats 7 --steps 2000
    python benchmarks/overhead.py --only leyden leyden-full

Linear 32-32-2, batch 8, SGD, CPU, one thread: so little work that any overhead shows. Every contestant reads the same
prepared batches through a DataLoader. The clock is read when the data set returns batch `warm-up` and batch
`warm-up + steps`, so set-up and the first steps do not count. The repeats of all contestants are interleaved. The table
shows each contestant's median, and the median of its differences from the raw loop of the same round.

"leyden-own" is a hand-written loop over Leyden's Accelerator, as "accelerate" is over Hugging Face's. "full" turns
everything on: a progress bar (on a terminal that discards it), a CSV logger, checkpoints, and the loss logged to
bar and logger at each step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 200
# Some contestants prefetch a batch or two; all must pass the last mark inside the epoch.
TAIL = 20


class Batches(Dataset[Any]):
    """Prepared batches; records when the first and the last batch of the measurement are read."""

    def __init__(self, steps: int) -> None:
        self.inputs, self.targets = torch.randn(8, 32), torch.randint(2, (8,))
        self.steps = steps
        self.served = 0
        self.start = self.end = 0.0

    def __len__(self) -> int:
        return WARM_UP + self.steps + TAIL

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        if self.served == WARM_UP:
            self.start = time.perf_counter()
        elif self.served == WARM_UP + self.steps:
            self.end = time.perf_counter()
        return self.inputs, self.targets

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self, batch_size=1, collate_fn=_first)

    @property
    def microseconds(self) -> float:
        """The time per step."""
        return (self.end - self.start) / self.steps * 1e6


def _first(items: list[Any]) -> Any:
    return items[0]


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def raw(batches: Batches, folder: str) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for inputs, targets in batches.loader():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def tiny(full: bool = False) -> Any:
    """Returns the class of Leyden's module; `full` logs the loss to bar and logger at each step."""
    from leyden import TrainModule

    class Tiny(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if full:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Tiny


def everything(folder: str) -> dict[str, Any]:
    """Returns the Trainer's arguments of "leyden-full"."""
    from leyden.callbacks import CSVLogger, ModelCheckpoint

    return {"logger": CSVLogger(folder), "callbacks": [ModelCheckpoint(folder)]}


def leyden(batches: Batches, folder: str, full: bool = False) -> None:
    from leyden import Trainer

    options = everything(folder) if full else {"barebones": True}
    Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **options).fit(tiny(full)(), batches.loader())


def leyden_own(batches: Batches, folder: str) -> None:
    from leyden import Accelerator

    own_loop(Accelerator(cpu=True), batches)


def own_loop(accelerator: Any, batches: Batches) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, batches.loader())
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(net(inputs), targets))
        optimizer.step()


def lightning(batches: Batches, folder: str, full: bool = False) -> None:
    name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    pl = importlib.import_module(name)
    loggers, callbacks = importlib.import_module(f"{name}.loggers"), importlib.import_module(f"{name}.callbacks")

    class Tiny(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if full:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    everything = {"logger": loggers.CSVLogger(folder), "callbacks": [callbacks.ModelCheckpoint(folder)]}
    options: dict[str, Any] = everything if full else {"barebones": True}
    pl.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **options).fit(Tiny(), batches.loader())


def accelerate(batches: Batches, folder: str) -> None:
    from accelerate import Accelerator

    own_loop(Accelerator(cpu=True), batches)


def ignite(batches: Batches, folder: str) -> None:
    from ignite.engine import Engine

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(engine: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    Engine(step).run(batches.loader(), max_epochs=1)


def transformers(batches: Batches, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.net(inputs), labels)}

    def collate(items: list[Any]) -> dict[str, Tensor]:
        return {"inputs": items[0][0], "labels": items[0][1]}

    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        num_train_epochs=1,
        use_cpu=True,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=Tiny(), args=arguments, train_dataset=batches, data_collator=collate).train()


def leyden_full(batches: Batches, folder: str) -> None:
    leyden(batches, folder, full=True)


def lightning_full(batches: Batches, folder: str) -> None:
    lightning(batches, folder, full=True)


# name → packages, one of which must be installed, and the run
CONTESTANTS: dict[str, tuple[tuple[str, ...], Callable[[Batches, str], None]]] = {
    "raw": ((), raw),
    "leyden": ((), leyden),
    "leyden-full": ((), leyden_full),
    "leyden-own": ((), leyden_own),
    "lightning": (("lightning", "pytorch_lightning"), lightning),
    "lightning-full": (("lightning", "pytorch_lightning"), lightning_full),
    "accelerate": (("accelerate",), accelerate),
    "ignite": (("ignite",), ignite),
    "transformers": (("transformers",), transformers),
}


class Nowhere(io.StringIO):
    """A terminal that shows nothing, so that progress bars draw as they would for a user."""

    def write(self, text: str) -> int:
        return len(text)

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hides the contestants' output and warnings."""
    terminal = Nowhere()
    with warnings.catch_warnings(), contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        warnings.simplefilter("ignore")
        yield


def measure(name: str, steps: int) -> float:
    """Returns the microseconds per step of one run."""
    batches = Batches(steps)
    with tempfile.TemporaryDirectory() as folder, hidden():
        CONTESTANTS[name][1](batches, folder)
    if not batches.end:
        raise RuntimeError(f"{name} served {batches.served} batches and never reached the last mark.")
    return batches.microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="run only these and the raw loop")
    args = parser.parse_args()

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    sys.path.insert(0, str(ROOT))
    chosen = [name for name in CONTESTANTS if args.only is None or name in args.only or name == "raw"]
    packages = {name: CONTESTANTS[name][0] for name in chosen}
    found = [name for name in chosen if not packages[name] or any(map(importlib.util.find_spec, packages[name]))]

    for name in found:
        measure(name, steps=10)  # imports
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.repeats):
        for name in found:
            times[name].append(measure(name, args.steps))

    print(f"{'':<16}{'µs per step':>12}{'beyond raw':>12}{'fastest':>10}{'slowest':>10}")
    for name, taken in times.items():
        beyond = statistics.median(own - base for own, base in zip(taken, times["raw"], strict=True))
        difference = "" if name == "raw" else f"{beyond:+.1f}"
        print(f"{name:<16}{statistics.median(taken):>12.1f}{difference:>12}{min(taken):>10.1f}{max(taken):>10.1f}")
    missing = [name for name in chosen if name not in found]
    if missing:
        print(f"not installed: {', '.join(missing)}")


if __name__ == "__main__":
    main()
