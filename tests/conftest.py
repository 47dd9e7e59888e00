"""What holds for the tests of every folder."""

import gc
import signal
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


def pytest_collection_finish() -> None:
    """Takes torch and the collected tests, which live to the end, out of what each garbage collection visits."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _leaves_process_group() -> Iterator[None]:
    """Ends a process group that a file's tests have made in pytest itself: ranks that are forked would take it."""
    yield
    if dist.is_initialized():
        sys.modules["leyden.strategies.process_group"]._leave()  # type: ignore[attr-defined]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores SIGINT, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
