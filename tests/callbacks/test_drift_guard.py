"""DriftGuard: the next check finds replicas that have drifted apart, and names the rank."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks.world import run_world
from samples import pairs
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer, seed_everything
from leyden.callbacks import DriftGuard, ModelCheckpoint
from leyden.callbacks.drift_guard import _compare
from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy

FLIPPED = 137


class Net(Squares):
    """One rank flips the sign of its averaged gradient in some steps."""

    def __init__(self, rank: int = 0, flipped: range = range(0)) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
        self.rank, self.flipped = rank, flipped

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.trainer.global_rank == self.rank and self.trainer.global_step + 1 in self.flipped:
            grad: Any = self.net[0].weight.grad  # type: ignore[index, union-attr]
            (grad._local_tensor if hasattr(grad, "_local_tensor") else grad).neg_()


class RankLocalState(Net):
    """Has buffers, and a parameter that DDP ignores, that differ between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(1))
        self._ddp_params_and_buffers_to_ignore = ["own", "seen"]

    def loss(self, batch: Any) -> Any:
        self.seen += batch[0].sum()
        return super().loss(batch) + (self.own - self.trainer.global_rank).square().sum()


def train(module: Net, guard: DriftGuard, samples: int = 900, **arguments: Any) -> None:
    seed_everything(0)
    for layer in module.net:  # type: ignore[union-attr]
        layer.reset_parameters()
    trainer = Trainer(**{**QUIET, "strategy": "ddp", "max_steps": 150, "callbacks": guard, **arguments})
    trainer.fit(module, DataLoader(pairs(samples, inputs=2), batch_size=2))


def warned(module: Net, every: int, samples: int = 900, **arguments: Any) -> tuple[list[str], list[int]]:
    guard = DriftGuard(every, "warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(module, guard, samples, **arguments)
    return [str(warning.message) for warning in caught if "drifted" in str(warning.message)], guard.drifted


def on_three_ranks() -> dict[str, Any]:
    return {
        "persistent": warned(Net(1, range(FLIPPED, 1000)), 1),
        "transient": warned(Net(1, range(FLIPPED, FLIPPED + 1)), 10),
        "first rank": warned(Net(0, range(4, 5)), 3, max_steps=7),
        "between": warned(Net(1, range(7, 8)), 6, max_steps=8),
        "none": warned(Net(), 1, max_steps=4),
        # The last global batch has a sample for the first rank only.
        "idle ranks": warned(Net(2, range(4, 5)), 1, samples=19, max_epochs=1, max_steps=-1),
        "windows": warned(Net(2, range(3, 4)), 1, accumulate_grad_batches=2, max_steps=4),
        "rank-local state": warned(RankLocalState(), 1, max_steps=4),
    }


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_world(3, on_three_ranks)


@pytest.mark.parametrize(
    ("case", "step", "agreed", "odd", "others"),
    [
        ("persistent", 137, 136, 1, "ranks 0 and 2"),
        ("transient", 140, 130, 1, "ranks 0 and 2"),
        ("first rank", 6, 3, 0, "ranks 1 and 2"),
        ("idle ranks", 4, 3, 2, "ranks 0 and 1"),
        ("windows", 3, 2, 2, "ranks 0 and 1"),
    ],
)
def test_three_replicas_identify_the_drifted_rank(
    three: list[dict[str, Any]], case: str, step: int, agreed: int, odd: int, others: str
) -> None:
    [text], _ = three[0][case]
    start = f"after step {step} rank {odd} has drifted from {others}: net.0.weight differs. All agreed after step "
    assert text.startswith(f"{start}{agreed}. ")
    assert [rank[case][1] for rank in three] == [[odd]] * 3
    assert three[1][case][0] == []


@pytest.mark.parametrize("case", ["none", "between", "rank-local state"])
def test_replicas_that_agree_at_each_check_pass(three: list[dict[str, Any]], case: str) -> None:
    assert [rank[case] for rank in three] == [([], [])] * 3


def stop(folder: str) -> None:
    keeper = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    guard = DriftGuard(10)
    train(Net(1, range(13, 14)), guard, callbacks=[guard, keeper], enable_checkpointing=True)


def test_two_replicas_name_both_ranks_and_save_no_drifted_weights(tmp_path: Path) -> None:
    ended = [str(end) for end in run_world(2, stop, str(tmp_path), may_fail=True)]
    drift = r"ranks 0 and 1 have drifted apart: net\.0\.weight differs\. All agreed after step 10\."
    words = f"DriftError: after step 20 {drift}"
    # The first rank to raise reports the error; it ends the others.
    assert all(re.match(rf"{words}|1$", end) for end in ended) and any(re.match(words, end) for end in ended)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=10", "step=15", "step=5"]


def refuse() -> None:
    train(Net(), DriftGuard(), strategy="fsdp")


def test_a_strategy_without_replicas_raises() -> None:
    ended = [str(end) for end in run_world(2, refuse, may_fail=True)]
    words = "ConfigurationError: DriftGuard compares replicas, and strategy='fsdp' has none: each of the 2 ranks"
    assert any(end.startswith(words) for end in ended)


def on_four_ranks() -> dict[str, Any]:
    """Two replicas on two ranks each: the first and the third rank hold the same shards."""
    short = {"samples": 80, "max_steps": 8}
    flip = range(6, 7)
    found: dict[str, Any] = {
        "hsdp": warned(Net(3, flip), 2, strategy=FSDPStrategy(device_mesh=(2, 2)), **short),
        "hsdp, none": warned(Net(), 2, strategy=FSDPStrategy(device_mesh=(2, 2)), **short),
        "mesh": warned(Net(3, flip), 2, strategy=MeshStrategy(dp_replicate=2, dp_shard=2), **short),
        "ddp pair": warned(Net(2, flip), 2, strategy=DDPStrategy(), **short),
    }
    strategy = MeshStrategy(dp_replicate=2, tp=2, plan={"net.0": "colwise", "net.1": "rowwise"})
    found["tp"] = warned(Net(), 2, strategy=strategy, **short), strategy.replicas
    return found


def test_replicated_shards_are_compared() -> None:
    ranks = run_world(4, on_four_ranks)
    for case in ("hsdp", "mesh"):
        [text], drifted = ranks[0][case]
        assert text.startswith("after step 6 ranks 1 and 3 have drifted apart: net.0.weight differs.") and drifted == [
            1,
            3,
        ]
    assert ranks[0]["ddp pair"][1] == [2]
    assert ranks[0]["hsdp, none"] == ([], [])
    assert ranks[0]["tp"] == (([], []), [[0, 2], [1, 3]])


def test_one_process_has_nothing_to_compare() -> None:
    guard = DriftGuard(1)
    train(Net(0, range(3, 4)), guard, strategy="auto", max_steps=5)
    assert guard.drifted == []


@pytest.mark.parametrize(
    ("values", "odd", "words"),
    [
        ("aaa", [], ""),
        ("aba", [1], "rank 1 has drifted from ranks 0 and 2: w differs, the first of 2 parameters that do"),
        ("aaabb", [3, 4], "ranks 3 and 4 have drifted from ranks 0, 1 and 2"),
        ("aabb", [0, 1, 2, 3], "ranks 0, 1, 2 and 3 have drifted apart"),
        ("abc", [0, 1, 2], "ranks 0, 1 and 2 have drifted apart"),
        ("a" * 20 + "b", [20], "rank 20 has drifted from 20 ranks (0, 1, 2, 3, 4, 5, 6, 7, …)"),
    ],
)
def test_the_minority_of_replicas_is_named(values: str, odd: list[int], words: str) -> None:
    digests = {rank: {"v": "same", "w": value, "x": value} for rank, value in enumerate(values)}
    apart, text = _compare(digests)
    assert apart == odd and text.startswith(words)


@pytest.mark.parametrize(
    ("arguments", "words"), [((0,), "every_n_steps=0"), ((True,), "every_n_steps=True"), ((1, "stpo"), "'stop'")]
)
def test_invalid_arguments_raise(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DriftGuard(*arguments)
