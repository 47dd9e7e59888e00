"""The mesh under a loop of the user's own: the Accelerator's model, loader and steps give one process's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, data
from ranks.world import run_world
from torch import nn
from torch.utils.data import DataLoader

from leyden import Accelerator
from leyden.strategies import MeshStrategy

GLOBAL_BATCH = 4


def train(accelerator: Accelerator, module: nn.Module | None = None) -> dict[str, Any]:
    """Trains the GPT for two epochs, in windows of two batches."""
    torch.manual_seed(0)
    module = GPT() if module is None else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
    readers = accelerator.strategy.data_size
    loader = DataLoader(data(), GLOBAL_BATCH // readers)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses, norms, seen = [], [], []
    for _ in range(2):
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(tokens[:, 0].tolist())
    state = accelerator.get_state_dict(model)
    return {
        "losses": losses,
        "norms": norms,
        "seen": seen,
        "data_rank": accelerator.strategy.data_rank,
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
    }


def train_on_a_mesh(sizes: dict[str, int], plan: dict[str, str]) -> dict[str, Any]:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=2, strategy=MeshStrategy(**sizes, plan=plan)))


def check_like_one_process(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    readers = {rank["data_rank"]: rank for rank in ranks}
    losses = [sum(column) / len(column) for column in zip(*(rank["losses"] for rank in readers.values()), strict=True)]
    assert losses == pytest.approx(single["losses"], abs=1e-5)
    for rank in ranks:
        assert rank["seen"] == readers[rank["data_rank"]]["seen"], "ranks of a tp group have one batch"
        assert rank["norms"] == pytest.approx(single["norms"], abs=1e-5)
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return train(Accelerator(cpu=True, gradient_accumulation_steps=2))


@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ({"tp": 2}, SEQUENCE_PLAN),
        pytest.param({"tp": 2}, PLAN, marks=pytest.mark.full),
        pytest.param({"dp_shard": 2, "tp": 2}, SEQUENCE_PLAN, marks=pytest.mark.full),
    ],
    ids=["sequence", "tensor", "within fsdp"],
)
def test_a_loop_of_ones_own_trains_on_a_mesh_as_one_process(
    sizes: dict[str, int], plan: dict[str, str], single: dict[str, Any]
) -> None:
    world = sizes["tp"] * sizes.get("dp_shard", 1)
    check_like_one_process(run_world(world, train_on_a_mesh, sizes, plan), single)
