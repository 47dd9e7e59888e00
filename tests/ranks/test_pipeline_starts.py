"""Pipelines of models that configure_model builds or that recompute activations, resumes, and a step that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy
from leyden.strategies.fsdp.sharding import local

STEPS = 4
PARTS = ("tokens", "places", "blocks", "norm", "head")


class Late(GPT):
    """A GPT that configure_model builds."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.sizes = sizes
        self.built_on: set[str] = set()
        for name in PARTS:
            setattr(self, name, None)

    def configure_model(self) -> None:
        if self.blocks is None:
            whole = GPT(**self.sizes)
            for name in PARTS:
                setattr(self, name, getattr(whole, name))
            self.built_on = {parameter.device.type for parameter in self.parameters()}


class FailsOnOneRank(GPT):
    """Raises in the third step on one rank."""

    def __init__(self, rank: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rank = rank

    def forward(self, tokens: Tensor) -> Tensor:
        if self.trainer.global_step == 2 and self.trainer.global_rank == self.rank:
            raise ValueError("of this rank alone")
        return super().forward(tokens)


def fit(kind: type[GPT], sizes: dict[str, Any] | None, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the losses of a fit, the devices on which the model was built, and the bytes of it on this rank."""
    torch.manual_seed(0)
    module = kind(depth=4, **(model or {}))
    strategy: Any = "single_device" if sizes is None else MeshStrategy(microbatches=2, **{"dp_shard": 1, **sizes})
    rows = 8 if sizes is None else 8 // sizes.get("dp_shard", 1)
    Trainer(strategy=strategy, max_steps=STEPS, **QUIET).fit(module, DataLoader(data(), rows))
    stored = sum(local(parameter).untyped_storage().nbytes() for parameter in module.parameters())
    return {"losses": module.losses, "on": getattr(module, "built_on", None), "stored": stored}


def with_loss(found: list[dict[str, Any]]) -> list[list[float]]:
    """Returns the losses of each rank that has them, which are those of the last stages."""
    return [each["losses"] for each in found if each["losses"]]


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2},
        pytest.param({"pp": 2, "dp_shard": 2}, marks=pytest.mark.full),
        pytest.param({"pp": 2, "tp": 2, "plan": PLAN}, marks=pytest.mark.full),
    ],
    ids=["pp", "pp × fsdp", "pp × tp"],
)
def test_a_model_built_by_configure_model_trains_like_one_process_and_no_rank_holds_it_whole(
    sizes: dict[str, Any],
) -> None:
    one = fit(Late, None)
    ranks = sizes["pp"] * sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    found = run_world(ranks, fit, Late, sizes)
    assert one["on"] == {"cpu"}
    assert all(each["on"] == {"meta"} for each in found)
    # Both stages hold the tied embeddings.
    assert all(each["stored"] < 1.15 * one["stored"] / ranks for each in found)
    losses = torch.tensor(with_loss(found)).mean(0).tolist()
    assert losses == pytest.approx(one["losses"], abs=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_activations_are_bit_identical_to_stored_ones(dropout: float) -> None:
    kept = with_loss(run_world(2, fit, GPT, {"pp": 2}, {"dropout": dropout}))
    sizes = {"pp": 2, "activation_checkpointing_policy": {"Block"}}
    assert with_loss(run_world(2, fit, GPT, sizes, {"dropout": dropout})) == kept != []


def resumed(folder: str) -> list[list[float]]:
    """Returns the losses of a fit with dropout, and those of two halves; the first is saved after its fit."""
    found = []
    for steps, start in ((STEPS, None), (STEPS // 2, None), (STEPS, folder)):
        torch.manual_seed(0)
        trainer = Trainer(strategy=MeshStrategy(pp=2, microbatches=2), max_steps=steps, **QUIET)
        module = GPT(depth=4, dropout=0.2)
        trainer.fit(module, DataLoader(data(), 8), ckpt_path=start)
        if steps < STEPS:
            trainer.save_checkpoint(folder)
        found.append(module.losses)
    whole, first, second = found
    return [whole, first + second]


def test_a_checkpoint_that_is_saved_after_the_fit_continues_its_random_numbers(tmp_path: Path) -> None:
    _, (whole, halves) = run_world(2, resumed, str(tmp_path / "saved"))
    assert halves == whole
    assert len(whole) == STEPS


@pytest.mark.full
@pytest.mark.parametrize("rank", [1, 2], ids=["first stage", "last stage"])
def test_an_error_on_one_rank_ends_all_stages_of_all_data_ranks(rank: int) -> None:
    found = run_world(4, fit, FailsOnOneRank, {"pp": 2, "dp_shard": 2}, {"rank": rank}, may_fail=True, timeout=120)
    assert found[rank] == "ValueError: of this rank alone"
    assert [code for other, code in enumerate(found) if other != rank] == [1] * 3
