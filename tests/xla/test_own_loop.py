"""A user's loop on XLA, through Accelerator, matches the CPU, compiles only once and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from xla.model import loader
from xla.process import on_xla

from leyden import Accelerator


def train(root: Path, resume: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """Trains two epochs in windows of two batches; saves a checkpoint after the first."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters(), 0.02)
    accelerator = Accelerator(gradient_accumulation_steps=2, **arguments)
    model, optimizer, data, scheduler = accelerator.prepare(
        model, optimizer, loader(shuffle=True), StepLR(optimizer, 1, 0.9)
    )
    if resume is not None:
        accelerator.load_state(resume)
    losses, compiled = [], []
    for epoch in range(0 if resume is None else 1, 2):
        for batch in data:
            compiled.append(compiled_programs())
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(batch[:, :4]), batch[:, 4:])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()))
        if epoch == 0:
            accelerator.save_state(root / "first")
    accelerator.save_model(model, root / "model")
    weights = accelerator.get_state_dict(model)
    return {
        "losses": [float(loss) for loss in losses],
        "compiled": compiled,
        "type": str(accelerator.distributed_type),
        "weights": {name: tensor.flatten().tolist() for name, tensor in weights.items()},
    }


def compiled_programs() -> int:
    import sys

    metrics = sys.modules.get("torch_xla.debug.metrics")
    data = None if metrics is None else metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


def on_one(root: Path) -> list[dict[str, Any]]:
    import torch_xla.debug.metrics  # noqa: F401

    straight = train(root, strategy="xla")
    return [
        straight,
        train(root, root / "first", strategy="xla"),
        train(root, root.parent / "cpu" / "first", strategy="xla"),
    ]


def on_four(root: Path) -> list[dict[str, Any]]:
    from leyden.strategies.xla.xla_strategy import XLAFSDPStrategy

    return [
        train(root, strategy=XLAFSDPStrategy(devices=4)),
        train(root, root / "first", strategy=XLAFSDPStrategy(devices=4)),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("own_loop")
    cpu = train(root / "cpu", cpu=True)
    return {"root": root, "cpu": cpu, "one": on_xla(on_one, root / "one"), "four": on_xla(on_four, root / "four")}


@pytest.mark.parametrize("where", ["one", "four"])
def test_a_users_loop_matches_the_cpu(runs: dict[str, Any], where: str) -> None:
    found = runs[where][0]
    assert found["losses"] == pytest.approx(runs["cpu"]["losses"], rel=1e-6, abs=1e-6)
    assert found["type"].endswith("XLA")
    for name, weight in runs["cpu"]["weights"].items():
        assert found["weights"][name] == pytest.approx(weight, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("where", ["one", "four"])
def test_a_users_loop_resumes_from_its_checkpoint(runs: dict[str, Any], where: str) -> None:
    straight, resumed = runs[where][:2]
    assert resumed["losses"] == pytest.approx(straight["losses"][5:], rel=1e-6, abs=1e-7)


def test_checkpoints_move_from_the_cpu_to_xla_and_back(runs: dict[str, Any]) -> None:
    assert runs["one"][2]["losses"] == pytest.approx(runs["cpu"]["losses"][5:], abs=1e-5)
    for where in ("one", "four"):
        there = train(runs["root"] / "again", runs["root"] / where / "first", cpu=True)
        assert there["losses"] == pytest.approx(runs["cpu"]["losses"][5:], abs=1e-5)


def test_the_second_epoch_compiles_nothing(runs: dict[str, Any]) -> None:
    compiled = runs["one"][0]["compiled"]
    assert compiled[1] > 0, "the counter saw no compilation"
    assert compiled[6:] == [compiled[6]] * 4
