"""Fixtures and hooks for the tests in every folder: among them a Trainer that writes nothing, and a disk."""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from models import QUIET

from leyden import Trainer, TrainModule
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.rank_zero import LOGGER

Fit = Callable[..., Trainer]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out tests/device unless it is asked for, and with -m gpu every file without such tests.

    Importing the device of tests/device makes that the process's accelerator. Other files may need packages that a
    machine with a GPU lacks.
    """
    if collection_path.name == "device":
        asked = any("device" in Path(argument.partition("::")[0]).parts for argument in config.args)
        return None if asked else True
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py" or collection_path.parent.name == "gpu":
        return None
    return True if "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_finish() -> None:
    """Exempts torch and the collected tests, which live until the end, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _leaves_process_group() -> Iterator[None]:
    """Ends a process group that a file's tests created in pytest's own process: forked ranks would inherit it."""
    yield
    if dist.is_initialized():
        sys.modules["leyden.strategies.process_group"]._leave()  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _shows_lines_as_a_plain_script() -> Iterator[None]:
    """Ignores pytest's own logging handlers, so that Leyden's lines are printed as in a script without logging."""

    def has_handlers() -> bool:
        handlers = [*LOGGER.handlers, *logging.root.handlers]
        return any(not type(handler).__module__.startswith("_pytest") for handler in handlers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOGGER, "hasHandlers", has_handlers)
        yield


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Handles SIGINT as in a terminal: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a Trainer that shows and writes nothing."""
    return {**QUIET, "default_root_dir": tmp_path}


@pytest.fixture
def fit(quiet: dict[str, Any]) -> Fit:
    """Returns a function that fits for one epoch, unless its arguments say otherwise."""

    def run(module: TrainModule, train: Any, val: Any = None, **arguments: Any) -> Trainer:
        trainer = Trainer(**{"max_epochs": 1, **quiet, **arguments})
        trainer.fit(module, train, val)
        return trainer

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that writes a tree to a checkpoint on disk and reads it back."""

    def round_trip(tree: Any, **reading: Any) -> Any:
        with CheckpointWriter(tmp_path / "tree") as writer:
            writer.state("user", tree)
            path = writer.commit(progress={})
        return CheckpointReader(path).state("user", **reading)

    return round_trip
