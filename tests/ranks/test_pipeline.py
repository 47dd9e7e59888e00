"""Pipelines on real ranks train and log like one process, whatever the schedule and the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy

GLOBAL_BATCH = 8


def train(strategy: dict[str, Any] | None, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trains the GPT for two epochs, on one process if `strategy` is None. An epoch's last batch has 7 samples."""
    torch.manual_seed(0)
    arguments = dict(arguments or {})
    module = GPT(depth=4, counts_items=arguments.pop("counts_items", False))
    chosen: Any = "single_device" if strategy is None else MeshStrategy(**strategy)
    trainer = Trainer(strategy=chosen, max_epochs=2, gradient_clip_val=1.0, **QUIET, **arguments)
    readers = trainer.strategy.data_size
    trainer.fit(module, DataLoader(data(39), GLOBAL_BATCH // readers))
    predicted = trainer.predict(module, DataLoader(data(GLOBAL_BATCH), GLOBAL_BATCH // readers)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    storages = {p.untyped_storage().data_ptr(): p for p in map(_local, module.parameters())}
    return {
        "losses": module.losses,
        "data_rank": trainer.strategy.data_rank,
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).numpy(),
        "bytes": sum(p.untyped_storage().nbytes() for p in storages.values()),
        "epoch loss": float(trainer.callback_metrics.get("loss_epoch", torch.tensor(0.0))),
        "step loss": float(trainer.callback_metrics.get("loss_step", torch.tensor(0.0))),
    }


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def check_like_one_process(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    readers = {rank["data_rank"]: rank["losses"] for rank in ranks if rank["losses"]}
    if len(readers) == 1:
        assert list(*readers.values()) == pytest.approx(single["losses"], abs=1e-5, rel=1e-5)
        assert [rank["step loss"] for rank in ranks] == pytest.approx([single["step loss"]] * len(ranks), abs=1e-5)
    for rank in ranks:
        assert rank["epoch loss"] == pytest.approx(single["epoch loss"], abs=1e-5)
        assert abs(rank["predicted"] - single["predicted"]).max() < 1e-4
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def train_by(schedules: list[str], strategy: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains by one schedule after the other on the same ranks."""
    return [train({**strategy, "schedule": schedule}) for schedule in schedules]


def test_every_schedule_trains_like_one_process() -> None:
    single = train(None)
    found = run_world(2, train_by, SCHEDULES, {"pp": 2, "microbatches": 4})
    for ranks in zip(*found, strict=True):
        check_like_one_process(list(ranks), single)
        # More than half, since the first and the last stage share the embedding.
        assert max(rank["bytes"] for rank in ranks) < 0.62 * single["bytes"]


CASES = {
    "accumulated": {"accumulate_grad_batches": 2},
    "by items": {"accumulate_grad_batches": 2, "counts_items": True},
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_accumulation_windows_train_like_one_process(world: int, arguments: dict[str, Any]) -> None:
    ranks = run_world(world, train, {"pp": 2, "dp_shard": world // 2, "microbatches": 4}, arguments)
    check_like_one_process(ranks, train(None, arguments))


LAYOUTS = {
    "pp 4": {"pp": 4},
    "pp × fsdp": {"pp": 2, "dp_shard": 2},
    "pp × hsdp": {"pp": 2, "dp_replicate": 2, "dp_shard": 1},
    "pp × tp": {"pp": 2, "tp": 2, "plan": PLAN},
    "two stages on a rank × fsdp": {"pp": 2, "dp_shard": 2, "schedule": "Interleaved1F1B", "microbatches": 2},
}
QUICK = ("pp × fsdp",)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(of, id=name, marks=[] if name in QUICK else pytest.mark.full) for name, of in LAYOUTS.items()],
)
def test_a_pipeline_composes_with_other_dimensions(layout: dict[str, Any]) -> None:
    layout = {"dp_shard": 1, "microbatches": 4, **layout}
    check_like_one_process(run_world(4, train, layout), train(None))


@pytest.mark.full
def test_three_dimensions_train_like_one_process() -> None:
    layout = {"pp": 2, "dp_shard": 2, "tp": 2, "plan": PLAN, "microbatches": 2}
    check_like_one_process(run_world(8, train, layout), train(None))
