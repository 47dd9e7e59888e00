"""`accumulate_grad_batches="auto"` on two ranks: when one runs out of memory, both use smaller micro-batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hungry import (
    Hungry,
    HungrySequences,
    loss_of,
    micro_batches_of,
    pad_collate,
    plain_loop,
    samples,
    sequences_of,
    split_batch,
)
from models import QUIET
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks import AutoAccumulation
from leyden.strategies import FSDPStrategy

# By case: where each of the two ranks runs out of memory, and each step's number of micro-batches.
CASES: dict[str, tuple[dict[Any, int], dict[Any, int], list[int]]] = {
    "never": ({}, {}, [1, 1, 1]),
    "the second rank, forward": ({}, {(1, "forward"): 2}, [1, 2, 2]),
    "the first rank, backward": ({(1, "backward"): 2}, {}, [1, 2, 2]),
    "both, in different places": ({(0, "forward"): 2}, {(0, "backward"): 2}, [2, 2, 2]),
    "one after the other": ({(0, "backward"): 2}, {(1, "forward"): 1}, [2, 4, 4]),
    "the second micro-batch": ({(2, "forward"): 1}, {(1, "backward"): 2}, [1, 2, 2]),
}
SIZE = 4


def strategy_of(name: str) -> Any:
    # Three groups: the two blocks, and the root with the rest.
    return (
        FSDPStrategy(auto_wrap_policy=lambda module: isinstance(module, torch.nn.Sequential))
        if name == "fsdp"
        else name
    )


def trained(name: str, module: Hungry, count: int, **more: Any) -> tuple[Trainer, dict[str, Any]]:
    steps = more.pop("max_steps", -1)
    data = more.pop("data", None) or DataLoader(TensorDataset(*samples(count)), SIZE)
    arguments: dict[str, Any] = {**QUIET, "max_epochs": 1, "max_steps": steps}
    arguments["accumulate_grad_batches"] = more.pop("accumulate_grad_batches", "auto")
    trainer = Trainer(**arguments, strategy=strategy_of(name), callbacks=more.pop("callbacks", None))
    trainer.fit(module, data, **more)
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    # Numbers, since a tensor's memory would go with its rank.
    return trainer, {name: value.tolist() for name, value in state.items()}


def run(name: str, folder: Path) -> dict[str, Any]:
    rank, found = int(os.environ["RANK"]), {}
    for case, (*limits, _) in CASES.items():
        module = Hungry(limits[rank])
        trainer, state = trained(name, module, 20)
        found[case] = (state, module.rows, micro_batches_of(trainer), float(trainer.callback_metrics["loss_epoch"]))
    # Seven samples for the last two steps: one rank has fewer, and then none.
    for items in (False, True):
        module = Hungry({(0, "forward"): 3} if rank else {(1, "backward"): 1}, items=items)
        found[f"uneven {items}"] = trained(name, module, 17)[1]
    # The second rank has less memory.
    for case, most in (("tried", 100 if rank else 1000), ("plain", 1000)):
        long = HungrySequences(most)
        data = DataLoader(sequences_of(16, 40), SIZE, shuffle=True, collate_fn=pad_collate)
        callback = AutoAccumulation(try_largest=True) if case == "tried" else AutoAccumulation(micro_batches=2)
        more: dict[str, Any] = {"accumulate_grad_batches": 1, "callbacks": [callback]}
        torch.manual_seed(5)
        found[case] = (trained(name, long, 16, data=data, **more)[1], long.lengths)
    # DDP has nothing to broadcast for a module without buffers.
    bare = Hungry({(0, "forward"): 2} if rank else {})
    bare.net.register_buffer("seen", None)
    found["bare"] = (trained(name, bare, 20)[1],)
    limits = {(1, "forward"): 2}
    trainer, _ = trained(name, Hungry(limits if rank else {}), 24, max_steps=2)
    trainer.save_checkpoint(folder / "saved")
    again = Hungry(limits if rank else {}, seed=4)
    trainer, state = trained(name, again, 24, ckpt_path=folder / "saved")
    found["resumed"] = (state, again.rows, micro_batches_of(trainer))
    found["whole"] = (trained(name, Hungry(limits if rank else {}), 24)[1],)
    return found


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def ranks(request: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """Returns the results of two ranks, under each strategy."""
    return run_world(2, run, request.param, tmp_path_factory.mktemp("ranks"))


def windows(count: int, parts: list[int]) -> Any:
    """Returns the micro-batches of a plain loop, by step and rank."""
    x, y = samples(count)
    found = []
    for start, number in zip(range(0, count, 2 * SIZE), parts, strict=True):
        whole = x[start : start + 2 * SIZE], y[start : start + 2 * SIZE]
        found.append([split_batch(*share, number) for share in split_batch(*whole, 2)])
    return found


def weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the weights by their names in the net, without its buffer, which differs by rank."""
    numbers = ((name.removeprefix("net."), torch.tensor(value, dtype=torch.float64)) for name, value in state.items())
    return {name: value for name, value in numbers if name != "seen"}


def whole_batches(count: int, items: bool = False) -> tuple[dict[str, Tensor], float]:
    """Trains a plain loop on one process; returns the weights, and the mean loss over the samples."""
    module, total = Hungry(), 0.0
    optimizer = torch.optim.AdamW(module.net.parameters(), lr=0.01)
    for x, y in zip(*(data.split(2 * SIZE) for data in samples(count)), strict=True):
        optimizer.zero_grad()
        losses = (module.net(x) - y).square()
        found = loss_of(losses, x, items)
        (found["loss"] / found["num_items"] if items else found).backward()
        optimizer.step()
        total += float(losses.sum())
    return module.net.state_dict(), total / count


@pytest.mark.parametrize("case", CASES)
def test_weights_are_bit_identical_to_a_plain_loop_with_the_same_micro_batches(ranks: Any, case: str) -> None:
    plain, (whole, mean) = Hungry(), whole_batches(20)
    plain_loop(plain, windows(20, CASES[case][2]))
    expected = plain.net.state_dict()
    for state, _, parts, loss in (rank[case] for rank in ranks):
        assert parts == CASES[case][2][-1]
        for name, value in weights(state).items():
            if CASES[case][2][-1] < 4:
                assert torch.equal(value, expected[name]), name
            torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)
        assert loss == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("items", [False, True])
def test_uneven_batches_train_like_one_process(ranks: Any, items: bool) -> None:
    expected, _ = whole_batches(17, items)
    for rank in ranks:
        for name, value in weights(rank[f"uneven {items}"]).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_a_resumed_run_keeps_its_micro_batches_and_is_bit_identical(ranks: Any) -> None:
    for rank in ranks:
        (state, rows, parts), (whole,) = rank["resumed"], rank["whole"]
        assert rows == [2, 2] and parts == 2
        expected = weights(whole)
        assert all(torch.equal(value, expected[name]) for name, value in weights(state).items())


def test_a_module_without_buffers_trains(ranks: Any) -> None:
    for rank in ranks:
        for name, value in weights(rank["bare"][0]).items():
            torch.testing.assert_close(value, whole_batches(20)[0][name], rtol=0, atol=1e-12)


def test_try_largest_runs_the_largest_batch_first_on_all_ranks(ranks: Any) -> None:
    for number, rank in enumerate(ranks):
        (tried, lengths), (plain, _) = rank["tried"], rank["plain"]
        assert tried == plain
        assert lengths[0] == 40 and len(lengths) >= 3 + number


def fail(name: str) -> None:
    trained(name, Hungry({(1, "backward"): 0} if os.environ["RANK"] == "1" else {}), 20)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_single_sample_that_does_not_fit_ends_all_ranks_and_the_error_names_its_rank(name: str) -> None:
    first, second = run_world(2, fail, name, may_fail=True)
    assert str(second).startswith(
        "OutOfMemory: out of memory on rank 1 (cpu) in backward with 1 of the batch's 4 samples"
    )
    assert first == 1
