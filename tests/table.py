"""Checks the table of docs/strategies.md: runs each of its cells for a few steps of a tiny module."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Accelerator, Callback, Trainer, TrainModule
from leyden.callbacks import CSVLogger, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from leyden.strategies import SEVERAL, FSDPStrategy, Strategy
from leyden.strategies.precision import MixedPrecision

DOCUMENT = Path(__file__).parents[1] / "docs" / "strategies.md"
WORKS, REFUSED, MEANINGLESS, UNTRIED = "✓", "✗", "–", "○"
OTHER_RANKS = "resume on other ranks"
COMPILE_GROUPS = ("fsdp", "fsdp_cpu_offload", "hsdp", "tp", "fsdp_tp")
RATE = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(TrainModule):
    """A regression whose blocks are split where ranks share a model."""

    def __init__(self, manual: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 16), Block(), Block())
        self.outer = nn.Linear(16, 4)
        self.automatic_optimization = not manual
        self.count = optimizers
        self.losses: list[Tensor] = []
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x))
        return out

    def parallel_plan(self) -> dict[str, str]:
        return {"inner.*.up": "colwise", "inner.*.down": "rowwise"}

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_batch_end(self, outputs: Any, batch: Any, *rest: Any) -> None:
        # A rank without a sample runs the step only to keep pace with the others, without hooks.
        self.samples += len(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).float()

    def configure_optimizers(self) -> Any:
        if self.count == 2:
            return [torch.optim.SGD(part.parameters(), RATE) for part in (self.inner, self.outer)]
        return torch.optim.SGD(self.parameters(), RATE, momentum=0.9 if self.automatic_optimization else 0.0)


class Plain(Net):
    """A net trained without momentum: a step is the clipped gradient times the rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE)


def data(count: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 4, generator=generator))


def loader(strategy: Strategy, count: int = 20) -> DataLoader[Any]:
    """Returns a loader of `count` samples in global batches of 4."""
    return DataLoader(data(count), 4 // strategy.data_size)


# the table ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        strategy: the name of the strategy.
        precision: the name of the precision.
        marks: the mark of each feature.
        run: "CI", "full", or "never".
    """

    strategy: str
    precision: str
    marks: dict[str, str]
    run: str

    def features(self, mark: str) -> list[str]:
        """Returns the features with a mark."""
        return [feature for feature, own in self.marks.items() if own.startswith(mark)]


def rows() -> list[Row]:
    """Returns the rows of the table."""
    lines = iter(DOCUMENT.read_text(encoding="utf-8").splitlines())
    header = next(_cells(line) for line in lines if line.startswith("| strategy | precision |"))
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        strategy, precision, *marks, run = _cells(line)
        found.append(Row(strategy.strip("`"), precision.strip("`"), dict(zip(header[2:-1], marks, strict=True)), run))
    return found


def rows_of(*strategies: str, run: str) -> list[Row]:
    """Returns the rows of some strategies that `.ci/run` ("CI") or only `.ci/run full` ("full") runs."""
    return [row for row in rows() if row.strategy in strategies and row.run == run]


def reasons() -> dict[str, str]:
    """Returns the letter of each refusal → words of its error."""
    return dict(re.findall(r'^- \*\*(\w)\*\* "([^"]+)"', DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))


def other_names() -> dict[str, str]:
    """Returns names of strategies without a row → the strategy whose rows apply."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Other names")[2]
    return dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def outcomes(rows: list[Row], features: Callable[[Row], list[str]], folder: str) -> list[tuple[Row, str, str]]:
    """Runs cells on this rank; returns their outcomes."""
    return [
        (row, feature, run(Cell(row.strategy, row.precision, Path(folder) / row.strategy / row.precision), feature))
        for row in rows
        for feature in features(row)
    ]


def run_working(rows: list[Row], folder: str) -> list[tuple[Row, str, str]]:
    """Runs the cells that work, except those that need another number of ranks."""
    return outcomes(rows, lambda row: [name for name in row.features(WORKS) if name != OTHER_RANKS], folder)


def run_on_other_ranks(rows: list[Row], folder: str) -> list[tuple[Row, str, str]]:
    """Resumes what `run_working` saved, on another number of ranks."""
    return outcomes(rows, lambda row: [name for name in row.features(WORKS) if name == OTHER_RANKS], folder)


def run_refused(rows: list[Row], folder: str) -> list[tuple[Row, str, str]]:
    """Runs the cells that are refused."""
    return outcomes(rows, lambda row: row.features(REFUSED), folder)


def mismatches(found: list[tuple[Row, str, str]]) -> list[str]:
    """Returns a line for each cell whose outcome differs from the table."""
    words = reasons()
    lines = []
    for row, feature, outcome in found:
        mark = row.marks[feature]
        if outcome != "works" if mark == WORKS else words[mark[1:]] not in outcome:
            lines.append(f"{row.strategy}, {row.precision}, {feature} is {mark}: {outcome}")
    return lines


def check(strategy: str, run: str, folder: Path, size: int, other: int | None, **environ: str) -> None:
    """Runs the rows of a strategy, and compares them with the table.

    Args:
        strategy: the name of the strategy.
        run: "CI" or "full".
        folder: for checkpoints.
        size: the number of ranks.
        other: the number of ranks on which runs are resumed; None where that has no meaning.
        **environ: environment variables of the ranks that resume.
    """
    rows = rows_of(strategy, run=run)
    assert rows
    if any(row.features(WORKS) for row in rows):
        for found in run_world(size, run_working, rows, str(folder), timeout=900):
            _assert_agreement(found)
        if other is not None:
            for found in run_world(other, run_on_other_ranks, rows, str(folder), environ=environ, timeout=900):
                _assert_agreement(found)
    # On a single rank where that is enough: an error on one of several ranks ends the others.
    if any(row.features(REFUSED) for row in rows):
        for found in run_world(size if strategy in ("tp", "fsdp_tp") else 1, run_refused, rows, str(folder)):
            _assert_agreement(found)


def check_other_names(*strategies: str, size: int, folder: Path) -> None:
    """Trains under the names that have no row of their own."""
    names = [name for name, owner in other_names().items() if owner in strategies]
    for found in run_world(size, run_names, names, str(folder)):
        assert found == dict.fromkeys(names, "works"), found


def run_names(names: list[str], folder: str) -> dict[str, str]:
    """Trains under each name, on this rank; returns the outcomes."""
    return {name: run(Cell(name, "32-true", Path(folder) / name), "accumulation") for name in names}


def _assert_agreement(found: list[tuple[Row, str, str]]) -> None:
    lines = mismatches(found)
    assert found and not lines, "\n".join(lines)


# a cell ---------------------------------------------------------------------------------------------------------------
@dataclass
class Cell:
    """The settings of a cell.

    Attributes:
        strategy: the name of the strategy, or a function that makes it.
        precision: the name of the precision.
        folder: for files of the cell.
        accelerator: "cpu" or "cuda" (default: the environment's TABLE_ACCELERATOR, or "cpu").
    """

    strategy: Any
    precision: str
    folder: Path
    accelerator: str = field(default_factory=lambda: os.environ.get("TABLE_ACCELERATOR", "cpu"))

    def trainer(self, **arguments: Any) -> Trainer:
        fixed = {"accelerator": self.accelerator, "max_epochs": 1, "default_root_dir": self.folder}
        settings = {**QUIET, **fixed, **arguments}
        return Trainer(
            strategy=self.make_strategy(),
            precision=self.make_precision(),
            devices=int(os.environ.get("TABLE_DEVICES") or os.environ.get("WORLD_SIZE", "1")),
            **settings,
        )

    def make_precision(self) -> Any:
        """Returns the precision. Its scale starts so low that no step is skipped, so that steps can be counted."""
        return MixedPrecision("16", init_scale=64.0) if self.precision == "16-mixed" else self.precision

    def make_strategy(self, **settings: Any) -> Any:
        """Returns the strategy: its name, or an object if settings are given."""
        if self.strategy == "hsdp":
            # The name needs four ranks; a mesh of two replicas needs only two.
            return FSDPStrategy(device_mesh=(2, int(os.environ["WORLD_SIZE"]) // 2), **settings)
        if settings:
            module, name, arguments = SEVERAL[self.strategy]
            return getattr(importlib.import_module(module), name)(**arguments, **settings)
        return self.strategy() if callable(self.strategy) else self.strategy


def weights(trainer: Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Returns full weights on rank 0; on other ranks, those the strategy provides."""
    return {name: value.detach().clone() for name, value in trainer.strategy.full_state_dict(module).items()}


def weight_changes(trainer: Trainer, module: nn.Module) -> list[Tensor]:
    """Returns the change of each weight since initialization, on rank 0; on other ranks, an empty list."""
    start = Net().state_dict()
    found = weights(trainer, module)
    pairs = [(found[name].cpu(), start[name].to(found[name].dtype)) for name in start] if trainer.is_global_zero else []
    return [new.double() - old.double() for new, old in pairs]


def assert_trained(trainer: Trainer, module: Net, steps: int) -> None:
    """Checks the number of steps, that losses are finite, and that every weight has changed."""
    assert trainer.global_step == steps, trainer.global_step
    assert all(bool(torch.isfinite(loss)) for loss in module.losses)
    assert all(bool(change.abs().max() > 0) for change in weight_changes(trainer, module))


# one function per column ---------------------------------------------------------------------------------------------
def accumulation(cell: Cell) -> None:
    """Windows of 2, 2 and 1 batches: the last window divides its loss by 1."""
    trainer, module = cell.trainer(accumulate_grad_batches=2), Net()
    trainer.fit(module, loader(trainer.strategy))
    assert_trained(trainer, module, 3)
    assert len(module.losses) == 5


def clip_by_norm(cell: Cell) -> None:
    trainer, module = cell.trainer(gradient_clip_val=0.1, max_steps=1), Plain()
    trainer.fit(module, loader(trainer.strategy))
    assert_trained(trainer, module, 1)
    changes = weight_changes(trainer, module)
    if changes:
        norm = float(torch.stack([change.square().sum() for change in changes]).sum().sqrt())
        # Half precision rounds the change of a weight.
        assert 0.7 * 0.1 * RATE < norm < 1.3 * 0.1 * RATE, norm


def clip_by_value(cell: Cell) -> None:
    trainer = cell.trainer(gradient_clip_val=0.01, gradient_clip_algorithm="value", max_steps=1)
    module = Plain()
    trainer.fit(module, loader(trainer.strategy))
    changes = weight_changes(trainer, module)
    if changes:
        largest = max(float(change.abs().max()) for change in changes)
        assert 0.7 * 0.01 * RATE < largest < 1.3 * 0.01 * RATE, largest


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def checkpoint(cell: Cell) -> None:
    """Saves after three of five steps; the resumed run ends with the same weights, bit for bit."""
    path = cell.folder / "saved"
    trainer, module = cell.trainer(callbacks=[Save(path)]), Net()
    trainer.fit(module, loader(trainer.strategy))
    expected = weights(trainer, module)
    trainer, module = cell.trainer(), Net()
    trainer.fit(module, loader(trainer.strategy), ckpt_path=path)
    assert trainer.global_step == 5 and len(module.losses) == 2
    found = weights(trainer, module)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def other_ranks(cell: Cell) -> None:
    """Resumes what `checkpoint` saved on another number of ranks: as many steps, over the remaining samples."""
    trainer, module = cell.trainer(), Net()
    trainer.fit(module, loader(trainer.strategy), ckpt_path=cell.folder / "saved")
    assert trainer.global_step == 5 and len(module.losses) == 2
    assert all(bool(torch.isfinite(loss)) for loss in module.losses)


def evaluation(cell: Cell) -> None:
    """Uses each of 18 samples once, even if ranks do not divide them evenly; predictions keep the data's order."""
    trainer, module = cell.trainer(), Net()
    [metrics] = trainer.validate(module, loader(trainer.strategy, 18), verbose=False)
    # Ranks that share a model have used the same samples.
    share = module.samples * trainer.strategy.data_size / trainer.world_size
    counted = trainer.strategy.ranks.reduce(torch.tensor(share, device=trainer.strategy.root_device), reduction="sum")
    assert torch.isfinite(torch.tensor(metrics["val_loss"])) and float(counted) == 18, counted
    predicted = torch.cat(trainer.predict(module, loader(trainer.strategy, 18)) or [])
    assert predicted.shape == (18, 4)
    error = F.mse_loss(predicted, data(18).tensors[1])
    assert abs(float(error) - metrics["val_loss"]) < 0.02


def compiled(cell: Cell) -> None:
    """Compiles the module; strategies that shard or split groups of layers compile those instead."""
    torch._dynamo.reset()
    if cell.strategy in COMPILE_GROUPS:
        strategy = cell.make_strategy(auto_wrap_policy={Block}, compile={"backend": "eager"})
        trainer, module = replace(cell, strategy=lambda: strategy).trainer(), Net()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trainer.fit(module, loader(trainer.strategy))
    else:
        trainer, module = cell.trainer(), Net()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trainer.fit(torch.compile(module, backend="eager"), loader(trainer.strategy))  # type: ignore[arg-type]
    assert_trained(trainer, module, 5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


def manual(cell: Cell) -> None:
    trainer, module = cell.trainer(), Net(manual=True)
    trainer.fit(module, loader(trainer.strategy))
    assert_trained(trainer, module, 5)


def two_optimizers(cell: Cell) -> None:
    trainer, module = cell.trainer(), Net(manual=True, optimizers=2)
    trainer.fit(module, loader(trainer.strategy))
    assert_trained(trainer, module, 5)


def callbacks(cell: Cell) -> None:
    """Callbacks that act on metrics, time and the learning rate."""
    best = ModelCheckpoint(cell.folder / "best", monitor="val_loss", save_last=True)
    stopper = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    trainer, module = (
        cell.trainer(
            callbacks=[best, stopper, Timer("00:01:00:00"), LearningRateMonitor("step")],
            max_epochs=4,
            logger=CSVLogger(cell.folder),
            enable_checkpointing=True,
        ),
        Net(),
    )
    trainer.fit(module, loader(trainer.strategy), loader(trainer.strategy, 8))
    # No value improves on the first by min_delta, so the second validation stops the run.
    assert (stopper.stopped_epoch, trainer.global_step) == (1, 10)
    assert Path(best.best_model_path).is_dir() and Path(best.last_model_path).is_dir()


def accelerator_loop(cell: Cell) -> None:
    accelerator = Accelerator(
        cpu=cell.accelerator == "cpu",
        mixed_precision=cell.make_precision(),
        gradient_accumulation_steps=2,
        strategy=cell.make_strategy(),
    )
    module = Net()
    optimizer: Any = torch.optim.SGD(module.parameters(), RATE)
    model, optimizer, batches = accelerator.prepare(module, optimizer, loader(accelerator.strategy))
    start = [p.detach().clone() for p in model.parameters()]
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x).float(), y.float())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.steps == 3 and bool(torch.isfinite(loss.detach()))
    assert all(not torch.equal(old, new.detach()) for old, new in zip(start, model.parameters(), strict=True))
    accelerator.save_state(cell.folder / "state")
    accelerator.load_state(cell.folder / "state")


FEATURES: dict[str, Callable[[Cell], None]] = {
    "accumulation": accumulation,
    "clip by norm": clip_by_norm,
    "clip by value": clip_by_value,
    "checkpoint, exact resume": checkpoint,
    OTHER_RANKS: other_ranks,
    "evaluation": evaluation,
    "compile": compiled,
    "manual optimization": manual,
    "several optimizers": two_optimizers,
    "callbacks": callbacks,
    "Accelerator": accelerator_loop,
}


def run(cell: Cell, feature: str) -> str:
    """Runs a cell; returns "works", or the error."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FEATURES[feature](cell)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "works"
