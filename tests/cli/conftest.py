"""Fixtures for tests of the command line: `leyden` as a subprocess or in process, each with its own cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Leyden = Callable[..., "subprocess.CompletedProcess[str]"]


def clean_environ(folder: Path) -> dict[str, str]:
    """Returns the current environment without variables of launchers, with the cache in `folder`."""
    prefixes = ("LEYDEN_", "SLURM_", "RANK", "LOCAL_", "WORLD_", "MASTER_", "HF_HOME", "PYTEST_")
    prefixes += ("PET_", "SKYPILOT_", "DSTACK_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {
        **clean,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="module")
def module_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """`environ` for module-scoped fixtures."""
    return clean_environ(tmp_path_factory.mktemp("module"))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without a launcher's variables and without default configuration files."""
    return clean_environ(tmp_path)


@pytest.fixture
def invoke(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Leyden:
    """Runs `leyden …` in this process, which saves the import of torch; for commands that start no ranks."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        from leyden.cli.main import main

        with monkeypatch.context() as patch:
            for name in set(os.environ) - set(environ):
                patch.delenv(name)
            patch.setenv("XDG_CACHE_HOME", environ["XDG_CACHE_HOME"])
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.chdir(tmp_path)
            capfd.readouterr()
            status = main([str(argument) for argument in arguments])
            done = capfd.readouterr()
        return subprocess.CompletedProcess(["leyden"], status, done.out, done.err)

    return run


def run_leyden(
    folder: Path, environ: dict[str, str], *arguments: object, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leyden", *(str(argument) for argument in arguments)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def leyden(tmp_path: Path, environ: dict[str, str]) -> Leyden:
    """Runs `leyden …` as a subprocess in the test's folder; returns its exit code and output."""

    def run(*arguments: object, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_leyden(tmp_path, {**environ, **variables}, *arguments, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def leyden_in() -> Leyden:
    """Runs `leyden …` as a subprocess in a given folder, for fixtures with a wider scope."""
    return lambda folder, *arguments: run_leyden(folder, clean_environ(folder), *arguments, timeout=240)
