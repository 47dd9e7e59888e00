"""FSDP with activation checkpointing, and with torch.compile of the blocks and the whole module, on two real ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from ranks.test_fsdp import Block, Regression, batches
from ranks.test_fsdp_features import differences, rank_and_size, trainer
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]


def count_forwards(again: bool) -> Counter[str]:
    """Returns how often blocks ran, in training and in validation."""
    counts: Counter[str] = Counter()
    module = Regression()
    forward = Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        counts["train" if self.training else "eval"] += 1
        return forward(self, x)

    Block.forward = counted  # type: ignore[method-assign]
    policy = {Block} if again else None
    trainer(FSDPStrategy(activation_checkpointing_policy=policy)).fit(
        module, batches(2, *rank_and_size()), batches(1, *rank_and_size())
    )
    Block.forward = forward  # type: ignore[method-assign]
    assert list(module.state_dict())[2] == "net.out.weight"
    return counts


def count_both() -> list[Counter[str]]:
    return [count_forwards(again) for again in (False, True)]


def test_activation_checkpointing_recomputes_activations() -> None:
    for plain, again in run_world(2, count_both):
        # 3 blocks, 2 batches; validation and its sanity check
        assert plain == {"train": 6, "eval": 6} and again == {"train": 12, "eval": 6}


def compile_the_blocks(backend: str) -> tuple[list[str], int, float]:
    """Returns differences from a script that compiles blocks, the number of graphs, the distance from plain blocks."""
    import torch._dynamo

    data = batches(3, *rank_and_size())
    modules = []
    for compiled in (True, False):
        torch.manual_seed(0)
        module = Regression()
        trainer(FSDPStrategy(compile={"backend": backend} if compiled else False)).fit(module, data)
        modules.append(module)
        if compiled:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.manual_seed(0)
    script, mesh = Regression(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in script.net.blocks:
        block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(script.net, mesh=mesh)
    configured: Any = script.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(script.net(x), y).backward()
        optimizer.step()
        scheduler.step()
    return differences(modules[0], script), graphs, largest_difference(*modules)


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((whole(a.detach()) - whole(b.detach())).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_blocks_match_a_script_and_plain_blocks(backend: str) -> None:
    for differ, graphs, distance in run_world(2, compile_the_blocks, backend):
        assert differ == [] and graphs > 0 and distance < 1e-5


def compile_the_module(backend: str) -> tuple[int, float, dict[str, Any]]:
    """Returns the number of graphs, and the distance of a compiled module's weights and metrics from a plain one's."""
    import torch._dynamo

    data, held_out = batches(3, *rank_and_size()), batches(1, *rank_and_size(), seed=6)
    modules, logged = [], []
    for compiled in (True, False):
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        module = Regression()
        model: Any = torch.compile(module, backend=backend) if compiled else module
        fitted = trainer(FSDPStrategy())
        fitted.fit(model, data, held_out)
        modules.append(module)
        logged.append({name: float(value) for name, value in fitted.callback_metrics.items()})
        if compiled:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert logged[0].keys() == logged[1].keys()
    return graphs, largest_difference(*modules), {name: abs(logged[0][name] - logged[1][name]) for name in logged[0]}


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_module_matches_a_plain_one(backend: str) -> None:
    for graphs, distance, logged in run_world(2, compile_the_module, backend):
        assert graphs > 0 and distance < 1e-5
        assert set(logged) == {"loss", "val_loss"} and max(logged.values()) < 1e-5
