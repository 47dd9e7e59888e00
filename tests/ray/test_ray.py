"""Fits in workers of Ray: a killed worker, an error, and trials. Each test starts Ray on this machine, and ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import serving
from torch import Tensor
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.checkpoint.folder import all_checkpoints
from leyden.checkpoint.format.bucket import BucketPath
from leyden.checkpoint.reader import CheckpointReader
from leyden.integrations.ray import RayTrainReportCallback, checkpoint_path, prepare_trainer
from leyden.launch.processes import descendants, runs, started

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that runs a script on a Ray of its own, ends all its processes, and returns its output."""

    def run_script(script: Path, *arguments: str) -> str:
        variables = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray takes one report per interval, of 2 seconds by default.
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        }
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(script), *arguments], env=variables, stdout=output, stderr=output
            )
            family: dict[str, str] = {}
            try:
                status = process.wait(600)
            finally:
                family |= {str(child): started(child) for child in descendants(process.pid)}
                process.kill()
                with suppress(FileNotFoundError):
                    family |= json.loads((tmp_path / "family.json").read_text())
                for child, start in family.items():
                    if start not in ("0", "gone") and runs(int(child), start):
                        os.kill(int(child), signal.SIGKILL)
        text = (tmp_path / "output").read_text()
        assert status == 0, text[-8000:]
        return text

    return run_script


@pytest.fixture
def drive(run: Callable[..., str], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Returns a function that runs a scenario of driver.py, and returns what it and its workers wrote."""

    def run_scenario(scenario: str) -> dict[str, Any]:
        run(Path(__file__).with_name("driver.py"), scenario, str(tmp_path))
        found: dict[str, Any] = {}
        for name in ("outcome", "fitted", "failed"):
            with suppress(FileNotFoundError):
                found |= json.loads((tmp_path / f"{name}.json").read_text())
        return found

    return run_scenario


def test_a_run_whose_worker_was_killed_ends_as_one_without_ray(
    drive: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    found = drive("killed")
    assert (tmp_path / "killed").exists()
    storage = tmp_path / "storage" / "run"
    # The last reports and the kill race, so Ray may know an earlier step only.
    assert Path(found["resumed"]).parent == storage
    assert Path(found["resumed"]).name in [
        f"epoch={epoch}-step={step}" for epoch, step in ((0, 2), (0, 4), (0, 5), (1, 6))
    ]
    assert found["step"] == 10
    assert found["weights"] == found["reference"]
    # The callback wrote each checkpoint where Ray keeps it, and Ray has deleted all but two.
    assert found["last"] == str(storage / "epoch=1-step=10")
    assert [(tmp_path / f"newest-{rank}").read_text() for rank in (0, 1)] == [found["last"]] * 2
    assert set(found["kept"]) == {str(storage / "epoch=1-step=8"), found["last"]}
    assert {path.name for path in storage.glob("epoch=*")} == {"epoch=1-step=8", "epoch=1-step=10"}
    assert found["metrics"]["step"] == 10 and found["metrics"]["epoch"] == 1 and found["metrics"]["loss_epoch"] > 0
    CheckpointReader(Path(found["last"])).verify()


@pytest.mark.full
def test_an_announced_preemption_saves_once_and_training_goes_on(
    drive: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    found = drive("drained")
    storage = tmp_path / "storage" / "run"
    kept = {Path(path).name for path in found["kept"]}
    # Ray is asked after steps 1, 2 and 4; after the third one, too, if a step took seconds.
    [extra] = kept - {"epoch=0-step=5", "epoch=1-step=10"}
    assert len(kept) == 3 and extra in ("epoch=0-step=3", "epoch=0-step=4")
    assert all((storage / name / "manifest.json").is_file() for name in kept)
    assert found["resumed"] is None and found["step"] == 10
    assert found["weights"] == found["reference"]


@pytest.mark.full
def test_a_restart_resumes_from_a_bucket_that_all_workers_write_to(
    drive: Callable[[str], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch) as server:
        found = drive("bucket")
        assert (tmp_path / "killed").exists() and found["resumed"].startswith("s3://runs/ray/run/epoch=")
        assert found["weights"] == found["reference"]
        assert found["last"] == "runs/ray/run/epoch=1-step=10"
        CheckpointReader(f"s3://{found['last']}").verify()
        # Each file was written once: Ray has uploaded nothing, and has deleted all but two.
        sent = [path for method, path, _ in server.requests if method == "PUT" and path.endswith(("0.json", "1.json"))]
        assert any(path.endswith("rank-1.json") for path in sent) and len(sent) == len(set(sent))
        kept = all_checkpoints(BucketPath("s3://runs/ray/run"))
        assert [path.name for path in kept] == ["epoch=1-step=8", "epoch=1-step=10"]


@pytest.mark.full
def test_a_restart_resumes_from_a_storage_that_only_ray_can_write_to(
    drive: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    found = drive("other")
    assert (tmp_path / "killed").exists() and found["resumed"] is not None
    assert found["weights"] == found["reference"]
    CheckpointReader(tmp_path / "other" / found["last"]).verify()


def test_an_error_reaches_ray_as_that_error_and_misfits_are_refused(drive: Callable[[str], dict[str, Any]]) -> None:
    found = drive("failed")
    # Not the death of the worker's process.
    assert list(found["failures"]) == ["1"]
    assert "KeyError('sample 13 is missing')" in found["failures"]["1"]
    assert found["error"] == "sample 13 is missing"
    assert found["joined"] is True
    assert "leave out strategy='single_device'" in found["refused"]["strategy"]
    assert "Leave them out: RayTrainReportCallback saves" in found["refused"]["preemption"]
    assert found["refused"]["resume"] == found["refused"]["preemption"]
    assert found["refused"]["devices"].startswith("Ray started 2 ranks")
    assert "Ray Data deals its rows to the workers" in found["refused"]["rows"]
    assert found["refused"]["rows"].endswith("use_distributed_sampler=False.")


@pytest.mark.full
def test_each_row_of_ray_data_is_trained_once_an_epoch(drive: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    assert drive("rows")["step"] == 10
    first, second = (json.loads((tmp_path / f"read-{rank}").read_text()) for rank in (0, 1))
    assert sorted(first + second) == sorted(2 * list(range(40)))


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def test_a_fit_outside_of_a_worker_is_refused_and_a_test_runs(tmp_path: Path) -> None:
    loader = DataLoader(torch.ones(2, 1))
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False, callbacks=[RayTrainReportCallback()])
    for outside in (lambda: trainer.fit(Line(), loader), lambda: prepare_trainer(trainer), checkpoint_path):
        with pytest.raises(ConfigurationError, match="only in a worker of Ray: call it in the function passed to"):
            outside()
    [found] = trainer.test(Line(), loader, verbose=False)
    assert list(found) == ["loss"]


@pytest.mark.full
def test_four_trials_report_metrics_and_checkpoints(drive: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    found = drive("tuned")
    assert found["errors"] == 0
    trials = found["trials"]
    assert sorted(trial["lr"] for trial in trials) == [0.01, 0.05, 0.1, 0.2]
    assert found["best"] == min(trials, key=lambda trial: trial["loss"])["lr"]
    for trial in trials:
        CheckpointReader(Path(trial["checkpoint"])).verify()
        assert "The Trainer would start 2 ranks" in (tmp_path / f"refused-{trial['lr']}").read_text()


@pytest.mark.full
def test_the_example_runs(run: Callable[..., str], tmp_path: Path) -> None:
    text = run(ROOT / "examples" / "ray_train.py", "--epochs", "2", "--root", str(tmp_path / "ray"))
    [accuracy] = re.findall(r"^test accuracy (\S+), from .*/ray/train/epoch=1-step=76$", text, re.MULTILINE)
    assert float(accuracy) > 0.5


@pytest.mark.full
def test_the_code_of_the_page_runs(run: Callable[..., str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks).replace("/tmp/ray-runs", str(tmp_path / "runs")))
    lines = run(script).splitlines()
    assert f"{tmp_path}/runs/line/epoch=2-step=12" in "".join(lines)
    assert lines.count("{'lr': 0.1}") == 1
