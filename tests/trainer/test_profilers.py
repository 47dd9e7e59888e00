"""Profilers: the hooks and steps they measure, their reports, and the traces they write."""

from __future__ import annotations

import gzip
import json
import pstats
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import Tiny
from samples import numbered

from leyden import Callback, ConfigurationError, Trainer
from leyden.callbacks import CSVLogger
from leyden.trainer import profilers
from leyden.trainer.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)


def test_the_simple_profiler_counts_calls(fit: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class Module(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("mine"):
                return super().training_step(batch, batch_idx)

    class Counts(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    profiler, module = SimpleProfiler(), Module()
    trainer = fit(
        module, numbered(4), numbered(2), profiler=profiler, num_sanity_val_steps=0, callbacks=[Counts(), Counts()]
    )
    counts = {name: len(times) for name, times in profiler.recorded_durations.items()}
    expected = {"training_step": 4, "mine": 4, "backward": 4, "optimizer_step": 4, "validation_step": 2}
    # The last next() raises StopIteration.
    expected |= {"train_dataloader_next": 5, "validation_dataloader_next": 3, "[Callback]Counts.on_train_batch_end": 8}
    assert {name: counts.get(name) for name in expected} == expected
    assert counts["[TrainModule]Module.on_validation_start"] == 1
    assert all(seconds >= 0 for times in profiler.durations.values() for seconds in times)
    lines = capfd.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["training_step", "4"] for line in lines)
    # After the run, the optimizer is no longer timed.
    trainer.optimizers[0].step()
    assert len(profiler.durations["optimizer_step"]) == 4 and not profiler.current_actions
    profiler.extended = False
    assert "calls" not in profiler.summary() and "total s" in profiler.summary()


def test_the_share_of_loading_is_that_of_the_training_time(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured as by the warning about a slow loader: without set-up, and without batches before a validation."""
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Waits(Tiny):
        def setup(self, stage: str) -> None:
            wait(1000)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wait(3)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            wait(100)

    class Slow:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[Any]:
            for batch in numbered(8):
                wait(1)
                yield batch

    monkeypatch.setattr(profilers.time, "perf_counter", lambda: now)
    profiler = SimpleProfiler()
    fit(Waits(), Slow(), numbered(2), profiler=profiler, max_epochs=2, val_check_interval=4)
    last = profiler.summary().splitlines()[-1]
    # Of each epoch's eight batches, the fourth comes before a validation, and the last one has no next.
    assert re.search(r"train_dataloader_next took 25% of the training time \(12 of 48 s", last)


@pytest.mark.parametrize("given", [None, PassThroughProfiler()], ids=["default", "PassThroughProfiler"])
def test_without_a_profiler_nothing_is_measured(fit: Any, given: Any) -> None:
    trainer = fit(Tiny(), numbered(1), profiler=given)
    assert type(trainer.profiler) is PassThroughProfiler
    with trainer.profiler.profile("mine") as name:
        assert name == "mine"
    assert trainer.profiler.summary() == ""


def test_profiling_does_not_change_training(fit: Any) -> None:
    plain, profiled = Tiny(), Tiny()
    fit(plain, numbered(3), numbered(2))
    fit(profiled, numbered(3), numbered(2), profiler="simple")
    assert profiled.trained == plain.trained and bool((profiled.net.weight == plain.net.weight).all())


def test_traces_label_zero_grad(fit: Any, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, "labels")
    fit(Tiny(), numbered(6), profiler=profiler)
    assert any("Optimizer.zero_grad" in path.read_text() for path in tmp_path.rglob("*.json"))


def test_the_advanced_profiler_reports_functions(fit: Any, tmp_path: Path) -> None:
    fit(Tiny(), numbered(2), numbered(1), profiler=AdvancedProfiler(tmp_path, "report", dump_stats=True))
    text = (tmp_path / "fit-report.txt").read_text()
    assert "training_step\n" in text and "validation_step\n" in text and "cumulative" in text and "linear" in text
    stats = pstats.Stats(str(tmp_path / "fit-report-training_step.prof"))
    assert any("linear" in name for _, _, name in stats.stats)  # type: ignore[attr-defined]
    assert (tmp_path / "fit-report-_TrainModule_Tiny.on_validation_start.prof").exists()


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


def test_the_pytorch_profiler_traces_evaluation(quiet: Any, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path / "traces", "table")
    Trainer(**quiet, profiler=profiler).test(Tiny(), numbered(8), verbose=False)
    assert len([*(tmp_path / "traces").glob("*.pt.trace.json*")]) == 1
    assert "test_step" in (tmp_path / "traces" / "test-table.txt").read_text()


def test_the_pytorch_profilers_output_is_configurable(fit: Any, tmp_path: Path) -> None:
    from torch.profiler import schedule

    chosen = PyTorchProfiler(
        tmp_path / "chosen",
        "table",
        schedule=schedule(wait=1, warmup=1, active=1, repeat=1),
        row_limit=3,
        sort_by_key="count",
        group_by_input_shapes=True,
        export_to_chrome=False,
        export_to_flame_graph=True,
        table_kwargs={"max_name_column_width": 30},
    )
    fit(Tiny(), numbered(4), profiler=chosen)
    text = (tmp_path / "chosen" / "fit-table.txt").read_text()
    assert "Input Shapes" in text and len(re.findall(r"^.*\d%.*$", text, re.M)) == 3
    assert not [*(tmp_path / "chosen").glob("*.json")]
    assert "_training_step" in (tmp_path / "chosen" / "fit-table-3.stack").read_text()

    seen: list[Any] = []
    named = PyTorchProfiler(tmp_path / "named", on_trace_ready=seen.append, row_limit=-1)
    module = Tiny()
    fit(module, numbered(6), profiler=named)
    names = {event.key for event in seen[0].key_averages()}
    assert {"Linear: net", "training_step", "backward", "optimizer_step"} <= names
    assert not (tmp_path / "named").exists() and not module.net._forward_hooks and not module.net._forward_pre_hooks

    unnamed = PyTorchProfiler(tmp_path, "short", record_module_names=False)
    fit(Tiny(), numbered(1), profiler=unnamed)
    assert "recorded nothing" in (tmp_path / "fit-short.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sort_by_key": "cpu"}, "sort_by_key='cpu'"),
        ({"schedule": 3}, "schedule=3.*torch.profiler.schedule"),
        ({"schedule": lambda step: step}, "ProfilerAction"),
        ({"use_gpu": True}, "torch.profiler.profile raised: .*use_gpu"),
    ],
)
def test_invalid_pytorch_profiler_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PyTorchProfiler(**arguments)


def test_a_profiler_written_for_lightning_runs(fit: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class ActionCountProfiler(Profiler):
        """A short form of the example in Lightning's documentation."""

        def __init__(self, dirpath: Any = None, filename: Any = None) -> None:
            super().__init__(dirpath=dirpath, filename=filename)
            self.counts: dict[str, int] = {}
            self.ended: list[Any] = []

        def start(self, action_name: str) -> None:
            self.counts[action_name] = self.counts.get(action_name, 0) + 1

        def stop(self, action_name: str) -> None:
            pass

        def summary(self) -> str:
            return f"counted {self.counts['training_step']}"

        def teardown(self, stage: str | None) -> None:
            self.ended.append((stage, self.counts))
            self.counts = {}
            super().teardown(stage=stage)

    profiler = ActionCountProfiler()
    fit(Tiny(), numbered(3), profiler=profiler)
    assert "counted 3\n" in capfd.readouterr().out
    assert profiler.ended[0][0] == "fit" and profiler.ended[0][1]["backward"] == 3
    profiler = ActionCountProfiler(dirpath=tmp_path, filename="perf")
    profiler.setup("fit", 1)
    profiler.start("training_step")
    profiler.describe()
    assert (tmp_path / "fit-perf-1.txt").read_text() == "counted 1" and profiler.local_rank == 1


def test_a_custom_profiler_receives_every_action_and_step(fit: Any) -> None:
    class RecordsActions(Profiler):
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

    profiler = RecordsActions()
    fit(Tiny(), numbered(5), profiler=profiler, accumulate_grad_batches=2)
    assert profiler.calls.count("training_step") == 5 and profiler.steps == 3
    with profiler.profile("mine"):
        pass
    assert profiler.calls[-1] == "mine"


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_actions_may_overlap(kind: type[Profiler]) -> None:
    profiler = kind()
    for _ in range(2):
        profiler.start("first")
        profiler.start("second")
        profiler.stop("first")
        profiler.stop("second")
    with profiler.profile("first"), profiler.profile("first"):
        pass
    with pytest.raises(ConfigurationError, match=r"stop\('first'\): the action is not running"):
        profiler.stop("first")


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_a_profiler_closes_when_the_run_fails(fit: Any, tmp_path: Path, kind: Any) -> None:
    class Failing(Tiny):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise ValueError("x")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.profiler.start("left open")
            return super().training_step(batch, batch_idx)

    profiler = kind(tmp_path, "table")
    with pytest.raises(ValueError, match="x"):
        fit(Failing(), numbered(1), profiler=profiler)
    fit(Tiny(), numbered(1), profiler=profiler)
    fit(Tiny(), numbered(1), profiler=kind(tmp_path, "table"))


def test_an_unfinished_nested_action_ends_with_the_outer_one() -> None:
    profiler = AdvancedProfiler()
    for _ in range(2):
        with profiler.profile("outer"):
            profiler.start("unfinished")
        sorted([3, 1, 2])
    with profiler.profile("next"):
        min(1, 2)
    own = pstats.Stats(profiler.profiled_actions["next"]).stats  # type: ignore[attr-defined]
    assert any("min" in name for _, _, name in own)
    left = pstats.Stats(profiler.profiled_actions["unfinished"]).stats  # type: ignore[attr-defined]
    assert not any("sorted" in name or "min" in name for _, _, name in left)
    assert profiler.summary().startswith("Each action excludes its nested actions.")


def test_each_logged_run_gets_its_own_summary(quiet: Any, tmp_path: Path) -> None:
    for _ in range(2):
        options = {**quiet, "logger": CSVLogger(tmp_path / "logs"), "default_root_dir": tmp_path, "max_epochs": 1}
        run = Trainer(**options, profiler=SimpleProfiler(filename="perf"))
        run.fit(Tiny(), numbered(2))
        run.test(Tiny(), numbered(2), verbose=False)
        assert run.log_dir is not None and (Path(run.log_dir) / "fit-perf.txt").exists()
    for stage in ("fit", "test"):
        assert len([*(tmp_path / "logs").rglob(f"{stage}-perf.txt")]) == 2
    assert not [*tmp_path.glob("*.txt")]


def test_a_failing_summary_warns(fit: Any, tmp_path: Path) -> None:
    class FailsInSummary(Profiler):
        ended = 0

        def summary(self) -> str:
            raise RuntimeError("no summary")

        def teardown(self, stage: str | None) -> None:
            self.ended += 1

    class FailsInFinalize(CSVLogger):
        def finalize(self, status: str) -> None:
            raise RuntimeError("logger")

    profiler = FailsInSummary()
    with pytest.warns(UserWarning, match="FailsInSummary failed at the end of the run: RuntimeError: no summary"):
        trainer = fit(Tiny(), numbered(2), profiler=profiler)
    assert profiler.ended == 1 and trainer.global_step == 2
    with pytest.warns(UserWarning, match="no summary"), pytest.raises(RuntimeError, match="logger"):
        fit(Tiny(), numbered(2), profiler=profiler, logger=FailsInFinalize(tmp_path))
    assert profiler.ended == 2


def test_an_advanced_profiler_describes_actions_outside_of_a_run(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path / "profiles", "own", dump_stats=True)
    with profiler.profile("sum"):
        sum(range(10))
    profiler.describe()
    assert "sum" in (tmp_path / "profiles" / "own.txt").read_text()
    assert (tmp_path / "profiles" / "own-sum.prof").is_file()
