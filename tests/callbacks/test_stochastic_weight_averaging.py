"""StochasticWeightAveraging: equality with torch.optim.swa_utils, resumes in each phase, and several ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks.world import run_world
from same import differences, numbers_of, weights_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from leyden.checkpoint.folder import newest
from leyden.checkpoint.reader import CheckpointReader

EPOCHS, START = 6, 3


def configured(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [ExponentialLR(optimizer, 0.9)]


class Net(Squares):
    """Records its learning rates."""

    def __init__(self, norm: bool = True, configure: Any = configured) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 4)))
        self.configure = configure
        self.rates: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def net(norm: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(norm)


def data(dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    rows: Any = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return DataLoader(rows, 4)


def callback(**arguments: Any) -> StochasticWeightAveraging:
    return StochasticWeightAveraging(0.03, START, **{"annealing_epochs": 2, **arguments})


def fit(callbacks: list[Callback], module: Net | None = None, ckpt_path: Any = None, **arguments: Any) -> Net:
    module = net() if module is None else module
    trainer = Trainer(callbacks=callbacks, **{**QUIET, "max_epochs": EPOCHS, **arguments})
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("epochs", [0, 2])
def test_averaging_equals_torchs_swa_utils_bit_for_bit(strategy: str, epochs: int) -> None:
    module = fit([callback(annealing_strategy=strategy, annealing_epochs=epochs)])
    model = net()
    [optimizer], [scheduler] = configured(model)
    average = AveragedModel(model)
    rates = []
    for epoch in range(EPOCHS):
        if epoch == START - 1:
            swa = SWALR(optimizer, 0.03, epochs, strategy)  # type: ignore[arg-type]
        for batch in data():
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
        if epoch >= START - 1:
            average.update_parameters(model)
            swa.step()
        else:
            scheduler.step()
    update_bn(data(), average)
    assert module.rates == rates
    assert not differences(weights_of(module), weights_of(average.module))


class RandomNumberRecorder(Callback):
    """Draws a random number at the end of training, which the batch norm pass must not change."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.drawn.append(float(torch.rand(())))


def test_the_batch_norm_pass_preserves_random_state_and_logs_no_metric() -> None:
    one, other = RandomNumberRecorder(), RandomNumberRecorder()
    module = fit([callback(), one])
    plain = fit([other])
    assert one.drawn == other.drawn
    assert module.trainer.callback_metrics.keys() == plain.trainer.callback_metrics.keys()
    assert module.net.training and module.net[1].momentum == 0.1


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


@pytest.mark.parametrize("at", [8, 14, 18, 29, 36])
def test_a_resume_in_each_phase_equals_an_uninterrupted_run(tmp_path: Path, at: int) -> None:
    straight = fit([callback(), every_step(tmp_path / "one")], enable_checkpointing=True)
    resumed = fit([callback()], Net(), tmp_path / "one" / f"step={at}")
    assert not differences(weights_of(resumed), weights_of(straight)) and resumed.rates == straight.rates[at:]


def test_checkpoints_hold_the_current_weights_until_the_last_epoch_ends(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    module = fit([callback(), checkpoint], enable_checkpointing=True)
    plain = fit([callback()], max_steps=24)
    inside = CheckpointReader(tmp_path / "epoch=4")
    assert inside.state("callbacks")["StochasticWeightAveraging"]["averages_are_in_model"] is False
    assert differences(inside.model(), weights_of(module)) and plain.trainer.global_step == 24
    assert not differences(CheckpointReader(tmp_path / "epoch=5").model(), weights_of(module))


def test_a_longer_fit_continues_from_the_current_weights(tmp_path: Path) -> None:
    straight = fit([callback()], max_epochs=8)
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fit([callback(), checkpoint], enable_checkpointing=True)
    assert not differences(
        weights_of(fit([callback()], Net(), tmp_path / "epoch=5", max_epochs=8)), weights_of(straight)
    )
    module = fit([callback()])
    module.trainer.fit(module, data(), data(), ckpt_path="current", max_epochs=8)
    assert not differences(weights_of(module), weights_of(straight))


def test_a_run_that_ends_early_counts_its_averages() -> None:
    swa = callback(avg_fn=lambda average, current, count: average + (current - average) / (count + 1), device=None)
    fit([swa], max_steps=27)
    assert swa.n_averaged == 2


@pytest.mark.parametrize(("start", "first"), [(1, 0), (4, 3), (0.5, 4), (0.0, 0), (1.0, 9)])
def test_swa_epoch_start_gives_the_first_epoch(start: float, first: int) -> None:
    assert StochasticWeightAveraging(0.1, start).first_epoch(10) == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_lrs": 0.0}, "give a learning rate above 0"),
        ({"swa_lrs": [0.1, -1.0]}, "give a learning rate above 0"),
        ({"swa_lrs": []}, "give a learning rate above 0"),
        ({"swa_epoch_start": 0}, "give an epoch from 1"),
        ({"swa_epoch_start": 1.5}, "give an epoch from 1"),
        ({"annealing_epochs": -1}, "give a whole number from 0"),
        ({"annealing_strategy": "cosine"}, "'cos'"),
        ({"avg_fn": 3}, "give a function"),
        ({"device": "gpux"}, "names no device"),
    ],
)
def test_invalid_arguments_raise_with_the_fix(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})


def test_unsupported_optimizers_and_endless_runs_raise() -> None:
    def two(module: nn.Module) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in list(module.parameters())[:2]]

    with pytest.raises(ConfigurationError, match="returned 2 and 0"):
        fit([callback()], Net(configure=two))
    with pytest.raises(ConfigurationError, match="2 learning rates, but the optimizer has 1"):
        fit([StochasticWeightAveraging([0.1, 0.2])])
    with pytest.raises(ConfigurationError, match="set the Trainer's max_epochs"):
        fit([StochasticWeightAveraging(0.1)], max_epochs=-1, max_steps=3)


def test_manual_optimization_with_batch_norm_raises_before_the_first_step() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[StochasticWeightAveraging(0.01)])
    with pytest.raises(ConfigurationError, match="under manual optimization that would step"):
        trainer.fit(Manual(), [torch.ones(2, 4)] * 2)
    assert trainer.global_step == 0


class InterruptedPass(Net):
    """Optionally receives SIGTERM in the third batch of the batch norm pass."""

    def __init__(self, interrupts: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.interrupts = interrupts
        self.measured = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not torch.is_grad_enabled():
            self.measured += 1
            if self.interrupts and self.measured == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def test_a_signal_ends_the_batch_norm_pass_and_a_resume_repeats_it(tmp_path: Path) -> None:
    straight = fit([callback()], InterruptedPass(False))
    assert straight.measured == 6
    saved, broken = ModelCheckpoint(tmp_path, save_last=True), InterruptedPass(True)
    with pytest.raises(SystemExit):
        fit([callback(), saved], broken, enable_checkpointing=True)
    assert broken.measured == 3
    # The module and the checkpoint have the current weights.
    assert not torch.equal(broken.net[0].weight, straight.net[0].weight)
    resumed = fit([callback()], InterruptedPass(False), ckpt_path=newest(tmp_path))
    assert resumed.measured == 6 and not differences(weights_of(resumed), weights_of(straight))


class UpdatesBatchNorm(Callback):
    """Recomputes batch norm's statistics in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            assert trainer.update_batch_norm()


def test_a_batch_norm_pass_within_an_epoch_leaves_the_fits_workers_alone() -> None:
    orders = []
    for callbacks in ([], [UpdatesBatchNorm()]):
        module = BatchOrder()
        persistent = DataLoader(data().dataset, 4, num_workers=1, persistent_workers=True)
        Trainer(callbacks=callbacks, **QUIET, max_epochs=2).fit(module, persistent)
        orders.append(module.order)
    assert len(orders[0]) == 12 and orders[0] == orders[1]


class BatchOrder(Net):
    """Records its training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            self.order.append(float(batch.sum()))
        return super().training_step(batch, batch_idx)


def test_update_batch_norm_outside_fit_raises() -> None:
    with pytest.raises(Exception, match="call it in a hook during fit"):
        Trainer(**QUIET).update_batch_norm()


# several ranks --------------------------------------------------------------------------------------------------------
def run_on_ranks(folder: str, strategy: str | None, norm: bool, ckpt: str | None = None) -> Any:
    module = net(norm)
    ranks = {} if strategy is None else {"strategy": strategy, "devices": 2, "global_batch_size": 4}
    arguments = {**QUIET, "enable_checkpointing": True, "precision": "64-true", **ranks}
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1, filename="{step}")
    Trainer(callbacks=[callback(), checkpoint], max_epochs=EPOCHS, **arguments).fit(
        module, data(torch.float64), ckpt_path=ckpt
    )
    return numbers_of(module)


def on_two_ranks(folder: str) -> Any:
    found = []
    for strategy in ("ddp", "fsdp"):
        straight = run_on_ranks(f"{folder}/{strategy}", strategy, norm=False)
        resumed = run_on_ranks(f"{folder}/{strategy}-resumed", strategy, False, f"{folder}/{strategy}/step=20")
        normed = run_on_ranks(f"{folder}/{strategy}-norm", strategy, norm=True)
        found.append((straight, resumed, normed))
    return found


def test_ranks_average_like_one_process(tmp_path: Path) -> None:
    expected = run_on_ranks(str(tmp_path / "one"), None, norm=False)
    ranks = run_world(2, on_two_ranks, str(tmp_path))
    for straight, resumed, _ in (strategy for rank in ranks for strategy in rank):
        assert not differences(straight, resumed)
        for name, values in expected.items():
            assert straight[name] == pytest.approx(values, rel=0, abs=1e-12), name
    # Batch norm's statistics cover the batches of all ranks, and are equal on all of them.
    for one, other in zip(*ranks, strict=True):
        assert not differences(one[2], other[2])
        assert one[2]["net.1.num_batches_tracked"] == [6]
