"""Logging and the progress bar make no step wait for the device: values are read back only when shown or written."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Squares
from terminals import Terminal
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks import CSVLogger, TQDMProgressBar
from leyden.callbacks.bars.paced_bar import DRAW_SECONDS

STEPS = 100
EVERY = 50
# Read-backs once per epoch: the loader's seed and order, and values returned or monitored at its end.
ONCE = 10
TORCH = str(Path(torch.__file__).parent) + os.sep

READING_METHODS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__float__, Tensor.__int__, Tensor.__bool__),
    *(Tensor.__index__, Tensor.__complex__, Tensor.__array__, Tensor.__contains__, Tensor.is_nonzero),
    *(torch.equal, torch.allclose, Tensor.equal, Tensor.allclose),
}
READING_OPS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


class MethodReads(TorchFunctionMode):
    """Records calls of the methods that read a tensor's values into Python."""

    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_cpu = function is Tensor.to and any(str(part) == "cpu" for part in (*args[1:], *(kwargs or {}).values()))
        # torch's own functions move norms and scales between devices.
        if function in READING_METHODS or (to_cpu and not sys._getframe(1).f_code.co_filename.startswith(TORCH)):
            self.record(function.__name__)
        return function(*args, **(kwargs or {}))


class OperationReads(TorchDispatchMode):
    """Records the operations beneath those methods, whatever called them."""

    def __init__(self, record: Callable[[str], None]) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READING_OPS:
            self.record(str(function))
        return function(*args, **(kwargs or {}))


class ReadBacks:
    """The read-backs of a run: how many by the bar, and the steps and callers of all others."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.by_bar = 0
        self.others: list[tuple[int, str]] = []

    def record(self, function: str) -> None:
        stack = traceback.extract_stack()
        if any(frame.name == "get_metrics" for frame in stack):
            self.by_bar += 1
            return
        step = self.trainer.progress.batches if self.trainer is not None else -1
        own = [frame for frame in stack if not frame.filename.startswith((TORCH, __file__))]
        self.others.append(
            (step, " < ".join((function, *(f"{Path(f.filename).name}:{f.lineno}" for f in own[:-4:-1]))))
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        with MethodReads(self.record), OperationReads(self.record):
            yield


def scheduled(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "interval": "step"}]


class Module(Squares):
    """Logs in every way, and calls `per_step` with the loss in each step."""

    def __init__(self, per_step: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__(torch.nn.Linear(4, 1), scheduled)
        self.per_step = per_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"double": 2 * loss.detach(), "constant": 1.0}, prog_bar=True)
        self.log("largest", loss, reduce_fx="max", on_epoch=True, on_step=False)
        if self.per_step is not None:
            self.per_step(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)


def run(
    folder: Path, module: Module | None = None, validation: bool = False, **arguments: Any
) -> tuple[ReadBacks, float]:
    module = module or Module()
    read_backs = ReadBacks()
    data = DataLoader(TensorDataset(torch.ones(STEPS * 2, 4)), batch_size=2, shuffle=True)
    loaders = (data, DataLoader(TensorDataset(torch.ones(STEPS, 4)), batch_size=1)) if validation else (data,)
    everything: dict[str, Any] = {
        "logger": CSVLogger(folder),
        "callbacks": [TQDMProgressBar()],
        "enable_checkpointing": False,
        "log_every_n_steps": EVERY,
    }
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **(everything | arguments))
    read_backs.trainer = trainer
    start = time.perf_counter()
    with read_backs.counted():
        trainer.fit(module, *loaders)
    assert trainer.progress.batch == STEPS
    return read_backs, time.perf_counter() - start


def assert_few(read_backs: ReadBacks, seconds: float) -> None:
    assert len(read_backs.others) <= STEPS // EVERY + ONCE, read_backs.others
    steps = [step for step, _ in read_backs.others if 0 < step < STEPS - 1]
    # The logger gets the last batch of every 50: nothing else reads between the first and the last step.
    assert {step % EVERY for step in steps} <= {0}, read_backs.others
    # The bar reads when it draws: at most ten times a second, and at its start and end.
    assert read_backs.by_bar <= 2 * (seconds / DRAW_SECONDS + 4)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 2, "log_every_n_steps": 25},
        {"gradient_clip_val": 1.0},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_with_a_bar_and_a_logger_only_logged_steps_read_values(arguments: dict[str, Any], tmp_path: Path) -> None:
    read_backs, seconds = run(tmp_path, **arguments)
    assert_few(read_backs, seconds)
    assert read_backs.by_bar >= 1, "the bar drew nothing, so the test proves nothing"
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    assert len(rows) >= 1 + STEPS // EVERY


def test_a_bar_in_a_terminal_reads_values_only_when_it_draws(tmp_path: Path) -> None:
    with Terminal() as terminal:
        read_backs, seconds = run(tmp_path)
    assert_few(read_backs, seconds)
    assert read_backs.by_bar >= 1
    assert any(line.startswith("Epoch 0/0") and "loss_step=" in line for line in terminal.drawn())


def test_validation_reads_values_no_more_often_than_training(tmp_path: Path) -> None:
    read_backs, _ = run(tmp_path, validation=True, num_sanity_val_steps=0, val_check_interval=STEPS)
    # Its batches go to the logger as those of training do, and its end reads the epoch's values.
    assert len(read_backs.others) <= 2 * (STEPS // EVERY) + ONCE, read_backs.others


def test_without_a_bar_or_logger_no_step_reads_values(tmp_path: Path) -> None:
    read_backs, _ = run(tmp_path, logger=False, callbacks=[], enable_progress_bar=False)
    assert read_backs.by_bar == 0
    assert len(read_backs.others) <= ONCE, read_backs.others
    assert not [step for step, _ in read_backs.others if 0 < step < STEPS], read_backs.others


@pytest.mark.parametrize(
    "reading",
    [
        lambda loss: loss.item(),
        lambda loss: float(loss),
        lambda loss: bool(loss > 0),
        lambda loss: loss.tolist(),
        lambda loss: loss.detach().cpu(),
        lambda loss: loss.detach().to("cpu"),
        lambda loss: loss.detach().numpy(),
        lambda loss: f"{loss:.3f}",
        lambda loss: torch.nonzero(loss),
    ],
)
def test_every_kind_of_read_back_is_counted(reading: Callable[[Tensor], Any], tmp_path: Path) -> None:
    """Proves that the tests above can fail: one read-back per step is found, of any kind."""
    read_backs, _ = run(tmp_path, Module(reading), logger=False, callbacks=[], enable_progress_bar=False)
    assert len(read_backs.others) >= STEPS


def test_the_scaler_reads_one_value_per_window(tmp_path: Path) -> None:
    """The check for inf is the one read-back that 16-mixed needs."""
    arguments = {"precision": "16-mixed", "accumulate_grad_batches": 4}
    read_backs, _ = run(tmp_path, logger=False, callbacks=[], enable_progress_bar=False, **arguments)
    steps = [step for step, source in read_backs.others if "_local_scalar_dense" in source and 0 < step < STEPS]
    assert steps == list(range(3, STEPS, 4)), read_backs.others
