"""The helper that runs functions on ranks reports which rank failed, and leaves no process behind."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from ranks.world import run_world


def add_up(value: float) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def fail_on_rank_one() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("of rank one")
    return "fine"


def hang() -> None:
    threading.Event().wait()


def leave() -> None:
    os._exit(3)


def test_every_rank_returns_its_result() -> None:
    assert run_world(2, add_up, 2.0) == [6.0, 6.0]


def test_the_failure_names_the_rank() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 raised(.|\n)*ValueError: of rank one"):
        run_world(2, fail_on_rank_one)
    assert run_world(2, fail_on_rank_one, may_fail=True) == ["fine", "ValueError: of rank one"]


def test_a_hanging_rank_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 0 hangs"):
        run_world(1, hang, timeout=0.5)


def test_a_rank_that_exits_silently_returns_its_exit_code() -> None:
    assert run_world(1, leave, may_fail=True) == [3]
