"""Profilers: every hook and step by name, and a trace that a viewer can read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from models import Tiny
from samples import numbered

from leyden import ConfigurationError, Trainer
from leyden.trainer.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler


def test_the_simple_profiler_counts_calls(fit: Any, capfd: pytest.CaptureFixture[str]) -> None:
    profiler = SimpleProfiler()
    fit(Tiny(), numbered(4), numbered(2), profiler=profiler, num_sanity_val_steps=0)
    counts = {name: len(times) for name, times in profiler.durations.items()}
    assert counts["training_step"] == 4 and counts["validation_step"] == 2 and counts["on_validation_start"] == 1
    assert all(seconds >= 0 for times in profiler.durations.values() for seconds in times)
    lines = capfd.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["training_step", "4"] for line in lines)


def test_a_profiler_changes_nothing(fit: Any) -> None:
    plain, profiled = Tiny(), Tiny()
    fit(plain, numbered(3), numbered(2))
    fit(profiled, numbered(3), numbered(2), profiler="simple")
    assert profiled.trained == plain.trained and bool((profiled.net.weight == plain.net.weight).all())


def test_traces_name_the_clearing_of_gradients(fit: Any, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "labels")
    fit(Tiny(), numbered(6), profiler=profiler)
    assert any("Optimizer.zero_grad" in path.read_text() for path in tmp_path.rglob("*.json"))


def test_the_advanced_profiler_shows_functions(fit: Any, tmp_path: Path) -> None:
    fit(Tiny(), numbered(2), numbered(1), profiler=AdvancedProfiler(tmp_path, "report"))
    text = (tmp_path / "fit-report.txt").read_text()
    assert "training_step\n" in text and "validation_step\n" in text and "cumulative" in text and "linear" in text


def test_the_pytorch_profiler_writes_a_trace(fit: Any, tmp_path: Path) -> None:
    fit(Tiny(), numbered(8), profiler="pytorch")
    [trace] = [path for path in tmp_path.rglob("*") if ".pt.trace.json" in path.name]
    raw = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = json.loads(raw)["traceEvents"]
    names = [event.get("name") for event in events]
    # The schedule skips one step, warms up for one, and records three.
    assert names.count("training_step") in (3, 6)
    assert any("aten::linear" in str(name) for name in names)
    assert sum(str(name).startswith("ProfilerStep#") for name in names) >= 3


def test_the_pytorch_profiler_writes_a_trace_of_an_evaluation(quiet: Any, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path / "traces", "table")
    Trainer(**quiet, profiler=profiler).test(Tiny(), numbered(8), verbose=False)
    assert len([*(tmp_path / "traces").glob("*.pt.trace.json*")]) == 1
    assert "test_step" in (tmp_path / "traces" / "test-table.txt").read_text()


def test_a_profiler_of_the_users_own_hears_each_action_and_step(fit: Any) -> None:
    class Own(Profiler):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []
            self.steps = 0

        def start(self, action: str) -> None:
            self.calls.append(action)

        def step(self) -> None:
            self.steps += 1

        def summary(self) -> str:
            return ""

    profiler = Own()
    fit(Tiny(), numbered(5), profiler=profiler, accumulate_grad_batches=2)
    assert profiler.calls.count("training_step") == 5 and profiler.steps == 3
    with profiler.profile("mine"):
        pass
    assert profiler.calls[-1] == "mine"


def test_actions_end_in_the_order_of_their_start() -> None:
    profiler = SimpleProfiler()
    profiler.start("outer")
    profiler.start("inner")
    with pytest.raises(ConfigurationError, match="end the innermost action first"):
        profiler.stop("outer")


def test_a_profiler_closes_when_the_run_fails(fit: Any, tmp_path: Path) -> None:
    class Failing(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fit(Failing(), numbered(1), profiler=PyTorchProfiler(tmp_path, "table"))
    fit(Tiny(), numbered(1), profiler=PyTorchProfiler(tmp_path, "table"))
