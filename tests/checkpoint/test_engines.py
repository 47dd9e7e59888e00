"""An engine with its own memory, behind the Strategy contract alone: it steps flat float64 master weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED, Squares
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint.reader import CheckpointReader
from leyden.strategies.deepspeed.engine_state import NamedOptimizer, Piece, weights
from leyden.strategies.master_weights import MasterWeights
from leyden.strategies.single import SingleDeviceStrategy
from leyden.strategies.weights import StateWriter, WeightReader


class FlatMasterWeights(MasterWeights):
    """The master weights of a FlatEngineStrategy."""

    def __init__(self, strategy: FlatEngineStrategy) -> None:
        self.strategy = strategy

    def groups(self, optimizer: Optimizer) -> list[list[Tensor]]:
        return self.strategy.groups

    def saved_form(self, optimizer: Optimizer) -> Any:
        return NamedOptimizer(optimizer, self.strategy.groups, self.strategy.pieces)

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        pieces = self.strategy.pieces
        return {name: pieces[id(p)].fragment() for name, p in module.named_parameters()} if pieces else None

    def load(self, reader: WeightReader, module: nn.Module) -> None:
        pieces = self.strategy.pieces
        reader.fill({name: pieces[id(p)].fragment() for name, p in module.named_parameters()})
        self.strategy.copy_back()


class FlatEngineStrategy(SingleDeviceStrategy):
    """Steps one flat copy of each group's parameters, made when the optimizer is set up."""

    name = "flat_engine"
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.master_weights = FlatMasterWeights(self)
        self.pieces: dict[int, Piece] = {}
        self.groups: list[list[Tensor]] = []

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        [optimizer] = optimizers
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, self.groups, strict=True):
            flat = torch.cat([p.detach().double().reshape(-1) for p in own])
            group["params"] = [flat]
            for number, p in enumerate(own):
                place = sum(other.numel() for other in own[:number])
                self.pieces[id(p)] = Piece(p, p.shape, flat, place, 0, p.numel(), optimizer)  # type: ignore[arg-type]
        return super().setup_optimizers(modules, optimizers)

    def step(self, optimizer: Optimizer, closure: Any = None) -> bool:
        for group, own in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"][0].grad = torch.cat([p.grad.double().reshape(-1) for p in own])  # type: ignore[union-attr]
        optimizer.step()
        self.count += 1
        for own in self.groups:
            for p in own:
                p.grad = None
        self.copy_back()
        return True

    @torch.no_grad()
    def copy_back(self) -> None:
        for piece in self.pieces.values():
            piece.parameter.copy_(piece.of(piece.flat).view(piece.shape))

    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        writer.model(weights(module, self.pieces))
        if optimizers is not None:
            writer.optimizers(optimizers)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state.get("count", self.count)


class Net(Squares):
    """Records its losses."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)))
        self.kind = kind
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": weights, "lr": 0.02}, {"params": biases}]
        return AdamW(groups, 0.01) if self.kind == "AdamW" else SGD(groups, 0.01, momentum=0.9)


def fit(kind: str, engine: bool, folder: Path, path: Path | None = None, end: int = 9) -> tuple[Net, Any]:
    module = Net(kind)
    strategy = FlatEngineStrategy() if engine else SingleDeviceStrategy()
    data = TensorDataset(torch.randn(24, 5, generator=torch.Generator().manual_seed(2)))
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=strategy,
        default_root_dir=folder,
        max_epochs=-1,
        max_steps=end,
        callbacks=[ModelCheckpoint(filename="{step}", every_n_train_steps=4, save_top_k=-1)],
    )
    torch.manual_seed(3)
    trainer.fit(module, DataLoader(data, 4, shuffle=True), ckpt_path=path)
    return module, trainer


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_engine_with_its_own_memory_resumes_exactly(kind: str, tmp_path: Path) -> None:
    uninterrupted, trainer = fit(kind, True, tmp_path / "uninterrupted")
    path = tmp_path / "uninterrupted" / SAVED / "step=4"
    reader = CheckpointReader(path)
    assert all(value.dtype == torch.float64 for value in reader.model().values())
    [state] = reader.optimizers()
    assert {key: value.shape for key, value in state["state"]["net.0.weight"].items()} == (
        {"step": torch.Size(()), "exp_avg": torch.Size((7, 5)), "exp_avg_sq": torch.Size((7, 5))}
        if kind == "AdamW"
        else {"momentum_buffer": torch.Size((7, 5))}
    )
    assert [group["params"] for group in state["param_groups"]] == [
        ["net.0.weight", "net.2.weight"],
        ["net.0.bias", "net.2.bias"],
    ]

    resumed_net, resumed = fit(kind, True, tmp_path / "resumed_net", path)
    assert resumed_net.losses == uninterrupted.losses[4:] and resumed.strategy.count == trainer.strategy.count == 9
    for piece, other in zip(resumed.strategy.pieces.values(), trainer.strategy.pieces.values(), strict=True):
        assert torch.equal(piece.of(piece.flat), other.of(other.flat)), "master weights differ"

    # Out of the engine, and back into it.
    away, _ = fit(kind, False, tmp_path / "away", path, end=8)
    back, _ = fit(kind, True, tmp_path / "back", tmp_path / "away" / SAVED / "step=8")
    assert away.losses + back.losses == pytest.approx(uninterrupted.losses[4:], rel=1e-5)

    # From a run without the engine into one with it.
    plain, _ = fit(kind, False, tmp_path / "plain")
    into, _ = fit(kind, True, tmp_path / "into", tmp_path / "plain" / SAVED / "step=4")
    assert into.losses == pytest.approx(plain.losses[4:], rel=1e-5)
