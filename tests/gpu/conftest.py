"""The device of the tests in this folder, and the table at the end of `python -m pytest -m gpu`.

Each test takes the fixture `device`, and so runs twice: on the CPU in the default run, which keeps its code from
decaying, and on a GPU with `-m gpu`. Tests of what only a GPU has take `cuda` instead. Figures that a test passes to
`record_property` appear in its row of the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
# cuBLAS reads it when it allocates its first workspace, possibly in another test.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
    ],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and a GPU. Ends a process group that the test created: the other device needs another backend."""
    yield torch.device(request.param)
    if request.param == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    if dist.is_initialized():
        sys.modules["leyden.strategies.process_group"]._leave()  # type: ignore[attr-defined]


@pytest.fixture(params=[CUDA])
def cuda(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU, for what no CPU has."""
    yield torch.device(request.param)
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Allows only algorithms that give the same bits each time."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


# the table ------------------------------------------------------------------------------------------------------------
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints a row for each test of a run with -m gpu, and writes the table to the folder GPU_TABLE, if it is set."""
    if config.option.markexpr != "gpu":
        return
    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
    rows = [_row(name, report) for name in outcomes for report in terminalreporter.stats.get(name, [])]
    rows.sort(key=lambda row: row["name"])
    terminalreporter.section("the GPU table")
    for row in rows:
        reason = f" ({row['reason']})" if row["reason"] else ""
        terminalreporter.line(f"{row['outcome']:<8}{row['seconds']:7.1f} s  {row['name']}{reason}")
        for name, value in row["figures"].items():
            terminalreporter.line(f"{'':<19}{name}: {value}")
    if os.environ.get("GPU_TABLE"):
        _write(Path(os.environ["GPU_TABLE"]), rows)


def _row(outcome: str, report: Any) -> dict[str, Any]:
    file, _, test = report.nodeid.partition("::")
    # "tests/gpu/test_saves.py::test_a_save[cuda-ddp]" becomes "saves: a save [ddp]".
    name, _, parameters = test.removeprefix("test_").partition("[")
    shown = re.sub("(^|-)cuda(?=-|$)", "", parameters.removesuffix("]")).strip("-")
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr or "") if crash is None else crash.message
    words = f"{Path(file).stem.removeprefix('test_')}: {name.replace('_', ' ')}{f' [{shown}]' if shown else ''}"
    return {
        # A file that is skipped as a whole has no test.
        "name": words.removesuffix(": "),
        "outcome": outcome,
        "seconds": round(getattr(report, "duration", 0.0), 2),
        "reason": next(iter(reason.strip().splitlines()), ""),
        "figures": dict(getattr(report, "user_properties", ())),
        "test": report.nodeid,
    }


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the table, with the machine that it describes."""
    check = [sys.executable, str(ROOT / "scripts" / "gpu-check")]
    machine = subprocess.run(check, capture_output=True, text=True, timeout=120).stdout
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps({"machine": machine.splitlines(), "rows": rows}, indent=1))
    table = ["| check | result | seconds | figures |", "|---|---|---|---|"]
    for row in rows:
        found = [*([row["reason"]] if row["reason"] else []), *(f"{n}: {value}" for n, value in row["figures"].items())]
        figures = "<br>".join(found).replace("|", "\\|")
        table.append(f"| {row['name']} | {row['outcome']} | {row['seconds']:.1f} | {figures} |")
    (folder / "gpu.md").write_text("\n".join(["```", machine.rstrip(), "```", "", *table, ""]))
