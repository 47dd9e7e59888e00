"""Schedule-free optimizers: validation and the end of a fit see their average, training and checkpoints do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, data
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint


class ScheduleFree(GPT):
    def configure_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.01, warmup_steps=2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def loss_of(self, batch: Any) -> Tensor:
        tokens, labels = batch
        return torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Modes(Callback):
    """Notes the optimizer's mode at several moments."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def note(self, moment: str, trainer: Trainer) -> None:
        self.seen[moment] = trainer.optimizers[0].param_groups[0]["train_mode"]

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.note("training", trainer)

    def on_validation_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note("validation", trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.note("a save after validation", trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self.note("a save at the end", trainer)


def fit(strategy: str, folder: str | None = None, resumes: bool = False, **arguments: Any) -> tuple[Trainer, GPT]:
    torch.manual_seed(0)
    module = ScheduleFree()
    saves = (
        [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)]
        if folder and not resumes
        else []
    )
    trainer = Trainer(
        strategy=strategy,
        max_steps=6,
        callbacks=[*saves, *arguments.pop("callbacks", [])],
        **{**QUIET, "enable_checkpointing": bool(saves), **arguments},
    )
    size = 4 // trainer.strategy.data_size
    loaders = DataLoader(data(24), size, shuffle=True), DataLoader(data(8), size)
    trainer.fit(module, *loaders, ckpt_path=f"{folder}/step=3" if resumes else None)
    return trainer, module


class Swaps(Callback):
    """Puts zeros into the module for a validation, and the weights back after it."""

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self.kept = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict({name: torch.zeros_like(value) for name, value in self.kept.items()})

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        module.load_state_dict(self.kept)


def weights(trainer: Trainer, module: GPT) -> dict[str, Any]:
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {name: value.numpy().copy() for name, value in state.items()}


def test_evaluation_sees_the_average_and_saves_the_training_weights() -> None:
    modes = Modes()
    trainer, module = fit("single_device", callbacks=[modes], val_check_interval=2, num_sanity_val_steps=1)
    assert modes.seen == {
        "training": True,
        "validation": False,
        "a save after validation": True,
        "a save at the end": True,
    }
    [optimizer] = trainer.optimizers
    assert not optimizer.param_groups[0]["train_mode"], "the module keeps the average after a fit"
    [after] = trainer.validate(module, DataLoader(data(8), 4), verbose=False)
    assert not optimizer.param_groups[0]["train_mode"]
    assert after["val_loss"] == pytest.approx(module.loss_of(data(8)[:]).item(), rel=1e-5)


def test_callbacks_that_swap_or_average_weights_do_not_mix_with_two_sets_of_weights() -> None:
    plain = weights(*fit("single_device"))
    swapped = weights(*fit("single_device", val_check_interval=1, callbacks=[Swaps()]))
    assert all((swapped[name] == value).all() for name, value in plain.items())
    with pytest.raises(ConfigurationError, match="EMAWeightAveraging averages the weights, and so does the optimizer"):
        fit("single_device", callbacks=[EMAWeightAveraging()])


def compare(folder: str) -> dict[str, float]:
    """Returns distances between runs that must end alike, bit for bit."""
    strategy = "fsdp" if torch.distributed.is_torchelastic_launched() else "single_device"
    plain = weights(*fit(strategy))
    validated = weights(*fit(strategy, val_check_interval=1))
    fit(strategy, folder)
    resumed = weights(*fit(strategy, folder, resumes=True))
    return {
        name: max(float(abs(other[key] - value).max()) for key, value in plain.items())
        for name, other in {"validated": validated, "resumed": resumed}.items()
    }


def test_validation_and_a_resume_change_no_weight(tmp_path: Path) -> None:
    assert compare(str(tmp_path / "single")) == {"validated": 0, "resumed": 0}
    for distances in run_world(2, compare, str(tmp_path / "fsdp")):
        assert distances == {"validated": 0, "resumed": 0}
