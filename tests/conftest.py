"""Fixtures and hooks for the tests in every folder."""

import gc
import signal
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


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


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Handles SIGINT as in a terminal: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
