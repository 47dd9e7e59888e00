"""The mesh against hand-written scripts of torch's own calls: the same bits, collectives and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.share import Messages
from ranks.world import run_world
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy
from leyden.strategies.process_group import GroupRanks

BATCH, STEPS = 2, 6


class Counted(GPT):
    """Counts the collectives of the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self._messages = Messages()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # The strategy compares gradients in steps 1, 2, 4, ..., so the third has the training's own collectives alone.
        if batch_idx == 2:
            self._messages.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self._messages.__exit__(None, None, None)
            self.counts = self._messages.counts


def by_trainer(sizes: dict[str, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Counted()
    trainer = Trainer(strategy=MeshStrategy(**sizes, plan=PLAN), max_steps=STEPS, **QUIET)
    trainer.fit(module, DataLoader(data(), BATCH))
    return result(module, module.losses, module.counts)


def by_hand(sizes: dict[str, int]) -> dict[str, Any]:
    GroupRanks().join()
    torch.manual_seed(0)
    module = GPT()
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    split_by_hand(module, mesh["tp"])
    if "dp_shard" in sizes:
        for part in (*module.blocks, module):
            fully_shard(part, mesh=mesh["dp_shard"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3, foreach=False)
    readers = sizes.get("dp_shard", 1)
    reader = mesh["dp_shard"].get_local_rank() if readers > 1 else 0
    losses: list[float] = []
    samples = data()
    messages = Messages()
    for step in range(STEPS):
        # Each reader has its slice of a global batch.
        begin = (step * readers + reader) * BATCH
        indices = range(begin, begin + BATCH)
        tokens, labels = (torch.stack(column) for column in zip(*(samples[i] for i in indices), strict=True))
        if step == 2:
            messages.__enter__()
        loss = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            messages.__exit__(None, None, None)
        losses.append(float(loss))
    return result(module, losses, messages.counts)


def split_by_hand(module: GPT, mesh: DeviceMesh) -> None:
    parallelize_module(module.tokens, mesh, RowwiseParallel(input_layouts=Replicate()))
    for block in module.blocks:
        block.attention.n_heads //= mesh.size()
        block.attention.n_kv_heads //= mesh.size()
        plan = {
            "attention": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(module.head, mesh, ColwiseParallel(output_layouts=Replicate()))
    # parallelize_module unties the weights.
    module.head.weight = module.tokens.weight


def result(module: GPT, losses: list[float], counts: dict[str, int]) -> dict[str, Any]:
    whole, held = {}, 0
    for name, parameter in module.named_parameters():
        is_split = isinstance(parameter, DTensor)
        whole[name] = (parameter.full_tensor() if is_split else parameter).detach().numpy()
        held += (parameter.to_local() if is_split else parameter).untyped_storage().nbytes()
    return {"losses": losses, "weights": whole, "counts": counts, "bytes": held}


@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.full)], ids=str)
def test_the_trainer_matches_a_script_in_bits_and_collectives(sizes: dict[str, int]) -> None:
    world = sizes["tp"] * sizes.get("dp_shard", 1)
    ours, theirs = run_world(world, by_trainer, sizes), run_world(world, by_hand, sizes)
    for rank, script in zip(ours, theirs, strict=True):
        assert rank["losses"] == script["losses"]
        assert rank["weights"].keys() == script["weights"].keys()
        for name, value in script["weights"].items():
            assert (rank["weights"][name] == value).all(), name
        assert script["counts"] and rank["counts"] == script["counts"]
        assert rank["bytes"] <= script["bytes"], "the Trainer holds more bytes than the script"
