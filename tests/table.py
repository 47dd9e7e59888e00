"""The table of docs/strategies.md: each of its cells is run for a few steps of a tiny module, and checked."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
    """A regression, with the layers of its blocks split where ranks share a model."""

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
        # A rank without a sample runs the step again for the others' sake, and no hook.
        self.samples += len(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).float()

    def configure_optimizers(self) -> Any:
        if self.count == 2:
            return [torch.optim.SGD(part.parameters(), RATE) for part in (self.inner, self.outer)]
        return torch.optim.SGD(self.parameters(), RATE, momentum=0.9 if self.automatic_optimization else 0.0)


class Plain(Net):
    """Without momentum: a step is the clipped gradient times the rate."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), RATE)


def data(count: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 4, generator=generator))


def loader(strategy: Strategy, count: int = 20) -> DataLoader[Any]:
    """20 samples in global batches of 4."""
    return DataLoader(data(count), 4 // strategy.data_size)


# the table ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        strategy: its name.
        precision: its name.
        marks: of each feature.
        run: "CI", "full", or "never".
    """

    strategy: str
    precision: str
    marks: dict[str, str]
    run: str

    def features(self, mark: str) -> list[str]:
        """The features that have a mark."""
        return [feature for feature, own in self.marks.items() if own.startswith(mark)]


def rows() -> list[Row]:
    """The table."""
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
    """The rows of some strategies that are run by `.ci/run` ("CI"), or by `.ci/run full` alone ("full")."""
    return [row for row in rows() if row.strategy in strategies and row.run == run]


def reasons() -> dict[str, str]:
    """Letter of each refusal → words that its error has."""
    return dict(re.findall(r'^- \*\*(\w)\*\* "([^"]+)"', DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))


def other_names() -> dict[str, str]:
    """Names of strategies that have no row → the strategy whose rows are theirs."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Other names")[2]
    return dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def outcomes(rows: list[Row], features: Callable[[Row], list[str]], folder: str) -> list[tuple[Row, str, str]]:
    """Runs cells on this rank."""
    return [
        (row, feature, run(Place(row.strategy, row.precision, Path(folder) / row.strategy / row.precision), feature))
        for row in rows
        for feature in features(row)
    ]


def working(rows: list[Row], folder: str) -> list[tuple[Row, str, str]]:
    """What works, but for what needs other ranks."""
    return outcomes(rows, lambda row: [name for name in row.features(WORKS) if name != OTHER_RANKS], folder)


def resuming(rows: list[Row], folder: str) -> list[tuple[Row, str, str]]:
    """What `working` has saved, on other ranks."""
    return outcomes(rows, lambda row: [name for name in row.features(WORKS) if name == OTHER_RANKS], folder)


def refused(rows: list[Row], folder: str) -> list[tuple[Row, str, str]]:
    """What is refused."""
    return outcomes(rows, lambda row: row.features(REFUSED), folder)


def wrong(found: list[tuple[Row, str, str]]) -> list[str]:
    """The cells of which the table says something else."""
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
        strategy: its name.
        run: "CI" or "full".
        folder: for checkpoints.
        size: number of ranks.
        other: the number on which they are resumed; None where that has no meaning.
        **environ: variables of the ranks that resume.
    """
    rows = rows_of(strategy, run=run)
    assert rows
    if any(row.features(WORKS) for row in rows):
        for found in run_world(size, working, rows, str(folder), timeout=900):
            _agree(found)
        if other is not None:
            for found in run_world(other, resuming, rows, str(folder), environ=environ, timeout=900):
                _agree(found)
    # One rank alone, where that is enough: an error on one of several ends the others.
    if any(row.features(REFUSED) for row in rows):
        for found in run_world(size if strategy in ("tp", "fsdp_tp") else 1, refused, rows, str(folder)):
            _agree(found)


def check_other_names(*strategies: str, size: int, folder: Path) -> None:
    """Trains under the names that have no row of their own."""
    names = [name for name, owner in other_names().items() if owner in strategies]
    for found in run_world(size, training, names, str(folder)):
        assert found == dict.fromkeys(names, "works"), found


def training(names: list[str], folder: str) -> dict[str, str]:
    """Trains under each name, on this rank."""
    return {name: run(Place(name, "32-true", Path(folder) / name), "accumulation") for name in names}


def _agree(found: list[tuple[Row, str, str]]) -> None:
    lines = wrong(found)
    assert found and not lines, "\n".join(lines)


# a cell ---------------------------------------------------------------------------------------------------------------
@dataclass
class Place:
    """Where a cell is run.

    Attributes:
        strategy: its name, or a function that makes it.
        precision: a name.
        folder: of its files.
    """

    strategy: Any
    precision: str
    folder: Path

    def trainer(self, **arguments: Any) -> Trainer:
        settings = {**QUIET, "max_epochs": 1, "default_root_dir": self.folder, **arguments}
        return Trainer(
            strategy=self.made(),
            precision=self.arithmetic(),
            devices=int(os.environ.get("TABLE_DEVICES") or os.environ.get("WORLD_SIZE", "1")),
            **settings,
        )

    def arithmetic(self) -> Any:
        """The precision. The scaler begins where no step of these is skipped, so that they can be counted."""
        return MixedPrecision("16", init_scale=64.0) if self.precision == "16-mixed" else self.precision

    def made(self, **settings: Any) -> Any:
        """The strategy: its name, or an object, which has settings of its own."""
        if self.strategy == "hsdp":
            # By its name it wants four ranks; two can be replicas, too.
            return FSDPStrategy(device_mesh=(2, int(os.environ["WORLD_SIZE"]) // 2), **settings)
        if settings:
            module, name, arguments = SEVERAL[self.strategy]
            return getattr(importlib.import_module(module), name)(**arguments, **settings)
        return self.strategy() if callable(self.strategy) else self.strategy


def weights(trainer: Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Whole tensors, on rank 0; elsewhere what there is."""
    return {name: value.detach().clone() for name, value in trainer.strategy.full_state_dict(module).items()}


def moved(trainer: Trainer, module: nn.Module) -> list[Tensor]:
    """By how much each weight has moved from where it began; nothing on ranks that do not have whole ones."""
    start = Net().state_dict()
    found = weights(trainer, module)
    pairs = [(found[name].cpu(), start[name].to(found[name].dtype)) for name in start] if trainer.is_global_zero else []
    return [new.double() - old.double() for new, old in pairs]


def trained(trainer: Trainer, module: Net, steps: int) -> None:
    assert trainer.global_step == steps, trainer.global_step
    assert all(bool(torch.isfinite(loss)) for loss in module.losses)
    assert all(bool(change.abs().max() > 0) for change in moved(trainer, module))


# one function for each column -----------------------------------------------------------------------------------------
def accumulation(place: Place) -> None:
    """Windows of 2, 2 and 1 batches: the last one's loss counts fully."""
    trainer, module = place.trainer(accumulate_grad_batches=2), Net()
    trainer.fit(module, loader(trainer.strategy))
    trained(trainer, module, 3)
    assert len(module.losses) == 5


def clip_by_norm(place: Place) -> None:
    trainer, module = place.trainer(gradient_clip_val=0.1, max_steps=1), Plain()
    trainer.fit(module, loader(trainer.strategy))
    trained(trainer, module, 1)
    changes = moved(trainer, module)
    if changes:
        norm = float(torch.stack([change.square().sum() for change in changes]).sum().sqrt())
        # A weight in half precision moves in steps of its own.
        assert 0.7 * 0.1 * RATE < norm < 1.3 * 0.1 * RATE, norm


def clip_by_value(place: Place) -> None:
    trainer = place.trainer(gradient_clip_val=0.01, gradient_clip_algorithm="value", max_steps=1)
    module = Plain()
    trainer.fit(module, loader(trainer.strategy))
    changes = moved(trainer, module)
    if changes:
        largest = max(float(change.abs().max()) for change in changes)
        assert 0.7 * 0.01 * RATE < largest < 1.3 * 0.01 * RATE, largest


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *rest: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def checkpoint(place: Place) -> None:
    """Saved after three of five steps; the run that goes on from there ends with the same weights, bit for bit."""
    path = place.folder / "saved"
    trainer, module = place.trainer(callbacks=[Save(path)]), Net()
    trainer.fit(module, loader(trainer.strategy))
    expected = weights(trainer, module)
    trainer, module = place.trainer(), Net()
    trainer.fit(module, loader(trainer.strategy), ckpt_path=path)
    assert trainer.global_step == 5 and len(module.losses) == 2
    found = weights(trainer, module)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def other_ranks(place: Place) -> None:
    """What `checkpoint` saved resumes on another number of ranks: as many steps, over the samples that are left."""
    trainer, module = place.trainer(), Net()
    trainer.fit(module, loader(trainer.strategy), ckpt_path=place.folder / "saved")
    assert trainer.global_step == 5 and len(module.losses) == 2
    assert all(bool(torch.isfinite(loss)) for loss in module.losses)


def evaluation(place: Place) -> None:
    """18 samples, which no number of ranks but 2 divides, once each; and predictions in the data's order."""
    trainer, module = place.trainer(), Net()
    [metrics] = trainer.validate(module, loader(trainer.strategy, 18), verbose=False)
    # Ranks that share a model have seen the same.
    share = module.samples * trainer.strategy.data_size / trainer.world_size
    counted = trainer.strategy.ranks.reduce(torch.tensor(share, device=trainer.strategy.root_device), reduction="sum")
    assert torch.isfinite(torch.tensor(metrics["val_loss"])) and float(counted) == 18, counted
    predicted = torch.cat(trainer.predict(module, loader(trainer.strategy, 18)) or [])
    assert predicted.shape == (18, 4)
    error = F.mse_loss(predicted, data(18).tensors[1])
    assert abs(float(error) - metrics["val_loss"]) < 0.02


def compiled(place: Place) -> None:
    """By torch.compile on the module; what shards or splits its groups compiles them instead."""
    torch._dynamo.reset()
    if place.strategy in COMPILE_GROUPS:
        made = place.made(auto_wrap_policy={Block}, compile={"backend": "eager"})
        trainer, module = Place(lambda: made, place.precision, place.folder).trainer(), Net()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trainer.fit(module, loader(trainer.strategy))
    else:
        trainer, module = place.trainer(), Net()
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        trainer.fit(torch.compile(module, backend="eager"), loader(trainer.strategy))  # type: ignore[arg-type]
    trained(trainer, module, 5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


def manual(place: Place) -> None:
    trainer, module = place.trainer(), Net(manual=True)
    trainer.fit(module, loader(trainer.strategy))
    trained(trainer, module, 5)


def two_optimizers(place: Place) -> None:
    trainer, module = place.trainer(), Net(manual=True, optimizers=2)
    trainer.fit(module, loader(trainer.strategy))
    trained(trainer, module, 5)


def callbacks(place: Place) -> None:
    """Those that look into the run: they stop it by a metric, save the best, watch the clock and the rate."""
    best = ModelCheckpoint(place.folder / "best", monitor="val_loss", save_last=True)
    stopper = EarlyStopping("val_loss", patience=0, min_delta=1e9)
    trainer, module = (
        place.trainer(
            callbacks=[best, stopper, Timer("00:01:00:00"), LearningRateMonitor("step")],
            max_epochs=4,
            logger=CSVLogger(place.folder),
            enable_checkpointing=True,
        ),
        Net(),
    )
    trainer.fit(module, loader(trainer.strategy), loader(trainer.strategy, 8))
    # Nothing improves on the first value by so much: the second ends it.
    assert (stopper.stopped_epoch, trainer.global_step) == (1, 10)
    assert Path(best.best_model_path).is_dir() and Path(best.last_model_path).is_dir()


def by_accelerator(place: Place) -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision=place.arithmetic(), gradient_accumulation_steps=2, strategy=place.made()
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
    accelerator.save_state(place.folder / "state")
    accelerator.load_state(place.folder / "state")


FEATURES: dict[str, Callable[[Place], None]] = {
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
    "Accelerator": by_accelerator,
}


def run(place: Place, feature: str) -> str:
    """Runs one cell; returns "works", or the error."""
    place.folder.mkdir(parents=True, exist_ok=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            FEATURES[feature](place)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return "works"
