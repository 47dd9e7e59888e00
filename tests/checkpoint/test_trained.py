"""Parameters that hooks freeze or unfreeze: a resumed run trains the same ones as the saved run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge_json
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.checkpoint.format.errors import CheckpointError
from leyden.strategies.fsdp.sharding import whole


class Gradual(TrainModule):
    """Trains its first layer from the second epoch on, and its second until then."""

    def __init__(self, trains_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.first.requires_grad_(trains_first)
        self.epochs: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.third(self.second(self.first(batch[0])).tanh()).pow(2).mean()  # type: ignore[no-any-return]

    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)
        if self.current_epoch == 1:
            self.first.requires_grad_(True)
            self.second.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 2, generator=torch.Generator().manual_seed(1))), batch_size=2)


def trainer_of(root: Path, strategy: str, **arguments: Any) -> Trainer:
    return Trainer(**{**QUIET, "strategy": strategy, "default_root_dir": root, "max_epochs": 3, **arguments})


def fit(root: Path, strategy: str, steps: list[int]) -> dict[str, list[list[float]]]:
    """Returns the weights of an uninterrupted run, and of runs saved at some steps and resumed."""
    found = {}
    for number in [-1, *steps]:
        module = Gradual()
        if number >= 0:
            first = trainer_of(root, strategy, max_steps=number)
            first.fit(Gradual(), loader())
            first.save_checkpoint(root / str(number))
        trainer_of(root, strategy).fit(module, loader(), ckpt_path=None if number < 0 else root / str(number))
        found[str(number)] = [whole(parameter).flatten().tolist() for parameter in module.parameters()]
    return found


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_resuming_restores_which_parameters_are_trained(strategy: str, tmp_path: Path) -> None:
    # An epoch has 8 batches on one process and 4 on two.
    ranks = 1 if strategy == "single_device" else 2
    steps = [number // ranks for number in (6, 8, 12, 16, 22)]
    if ranks == 1:
        runs = [fit(tmp_path, strategy, steps)]
    else:
        runs = run_world(ranks, fit, tmp_path, strategy, steps)
    for found in runs:
        uninterrupted = found.pop("-1")
        assert len(found) == 5 and all(resumed == uninterrupted for resumed in found.values())


def test_a_changed_script_decides_for_parameters_that_no_hook_had_changed(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, "single_device", max_steps=3)
    first.fit(Gradual(), loader())
    first.save_checkpoint(tmp_path / "saved")
    module = Gradual(trains_first=True)
    before = module.first.weight.clone()
    trainer_of(tmp_path, "single_device", max_epochs=1).fit(module, loader(), ckpt_path=tmp_path / "saved")
    assert module.epochs == [] and not torch.equal(module.first.weight, before)


def test_restoring_only_weights_neither_freezes_nor_unfreezes_parameters(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, "single_device", max_steps=12)
    first.fit(Gradual(), loader())
    first.save_checkpoint(tmp_path / "saved")
    module = Gradual()
    trainer_of(tmp_path, "single_device", max_epochs=1).fit(
        module, loader(), ckpt_path=tmp_path / "saved", restore="weights"
    )
    assert not module.first.weight.requires_grad and module.second.weight.requires_grad


def test_the_error_for_a_forged_entry_names_it(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, "single_device", max_steps=12)
    first.fit(Gradual(), loader())
    first.save_checkpoint(tmp_path / "saved")
    forge_json(tmp_path / "saved", "rank-0.json", lambda state: state["tree"]["trained"].update({"first.weight": 3}))
    with pytest.raises(CheckpointError, match=r"rank-0\.json.*first\.weight"):
        trainer_of(tmp_path, "single_device").fit(Gradual(), loader(), ckpt_path=tmp_path / "saved")
