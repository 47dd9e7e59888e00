"""DeepSpeed's runs are saved as every other: bit for bit on as many ranks, and gone on with by any strategy, and from any."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.world import run_world
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.callbacks.model_checkpoint import ModelCheckpoint
from leyden.trainer.checkpoint.merge import merge
from leyden.trainer.checkpoint.reader import CheckpointReader

INSTALLED = any(name == "deepspeed" for name in (found.name.lower() for found in metadata.distributions()))
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(not INSTALLED, reason="deepspeed is not installed here: see scripts/deepspeed-env"),
]

# 86 samples are ten global batches of 8 and one of 6.
SIZE, GLOBAL = 86, 8


@dataclass(frozen=True)
class Layout:
    """How a run goes on.

    Attributes:
        ranks: how many.
        strategy: a name, or arguments of DeepSpeedStrategy.
        precision: of the Trainer.
        built: in configure_model, where stage 3 cuts each layer as it is built.
    """

    ranks: int
    strategy: Any = field(default_factory=dict)
    precision: str = "32-true"
    built: bool = True


LAYOUTS = {
    "single": Layout(1, "single_device"),
    "ddp": Layout(2, "ddp"),
    "fsdp": Layout(2, "fsdp"),
    **{f"stage {stage}": Layout(2, {"stage": stage}) for stage in range(4)},
    "stage 3 of a whole model": Layout(2, {"stage": 3, "stage3_param_persistence_threshold": 20}, built=False),
    "stage 2 offload": Layout(2, {"stage": 2, "offload_optimizer": True}),
    "stage 3 offload": Layout(2, {"stage": 3, "offload_optimizer": True, "offload_parameters": True}),
    "round robin": Layout(2, {"stage": 2, "round_robin_gradients": True}),
    "many groups": Layout(2, {"stage": 3, "sub_group_size": 100}),
    **{f"bf16 stage {stage}": Layout(2, {"stage": stage}, "bf16-true") for stage in range(4)},
    "bf16 ddp": Layout(2, "ddp", "bf16-true"),
    "stage 2 on 1": Layout(1, {"stage": 2}),
    "stage 3 on 1": Layout(1, {"stage": 3}),
    "stage 3 on 4": Layout(4, {"stage": 3}),
    "stage 1 on 4": Layout(4, {"stage": 1}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 31), nn.Linear(31, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(torch.tanh(self.first(x)))
        return out


class Net(TrainModule):
    """Odd sizes, so that stretches begin and end within rows; a frozen layer, a buffer, and two groups of the optimizer."""

    def __init__(self, layout: Layout, die_at: int | None = None) -> None:
        super().__init__()
        self.layout, self.die_at = layout, die_at
        self.seen: list[tuple[list[int], list[float]]] = []
        if not layout.built:
            self.build()

    def configure_model(self) -> None:
        if self.layout.built:
            self.build()

    def build(self) -> None:
        torch.manual_seed(3)
        self.blocks = nn.Sequential(nn.Linear(6, 16), Block(), Block(), nn.Linear(16, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        if len(self.seen) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        out = self.blocks(x)
        losses = cross_entropy((out + self.scale * self.frozen(out)).float(), y, reduction="none")
        self.seen.append((index.tolist(), losses.detach().tolist()))
        return losses.mean()

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1 or getattr(p, "ds_shape", torch.Size())[1:]]
        known = {id(p) for p in decayed}
        rest = [p for p in self.parameters() if id(p) not in known]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.004}], 0.005)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"},
        }


def fit(
    name: str, folder: str, steps: int, save_at: int, path: str | None = None, die_at: int | None = None
) -> dict[str, Any]:
    """Fits under a layout; gives back what this rank saw, and the whole weights at the end on rank 0."""
    from leyden.strategies.deepspeed import DeepSpeedStrategy

    layout = LAYOUTS[name]
    strategy = layout.strategy if isinstance(layout.strategy, str) else DeepSpeedStrategy(**layout.strategy)
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(SIZE, 6, generator=generator), torch.randint(0, 3, (SIZE,), generator=generator)
    data = TensorDataset(x, y, torch.arange(SIZE))
    torch.manual_seed(4)
    module = Net(layout, die_at)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision=layout.precision,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        max_epochs=-1,
        max_steps=steps,
        callbacks=[ModelCheckpoint(filename="{step}", save_top_k=-1, every_n_train_steps=save_at)],
    )
    trainer.fit(module, DataLoader(data, GLOBAL // layout.ranks, shuffle=True), ckpt_path=path)
    weights = trainer.strategy.full_state_dict(module)
    return {
        "seen": module.seen,
        "weights": {key: value.float().numpy().copy() for key, value in weights.items()},
        "lr": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "path": str(trainer.last_checkpoint),
    }


def fits(runs: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [fit(*run) for run in runs]


def batches(ranks: list[dict[str, Any]]) -> list[tuple[list[int], float]]:
    """Of each global batch, in the order of steps: its samples and its mean loss."""
    found = []
    for parts in zip(*(rank["seen"] for rank in ranks), strict=True):
        samples = [index for part in parts for index in part[0]]
        losses = [loss for part in parts for loss in part[1]]
        found.append((sorted(samples), sum(losses) / len(losses)))
    return found


if __name__ == "__main__":
    import sys, tempfile, time
    folder = tempfile.mkdtemp()
    names = sys.argv[1:]
    t = time.time()
    runs = [(n, f"{folder}/{n}", 14, 4) for n in names]
    a = run_world(2, fits, runs)
    print("straight", time.time() - t); t = time.time()
    again = [(n, f"{folder}/again {n}", 14, 4, f"{folder}/{n}/checkpoints/step=4") for n in names]
    b = run_world(2, fits, again)
    print("resumed", time.time() - t)
    for k, n in enumerate(names):
        for r in range(2):
            print(n, r, a[r][k]["seen"][-10:] == b[r][k]["seen"][-10:], all((b[r][k]["weights"][w] == v).all() for w, v in a[r][k]["weights"].items()), a[r][k]["lr"] == b[r][k]["lr"])
        print(max(abs(x[1]-y[1]) for x, y in zip(batches([a[0][0], a[1][0]]), batches([a[0][k], a[1][k]]))))
    print(sorted(os.listdir(f"{folder}/{names[0]}/checkpoints/step=4")))
