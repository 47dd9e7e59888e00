"""docs/configuration.md is executable: its files are written as shown, and its commands run in order."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
HYDRA = PAGE.index("## Hydra")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Creates the files of the page in a folder, and changes to it."""
    for name, text in re.findall(r"```(?:python|yaml)\n# ([\w/]+\.\w+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("shapes", "adaptive"):
        sys.modules.pop(name, None)


def commands(text: str) -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def run(line: str, environ: dict[str, str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a line of the page, in this process if it starts no ranks; returns its output."""
    line, _, file = line.partition(" > ")
    words = shlex.split(line)
    if "launch" in words or "--trainer.devices" in words:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout
    patch.setattr(sys, "argv", words[1:] if words[0] == "python" else words)
    status: Any = 0
    try:
        status = main(words[1:]) if words[0] == "leyden" else runpy.run_path(words[1], run_name="__main__") and 0
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status in (0, None), printed.err
    if file:
        Path(file).write_text(printed.out, encoding="utf-8")
    return printed.out


def same_configurations(one: str, other: str) -> bool:
    return Path(one, "config.yaml").read_text() == Path(other, "config.yaml").read_text()


def test_a_cli_runs_and_saves_a_configuration_composed_by_hydra(
    folder: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra", reason="pip install hydra-core")
    lines = commands(PAGE[HYDRA:])
    assert len(lines) == 2
    for line in lines:
        run(line, environ, monkeypatch, capsys)
    saved = yaml.safe_load((folder / "hydra_runs/logs/version_0/config.yaml").read_text())
    assert saved["model"] == {"class_path": "shapes.Net", "init_args": {"width": 16, "rate": 0.1}}
    assert same_configurations("hydra_runs/logs/version_0", "hydra_runs/logs/version_1")


@pytest.mark.full
def test_every_command_on_the_page_runs(
    folder: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = commands(PAGE[:HYDRA])
    assert len(lines) > 15
    for line in lines:
        run(line, environ, monkeypatch, capsys)
    assert yaml.safe_load((folder / "defaults.yaml").read_text())["trainer"]["max_steps"] == -1
    monkeypatch.setattr(sys, "argv", ["inspect_run.py"])
    runpy.run_path("inspect_run.py")
    assert "16 8" in capsys.readouterr().out
