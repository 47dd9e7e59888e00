"""Cases in which the ranks' weights or buffers could silently drift apart, and Ctrl-C in a loader's workers."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies import DDPStrategy
from leyden.strategies.fsdp.sharding import whole
from leyden.trainer.events.signals import Signals


class Net(TrainModule):
    def __init__(self, freezes: bool = False, plateau: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)
        self.first.requires_grad_(not freezes)
        self.plateau = plateau

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.second(self.first(batch[0])).pow(2).mean()
        self.log("loss", loss, on_step=True)
        return loss  # type: ignore[no-any-return]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.plateau:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss"}}


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 2, generator=torch.Generator().manual_seed(1))), batch_size=2)


def fit_on_a_plateau() -> tuple[list[float], float]:
    module = Net(plateau=True)
    trainer = Trainer(strategy="ddp", max_epochs=2, **QUIET)
    trainer.fit(module, loader())
    return module.first.weight.flatten().tolist(), trainer.optimizers[0].param_groups[0]["lr"]


def test_reduce_lr_on_plateau_by_step_values_keeps_ranks_equal() -> None:
    one, other = run_world(2, fit_on_a_plateau)
    assert one == other and one[1] < 0.1


class Unfreezing(Net):
    """Trains its first layer only in the second of three epochs, or only after the given batch."""

    def __init__(self, unfreezes_in_batch: int | None = None, manual: bool = False) -> None:
        super().__init__(freezes=True)
        self.double()
        self.unfreezes_in_batch = unfreezes_in_batch
        self.automatic_optimization = not manual
        self.trained: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step([batch[0].double()], batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch == 1 and self.unfreezes_in_batch is None)
        self.trained.append(self.first.weight.requires_grad)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.unfreezes_in_batch:
            self.first.requires_grad_(True)


class StaysUnfrozen(Unfreezing):
    def on_train_epoch_start(self) -> None: ...


def fit_unfreezing(strategy: Any, rows: int = 2, manual: bool = False, **arguments: Any) -> list[float]:
    module = Unfreezing(manual=manual)
    settings = {**QUIET, **arguments}
    if isinstance(strategy, dict):
        strategy = DDPStrategy(**strategy)
    data = DataLoader(loader().dataset, batch_size=rows)
    Trainer(strategy=strategy, max_epochs=3, **settings).fit(module, data)
    assert module.trained == [False, True, False]
    return whole(module.first.weight).flatten().tolist()


def fit_each_unfreezing(strategies: list[Any]) -> list[list[float]]:
    found = [fit_unfreezing(strategy) for strategy in strategies]
    return [
        *found,
        fit_unfreezing("ddp", manual=True),
        fit_unfreezing("ddp", 1, accumulate_grad_batches=2),
    ]


def fit_and_unfreeze_in(arguments: dict[str, Any], batch: int | None) -> None:
    kind, epochs = (Unfreezing, 2) if batch is None else (StaysUnfrozen, 1)
    Trainer(strategy=DDPStrategy(**arguments), max_epochs=epochs, **QUIET).fit(kind(batch), loader())


def test_unfrozen_and_refrozen_parameters_train_like_one_process() -> None:
    one = fit_unfreezing("single_device", 4)
    strategies: list[Any] = ["ddp", "fsdp", {"ddp_comm_hook": "fp16", "find_unused_parameters": True}]
    both = run_world(2, fit_each_unfreezing, strategies)
    assert both[0] == both[1]
    ddp, fsdp, compressed, manual, accumulated = both[0]
    assert ddp == pytest.approx(one, abs=1e-12)
    assert fsdp == pytest.approx(one, abs=1e-12)
    assert compressed == pytest.approx(one, abs=1e-3)
    assert manual == pytest.approx(one, abs=1e-12)
    assert accumulated == pytest.approx(one, abs=1e-12)


@pytest.mark.parametrize(
    ("arguments", "batch", "message"),
    [
        ({}, 3, "first.weight was unfrozen within an epoch, so DDP did not exchange its gradients"),
        (
            {"static_graph": True},
            None,
            "first.weight was frozen when the fit began and is trained now, but with static_",
        ),
        (
            {"ddp_comm_hook": "powersgd"},
            None,
            "first.weight was frozen when the fit began and is trained now, but with the",
        ),
    ],
    ids=["within an epoch", "static graph", "PowerSGD"],
)
def test_the_error_names_a_parameter_whose_gradients_are_not_exchanged(
    arguments: dict[str, Any], batch: int | None, message: str
) -> None:
    found = run_world(2, fit_and_unfreeze_in, arguments, batch, may_fail=True)
    # One rank raises the error, and the other exits silently.
    [error] = [text for text in found if isinstance(text, str)]
    assert error.startswith(f"ConfigurationError: {message}")


def test_one_process_may_unfreeze_a_parameter() -> None:
    module = Net(freezes=True)
    before = module.first.weight.clone()
    Trainer(max_epochs=2, **QUIET).fit(module, loader())
    assert not torch.equal(before, module.first.weight)


# manual optimization --------------------------------------------------------------------------------------------------
class Manual(Net):
    """Manual optimization, with a plain backward in some batches."""

    def __init__(self, plain: set[int]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain = plain

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.second(self.first(batch[0])).pow(2).mean()
        loss.backward() if batch_idx in self.plain else self.manual_backward(loss)
        optimizer.step()


def fit_by_hand(plain: set[int], strategy: str, precision: str = "32-true") -> tuple[list[float], list[str]]:
    module = Manual(plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(strategy=strategy, precision=precision, max_epochs=1, **QUIET).fit(module, loader())
    messages = [str(warning.message) for warning in caught if "manual_backward" in str(warning.message)]
    return module.first.weight.detach().flatten().tolist(), messages


def fit_twice_by_hand() -> list[tuple[list[float], list[str]]]:
    return [fit_by_hand(set(), "ddp"), fit_by_hand({2, 3, 4}, "ddp")]


def test_a_plain_backward_warns_once() -> None:
    one, other = run_world(2, fit_twice_by_hand)
    assert one[0][1] == other[0][1] == []
    # All batches have one size, and DDP averages the gradients of a plain backward before the step.
    assert one[0][0] == one[1][0] == other[0][0] == other[1][0]
    [message], [] = one[1][1], other[1][1]
    assert "not weighted by the size of each rank's batch" in message and "self.manual_backward(loss)" in message
    [message] = fit_by_hand({2}, "single_device", "16-mixed")[1]
    assert "are not scaled for precision='16-mixed'" in message
    assert fit_by_hand({2}, "single_device")[1] == []


# buffers --------------------------------------------------------------------------------------------------------------
class Normalized(Net):
    """A net with batch norm, whose statistics differ by rank; records them in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.trained: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.second(self.first(self.norm(batch[0]))).pow(2).mean()
        return loss  # type: ignore[no-any-return]

    def statistics(self) -> list[float]:
        return torch.cat([self.norm.running_mean, self.norm.running_var]).tolist()  # type: ignore[list-item]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained = self.statistics()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated = self.statistics()


def validate_with_buffers(strategy: str) -> tuple[list[float], list[float]]:
    module = Normalized()
    trainer = Trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, loader(), loader())
    return module.trained, module.validated


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_validation_in_fit_uses_the_buffers_of_rank_0(strategy: str) -> None:
    (trained, validated), (other, validated_there) = run_world(2, validate_with_buffers, strategy)
    assert trained != other
    assert validated == validated_there == trained


def test_a_forked_worker_survives_ctrl_c() -> None:
    reader, writer = os.pipe()
    with Signals() as signals:
        child = os.fork()
        if child == 0:
            os.write(writer, b"1")
            # Killed by the signal while waiting, or exits below.
            signal.sigtimedwait([signal.SIGUSR1], 60) if signals.received is None else None
            os._exit(7)
        os.read(reader, 1)
        os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert signals.received is None
    # Killed not by Ctrl-C, which a terminal sends to every process, but by the signal sent to this one alone.
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
