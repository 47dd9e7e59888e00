"""Code that reads shards where FSDP has not gathered them: the error says what happened, and its fix is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, data
from ranks.world import run_world
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from leyden import Trainer

PENALTY = 0.01


class Penalized(GPT):
    """Adds a penalty on all weights, and reads weights in a hook; keeps the explanations of errors there."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers
        self.explained: dict[str, str | None] = {}

    def explain(self, name: str, error: BaseException) -> None:
        self.explained[name] = self.trainer.strategy.explain(error)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        weights: Any = self.parameters()
        if self.gathers:
            weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights]
        return loss + PENALTY * sum(p.square().sum() for p in weights)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.world_size == 1:
            return
        weight = self.blocks[0].up.weight
        try:
            torch.zeros(weight.shape, dtype=weight.dtype).lerp_(weight.detach(), 0.1)
        except RuntimeError as error:
            self.explain("average", error)
        try:
            self.blocks[0].up(torch.zeros(1, 32, dtype=weight.dtype))
        except RuntimeError as error:
            self.explain("submodule", error)


def train(strategy: str, gathers: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Penalized(gathers)
    arguments: dict[str, Any] = {"max_epochs": 1, "precision": "64-true", "accumulate_grad_batches": 2, **QUIET}
    trainer = Trainer(strategy=strategy, **arguments)
    trainer.fit(module, DataLoader(data(32), 8 // trainer.strategy.data_size))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {"weights": {name: tensor.numpy() for name, tensor in state.items()}, "explained": module.explained}


MIXED = "An operation mixed a plain tensor and a shard"


def test_a_penalty_on_shards_is_not_taken_for_a_submodule_that_ran_outside() -> None:
    errors = [str(error) for error in run_world(2, train, "fsdp", False, may_fail=True)]
    assert any(MIXED in error and "weight_decay" in error and "p.full_tensor()" in error for error in errors), errors


def test_a_penalty_on_full_tensors_trains_like_one_process_and_hooks_get_explanations_that_fit() -> None:
    single = train("single_device", False)
    for rank in run_world(2, train, "fsdp", True):
        assert MIXED in rank["explained"]["average"]
        assert "a Linear ran outside of the steps" in rank["explained"]["submodule"]
        for name, value in single["weights"].items():
            assert np.abs(rank["weights"][name] - value).max() < 2e-15, name
