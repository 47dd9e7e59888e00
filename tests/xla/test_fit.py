"""The Trainer on XLA matches the CPU to 6 digits on one device, with SPMD and with sharded parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from xla.model import Regression, loader
from xla.process import on_xla

from leyden import Trainer
from leyden.strategies.xla.xla_strategy import XLAStrategy


def layout_of(module: Regression) -> str:
    """Returns how XLA shards the first weight over its devices."""
    weight = module.net[0].weight
    if weight.device.type != "xla":
        return ""
    import torch_xla

    return str(torch_xla._XLAC._get_xla_sharding_spec(weight))


def fit(root: Path, options: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Fits two epochs; returns losses, metrics, weights and predictions."""
    torch.manual_seed(0)
    module = Regression(**options)
    trainer = Trainer(max_epochs=2, default_root_dir=root, **{**QUIET, **arguments})
    trainer.fit(module, loader(shuffle=True), loader())
    # As lists, since shared memory is freed with the process.
    weights = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
    predictions = trainer.predict(module, loader())
    assert predictions is not None and all(part.device.type == "cpu" for part in predictions)
    return {
        "losses": [float(loss) for loss in module.losses],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": weights,
        "predictions": torch.cat(predictions).flatten().tolist(),
        "layout": layout_of(module),
        "tied": module.tied.weight is module.net[4].weight,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "momentum": ({"sgd": True}, {}),
    "uneven windows, clipped by norm": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "clipped by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "items": ({"num_items": True}, {"accumulate_grad_batches": 2}),
    "items as tensors": ({"num_items": "tensor"}, {"accumulate_grad_batches": 3}),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one device": {"accelerator": "xla", "strategy": "xla", "devices": 1},
    "SPMD over 4": {"accelerator": "xla", "strategy": "xla", "devices": 4},
    "FSDP over 4": {"accelerator": "xla", "strategy": "xla_fsdp", "devices": 4},
}
LAYOUTS = {
    "one device": "",
    "SPMD over 4": "{replicated}",
    "FSDP over 4": "{devices=[4,1]0,1,2,3}",
    "tensor parallel over 2, data over 2": "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}",
}
TENSOR = {"mesh": {"data": 2, "model": 2}, "shard": {"net.0.*eight": ("model", None), "net.2.weight": (None, "model")}}


def run_cases(root: Path, strategy: dict[str, Any] | None, names: list[str]) -> list[dict[str, Any]]:
    """Runs cases under one strategy or, for None, with tensor sharding."""
    arguments = (
        {"strategy": XLAStrategy(**TENSOR), "accelerator": "xla", "devices": 4} if strategy is None else strategy
    )
    return [fit(root, CASES[name][0], **{**arguments, **CASES[name][1]}) for name in names]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found = run_cases(tmp_path_factory.mktemp("cpu"), {"accelerator": "cpu"}, list(CASES))
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", [*STRATEGIES, "tensor parallel over 2, data over 2"])
def test_xla_matches_the_cpu(name: str, on_cpu: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    # Two cases cover what a partitioner could get wrong.
    cases = list(CASES) if name == "one device" else ["uneven windows, clipped by norm", "items"]
    for case, here in zip(cases, on_xla(run_cases, tmp_path, STRATEGIES.get(name), cases), strict=True):
        there = on_cpu[case]
        assert here["tied"], f"{case}: weights are no longer tied"
        assert here["layout"] == LAYOUTS[name]
        assert here["losses"] == pytest.approx(there["losses"], rel=1e-6, abs=1e-6), case
        assert here["metrics"] == pytest.approx(there["metrics"], rel=1e-6, abs=1e-6), case
        for key, weight in there["weights"].items():
            assert here["weights"][key] == pytest.approx(weight, rel=1e-5, abs=1e-6), f"{case}: {key}"
        assert here["predictions"] == pytest.approx(there["predictions"], rel=1e-5, abs=1e-5), case


def fit_in_bf16(root: Path) -> list[dict[str, Any]]:
    return [fit(root, {}, **STRATEGIES["one device"], precision=name) for name in ("bf16-mixed", "bf16-true")]


def test_bf16_losses_are_close_to_the_cpus(tmp_path: Path) -> None:
    """Two runs in bf16 sum in another order, so losses differ by a few of its 8 bits."""
    for name, found in zip(("bf16-mixed", "bf16-true"), on_xla(fit_in_bf16, tmp_path), strict=True):
        there = fit(tmp_path, {}, accelerator="cpu", precision=name)
        assert found["losses"] == pytest.approx(there["losses"], rel=0.03, abs=0.03), name
        assert found["losses"] != there["losses"] or name == "bf16-true"
