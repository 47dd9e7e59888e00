"""The mesh on real ranks: the losses and weights of one process, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, data
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy

GLOBAL_BATCH = 4


def train(sizes: dict[str, int] | None, plan: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """Trains the GPT for two epochs, on one process if `sizes` is None. The last global batch has 3 samples."""
    torch.manual_seed(0)
    module = GPT(counts_items=arguments.pop("counts_items", False), n_kv_heads=arguments.pop("n_kv_heads", 2))
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, plan=plan)
    trainer = Trainer(strategy=strategy, max_epochs=2, gradient_clip_val=1.0, **QUIET, **arguments)
    readers = trainer.strategy.data_size
    trainer.fit(module, DataLoader(data(39), GLOBAL_BATCH // readers))
    predicted = trainer.predict(module, DataLoader(data(GLOBAL_BATCH), GLOBAL_BATCH // readers)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    bytes_held = sum(getattr(p, "to_local", lambda p=p: p)().untyped_storage().nbytes() for p in module.parameters())
    return {
        "losses": module.losses,
        "data_rank": trainer.strategy.data_rank,
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).numpy(),
        "bytes": bytes_held,
        "epoch loss": float(trainer.callback_metrics.get("loss_epoch", torch.tensor(0.0))),
        "without a gradient": [name for name, p in module.named_parameters() if p.grad is None],
    }


def check_like_one_process(
    ranks: list[dict[str, Any]], single: dict[str, Any], arguments: dict[str, Any] | None = None
) -> None:
    readers = {rank["data_rank"]: rank["losses"] for rank in ranks}
    if len(readers) == 1:
        # A loss summed over items is about a hundred times the mean, hence the relative tolerance.
        assert list(*readers.values()) == pytest.approx(single["losses"], abs=1e-5, rel=1e-5)
    elif not (arguments or {}).get("counts_items"):
        # Only some readers have a sample in the last batch of an epoch.
        columns = zip(*(losses[:9] for losses in readers.values()), strict=True)
        means = [sum(column) / len(column) for column in columns]
        assert means == pytest.approx(single["losses"][:9], abs=1e-5)
    for rank in ranks:
        assert rank["losses"] == readers[rank["data_rank"]], "ranks of a tp group have different losses"
        assert rank["epoch loss"] == pytest.approx(single["epoch loss"], abs=1e-5)
        assert not rank["without a gradient"]
        assert abs(rank["predicted"] - single["predicted"]).max() < 1e-4, "predicted logits differ"
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name


@pytest.mark.parametrize("plan", [PLAN, SEQUENCE_PLAN], ids=["tensor", "sequence"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_a_mesh_trains_like_one_process(sizes: dict[str, int], plan: dict[str, str]) -> None:
    single = train(None)
    world = sizes["tp"] * sizes.get("dp_shard", 1)
    ranks = run_world(world, train, sizes, plan)
    check_like_one_process(ranks, single)
    replicated = 8 * 1024
    assert max(rank["bytes"] for rank in ranks) < single["bytes"] / world + replicated


LARGER = [{"dp_shard": 1, "tp": 4}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, {"dp_replicate": 2, "tp": 2}]
"""Sizes of larger meshes. The last one is for 8 ranks, of which two have no sample of the last batch."""


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 3}, {"accumulate_grad_batches": 2, "counts_items": True}],
    ids=["plain", "accumulated", "by items"],
)
@pytest.mark.parametrize("sizes", LARGER, ids=str)
def test_larger_meshes_train_like_one_process(sizes: dict[str, int], arguments: dict[str, Any]) -> None:
    arguments = {**arguments, "n_kv_heads": 4}
    single = train(None, **arguments)
    world = 4 if "dp_shard" in sizes else 8
    check_like_one_process(run_world(world, call, sizes, SEQUENCE_PLAN, arguments), single, arguments)


def call(sizes: dict[str, int], plan: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
    return train(sizes, plan, **arguments)


def recompute() -> list[list[float]]:
    """Returns the losses under dropout, without and with activation checkpointing."""
    found = []
    for policy in (None, {"Block"}):
        torch.manual_seed(0)
        module = GPT(dropout=0.2)
        strategy = MeshStrategy(dp_shard=1, tp=2, plan=PLAN, activation_checkpointing_policy=policy)
        Trainer(strategy=strategy, max_steps=6, **QUIET).fit(module, DataLoader(data(), GLOBAL_BATCH))
        found.append(module.losses)
    return found


def test_recomputed_blocks_repeat_their_dropout() -> None:
    for plain, again in run_world(2, recompute):
        assert len(plain) == 6
        assert again == plain


class DropsScores(GPT):
    """Has dropout within attention only, so torch stops rerunning a block before its last layer."""

    def on_fit_start(self) -> None:
        for block in self.blocks:
            block.attention.dropout = 0.2  # type: ignore[union-attr]


def recompute_scores() -> list[list[float]]:
    """Returns the losses of two shuffled epochs with dropout in attention, without and with recomputation."""
    found = []
    for policy in (None, {"Block"}):
        torch.manual_seed(0)
        module = DropsScores()
        strategy = MeshStrategy(dp_shard=1, tp=2, plan=PLAN, activation_checkpointing_policy=policy)
        Trainer(strategy=strategy, max_epochs=2, **QUIET).fit(module, DataLoader(data(), GLOBAL_BATCH, shuffle=True))
        found.append(module.losses)
    return found


def test_blocks_whose_rerun_stops_early_repeat_their_dropout_and_leave_the_samples_order() -> None:
    for plain, again in run_world(2, recompute_scores):
        assert len(plain) == 20
        assert again == plain
