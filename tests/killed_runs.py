"""A program that trains, is killed at chosen points, and resumes; test_resume.py runs it and compares results.

    python killed_runs.py SCENARIO FOLDER POINT…

A point is "none", or SIGNAL@EVENT:COUNT as in KILL@training_step:5. "+" joins several signals to one run, ">" joins
consecutive runs. Each run of a point resumes from the last checkpoint of the one before, in a process that is forked
before torch starts a thread; the last run gets no signal. A run that is not killed writes its results to
FOLDER/POINT/NUMBER.pt.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from samples import labeled
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from leyden import Trainer, TrainModule
from leyden.callbacks.base import Callback
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.gradient_accumulation import GradientAccumulation
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.checkpoint import writer
from leyden.checkpoint.writer import CheckpointWriter
from leyden.strategies.precision.amp import MixedPrecision

SIZE, BATCH = 38, 4


class SignalPlan:
    """Sends this process signals at chosen occurrences of events; ignores events in loader workers."""

    def __init__(self, points: str) -> None:
        self.pid = os.getpid()
        self.counts: Counter[str] = Counter()
        self.signals: dict[tuple[str, int], int] = {}
        for point in points.split("+") if points != "none" else ():
            name, _, place = point.partition("@")
            event, _, count = place.partition(":")
            self.signals[event, int(count)] = getattr(signal, f"SIG{name}")

    def reach(self, event: str) -> None:
        if os.getpid() != self.pid:
            return
        self.counts[event] += 1
        number = self.signals.get((event, self.counts[event]))
        if number is not None:
            os.kill(self.pid, number)


plan = SignalPlan("none")


class Samples(Dataset[dict[str, Tensor]]):
    """Labeled samples with random noise; noise in loader workers is reproducible only with sample_rng."""

    def __init__(self, size: int = SIZE, noisy: bool = True) -> None:
        self.x, self.y = labeled(size).tensors
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        plan.reach("getitem")
        x = self.x[index]
        if self.noisy:
            x = x + 0.1 * (torch.rand(6) + random.random() + float(np.random.rand()))
        return {"x": x, "y": self.y[index], "id": torch.tensor(index)}


class BlockSampler(Sampler[int]):
    """A user's sampler: blocks of four, in an order that depends on the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SIZE // 4 + 1, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (i for block in order for i in range(4 * block, min(4 * block + 4, SIZE)))


class StatefulLoader:
    """A loader that saves its position; it draws the order of its samples from a private generator."""

    def __init__(self) -> None:
        self.data = Samples()
        self.rng = random.Random(3)
        self.order: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.order, self.at = self.rng.sample(range(SIZE), SIZE), 0
        while self.at < SIZE:
            ids = self.order[self.at : self.at + BATCH]
            self.at += BATCH
            yield torch.utils.data.default_collate([self.data[i] for i in ids])
        self.order = []

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.getstate(), "order": list(self.order), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["rng"]
        self.rng.setstate((version, tuple(words), gauss))
        self.order, self.at = list(state["order"]), state["at"]


class Stream(IterableDataset[Any]):
    """An unsized iterable that saves its position; each pass is a little longer than the one before."""

    def __init__(self) -> None:
        self.data = Samples()
        self.at, self.passes = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SIZE - 4 + 4 * self.passes:
            self.at += 1
            yield self.data[(7 * self.at + self.passes) % SIZE]
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Net(TrainModule):
    """Has dropout and batch norm, logs every kind of metric, and saves the order of its samples as user state."""

    def __init__(self, scheduler: str = "step", lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.confusion = torchmetrics.MeanMetric()
        self.val_accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.val_largest = torchmetrics.MaxMetric()
        self.both = torchmetrics.MetricCollection(
            [torchmetrics.Precision("multiclass", num_classes=3), torchmetrics.Recall("multiclass", num_classes=3)]
        )
        self.order: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        plan.reach("training_step")
        self.order.append([self.current_epoch, batch_idx, *batch["id"].tolist()])
        scores = self.net(batch["x"])
        loss = cross_entropy(scores, batch["y"])
        self.accuracy(scores, batch["y"])
        self.confusion.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.both.update(scores, batch["y"])
        self.log_dict(self.both, on_step=False, on_epoch=True)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx="max")
        self.log("median", loss, on_epoch=True, on_step=False, reduce_fx=torch.median)
        return loss

    def on_train_start(self) -> None:
        self.log("starts", 1.0, reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        plan.reach("train_epoch_end")
        self.log("mean_of_losses", self.confusion.compute())
        self.confusion.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plan.reach("validation_step")
        scores = self.net(batch["x"])
        self.val_accuracy.update(scores, batch["y"])
        self.log("val_loss", cross_entropy(scores, batch["y"]))
        self.log("val_accuracy", self.val_accuracy)
        self.val_largest.update(scores)

    def on_validation_epoch_end(self) -> None:
        self.log("val_largest", self.val_largest.compute())
        self.val_largest.reset()

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), self.hparams["lr"])
        kind = self.hparams["scheduler"]
        if kind == "plateau":
            scheduler: Any = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        elif kind == "epoch":
            scheduler = StepLR(optimizer, 1, 0.7)
        else:
            scheduler = ExponentialLR(optimizer, 0.95)
        interval = "step" if kind == "plateau" else kind
        # 2 does not divide the number of steps in an epoch, so the count continues across epochs.
        frequency = 1 if kind == "epoch" else 2
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "interval": interval,
                "frequency": frequency,
                "monitor": "val_loss",
                "strict": False,
            },
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        plan.reach("save")
        checkpoint["order"] = self.order

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.order = checkpoint["order"]


class ManualNet(Net):
    """Manual optimization with two optimizers, one of which steps every other batch."""

    def __init__(self) -> None:
        super().__init__("step")
        self.automatic_optimization = False
        self.other = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        decay = self.lr_schedulers()
        loss = super().training_step(batch, batch_idx)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        decay.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(cross_entropy(self.other(batch["x"] + torch.randn(6)), batch["y"]))
            second.step()

    def configure_optimizers(self) -> Any:
        first = Adam(self.net.parameters(), 0.01)
        return [first, SGD(self.other.parameters(), 0.1, momentum=0.9)], [ExponentialLR(first, 0.97)]


class CompiledNet(Net):
    """Reports, and records the order of samples, before the step, which is one graph of torch.compile."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        plan.reach("training_step")
        self.order.append([self.current_epoch, batch_idx, *batch["id"].tolist()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_epoch=True, on_step=False, reduce_fx="max")
        return loss

    def on_train_epoch_end(self) -> None:
        plan.reach("train_epoch_end")


class CombinedNet(Net):
    """Trains on batches from two loaders, of which the shorter one starts over."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = {key: torch.cat([batch["long"][key], batch["short"][key]]) for key in ("x", "y", "id")}
        return super().training_step(batch, batch_idx)


class HookReporter(Callback):
    """Reports hooks to the signal plan, before or right after the callbacks that save checkpoints."""

    def __init__(self, order: int) -> None:
        self.order = order  # type: ignore[misc]
        self.when = "after" if order else "before"

    @property
    def state_key(self) -> str:
        return f"HookReporter {self.when}"

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_train_epoch_start")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        plan.reach(f"{self.when}_train_batch_start")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_after_backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        plan.reach(f"{self.when}_optimizer_step")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        plan.reach(f"{self.when}_train_batch_end")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_validation_start")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_validation_end")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_train_epoch_end")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_train_end")

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        plan.reach(f"{self.when}_sanity_check_start")


class OutsideReporter(HookReporter):
    """Reports no hook that would run inside a compiled step."""

    on_after_backward = Callback.on_after_backward  # type: ignore[assignment]
    on_before_optimizer_step = Callback.on_before_optimizer_step  # type: ignore[assignment]


def save_every(steps: int) -> ModelCheckpoint:
    return ModelCheckpoint(every_n_train_steps=steps, save_top_k=2)


class ReportingWriter(CheckpointWriter):
    """Reports the progress of the thread that writes a checkpoint to the signal plan."""

    def write(self) -> None:
        plan.reach("before_write")
        super().write()
        plan.reach("after_write")

    def commit(self, **facts: Any) -> Path:
        plan.reach("before_commit")
        path = super().commit(**facts)
        plan.reach("after_commit")
        return path


def asynchronous(**arguments: Any) -> Callable[[Path], tuple[Trainer, TrainModule, Any]]:
    """Returns a function that makes a run whose checkpoints are written by a thread."""
    writer.CheckpointWriter = ReportingWriter  # type: ignore[misc]
    checkpoint = ModelCheckpoint(every_n_train_steps=1, save_top_k=2, asynchronous=True)
    return run_of(Net(), DataLoader(Samples(), BATCH, shuffle=True), callbacks=[checkpoint], **arguments)


def run_of(module: TrainModule, train: Any, **arguments: Any) -> Callable[[Path], tuple[Trainer, TrainModule, Any]]:
    """Returns a function from a folder to a Trainer, the module and its training data."""

    def make(folder: Path) -> tuple[Trainer, TrainModule, Any]:
        settings: dict[str, Any] = {
            "max_epochs": 3,
            "accumulate_grad_batches": 4,
            "gradient_clip_val": 0.5,
            "log_every_n_steps": 1,
            "digest_every_n_steps": 1,
            **arguments,
        }
        reporter = OutsideReporter if "compile" in settings else HookReporter
        callbacks = [reporter(0), *settings.pop("callbacks", [save_every(1)]), reporter(300)]
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            logger=CSVLogger(folder),
            enable_progress_bar=False,
            callbacks=callbacks,
            **settings,
        )
        return trainer, module, train

    return make


SCENARIOS: dict[str, Callable[[], Callable[[Path], tuple[Trainer, TrainModule, Any]]]] = {
    "shuffle": lambda: run_of(Net(), DataLoader(Samples(), BATCH, shuffle=True)),
    "asynchronous": lambda: asynchronous(),
    "asynchronous, every batch": lambda: asynchronous(accumulate_grad_batches=1),
    "infrequent saves": lambda: run_of(
        Net("epoch"), DataLoader(Samples(), BATCH, shuffle=True), callbacks=[save_every(2)]
    ),
    "saved every epoch": lambda: run_of(
        Net("epoch"), DataLoader(Samples(), BATCH, shuffle=True), callbacks=[ModelCheckpoint(save_last=True)]
    ),
    "workers": lambda: run_of(Net(), DataLoader(Samples(noisy=False), BATCH, shuffle=True, num_workers=2)),
    "persistent workers": lambda: run_of(
        Net(), DataLoader(Samples(noisy=False), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    ),
    "seeded samples in workers": lambda: run_of(
        Net(), DataLoader(Samples(), BATCH, shuffle=True, num_workers=2), sample_rng=True
    ),
    "sampler": lambda: run_of(Net(), DataLoader(Samples(), BATCH, sampler=BlockSampler())),
    "generator": lambda: run_of(
        Net(), DataLoader(Samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    ),
    "stateful loader": lambda: run_of(Net(), StatefulLoader()),
    "stream": lambda: run_of(Net(), DataLoader(Stream(), BATCH)),
    "limited stream": lambda: run_of(Net(), DataLoader(Stream(), BATCH), limit_train_batches=6),
    "limited": lambda: run_of(Net(), DataLoader(Samples(), BATCH, shuffle=True), limit_train_batches=7),
    "16-mixed": lambda: run_of(
        Net(),
        DataLoader(Samples(), BATCH, shuffle=True),
        precision=MixedPrecision("16", init_scale=2.0**19, growth_interval=2),
        accumulate_grad_batches=2,
    ),
    "monitored": lambda: run_of(
        Net("plateau"),
        DataLoader(Samples(), BATCH, shuffle=True),
        val_check_interval=3,
        accumulate_grad_batches=1,
        max_epochs=4,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=1, monitor="val_loss", save_top_k=2, filename="{step}", save_last=True),
            EarlyStopping("val_loss", patience=5, min_delta=0.001),
        ],
    ),
    "plateau by epoch": lambda: run_of(
        Net("plateau"), DataLoader(Samples(), BATCH, shuffle=True), val_check_interval=4, check_val_every_n_epoch=None
    ),
    "combined": lambda: run_of(
        CombinedNet(),
        {
            "long": DataLoader(Samples(), BATCH, shuffle=True),
            "short": DataLoader(Samples(14), BATCH, shuffle=True, generator=torch.Generator().manual_seed(2)),
        },
    ),
    "reloaded": lambda: run_of(Net(), DataLoader(Samples(), BATCH, shuffle=True), reload_dataloaders_every_n_epochs=1),
    "growing windows": lambda: run_of(
        Net(),
        DataLoader(Samples(), BATCH, shuffle=True),
        accumulate_grad_batches=1,
        callbacks=[GradientAccumulation({0: 1, 1: 4, 2: 3}), save_every(1)],
    ),
    "manual": lambda: run_of(
        ManualNet(), DataLoader(Samples(), BATCH, shuffle=True), accumulate_grad_batches=1, gradient_clip_val=None
    ),
    "compiled step": lambda: run_of(
        CompiledNet(),
        DataLoader(Samples(), BATCH, shuffle=True),
        accumulate_grad_batches=1,
        compile={"backend": "eager"},
    ),
    "steps": lambda: run_of(Net(), DataLoader(Samples(), BATCH, shuffle=True), max_epochs=-1, max_steps=7),
    "stream, steps": lambda: run_of(Net("plateau"), DataLoader(Stream(), BATCH), max_epochs=-1, max_steps=6),
}


def plain(value: Any) -> Any:
    """Returns a copy of nested values that torch.load(weights_only=True) can read."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str, bool, bytes)) or value is None else repr(value)


def kept_checkpoints(checkpoint: ModelCheckpoint) -> dict[str, Any]:
    """Returns which checkpoints a ModelCheckpoint has recorded, and which are on disk."""
    names = {os.path.basename(path): float(score) for path, score in checkpoint.best_k_models.items()}
    folder = Path(checkpoint.dirpath or "")
    return {
        "best": os.path.basename(checkpoint.best_model_path),
        "last": os.path.basename(checkpoint.last_model_path),
        "kept": names,
        "on disk": sorted(path.name for path in folder.iterdir()),
    }


def result_of(trainer: Trainer, module: Any) -> dict[str, Any]:
    progress = trainer.progress.to_dict()
    stopping = trainer.early_stopping_callback
    csv = Path(trainer.log_dir or "", "metrics.csv")
    return {
        "weights": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.strategy.precision.state_dict(),
        "metrics": trainer.callback_metrics,
        "csv": csv.read_text() if csv.exists() else "",
        "digests": csv.with_name("digests.jsonl").read_text(),
        "order": module.order,
        "progress": {name: value for name, value in progress.items() if not name.startswith("seconds")},
        "checkpoints": [kept_checkpoints(callback) for callback in trainer.checkpoint_callbacks],
        "stopping": None if stopping is None else stopping.state_dict(),
        "history": list(trainer.history),
        "random": [float(torch.rand(())), random.random(), float(np.random.rand())],
    }


def run(scenario: str, folder: Path, point: str, name: str) -> None:
    """Runs a scenario, from its last checkpoint if there is one."""
    global plan
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    make = SCENARIOS[scenario]()
    # A forked process would inherit the plan of its parent.
    plan = SignalPlan(point)
    trainer, module, train = make(folder)
    ended = "success"
    try:
        trainer.fit(module, train, DataLoader(Samples(9), BATCH), ckpt_path="auto")
    except (KeyboardInterrupt, SystemExit) as error:
        ended = repr(error)
    last = trainer.last_checkpoint
    result = {
        **result_of(trainer, module),
        "ended": ended,
        "events": dict(plan.counts),
        "last_checkpoint_exists": last is not None and last.is_dir(),
    }
    torch.save(plain(result), folder / f"{name}.pt")


def in_fork(work: Callable[[], None]) -> int:
    """Runs a function in a forked process; returns its exit code, or the negative number of a fatal signal."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def chain(scenario: str, root: Path, point: str) -> list[int]:
    """Runs a point's runs one after another, then one without signals; returns their exit codes."""
    folder = root / point.translate(str.maketrans("@:+>", "----"))
    folder.mkdir()
    points = point.split(">")
    if point != "none":
        points.append("none")
    return [in_fork(functools.partial(run, scenario, folder, each, str(i))) for i, each in enumerate(points)]


def main() -> None:
    scenario, root, *points = sys.argv[1:]
    torch.set_num_threads(1)
    # The first optimizer imports 800 modules of torch, and a compiled step as many: import them before the forks.
    AdamW([torch.zeros(1)])
    if scenario == "compiled step":
        importlib.import_module("leyden.trainer.loops.compiled_step")
    codes = {point: chain(scenario, Path(root), point) for point in points}
    Path(root, "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
