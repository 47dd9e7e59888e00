"""CSVLogger: real files, read back."""

from __future__ import annotations

import csv
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from logged import set_up
from programs import run_program

from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.core.errors import ConfigurationError


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(logger.metrics_file_path, newline="") as file:
        return list(csv.DictReader(file))


def in_trainer(root: Path, stage: str = "fit", **arguments: Any) -> CSVLogger:
    logger = CSVLogger(**arguments)
    set_up(root, logger, stage=stage)
    return logger


def test_a_metric_named_step_gets_its_own_column(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"step": 40, "loss": 0.5}, step=7)
    logger.save()
    assert Path(logger.metrics_file_path).read_text() == "step,loss,logged_step\n7,0.5,40\n"


def test_a_late_column_keeps_earlier_rows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()
    logger.log_metrics({"val, loss": 0.5}, 1)
    logger.log_metrics({"loss": 0.25, "lr": 0.1}, 2)
    logger.save()
    assert rows(logger) == [
        {"step": "1", "loss": "1.0", "val, loss": "", "lr": ""},
        {"step": "1", "loss": "", "val, loss": "0.5", "lr": ""},
        {"step": "2", "loss": "0.25", "val, loss": "", "lr": "0.1"},
    ]
    assert sorted(entry.name for entry in Path(logger.log_dir or "").iterdir()) == ["metrics.csv", "run.json"]


def test_the_file_is_rewritten_only_when_the_header_grows(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    inodes = []
    for step in range(1, 6):
        logger.log_metrics({"a": step} if step < 4 else {"a": step, "b": 0}, step)
        inodes.append(os.stat(logger.metrics_file_path).st_ino)
    assert len(set(inodes[:3])) == 1
    assert len(set(inodes[3:])) == 1
    assert inodes[0] != inodes[3]
    assert [row["a"] for row in rows(logger)] == ["1", "2", "3", "4", "5"]


def test_numbers_survive_a_round_trip_exactly(tmp_path: Path) -> None:
    values = [random.Random(0).random() * 10**exponent for exponent in (-300, -5, 0, 5, 300)]
    logger = CSVLogger(tmp_path)
    for step, value in enumerate([*values, float("nan"), float("inf"), -float("inf")]):
        logger.log_metrics({"x": value}, step)
    logger.save()
    read = [float(row["x"]) for row in rows(logger)]
    assert read[:5] == values
    assert math.isnan(read[5])
    assert read[6:] == [float("inf"), -float("inf")]


def test_rows_reach_the_disk_every_n_steps(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=20)
    seen = []
    for step in range(5, 51, 5):
        logger.log_metrics({"x": 0.0}, step)
        path = Path(logger.metrics_file_path)
        seen.append(len(path.read_text().splitlines()) - 1 if path.exists() else 0)
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8, 8, 8]


def test_an_omitted_step_continues_the_count(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in (None, None, 7, None):
        logger.log_metrics({"x": 1}, step)
    logger.save()
    assert [row["step"] for row in rows(logger)] == ["0", "1", "7", "8"]


def test_values_can_be_logged_after_finalize(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"x": 1}, 1)
    logger.finalize("success")
    logger.log_metrics({"test": 2}, 1)
    logger.finalize("success")
    assert rows(logger) == [{"step": "1", "x": "1", "test": ""}, {"step": "1", "x": "", "test": "2"}]


@pytest.mark.parametrize("flushed_later", [True, False])
def test_a_resume_removes_values_logged_after_the_checkpoint(tmp_path: Path, flushed_later: bool) -> None:
    whole = in_trainer(tmp_path / "whole")
    broken = in_trainer(tmp_path / "broken")
    state: dict[str, Any] = {}
    for logger in (whole, broken):
        for step in (1, 2):
            logger.log_metrics({"loss": 1 / step}, step)
        state = logger.state_dict()
        logger.save()
        # A row at the checkpoint's step but logged after it, and a new column.
        logger.log_metrics({"val": 0.5}, 2)
        logger.log_metrics({"loss": 0.3}, 3)
        if logger is whole or flushed_later:
            logger.save()
    resumed = in_trainer(tmp_path / "broken")
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    resumed.log_metrics({"val": 0.5}, 2)
    resumed.log_metrics({"loss": 0.3}, 3)
    resumed.save()
    assert resumed.log_dir == broken.log_dir
    assert Path(resumed.metrics_file_path).read_bytes() == Path(whole.metrics_file_path).read_bytes()


def test_the_state_counts_unwritten_rows(tmp_path: Path) -> None:
    logger = in_trainer(tmp_path)
    assert logger.version == 0
    for step in range(3):
        logger.log_metrics({"x": step}, step)
    assert logger.state_dict()["rows"] == 3
    logger.save()
    assert logger.state_dict()["rows"] == 3


def test_testing_a_checkpoint_removes_no_rows(tmp_path: Path) -> None:
    logger = in_trainer(tmp_path)
    logger.log_metrics({"x": 1}, 1)
    state = logger.state_dict()
    logger.log_metrics({"x": 2}, 2)
    logger.finalize("success")
    tester = in_trainer(tmp_path, stage="test")
    tester.load_state_dict(state)
    tester.log_metrics({"test": 3}, 2)
    tester.finalize("success")
    assert [row["x"] for row in rows(tester)] == ["1", "2", ""]
    assert rows(tester)[2]["test"] == "3"


def test_an_open_logger_can_return_to_a_checkpoint(tmp_path: Path) -> None:
    logger = in_trainer(tmp_path)
    logger.log_metrics({"x": 1}, 1)
    state = logger.state_dict()
    logger.log_metrics({"x": 2}, 2)
    logger.finalize("success")
    logger.log_metrics({"x": 3}, 3)
    logger.load_state_dict(state)
    logger.log_metrics({"x": 20}, 2)
    logger.finalize("success")
    assert [row["x"] for row in rows(logger)] == ["1", "20"]


def test_an_earlier_run_of_the_same_version_is_kept_with_a_warning(tmp_path: Path) -> None:
    for value in (1, 2):
        logger = CSVLogger(tmp_path, version="same")
        logger.log_metrics({"x": value}, 1)
        if value == 1:
            logger.save()
    with pytest.warns(UserWarning, match="1 rows from an earlier run"):
        logger.save()
    assert [row["x"] for row in rows(logger)] == ["1", "2"]


KILLED = """
import os, signal, sys
from leyden.callbacks.loggers.csv_logger import CSVLogger
logger = CSVLogger(sys.argv[1], flush_logs_every_n_steps=1)
for step in range(1, 200):
    logger.log_metrics({"x": step}, step)
    if step == 120:
        print(logger.state_dict(), flush=True)
    if step == 160:
        # A kill during a write can leave such a partial row.
        with open(logger.metrics_file_path, "a") as file:
            file.write("161,16")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_resumes_without_partial_rows(tmp_path: Path) -> None:
    import ast

    done = run_program(["-c", KILLED, tmp_path])
    assert done.returncode == -signal.SIGKILL, done.stderr
    logger = CSVLogger(tmp_path)
    logger.load_state_dict(ast.literal_eval(done.stdout))
    logger.log_metrics({"x": 121}, 121)
    logger.save()
    assert [int(row["x"]) for row in rows(logger)] == list(range(1, 122))
    later = CSVLogger(tmp_path)
    later.load_state_dict(ast.literal_eval(done.stdout) | {"rows": 10**6})
    later.log_metrics({"x": 122}, 122)
    later.save()
    assert [int(row["x"]) for row in rows(later)] == list(range(1, 123))


def test_a_partial_row_is_dropped_when_all_rows_are_kept(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version="same")
    logger.log_metrics({"x": 1.5}, 1)
    logger.save()
    with open(logger.metrics_file_path, "a") as file:
        file.write("2,2.")
    second = CSVLogger(tmp_path, version="same")
    second.log_metrics({"x": 2.5}, 2)
    with pytest.warns(UserWarning, match="1 rows from an earlier run"):
        second.save()
    assert [row["x"] for row in rows(second)] == ["1.5", "2.5"]


@pytest.mark.parametrize("value", [0, -5, True])
def test_flush_interval_must_be_positive(value: int) -> None:
    with pytest.raises(ConfigurationError, match="use 1 or more"):
        CSVLogger(flush_logs_every_n_steps=value)
