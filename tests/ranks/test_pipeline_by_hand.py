"""A pipeline against a hand-written script of torch.distributed.pipelining: the same bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, data
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy
from leyden.strategies.process_group import GroupRanks

BATCH, MICRO_BATCHES, STEPS = 8, 4, 6


def untied() -> GPT:
    torch.manual_seed(0)
    module = GPT()
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())
    return module


def by_trainer() -> dict[str, Any]:
    module = untied()
    trainer = Trainer(strategy=MeshStrategy(pp=2, microbatches=MICRO_BATCHES), max_steps=STEPS, max_epochs=-1, **QUIET)
    trainer.fit(module, DataLoader(data(), BATCH))
    weights = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {"losses": module.losses, "weights": {name: tensor.numpy() for name, tensor in weights.items()}}


class FirstStage(nn.Module):
    def __init__(self, module: GPT) -> None:
        super().__init__()
        self.tokens, self.places, self.blocks = module.tokens, module.places, module.blocks[:1]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])))


class LastStage(nn.Module):
    def __init__(self, module: GPT) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = module.blocks[1:], module.norm, module.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks[0](x)))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def by_hand() -> dict[str, Any]:
    ranks = GroupRanks()
    ranks.join()
    module = untied()
    is_last = ranks.global_rank == 1
    stage = PipelineStage(
        LastStage(module) if is_last else FirstStage(module), ranks.global_rank, 2, torch.device("cpu")
    )
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    own = stage.submod.parameters()
    optimizer = torch.optim.SGD(own, lr=0.3)
    batches = iter(DataLoader(data(), BATCH))
    means: list[float] = []
    for step in range(STEPS):
        if step % 5 == 0:
            batches = iter(DataLoader(data(), BATCH))
        tokens, labels = next(batches)
        losses: list[Tensor] = []
        schedule.step(*(() if is_last else (tokens,)), **({"target": labels, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if is_last:
            means.append(float((torch.stack(losses) / MICRO_BATCHES).sum()))
    mine = {id(parameter) for parameter in stage.submod.parameters()}
    weights = {name: p.detach().numpy() for name, p in module.named_parameters() if id(p) in mine}
    return {"losses": means, "weights": weights}


def test_a_two_stage_pipeline_is_bit_identical_to_a_script() -> None:
    ours, theirs = run_world(2, by_trainer), run_world(2, by_hand)
    for rank, script in zip(ours, theirs, strict=True):
        assert rank["losses"] == script["losses"]
        for name, value in script["weights"].items():
            assert (rank["weights"][name] == value).all(), name
    assert ours[0]["weights"].keys() == {name for script in theirs for name in script["weights"]}
    assert len(ours[1]["losses"]) == STEPS
