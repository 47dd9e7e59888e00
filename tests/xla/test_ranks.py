"""One rank per device, as on TPU hosts; here a single one, since XLA's CPU has no collectives between processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from xla.model import Regression, loader
from xla.process import on_xla

from leyden import Trainer
from leyden.strategies.xla.ddp import XLADDPStrategy


def fit(root: Path, **where: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Regression()
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1, default_root_dir=root, **{**QUIET, **where}
    )
    trainer.fit(module, loader(shuffle=True), loader())
    return {
        "losses": [float(loss) for loss in module.losses],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.flatten().tolist() for name, value in module.state_dict().items()},
        "place": (trainer.strategy.name, trainer.world_size, trainer.global_rank, trainer.global_step),
    }


def under_torchrun(root: Path) -> dict[str, Any]:
    """Fits as a rank of torchrun, which joins torch_xla's process group."""
    import torch.distributed as dist

    found = fit(root, accelerator="xla", strategy="xla_ddp")
    found["backend"] = dist.get_backend()
    return found


def by_launch(root: Path) -> dict[str, Any]:
    """Fits in a process that is not a rank, so that torch_xla.launch starts one for its device."""
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    return fit(root, accelerator="xla", strategy=XLADDPStrategy(devices=1, start_method="xla"))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(tmp_path_factory.mktemp("cpu"), accelerator="cpu")


def test_a_rank_of_torchrun_joins_xlas_process_group(on_cpu: dict[str, Any], tmp_path: Path) -> None:
    found = on_xla(under_torchrun, tmp_path)
    assert found["backend"] == "xla"
    assert found["place"] == ("xla_ddp", 1, 0, 6)
    assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-6, abs=1e-6)
    assert found["metrics"] == pytest.approx(on_cpu["metrics"], rel=1e-6, abs=1e-6)


def test_torch_xla_launch_starts_a_rank_and_returns_its_result(on_cpu: dict[str, Any], tmp_path: Path) -> None:
    found = on_xla(by_launch, tmp_path)
    assert found["place"] == ("xla_ddp", 1, 0, 6)
    assert found["metrics"] == pytest.approx(on_cpu["metrics"], rel=1e-6, abs=1e-6)
    for name, weight in on_cpu["weights"].items():
        assert found["weights"][name] == pytest.approx(weight, rel=1e-5, abs=1e-6)
