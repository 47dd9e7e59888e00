"""`leyden new`: the project that it writes trains, passes its own tests, and depends on the Leyden that wrote it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

import leyden
from leyden.cli.new.new import TEMPLATE, render

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(leyden_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    done = leyden_in(folder, "new", "rain")
    assert done.returncode == 0, done.stderr
    # What is printed are the README's commands.
    commands = re.findall(r"```bash\n(.*?)```", (folder / "rain" / "README.md").read_text(), re.DOTALL)[0]
    assert done.stdout.endswith("".join(f"  {line}\n" for line in ["cd rain", *commands.splitlines()]))
    return folder / "rain"


def run(project: Path, *command: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = run_program(["-m", *command], folder=project, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_project_trains_and_its_best_checkpoint_is_tested(project: Path) -> None:
    output = run(project, "leyden", "fit", "--config", "config.yaml", "--trainer.default_root_dir", "trained")
    best = re.search(r"best .*\(val_acc=([\d.]+)\)", output)
    assert best is not None and float(best[1]) > 0.97, output
    checkpoint = next((project / "trained" / "logs" / "version_0" / "checkpoints").iterdir())
    tested = run(project, "leyden", "test", "--config", "config.yaml", "--ckpt_path", str(checkpoint))
    accuracy = re.search(r"test_acc +([\d.]+)", tested)
    assert accuracy is not None and float(accuracy[1]) > 0.95, tested


def test_ruff_has_no_complaint_with_its_own_defaults(project: Path) -> None:
    """Nor would it format the files differently."""
    for command in (("check", "--isolated", "--extend-select", "I,B"), ("format", "--isolated", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache"], cwd=project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_options_change_the_configuration(project: Path) -> None:
    options = ("--model.width", "8", "--data.batch_size", "64", "--trainer.max_epochs", "1")
    run(project, "leyden", "fit", "--config", "config.yaml", "--trainer.default_root_dir", "changed", *options)
    yaml: Any = pytest.importorskip("yaml")
    saved = yaml.safe_load((project / "changed" / "logs" / "version_0" / "config.yaml").read_text())
    assert saved["model"] == {
        "class_path": "rain.module.Classifier",
        "init_args": {"width": 8, "dropout": 0.25, "lr": 0.002},
    }
    assert saved["data"]["init_args"] == {"batch_size": 64} and saved["trainer"]["max_epochs"] == 1


def test_its_own_tests_pass(project: Path) -> None:
    assert "2 passed" in run(project, "pytest", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    "folder, message",
    [
        ("missing/rain", "There is no folder "),
        ("full", "is not empty, and nothing is overwritten"),
        ("file", "is a file: name a new folder"),
        ("my-rain", "use letters, digits and underscores"),
        ("_rain", "use letters, digits and underscores"),
        ("class", "use letters, digits and underscores"),
        ("numpy", "A package named 'numpy' would hide another one"),
        ("tests", "A package named 'tests' would hide another one"),
        ("s3://bucket/rain", "is a URL"),
    ],
)
def test_an_error_is_raised_before_anything_is_written(folder: str, message: str, invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    for name in ("full/notes.md", "file"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = invoke("new", folder)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "full" / "notes.md").read_text() == "mine"


def test_an_empty_folder_is_filled(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert invoke("new", "empty").returncode == 0
    written = {path.relative_to(tmp_path / "empty").as_posix() for path in (tmp_path / "empty").rglob("*.*")}
    assert {".gitignore", "config.yaml", "empty/__init__.py", "tests/test_training.py"} < written


def test_nothing_else_in_a_file_depends_on_the_name() -> None:
    """The name given to the template's own files gives them back."""
    files = render("project_name", None)
    for name, text in files.items():
        if name != "pyproject.toml":
            assert text == (TEMPLATE / name).read_text(encoding="utf-8")
    assert not [name for name, text in render("rain", None).items() if "project_name" in name + text]


@pytest.mark.parametrize(
    "local, requirement, source, command",
    [
        (None, f"leyden[cli]>={leyden.__version__}", None, "pip install -e . pytest"),
        (
            ("/my code/leyden", True),
            "leyden[cli]",
            {"path": "/my code/leyden", "editable": True},
            "pip install -e '/my code/leyden' -e . pytest",
        ),
        (
            ("/wheels/leyden-0.1.0-py3-none-any.whl", False),
            "leyden[cli]",
            {"path": "/wheels/leyden-0.1.0-py3-none-any.whl"},
            "pip install /wheels/leyden-0.1.0-py3-none-any.whl -e . pytest",
        ),
    ],
    ids=["released", "checkout", "wheel"],
)
def test_a_project_depends_on_the_leyden_that_wrote_it(
    local: tuple[str, bool] | None, requirement: str, source: dict[str, Any] | None, command: str
) -> None:
    tomllib: Any = pytest.importorskip("tomllib", reason="Python 3.11 has tomllib")
    files = render("rain", local)
    settings = tomllib.loads(files["pyproject.toml"])
    assert settings["project"]["name"] == "rain" and settings["tool"]["setuptools"]["packages"] == ["rain"]
    assert settings["project"]["dependencies"] == [requirement, "scikit-learn>=1.3"]
    assert settings["tool"].get("uv", {}).get("sources", {}).get("leyden") == source
    assert f"\n{command}\n" in files["README.md"]
