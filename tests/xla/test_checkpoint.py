"""XLA checkpoints: exact on the same devices, and interchangeable with the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from safetensors.torch import load_file
from torch import Tensor
from xla.model import Regression, loader
from xla.process import on_xla

from leyden import Trainer, TrainModule
from leyden.callbacks import Callback

STEP = 2
"""A checkpoint requested inside a window of two batches is written at its end: after four batches of five."""
CPU = {"accelerator": "cpu"}
ONE = {"accelerator": "xla", "devices": 1}
SHARDED = {"accelerator": "xla", "strategy": "xla_fsdp", "devices": 4}


class SaveAt(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == STEP and trainer.window.closes:
            trainer.save_checkpoint(self.path)


def run(
    where: dict[str, Any], root: Path, *, save: Path | None = None, path: Path | None = None, dropout: float = 0.0
) -> Regression:
    torch.manual_seed(1)
    module = Regression(dropout=dropout)
    callbacks = [] if save is None else [SaveAt(save)]
    trainer = Trainer(
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        default_root_dir=root,
        **{**QUIET, **where},
    )
    trainer.fit(module, loader(shuffle=True), ckpt_path=path)
    return module


def losses(module: Regression) -> list[float]:
    return [float(loss) for loss in module.losses]


def one_device(root: Path) -> dict[str, Any]:
    """Saves and resumes with dropout, drawn on the device; without it, saves, and resumes from the CPU's checkpoint."""
    straight = run(ONE, root, save=root / "drawn", dropout=0.5)
    resumed = run(ONE, root, path=root / "drawn", dropout=0.5)
    run(ONE, root, save=root / "one")
    return {
        "straight": losses(straight),
        "resumed": losses(resumed),
        "same weights": all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True)
        ),
        "from cpu": losses(run(ONE, root, path=root / "cpu")),
    }


def sharded(root: Path) -> dict[str, Any]:
    """Saves, and resumes from its own checkpoint, the CPU's and one device's."""
    import torch_xla

    straight = run(SHARDED, root, save=root / "sharded")
    found: dict[str, Any] = {"straight": losses(straight)}
    for name in ("sharded", "cpu", "one"):
        module = run(SHARDED, root, path=root / name)
        found[f"from {name}"] = losses(module)
        optimizer: Any = module.trainer.optimizers[0]
        weight = module.net[0].weight
        held: list[Tensor] = [weight, *(value for value in optimizer.state[weight].values() if value.dim())]
        found[f"sharding from {name}"] = [torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in held]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("runs")
    found: dict[str, Any] = {"root": root, "cpu": losses(run(CPU, root, save=root / "cpu"))}
    found["one"] = on_xla(one_device, root)
    found["sharded"] = on_xla(sharded, root)
    return found


DONE = STEP * 2
"""Batches before the checkpoint."""


def test_resuming_on_the_same_device_is_exact_including_random_numbers(runs: dict[str, Any]) -> None:
    found = runs["one"]
    assert found["resumed"] == found["straight"][DONE:]
    assert found["same weights"]


def test_sharded_runs_resume_from_their_own_checkpoint(runs: dict[str, Any]) -> None:
    assert runs["sharded"]["from sharded"] == pytest.approx(runs["sharded"]["straight"][DONE:], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("there", ["one", "sharded"])
def test_xla_checkpoints_resume_on_the_cpu(runs: dict[str, Any], there: str) -> None:
    found = losses(run(CPU, runs["root"], path=runs["root"] / there))
    assert found == pytest.approx(runs["cpu"][DONE:], abs=1e-5)
    assert len(found) == 15 - DONE


@pytest.mark.parametrize(("here", "there"), [("one", "cpu"), ("sharded", "cpu"), ("sharded", "one")])
def test_checkpoints_of_other_devices_resume_on_xla(runs: dict[str, Any], here: str, there: str) -> None:
    assert runs[here][f"from {there}"] == pytest.approx(runs["cpu"][DONE:], abs=1e-5)


def test_loaded_weights_are_sharded_again(runs: dict[str, Any]) -> None:
    for name in ("sharded", "cpu", "one"):
        specs = runs["sharded"][f"sharding from {name}"]
        assert len(specs) == 3
        assert set(specs) == {"{devices=[4,1]0,1,2,3}"}


def test_sharded_checkpoints_store_the_same_tensors_as_the_cpus(runs: dict[str, Any]) -> None:
    root = runs["root"]
    there, here = load_file(root / "cpu" / "model.safetensors"), load_file(root / "sharded" / "model.safetensors")
    # The tied weight is stored once.
    assert there.keys() == here.keys()
    assert "tied.weight" not in here
    for name, weight in there.items():
        torch.testing.assert_close(here[name], weight, rtol=1e-5, atol=1e-6)
