"""Runs killed while their loggers start: the next start clears what they left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from leyden.callbacks import CSVLogger, TensorBoardLogger
from leyden.callbacks.loggers.logger import FolderLogger
from leyden.checkpoint.format import staging

KILLED = """
import os, signal, sys
from pathlib import Path
from leyden.callbacks import CSVLogger
root, point, version = sys.argv[1], int(sys.argv[2]), None if sys.argv[3] == "None" else sys.argv[3]
calls = 0

def audit(event, arguments):
    global calls
    writes = event == "open" and isinstance(arguments[1], str) and any(mark in arguments[1] for mark in "wxa+")
    if (writes or event in ("os.rename", "os.mkdir")) and str(arguments[0]).startswith(root):
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
logger = CSVLogger(root, version=version)
logger.log_hyperparams({"lr": 0.1})
logger.log_run({"started": "2026-02-01T12:30:00.250Z"}, "diff --git")
logger.log_metrics({"loss": 1.0}, step=1)
logger.save()
logger.log_metrics({"loss": 1.0, "late": 2.0}, step=2)
logger.save()
"""


def leftovers(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if staging.is_staging(path.name))


@pytest.mark.parametrize("version", [None, "mine"])
def test_the_next_start_clears_what_a_kill_at_any_point_of_a_start_left(tmp_path: Path, version: str | None) -> None:
    found: list[str] = []
    for point in range(1, 100):
        root = tmp_path / str(point)
        root.mkdir()
        done = run_program(["-c", KILLED, root, point, version])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        found += leftovers(root)
        for starts in root.rglob("starts"):
            for start in (path for path in starts.iterdir() if not staging.is_staging(path.name)):
                assert sorted(os.listdir(start)) == ["diff.patch", "run.json"]
        CSVLogger(root, version=version).log_metrics({"loss": 1.0}, step=1)
        assert leftovers(root) == []
    # The kills have come between the write and the rename of each file.
    for name in ("run.json", "hparams.json", "hparams.yaml", "starts", "metrics.csv"):
        assert any(f".{name}.tmp-" in path for path in found)


def test_loggers_that_share_a_folder_record_a_start_once(tmp_path: Path) -> None:
    record: dict[str, Any] = {"started": "2026-02-01T12:30:00.250Z"}
    loggers: list[FolderLogger] = [CSVLogger(tmp_path, version="mine"), TensorBoardLogger(tmp_path, version="mine")]
    for started in ("2026-02-01T12:30:00.250Z", "2026-02-02T12:30:00.250Z"):
        for logger in loggers:
            logger.log_run({**record, "started": started}, "diff")
    starts = sorted((tmp_path / "logs" / "mine" / "starts").iterdir())
    assert [json.loads((start / "run.json").read_text())["started"][:10] for start in starts] == [
        "2026-02-01",
        "2026-02-02",
    ]
    assert all(sorted(os.listdir(start)) == ["diff.patch", "run.json"] for start in starts)
