"""Edge cases of pipelines: random numbers, buffers, empty micro-batches, frozen stages, outputs of blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from leyden import Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy
from leyden.strategies.mesh.pipeline.rng import may_draw
from leyden.strategies.micro_batches import cut


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        return x + torch.tanh(self.linear(x))


class Net(TrainModule):
    """Counts samples, logs metrics and the loss, and records its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(8, 8)
        self.count, self.mean, self.each = SumMetric(), MeanMetric(), MeanMetric()
        self.register_buffer("scale", torch.ones(()))
        self.drawn: dict[int, list[Any]] = {}
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, numbers = batch
        self.count.update(float(len(x)))
        output = self(x)
        loss = F.mse_loss(output, x)
        self.mean.update(numbers)
        self.each(numbers)
        self.log("each", self.each, on_step=True, on_epoch=True)
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.losses.append(float(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Drawing(Net):
    """Draws random numbers before, between and after the blocks; records those before them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x + torch.rand_like(x) + random.random() + np.random.rand())
        return self.last(x)

    def draw(self, batch: Any) -> Tensor:
        x = batch[0]
        noise = torch.randn_like(x) + random.random() + np.random.rand()
        if not self.trainer.strategy.outputs.are_rehearsed:
            stage = self.trainer.strategy._pipeline.pipeline.runner.stage
            self.drawn.setdefault(stage, []).append(float(noise.sum()))
        output = self(x + noise)
        torch.rand(3)
        random.random()
        np.random.rand()
        return F.mse_loss(output, noise)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.draw(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.draw(batch)


def data(samples: int = 10) -> TensorDataset:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.arange(samples).float())


def make(kind: type[Net] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def trainer_of(strategy: dict[str, Any] | None, **arguments: Any) -> Trainer:
    chosen: Any = "single_device" if strategy is None else MeshStrategy(pp=2, microbatches=4, **strategy)
    return Trainer(strategy=chosen, **{**QUIET, "max_epochs": 2, **arguments})


def metrics_of(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def draws(schedule: str) -> dict[int, list[float]]:
    module = make(Drawing)
    random.seed()
    np.random.seed(None)
    trainer = trainer_of({"schedule": schedule}, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(data(), 4), DataLoader(data(4), 4))
    return module.drawn


def counts(strategy: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """Trains with a last batch of two samples for four micro-batches; returns metrics, weights and counts."""
    module = make()
    trainer = trainer_of(strategy)
    trainer.fit(module, DataLoader(data(), 4))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    trainer.save_checkpoint(folder)
    loaded = Net.load_from_checkpoint(folder).state_dict()
    return {
        "metrics": metrics_of(trainer),
        "weight": state["last.weight"].numpy(),
        "seen": [[float(found[f"blocks.{block}.seen"]) for block in range(4)] for found in (state, loaded)],
    }


def frozen(strategy: dict[str, Any] | None, which: str, precision: str = "32-true") -> dict[str, Any]:
    """Trains with some parameters frozen, and with clipping and weight decay; returns the parameters."""
    module = make()
    if which == "tied":
        module.last.weight = module.first.weight
        module.last.weight.requires_grad_(False)
    else:
        for part in (module.first, *module.blocks[:2]):
            part.requires_grad_(False)
    trainer = trainer_of(strategy, gradient_clip_val=0.1, precision=precision)
    trainer.fit(module, DataLoader(data(), 4))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {name: state[name].float().numpy() for name, _ in module.named_parameters()}


def resumed(strategy: dict[str, Any] | None, folder: str) -> list[dict[str, float]]:
    """Returns epoch values of a run without and with a resume within the epoch."""
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    settings = {"enable_checkpointing": True, "max_epochs": 1, "default_root_dir": folder}
    whole = trainer_of(strategy, callbacks=[checkpoint], **settings)
    whole.fit(make(), DataLoader(data(), 4))
    again = trainer_of(strategy, **{**settings, "enable_checkpointing": False})
    again.fit(make(), DataLoader(data(), 4), ckpt_path=str(Path(folder) / "step=2"))
    return [metrics_of(whole), metrics_of(again)]


def run_edges(folder: str) -> dict[str, Any]:
    return {
        "draws": {schedule: draws(schedule) for schedule in ("1F1B", "Interleaved1F1B")},
        "counts": counts({}, f"{folder}/counts"),
        "tied": frozen({}, "tied"),
        "first": frozen({}, "first"),
        "bf16": frozen({}, "first", "bf16-true"),
        "resumed": resumed({}, f"{folder}/resumed"),
    }


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, run_edges, str(tmp_path_factory.mktemp("edges")))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_all_stages_draw_the_same_numbers_before_the_blocks(edges: list[dict[str, Any]], schedule: str) -> None:
    by_stage = {stage: drawn for rank in edges for stage, drawn in rank["draws"][schedule].items()}
    first = by_stage[0]
    assert len(set(first)) == len(first) > 20
    for stage, drawn in by_stage.items():
        assert drawn == first, stage


def test_an_empty_micro_batch_leaves_no_trace(edges: list[dict[str, Any]], tmp_path: Path) -> None:
    single = counts(None, str(tmp_path / "single"))
    for rank in edges:
        found = rank["counts"]
        assert found["metrics"] == pytest.approx(single["metrics"], rel=1e-5)
        assert abs(found["weight"] - single["weight"]).max() < 1e-5
        assert found["seen"] == single["seen"], "buffers are not those of the stage that changed them"


@pytest.mark.parametrize("which", ["tied", "first"])
def test_frozen_parameters_stay_unchanged(edges: list[dict[str, Any]], which: str) -> None:
    single = frozen(None, which)
    for rank in edges:
        for name, value in single.items():
            assert abs(rank[which][name] - value).max() < 1e-5, name


def test_clipping_works_if_a_stage_has_no_gradients(edges: list[dict[str, Any]]) -> None:
    assert all(np.isfinite(value).all() for rank in edges for value in rank["bf16"].values())


def test_a_resumed_epoch_includes_the_batches_before_the_checkpoint(edges: list[dict[str, Any]]) -> None:
    for rank in edges:
        whole, again = rank["resumed"]
        assert again == pytest.approx(whole, rel=1e-6)


class ChangingBlock(nn.Module):
    """A block that returns a changing number, or a shape that depends on values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.calls = nn.Linear(8, 8), kind, 0

    def forward(self, x: Any) -> Any:
        x = x[0] if isinstance(x, tuple) else x
        self.calls += 1
        if self.kind == "number":
            return self.linear(x), self.calls
        return self.linear(x[x[:, 0] > -1e9 if self.calls < 3 else x[:, 0] > 0])


class ChangingNet(TrainModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ChangingBlock(kind) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return (x[0] if isinstance(x, tuple) else x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_changing_blocks(kind: str) -> None:
    trainer_of({}).fit(ChangingNet(kind), DataLoader(data(8), 8))


@pytest.mark.parametrize("kind", ["number", "shape"])
def test_blocks_whose_outputs_change_after_the_rehearsal_raise(kind: str) -> None:
    found = run_world(2, run_changing_blocks, kind, may_fail=True)
    assert any("Stages agree on shapes and on values other than tensors in advance" in str(text) for text in found), (
        found
    )


def test_cutting_a_list_of_samples_of_different_lengths_raises() -> None:
    samples = [torch.zeros(5), torch.zeros(4)]
    for batch in (samples, {"x": samples}):
        with pytest.raises(
            ConfigurationError, match="lengths, \\[4, 5\\], and cannot be split into micro-batches by sample"
        ):
            cut(batch, 2)
    assert [part.rows for part in cut([torch.zeros(2, 3), torch.zeros(2)], 2)] == [1, 1]


def test_only_plain_torch_layers_are_known_to_draw_no_random_numbers() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(())

    hooked = nn.Embedding(4, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert not may_draw(nn.Embedding(4, 2)) and not may_draw(nn.Linear(2, 2))
    assert may_draw(nn.Sequential(nn.Embedding(4, 2), nn.Dropout(0.1)))
    assert may_draw(Noisy(2, 2)) and may_draw(hooked)
