"""ThroughputMonitor: its counts and rates, and the names and steps they are logged under."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from programs import run_program
from samples import Broken
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import CSVLogger, ModelCheckpoint, ThroughputMonitor, measure_flops, throughput_monitor
from leyden.callbacks.peak_flops import peak_of
from leyden.core.errors import ConfigurationError

BATCHES = [torch.ones(3, 4)] * 6


class Evaluated(Squares):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def module() -> Evaluated:
    return Evaluated(torch.nn.Linear(4, 1))


@pytest.fixture
def ticking_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock by one that advances a second per reading, so each of a batch's four parts takes a second."""
    now = iter(range(10**6))

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return float(next(now))

    monkeypatch.setattr(throughput_monitor, "time", Clock)


def rows(root: Path, beginning: str = "train/") -> dict[int, dict[str, float]]:
    """Returns the values of the CSV file by step."""
    [path] = root.rglob("metrics.csv")
    found: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        values = {name: float(value) for name, value in row.items() if name.startswith(beginning) and value}
        if values:
            found[int(row["step"])] = values
    return found


def fitted(root: Path, monitor: ThroughputMonitor, own: Any = None, **arguments: Any) -> Trainer:
    settings = {**QUIET, "logger": CSVLogger(root), "max_epochs": 1, "log_every_n_steps": 2, "default_root_dir": root}
    trainer = Trainer(**{**settings, "callbacks": [monitor], **arguments})
    trainer.fit(own or module(), BATCHES)
    return trainer


def length(batch: torch.Tensor) -> int:
    return batch.numel()


@pytest.mark.usefixtures("ticking_clock")
def test_totals_are_logged_from_the_start_and_rates_once_the_window_is_full(tmp_path: Path) -> None:
    trainer = fitted(tmp_path, ThroughputMonitor(len, length, window_size=4, split=True))
    found = rows(tmp_path)
    assert list(found) == [2, 4, 6]
    peaks = [row.pop("train/device/peak_memory_gb") for row in found.values()]
    assert 0.05 < peaks[0] <= peaks[-1] < 50
    assert found[2] == {"train/time": 8, "train/batches": 2, "train/samples": 6, "train/lengths": 24}
    rates = {"batches_per_sec": 0.25, "samples_per_sec": 0.75, "items_per_sec": 3.0}
    assert found[6] == {
        "train/time": 24,
        "train/batches": 6,
        "train/samples": 18,
        "train/lengths": 72,
        **{f"train/{place}{name}": rate for name, rate in rates.items() for place in ("", "device/")},
        **{f"train/split/{part}": 0.25 for part in ("data", "forward", "backward", "optimizer")},
    }
    assert trainer.callback_metrics["train/samples"] == 18


def test_the_bar_shows_the_rate_utilization_and_memory_of_training(tmp_path: Path) -> None:
    own = module()
    own.flops_per_batch = 80.0
    monitor = ThroughputMonitor(len, length, window_size=2, available_flops=100, prog_bar=True)
    trainer = fitted(tmp_path, monitor, own, logger=False)
    shown = {name for name in trainer.progress_bar_metrics if "/" in name}
    assert shown == {"train/items_per_sec", "train/device/mfu", "train/device/peak_memory_gb"}


@pytest.mark.usefixtures("ticking_clock")
@pytest.mark.parametrize("flops", [80.0, lambda batch: 20 * len(batch) + 20])
def test_flops_per_batch_gives_flops_per_second_and_utilization(tmp_path: Path, flops: Any) -> None:
    own = module()
    own.flops_per_batch = flops
    fitted(tmp_path, ThroughputMonitor(len, window_size=2, available_flops=100, separator="|"), own)
    last = rows(tmp_path, "train|")[6]
    assert last["train|device|flops_per_sec"] == last["train|flops_per_sec"] == 20
    assert last["train|device|mfu"] == 0.2
    assert "train|items_per_sec" not in last and "train|split|data" not in last


@pytest.mark.usefixtures("ticking_clock")
def test_validation_has_separate_rates_and_is_excluded_from_training_time(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(len, window_size=2)
    settings = {**QUIET, "logger": CSVLogger(tmp_path), "max_epochs": 2, "default_root_dir": tmp_path}
    trainer = Trainer(**settings, callbacks=[monitor], log_every_n_steps=2, val_check_interval=3)
    trainer.fit(module(), BATCHES, [torch.ones(5, 4)] * 2)
    assert rows(tmp_path)[12]["train/time"] == 4 * 12
    # Four passes of two batches, not counting the sanity check.
    found = rows(tmp_path, "validate/")[12]
    del found["validate/device/peak_memory_gb"]
    assert found == {
        "validate/time": 8,
        "validate/batches": 8,
        "validate/samples": 40,
        **{f"validate/{place}batches_per_sec": 1 for place in ("", "device/")},
        **{f"validate/{place}samples_per_sec": 5 for place in ("", "device/")},
    }
    trainer.test(module(), BATCHES)
    assert trainer.callback_metrics["test/samples"] == 18
    trainer.predict(module(), BATCHES)
    assert monitor._stages["predict"].totals.samples == 18


@pytest.mark.usefixtures("ticking_clock")
def test_every_accumulated_batch_counts_at_its_step(tmp_path: Path) -> None:
    fitted(tmp_path, ThroughputMonitor(len, window_size=2), accumulate_grad_batches=2, log_every_n_steps=1)
    assert {step: row["train/batches"] for step, row in rows(tmp_path).items()} == {1: 2, 2: 4, 3: 6}


@pytest.mark.parametrize(("every", "steps"), [(2, [3, 4, 6]), (1, [1, 3, 4, 5, 6]), (0, [])])
def test_a_row_due_at_a_skipped_batch_is_logged_at_the_next_step(every: int, steps: list[int], tmp_path: Path) -> None:
    """All samples of the second batch are bad, so its hooks are not called."""
    own, loader = Squares(torch.nn.Linear(3, 1)), DataLoader(Broken(set(range(4, 8)), 24), 4)
    settings = {**QUIET, "logger": CSVLogger(tmp_path), "max_epochs": 1, "default_root_dir": tmp_path}
    trainer = Trainer(**settings, callbacks=[ThroughputMonitor(len)], log_every_n_steps=every, on_bad_sample="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(own, loader)
    assert (list(rows(tmp_path)) if steps else []) == steps
    if steps:
        assert rows(tmp_path)[6]["train/batches"] == 5


def test_totals_survive_a_resume_and_restart_in_a_new_fit(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    monitor = ThroughputMonitor(len)
    fitted(tmp_path / "a", monitor, enable_checkpointing=True, callbacks=[monitor, checkpoint])
    again = ThroughputMonitor(len)
    trainer = Trainer(**{**QUIET, "logger": CSVLogger(tmp_path / "b")}, max_epochs=1, callbacks=[again])
    trainer.fit(module(), BATCHES, ckpt_path=tmp_path / "saved" / "epoch=0-step=4")
    assert again._stages["train"].totals.samples == monitor._stages["train"].totals.samples == 18
    trainer.fit(module(), BATCHES)
    assert again._stages["train"].totals.samples == 18


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"batch_size_fn": 3}, "batch_size_fn=3"),
        ({"batch_size_fn": len, "length_fn": "x"}, "length_fn='x'"),
        ({"batch_size_fn": len, "window_size": 1}, "from 2"),
        ({"batch_size_fn": len, "available_flops": 0}, "above 0"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        ThroughputMonitor(**arguments)


def test_peak_flops_are_found_by_device_name() -> None:
    assert peak_of("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    assert peak_of("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12
    assert peak_of("NVIDIA L40S", torch.float16) == 362e12
    assert peak_of("Tesla T4", torch.float16, tf32=True) == 65e12
    assert peak_of("Tesla T4", torch.bfloat16) is None
    assert peak_of("Tesla V100-SXM2-16GB", torch.float32, tf32=True) == 15.7e12
    assert peak_of("NVIDIA A3000", torch.float16) is None
    assert peak_of("NVIDIA GH200 480GB", torch.bfloat16) == 989e12
    assert peak_of("NVIDIA GB200", torch.bfloat16) == 2500e12 and peak_of("NVIDIA B200", torch.bfloat16) == 2250e12
    assert peak_of("NVIDIA H200 NVL", torch.bfloat16) == 835e12
    # A slice of a GPU has only a fraction of its rate.
    assert peak_of("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16) is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 19.5),
        ("NVIDIA A30", 10.3),
        ("NVIDIA H100 80GB HBM3", 67),
        ("NVIDIA H100 PCIe", 51),
        ("NVIDIA H200", 67),
        ("NVIDIA GB200", 40),
        ("Tesla V100-PCIE-16GB", 7),
    ],
)
def test_float64_peaks_are_those_of_tensor_cores_where_available(name: str, tera: float) -> None:
    assert peak_of(name, torch.float64) == pytest.approx(tera * 1e12)


SETTINGS = {
    "pass": False,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
}


def test_each_torch_setting_for_tf32_is_detected() -> None:
    """Tests each setting in a separate process: they cannot be mixed, nor reset."""
    program = f"""
import os, torch
from leyden.callbacks.peak_flops import _allows_tf32
for line in {list(SETTINGS)}:
    if os.fork() == 0:
        exec(line)
        print(_allows_tf32(), flush=True)
        os._exit(0)
    os.wait()
"""
    done = run_program(["-c", program])
    assert done.stdout.split() == [str(allows) for allows in SETTINGS.values()], done.stderr


def test_measure_flops_counts_forward_and_backward() -> None:
    with torch.device("meta"):
        net, x = torch.nn.Linear(8, 4), torch.randn(2, 8)
    assert measure_flops(net, lambda: net(x)) == 2 * 2 * 8 * 4
    # Backward computes only the weight's gradient; the input needs none.
    assert measure_flops(net, lambda: net(x), torch.sum) == 2 * 2 * 2 * 8 * 4
    assert net.weight.grad is None
