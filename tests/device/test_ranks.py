"""Two ranks whose model is on a device that is not the CPU: the weights of one process on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from models import QUIET
from ranks import mixture
from ranks.world import run_world
from samples import labeled
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Callback, Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint
from leyden.strategies.ddp import DDPStrategy
from leyden.strategies.mesh.mesh_strategy import MeshStrategy


class Net(TrainModule):
    """Has a buffer, returns a number of items, and logs values of the device and of the host."""

    def __init__(self, items: str = "number", net: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) if net is None else net()
        self.register_buffer("seen", torch.zeros(()))
        self.items = items

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x).flatten(0, -2), y.flatten(), reduction="sum")
        self.seen += 1
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.log("size", len(x), on_epoch=True)
        return {
            "loss": loss,
            "num_items": {"number": y.numel(), "device": torch.full((), y.numel(), device=x.device)}[self.items],
        }

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class Attention(nn.Module):
    """A layer that attends to the earlier positions of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(mixture.VOCABULARY, 16), nn.Linear(16, mixture.VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x).unflatten(-1, (2, 8)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits: Tensor = self.head(x.transpose(1, 2).flatten(2))
        return logits


class Experts(nn.Module):
    """Experts that read every token, with a weight of zero unless it is theirs: no line waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.up = 4, nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.zeros_like(x)
        for expert in range(self.num_experts):
            outputs = outputs + (x @ self.up[expert]) * (weights * (index == expert)).sum(-1, keepdim=True)
        return outputs


class Routed(Attention):
    """A layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        logits: Tensor = self.head(hidden + self.experts(hidden, index, weights))
        return logits.unflatten(0, x.shape)


GUARDS = {
    "tp": {"strategies/local_weights.py", "strategies/mesh/consistency.py"},
    "gather": {"strategies/local_weights.py"},
    "ulysses": {"strategies/local_weights.py"},
    # The sizes of the exchange.
    "ep": {"strategies/mesh/expert_parallel.py"},
}
"""The files whose lines wait in some steps."""
NETS = {"gather": Attention, "ulysses": Attention, "ep": Routed}


class DuringSteps(Callback):
    """Records waits from the third step on: DDP arranges its buckets in the second."""

    def __init__(self) -> None:
        self.waits = toy.Waits()

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        toy.Waits.active = self.waits if trainer.global_step > 1 else None

    def on_train_batch_end(self, *_: Any) -> None:
        # A checkpoint may be saved next.
        toy.Waits.active = None


def numbers(module: nn.Module) -> dict[str, list[float]]:
    found = {}
    for name, tensor in module.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.cpu().flatten().tolist()
    return found


def strategy_of(name: str) -> Any:
    if name == "toyalone":
        return DDPStrategy(process_group_backend="toyalone", timeout=timedelta(seconds=60))
    if name == "tp":
        return MeshStrategy(tp=2, plan={"net.0": "colwise", "net.2": "rowwise"})
    if name == "ep":
        return MeshStrategy(ep=2, plan={"net.experts": "expert_parallel"})
    if name in NETS:
        return MeshStrategy(dp_shard=1, cp=2, cp_method=name, sequence_dims={0: 1, 1: 1})  # type: ignore[arg-type]
    return name


def fit(
    folder: str, strategy: str, accelerator: str, items: str = "number", net: str = "", resume: str | None = None
) -> Any:
    torch.manual_seed(0)
    # FSDP moves a module by assigning `.data`, which torch refuses between classes of tensors.
    with torch.device(accelerator):
        module = Net(items, NETS.get(net))
    recorder = DuringSteps()
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": None, "accelerator": accelerator},
        strategy=strategy_of(strategy),
        max_epochs=2,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[recorder, ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)] if not resume else [recorder],
        default_root_dir=folder,
    )
    data = mixture.data(32) if net in NETS else labeled(32)
    trainer.fit(module, DataLoader(data, 4 // trainer.strategy.data_size), ckpt_path=resume)
    gathered = trainer.strategy.ranks.all_gather_object({"x": torch.ones(1, device=trainer.strategy.root_device)})
    backend = str(dist.get_backend()) if dist.is_initialized() else ""
    return numbers(module), backend, recorder.waits.found, str(gathered[-1]["x"].device)


@pytest.mark.parametrize(
    ("strategy", "items"),
    [("ddp", "number"), ("ddp", "device"), ("toyalone", "number"), ("fsdp", "number"), ("tp", "number")]
    + [(net, "number") for net in NETS],
)
def test_ranks_train_the_weights_of_one_process(strategy: str, items: str, tmp_path: Path) -> None:
    expected = fit(str(tmp_path / "one"), "auto", "cpu", net=strategy)[0]
    given = (str(tmp_path / "two"), strategy, "toy", items, strategy)
    for found, backend, waits, device in run_world(2, fit, *given, timeout=200):
        assert backend == ("toyalone" if strategy == "toyalone" else "cpu:gloo,toy:toygloo")
        assert device == "toy:0"
        for name, values in expected.items():
            if name != "seen":
                assert found[name] == pytest.approx(values, abs=1e-6), name
        # Some steps of a tp or cp group compare batches and gradients.
        guards = GUARDS.get(strategy, set())
        assert {line.partition(":")[0] for _, line in waits} == guards
    # One process on the CPU goes on with the checkpoint, from the middle.
    [saved] = (tmp_path / "two").rglob("*step=3")
    moved = fit(str(tmp_path / "moved"), "auto", "cpu", net=strategy, resume=str(saved))[0]
    for name, values in expected.items():
        if name != "seen":
            assert moved[name] == pytest.approx(values, abs=1e-6), name
