"""FSDP on real ranks: bit-identical to `fully_shard` scripts written by hand."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from leyden import Callback, Trainer, TrainModule
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole

SETTINGS: dict[str, Any] = {**QUIET, "use_distributed_sampler": False}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 7, depth: int = 3) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Regression(TrainModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Net() if net is None else net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count: int, rank: int, size: int, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Returns this rank's batches."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count * size)
    ]
    return found[rank::size]


def full_weights(module: nn.Module) -> dict[str, Any]:
    return {name: whole(p).clone().float().numpy() for name, p in module.state_dict().items()}


@dataclass
class Case:
    """The settings with which a script and a Trainer both train."""

    accumulate: int = 1
    clip: tuple[float, str] | None = None
    precision: str = "32-true"
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    autocast: bool = True
    offload: bool = False
    checkpoint: bool = False
    replicate: int = 1
    reshard: bool | int | None = None
    epochs: int = 2
    count: int = 5
    strategy: dict[str, Any] = field(default_factory=dict)


def by_hand(case: Case) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (size,) if case.replicate == 1 else (case.replicate, size // case.replicate)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(0)
    net = Net()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": case.policy, "reshard_after_forward": case.reshard}
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in net.blocks:
        if case.checkpoint:
            checkpoint(block)
        fully_shard(block, **options)
    fully_shard(net, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    own = batches(case.count, rank, size)
    for _ in range(case.epochs):
        for start in range(0, case.count, case.accumulate):
            window = own[start : start + case.accumulate]
            optimizer.zero_grad()
            for i, (x, y) in enumerate(window):
                net.set_requires_gradient_sync(i == len(window) - 1)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed" and case.autocast):
                    loss = F.mse_loss(net(x).float(), y)
                (loss / len(window)).backward()
            if case.clip is not None and case.clip[1] == "norm":
                nn.utils.clip_grad_norm_(net.parameters(), case.clip[0])
            elif case.clip is not None:
                nn.utils.clip_grad_value_(net.parameters(), case.clip[0])
            optimizer.step()
            scheduler.step()
    return full_weights(net)


def by_trainer(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Regression()
    own = batches(case.count, dist.get_rank(), dist.get_world_size())
    strategy = FSDPStrategy(
        cpu_offload=case.offload,
        activation_checkpointing_policy={Block} if case.checkpoint else None,
        device_mesh=(case.replicate, dist.get_world_size() // case.replicate) if case.replicate > 1 else None,
        reshard_after_forward=case.reshard,
        **case.strategy,
    )
    trainer = Trainer(
        strategy=strategy,
        precision=case.precision,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip[0] if case.clip else None,
        gradient_clip_algorithm=case.clip[1] if case.clip else None,
        **SETTINGS,
    )
    trainer.fit(module, own)
    return full_weights(module.net)


def compare(cases: dict[str, Case]) -> dict[str, list[str]]:
    """Returns, for each case, the parameters whose values differ between the Trainer and the script."""
    dist.init_process_group("gloo")
    differ = {}
    for name, case in cases.items():
        expected, found = by_hand(case), by_trainer(case)
        assert list(expected) == list(found) and len(expected) == 22
        differ[name] = [key for key, value in expected.items() if not np.array_equal(value, found[key])]
    gc.collect()
    dist.destroy_process_group()
    return differ


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
# As in torch's examples: no autocast, and each group casts its inputs.
ALONE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {
    "plain": Case(),
    "accumulation": Case(accumulate=4),
    "norm": Case(clip=(0.05, "norm")),
    "value": Case(clip=(0.005, "value"), accumulate=3),
    "bf16": Case(precision="bf16-mixed", policy=BF16, accumulate=4, clip=(0.1, "norm")),
    "bf16 by policy alone": Case(precision="bf16-mixed", policy=ALONE, autocast=False, accumulate=3),
    "offload": Case(offload=True, clip=(0.05, "norm")),
    "checkpoint": Case(checkpoint=True, accumulate=4),
    "shard_grad_op": Case(reshard=False, accumulate=4),
}


def test_two_ranks_match_the_hand_written_script() -> None:
    assert run_world(2, compare, CASES) == [{name: [] for name in CASES}] * 2


FOUR = {
    "plain": Case(accumulate=4, clip=(0.05, "norm")),
    "bf16": Case(precision="bf16-mixed", policy=BF16, checkpoint=True),
    "hsdp": Case(replicate=2, accumulate=3, clip=(0.05, "norm")),
    "reshard to two": Case(reshard=2, offload=True),
}


@pytest.mark.full
def test_four_ranks_match_the_hand_written_script() -> None:
    assert run_world(4, compare, FOUR) == [{name: [] for name in FOUR}] * 4


def fit_by_name(name: str) -> dict[str, Any]:
    torch.manual_seed(int(os.environ["RANK"]))
    module = Regression()
    seen: dict[str, Any] = {}

    class Inspect(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
            seen["weights"] = full_weights(module)
            seen["sharded"] = all(isinstance(p, DTensor) for p in module.parameters())
            seen["device_mesh"] = tuple(module.device_mesh.shape)

    trainer = Trainer(strategy=name, max_epochs=1, callbacks=Inspect(), **SETTINGS)
    place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainer.fit(module, batches(3, *place), batches(2, *place))
    assert "val_loss" in trainer.callback_metrics
    assert trainer.strategy.data_size == trainer.world_size == int(os.environ["WORLD_SIZE"])
    return seen


@pytest.mark.parametrize(("name", "mesh"), [("fsdp", (2,)), ("hsdp", (2, 2))])
def test_strategies_by_name_shard_rank_0s_weights_over_their_mesh(name: str, mesh: tuple[int, ...]) -> None:
    """Ranks seeded differently start from rank 0's weights; validation runs before and between the steps."""
    first, *others = run_world(mesh[0] * mesh[-1] if len(mesh) > 1 else mesh[0], fit_by_name, name)
    assert first["sharded"] and first["device_mesh"] == mesh
    for other in others:
        assert all(np.array_equal(value, other["weights"][key]) for key, value in first["weights"].items())
