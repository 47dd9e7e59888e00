"""The runs whose checkpoints are frozen in this folder; nothing is rounded before the optimizer step.

The loss is linear in the weights, and samples and random numbers are small integers: a batch's gradient is the same
on every machine, in whatever order it is summed. So `continued` can compute the weights that AdamW must reach.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from leyden import Accelerator, Trainer, TrainModule
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.callbacks.early_stopping import EarlyStopping
from leyden.callbacks.loggers.csv_logger import CSVLogger

STRATEGIES = {"single": ("single_device", 1), "ddp": ("ddp", 2), "fsdp": ("fsdp", 2)}
"""The strategy and the number of ranks of each frozen run of the Trainer."""
SAVED, STEPS, LENGTH = 3, 9, 26
"""Optimizer steps before the checkpoint, total steps, and samples: the checkpoint is within the first epoch."""
BATCHES = 17
"""The batches of the user's own loop: an epoch of 13, and two more windows."""
LR, WIDTH = 0.125, 6

Batches: TypeAlias = list[dict[str, Any]]


def samples() -> TensorDataset:
    """Returns x of small integers, with shape (26, 6), and the number of each sample."""
    numbers = torch.arange(LENGTH)
    x = torch.stack([(numbers * (2 * column + 1) + column) % 7 - 3 for column in range(WIDTH)], dim=1)
    return TensorDataset(x.float(), numbers)


class Branches(nn.Module):
    """Two linear layers, of which the second counts twice; gradients do not depend on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) + 2 * self.right(x)
        return out


def drawn() -> tuple[int, int, int]:
    """Returns a number from each global generator."""
    return int(torch.randint(-3, 4, ())), random.randint(-3, 3), int(np.random.randint(-3, 4))


def loss_of(out: Tensor, numbers: Sequence[int]) -> Tensor:
    """Returns the mean over the batch of the outputs, weighted by the random `numbers`."""
    weights = torch.tensor([*numbers, 1.0])
    return (out * weights).sum(dim=1).mean()


def seed(rank: int = 0) -> None:
    torch.manual_seed(7 + rank)
    random.seed(7 + rank)
    np.random.seed(7 + rank)


class Net(TrainModule):
    """Draws random numbers for each batch, and records them with its samples."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Branches()
        self.total = SumMetric()
        self.batches: Batches = []
        self.counted = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, numbers = batch
        draws = drawn()
        self.batches.append({"samples": numbers.tolist(), "drawn": list(draws)})
        self.counted += 1
        self.total(numbers)
        self.log("draw", float(draws[0]), on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        return loss_of(self.net(x), draws)

    def on_train_epoch_end(self) -> None:
        self.batches.append({"epoch": self.current_epoch, "counted": self.counted})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(kind: str, root: str, ckpt_path: str | None) -> dict[str, Any]:
    """Runs the Trainer on this rank; returns what it did.

    Args:
        kind: "single", "ddp" or "fsdp".
        root: the run's folder; checkpoints go into `root/saved`.
        ckpt_path: the checkpoint to resume from.
    """
    strategy, _ = STRATEGIES[kind]
    seed()
    module = Net()
    checkpoint = ModelCheckpoint(Path(root) / "saved", filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        default_root_dir=root,
        logger=CSVLogger(root, name="rows"),
        enable_progress_bar=False,
        max_epochs=-1,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        callbacks=[checkpoint, EarlyStopping("draw", mode="max", patience=1000, check_on_train_epoch_end=True)],
    )
    seed(trainer.global_rank)
    trainer.fit(module, DataLoader(samples(), 2, shuffle=True), ckpt_path=ckpt_path)
    return {
        "batches": module.batches,
        "values": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "end": [*drawn(), trainer.global_step, trainer.current_epoch, trainer.progress.samples],
        "weights": {name: tensor.tolist() for name, tensor in trainer.strategy.full_state_dict(module).items()},
    }


class Counter:
    """A user's object with state."""

    def __init__(self) -> None:
        self.count, self.odd = 0, {1}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "odd": self.odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.odd = state["count"], state["odd"]


def own_loop(folder: str, ckpt_path: str | None) -> dict[str, Any]:
    """Runs a loop with the Accelerator that saves its state once in `folder`, or resumes from `ckpt_path`."""
    seed()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, counter = Branches(), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(samples(), 2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(counter)
    if ckpt_path is not None:
        accelerator.load_state(ckpt_path)
    batches: Batches = []
    while counter.count < BATCHES:
        for x, numbers in loader:
            draws = drawn()
            batches.append({"samples": numbers.tolist(), "drawn": list(draws)})
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x), draws))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.count += 1
            counter.odd |= {2 * counter.count + 1}
            if counter.count == 2 * SAVED and ckpt_path is None:
                accelerator.save_state(folder)
            if counter.count >= BATCHES:
                break
    weights = {f"net.{name}": tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}
    return {
        "batches": batches,
        "values": {"lr": scheduler.get_last_lr()[0], "odd": len(counter.odd)},
        "end": [*drawn(), counter.count],
        "weights": weights,
    }


def continued(checkpoint: Path, ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Continues from a checkpoint's files with plain AdamW.

    Args:
        checkpoint: the checkpoint's folder.
        ranks: what each rank did after it, as `fit` returns it.

    Returns:
        The final weights by name, as nested lists.
    """
    layout = json.loads((checkpoint / "layout.json").read_text())["tensors"]
    weights = {name: _full_tensor(checkpoint, entry["parts"][""]) for name, entry in layout.items()}
    state = json.loads((checkpoint / "optimizer.json").read_text())["optimizers"][0]["tensors"]
    moments = {name: _full_tensor(checkpoint, entry) for name, entry in state.items()}
    prefix = "net." if "net.left.weight" in weights else ""
    model = Branches()
    model.load_state_dict({name: weights[prefix + name] for name in model.state_dict()})
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            key: moments[f"state.{prefix}{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
        }
    x = samples().tensors[0]
    of_ranks = ([entry for entry in rank["batches"] if "samples" in entry] for rank in ranks)
    batches = list(zip(*of_ranks, strict=True))
    for step, window in enumerate(_windows(batches, 2 * len(ranks)), SAVED):
        optimizer.param_groups[0]["lr"] = LR * 0.5 ** (step // 2)
        optimizer.zero_grad()
        for batch in window:
            count = sum(len(part["samples"]) for part in batch)
            for part in batch:
                # A rank without a sample of a short last batch adds nothing.
                if part["samples"]:
                    loss = loss_of(model(x[part["samples"]]), part["drawn"])
                    (loss * (len(part["samples"]) / count / len(window))).backward()
        optimizer.step()
    return {f"net.{name}": tensor.tolist() for name, tensor in model.state_dict().items()}


def _windows(batches: Sequence[Any], batch_size: int) -> Iterator[Sequence[Any]]:
    """Yields the global batches after the checkpoint in accumulation windows of two, or fewer at an epoch's end."""
    per_epoch = -(-LENGTH // batch_size)
    start, done = 0, 2 * SAVED
    while start < len(batches):
        length = min(2, per_epoch - done % per_epoch)
        yield batches[start : start + length]
        start, done = start + length, done + length


def _full_tensor(checkpoint: Path, entry: Mapping[str, Any]) -> Tensor:
    """Returns a full tensor of a checkpoint, assembled from its shards."""
    full = torch.full(entry["shape"], torch.nan)
    for file, key, offsets, *_ in entry["shards"]:
        part = load_file(checkpoint / file)[key]
        full[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))] = part
    return full
