"""DeviceStatsMonitor: the batches that are logged, their names, and its requirements."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from models import QUIET, Squares

from leyden.callbacks import DeviceStatsMonitor
from leyden.callbacks.device_stats_monitor import device_statistics
from leyden.callbacks.loggers.logger import Logger
from leyden.core.errors import ConfigurationError, MissingExtraError
from leyden.trainer.trainer import Trainer

NAMES = {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
BATCHES = [torch.ones(2, 4)] * 5


class StatsRecorder(Logger):
    def __init__(self) -> None:
        self.rows: list[tuple[int | None, str]] = []
        self.values: list[float] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        hooks = {name.partition("/")[0] for name in metrics}
        if hooks == {hook for hook in hooks if hook.startswith("DeviceStatsMonitor.")}:
            assert {name.partition("/")[2] for name in metrics} == NAMES
            [hook] = hooks
            self.rows.append((step, hook.removeprefix("DeviceStatsMonitor.on_")))
            self.values += metrics.values()


class Evaluated(Squares):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...


def module() -> Evaluated:
    return Evaluated(torch.nn.Linear(4, 1))


def trainer_of(root: Path, kept: StatsRecorder | None, monitor: DeviceStatsMonitor, **arguments: Any) -> Trainer:
    settings = {"logger": kept or False, "max_epochs": 1, "default_root_dir": root, **arguments}
    return Trainer(callbacks=[monitor], **{**QUIET, **settings})


def test_statistics_are_logged_at_the_start_and_end_of_logged_batches(tmp_path: Path) -> None:
    kept = StatsRecorder()
    trainer = trainer_of(tmp_path, kept, DeviceStatsMonitor(), log_every_n_steps=2, num_sanity_val_steps=2)
    trainer.fit(module(), BATCHES, BATCHES)
    both = ("batch_start", "batch_end")
    assert kept.rows == [
        *((2, f"train_{hook}") for hook in both),
        *((4, f"train_{hook}") for hook in both),
        *((5, f"validation_{hook}") for _ in range(3) for hook in both),
    ]
    assert all(0 <= value <= 100 for value in kept.values)
    kept.rows.clear()
    trainer.test(module(), BATCHES)
    assert [hook for _, hook in kept.rows] == ["test_batch_start", "test_batch_end"] * 3


def test_statistics_are_logged_at_the_start_and_end_of_accumulation_windows(tmp_path: Path) -> None:
    kept = StatsRecorder()
    trainer = trainer_of(tmp_path, kept, DeviceStatsMonitor(), log_every_n_steps=1, accumulate_grad_batches=2)
    trainer.fit(module(), BATCHES)
    assert kept.rows == [(step, f"train_{hook}") for step in (1, 2, 3) for hook in ("batch_start", "batch_end")]


def test_psutil_is_needed_only_for_cpu_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert psutil.cpu_count()
    monkeypatch.setitem(sys.modules, "psutil", None)
    kept = StatsRecorder()
    trainer_of(tmp_path, kept, DeviceStatsMonitor(cpu_stats=False), log_every_n_steps=1).fit(module(), BATCHES)
    with pytest.raises(MissingExtraError, match="pip install psutil"):
        trainer_of(tmp_path, kept, DeviceStatsMonitor()).fit(module(), BATCHES)


def test_an_invalid_argument_raises() -> None:
    with pytest.raises(ConfigurationError, match="True, False or None"):
        DeviceStatsMonitor(cpu_stats="yes")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_statistics_include_the_allocators() -> None:
    kept = torch.ones(1000, device="cuda")
    found = device_statistics(kept.device)
    assert found["allocated_bytes.all.current"] >= 4000
