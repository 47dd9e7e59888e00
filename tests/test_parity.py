"""With the same seed, fits give the same weights and random numbers as plain PyTorch loops, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import QUIET
from samples import Unsized, labeled
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, Dataset

from leyden import Trainer, TrainModule
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.strategies.precision.amp import MixedPrecision

EPOCHS = 3
BATCH = 4
SIZE = 38
BATCHES = 10
"""The last batch holds 2 samples; with windows of 4, the last window holds 2 batches."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int = SIZE, noisy: bool = False) -> None:
        self.x, self.y = labeled(size).tensors
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.noisy:
            x = x + torch.rand(6) + random.random() + float(np.random.rand())
        return x, self.y[index]


@dataclass(frozen=True)
class Case:
    """The settings of a plain PyTorch loop and of the Trainer."""

    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda parameters: SGD(parameters, 0.1, momentum=0.9)
    scheduler: Callable[[Optimizer], Any] | None = None
    interval: str = "epoch"
    accumulation: int = 1
    clip: tuple[float, str] | None = None
    precision: str = "32-true"
    init_scale: float = 2.0**16
    shuffle: bool = True
    noisy: bool = False
    workers: int = 0
    drop_last: bool = False
    val_every: int | None = None
    """Validates after every so many batches of an epoch; None: at the end of each epoch."""

    def loaders(self) -> tuple[DataLoader[Any], DataLoader[Any]]:
        train = DataLoader(
            Samples(noisy=self.noisy), BATCH, self.shuffle, num_workers=self.workers, drop_last=self.drop_last
        )
        return train, DataLoader(Samples(9), BATCH)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class Classifier(TrainModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = network()
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = self.case.optimizer(self.parameters())
        if self.case.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.case.scheduler(optimizer), "interval": self.case.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def draws() -> list[float]:
    """Returns the next number of each generator, which depends on everything drawn before."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def plain_loop(case: Case) -> tuple[nn.Module, list[float], int]:
    """Trains by hand; returns the network, the next random numbers, and how many steps the scaler skipped."""
    seed()
    net = network()
    optimizer = case.optimizer(net.parameters())
    scheduler = None if case.scheduler is None else case.scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.init_scale, enabled=case.precision == "16-mixed")
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(case.precision)
    train, val = case.loaders()
    total, skipped = len(train), 0

    def autocast() -> Any:
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def validate() -> None:
        net.eval()
        with torch.no_grad(), autocast():
            for x, _ in val:
                net(x)
        net.train()

    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(train):
            place = index % case.accumulation
            if place == 0:
                optimizer.zero_grad()
            with autocast():
                loss = cross_entropy(net(x), y)
            length = min(case.accumulation, total - (index - place))
            scaler.scale(loss / length).backward()
            if place == length - 1:
                scaler.unscale_(optimizer)
                if case.clip is not None and case.clip[1] == "norm":
                    nn.utils.clip_grad_norm_(net.parameters(), case.clip[0])
                elif case.clip is not None:
                    nn.utils.clip_grad_value_(net.parameters(), case.clip[0])
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                was_skipped = scaler.get_scale() < scale
                skipped += was_skipped
                if scheduler is not None and case.interval == "step" and not was_skipped:
                    scheduler.step()
            if scheduler is not None and case.interval == "epoch" and index == total - 1:
                scheduler.step()
            if case.val_every is not None and (index + 1) % case.val_every == 0:
                validate()
        if case.val_every is None:
            validate()
    return net, draws(), skipped


def trainer_in(folder: Path, **arguments: Any) -> Trainer:
    return Trainer(**{**QUIET, "max_epochs": EPOCHS, "default_root_dir": folder, **arguments})


def with_trainer(
    case: Case, folder: Path, sized: bool = True, **arguments: Any
) -> tuple[nn.Module, list[float], Trainer]:
    """Fits; returns the network, the next random numbers and the Trainer. Without `sized` the loader has no length."""
    seed()
    module = Classifier(case)
    precision: Any = case.precision
    if precision == "16-mixed":
        precision = MixedPrecision("16", init_scale=case.init_scale)
    clip, algorithm = case.clip if case.clip is not None else (None, None)
    trainer = trainer_in(
        folder,
        precision=precision,
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        val_check_interval=1.0 if case.val_every is None else case.val_every,
        **arguments,
    )
    train, val = case.loaders()
    trainer.fit(module, train if sized else Unsized(train), val)
    return module.net, draws(), trainer


def assert_same(ours: nn.Module, plain: nn.Module) -> None:
    here, there = ours.state_dict(), plain.state_dict()
    assert here.keys() == there.keys()
    different = [name for name in here if not torch.equal(here[name], there[name])]
    assert not different


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, 0.01)


def one_cycle(optimizer: Optimizer) -> Any:
    return OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * BATCHES)


def step_lr(optimizer: Optimizer) -> Any:
    return StepLR(optimizer, 1, 0.5)


CASES = {
    "sgd": Case(),
    "sgd, unshuffled": Case(shuffle=False),
    "adamw, scheduler by epoch": Case(adamw, step_lr),
    "adamw, scheduler by step": Case(adamw, one_cycle, "step"),
    "clipping by norm": Case(clip=(0.5, "norm")),
    "clipping by value": Case(adamw, clip=(0.02, "value")),
    "accumulation": Case(accumulation=4),
    "accumulation, full last batch": Case(adamw, accumulation=4, drop_last=True),
    "accumulation, clipping, scheduler": Case(
        adamw, lambda o: ExponentialLR(o, 0.9), "step", accumulation=4, clip=(0.5, "norm")
    ),
    "a window longer than the epoch": Case(accumulation=16),
    "a dataset that draws random numbers": Case(noisy=True, accumulation=4),
    "workers": Case(workers=2, noisy=True),
    "validation within the epoch": Case(adamw, noisy=True, val_every=3),
    "bf16": Case(adamw, one_cycle, "step", precision="bf16-mixed", accumulation=4, clip=(0.5, "norm")),
    "fp16": Case(
        adamw, one_cycle, "step", precision="16-mixed", init_scale=2.0**10, accumulation=4, clip=(0.5, "norm")
    ),
    "fp16, skipped steps": Case(adamw, one_cycle, "step", precision="16-mixed", init_scale=2.0**19, noisy=True),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_and_random_numbers_match_the_plain_loop(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain, plain_draws, skipped = plain_loop(case)
    ours, our_draws, trainer = with_trainer(case, tmp_path)
    assert_same(ours, plain)
    assert our_draws == plain_draws
    assert trainer.progress.global_step - trainer.progress.stepped == skipped
    assert (skipped > 0) == ("skipped" in name)


def test_default_callbacks_change_neither_weights_nor_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = Case(adamw, step_lr, accumulation=4, clip=(0.5, "norm"), noisy=True)
    plain, plain_draws, _ = plain_loop(case)
    on = {"logger": True, "enable_progress_bar": True, "enable_checkpointing": True, "log_every_n_steps": 2}
    ours, our_draws, trainer = with_trainer(case, tmp_path, **on)
    assert_same(ours, plain)
    assert our_draws == plain_draws
    assert trainer.checkpoint_callback is not None and Path(trainer.checkpoint_callback.best_model_path).is_dir()


def test_the_last_window_of_an_unsized_loader_is_scaled_by_its_true_length(tmp_path: Path) -> None:
    case = Case(adamw, step_lr, accumulation=4, clip=(0.5, "norm"))
    plain, plain_draws, _ = plain_loop(case)
    ours, our_draws, _ = with_trainer(case, tmp_path, sized=False)
    # 2 / 4 is exact in floating point, so the correction rounds nothing.
    assert_same(ours, plain)
    assert our_draws == plain_draws


@pytest.mark.parametrize("sanity", [0, 2, -1])
def test_the_sanity_check_does_not_advance_random_numbers(sanity: int, tmp_path: Path) -> None:
    case = Case(noisy=True)
    plain, plain_draws, _ = plain_loop(case)
    ours, our_draws, _ = with_trainer(case, tmp_path, num_sanity_val_steps=sanity, logger=CSVLogger(tmp_path))
    assert_same(ours, plain)
    assert our_draws == plain_draws


def test_scaling_a_short_last_window_by_the_full_length_changes_the_weights() -> None:
    """So the accumulation cases above can fail."""
    plain, _, _ = plain_loop(Case(accumulation=4))
    seed()
    net = network()
    optimizer = SGD(net.parameters(), 0.1, momentum=0.9)
    train, val = Case().loaders()
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(train):
            (cross_entropy(net(x), y) / 4).backward()
            if index % 4 == 3 or index == BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
        iter(val)
    assert any(not torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


# items ----------------------------------------------------------------------------------------------------------------
class SummedLoss(TrainModule):
    """Returns a loss summed over the samples that count, and their number, which differs between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        loss = cross_entropy(self.net(x.double()), y, ignore_index=0, reduction="sum")
        return {"loss": loss, "num_items": (y != 0).sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), 0.3, momentum=0.9)


def test_a_window_with_num_items_matches_one_big_batch(tmp_path: Path) -> None:
    data = Samples()
    seed()
    module = SummedLoss()
    start = {name: value.clone() for name, value in module.net.state_dict().items()}
    trainer_in(tmp_path, accumulate_grad_batches=4).fit(module, DataLoader(data, BATCH))

    big = nn.Linear(6, 3).double()
    big.load_state_dict(start)
    optimizer = SGD(big.parameters(), 0.3, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in DataLoader(data, 4 * BATCH):
            optimizer.zero_grad()
            cross_entropy(big(x.double()), y, ignore_index=0).backward()
            optimizer.step()
    for ours, theirs in zip(module.net.parameters(), big.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    # Hooks get the loss that the user returned: a sum.
    first = cross_entropy(
        nn.functional.linear(data.x[:4].double(), start["weight"], start["bias"]),
        data.y[:4],
        ignore_index=0,
        reduction="sum",
    )
    assert module.seen[0] == float(first)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_first_batch_without_items_keeps_the_weights_finite(accumulation: int, tmp_path: Path) -> None:
    data = Samples()
    data.y[:4] = 0
    seed()
    module = SummedLoss()
    start = module.net.weight.detach().clone()
    trainer = trainer_in(tmp_path, max_epochs=1, accumulate_grad_batches=accumulation, limit_train_batches=accumulation)
    trainer.fit(module, DataLoader(data, BATCH))
    assert bool(torch.isfinite(module.net.weight).all())
    assert torch.equal(module.net.weight, start) == (accumulation == 1)


def test_a_window_with_num_items_matches_the_plain_loop(tmp_path: Path) -> None:
    """Bit for bit: each loss is divided by the first batch's count, and the gradients are corrected once."""
    seed()
    module = SummedLoss()
    plain = nn.Linear(6, 3).double()
    plain.load_state_dict(module.net.state_dict())
    trainer = trainer_in(tmp_path, max_epochs=1, accumulate_grad_batches=4, gradient_clip_val=0.1)
    trainer.fit(module, DataLoader(Samples(), BATCH))
    optimizer = SGD(plain.parameters(), 0.3, momentum=0.9)
    batches = list(DataLoader(Samples(), BATCH))
    for start in range(0, BATCHES, 4):
        window = batches[start : start + 4]
        counts = [(y != 0).sum() for _, y in window]
        optimizer.zero_grad()
        for x, y in window:
            (cross_entropy(plain(x.double()), y, ignore_index=0, reduction="sum") / counts[0]).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(int(counts[0]) / int(sum(counts)))
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    assert_same(module.net, plain)


# closures and manual optimization -------------------------------------------------------------------------------------
def lbfgs(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.LBFGS(parameters, 0.5, max_iter=4, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("clip", [None, 0.5])
def test_lbfgs_weights_match_the_plain_loop(clip: float | None, tmp_path: Path) -> None:
    case = Case(lbfgs, step_lr, clip=None if clip is None else (clip, "norm"))
    seed()
    net = network()
    optimizer = lbfgs(net.parameters())
    scheduler = step_lr(optimizer)
    train, val = case.loaders()
    calls = 0
    for _ in range(EPOCHS):
        for x, y in train:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        scheduler.step()
        for _ in val:
            pass
    plain_draws = draws()
    ours, our_draws, trainer = with_trainer(case, tmp_path)
    assert_same(ours, net)
    assert our_draws == plain_draws
    assert trainer.global_step == EPOCHS * BATCHES < calls


class GAN(TrainModule):
    """Two networks, each with an optimizer that is stepped manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        of_generator, of_critic = self.optimizers()
        decay, _ = self.lr_schedulers()
        fake = self.generator(torch.randn(len(real), 2))

        self.toggle_optimizer(of_generator)
        loss = binary_cross_entropy_with_logits(self.critic(fake), torch.ones(len(real), 1))
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, 0.5, "norm")
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator", loss, prog_bar=True)

        scores = self.critic(torch.cat([real, fake.detach()]))
        loss = binary_cross_entropy_with_logits(
            scores, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        )
        of_critic.zero_grad()
        self.manual_backward(loss)
        if batch_idx % 2 == 0:
            of_critic.step()
        decay.step()
        self.log_dict({"critic": loss})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.critic(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizers = [Adam(self.generator.parameters(), 0.01), SGD(self.critic.parameters(), 0.1)]
        return optimizers, [step_lr(optimizers[0]), ExponentialLR(optimizers[1], 0.9)]


def test_the_weights_of_a_manually_optimized_gan_match_the_plain_loop(tmp_path: Path) -> None:
    seed()
    plain = GAN()
    of_generator, of_critic = Adam(plain.generator.parameters(), 0.01), SGD(plain.critic.parameters(), 0.1)
    decay = step_lr(of_generator)
    train, val = Case(noisy=True).loaders()
    for _ in range(EPOCHS):
        for index, (real, _) in enumerate(train):
            fake = plain.generator(torch.randn(len(real), 2))
            loss = binary_cross_entropy_with_logits(plain.critic(fake), torch.ones(len(real), 1))
            of_generator.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(plain.generator.parameters(), 0.5)
            of_generator.step()
            scores = plain.critic(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            of_critic.zero_grad()
            binary_cross_entropy_with_logits(scores, truth).backward()
            if index % 2 == 0:
                of_critic.step()
            decay.step()
        for _ in val:
            pass
    plain_draws = draws()

    seed()
    module = GAN()
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", default_root_dir=tmp_path, logger=CSVLogger(tmp_path))
    trainer.fit(module, *Case(noisy=True).loaders())
    assert_same(module, plain)
    assert draws() == plain_draws
    assert trainer.global_step == EPOCHS * BATCHES


class TwoOptimizers(TrainModule):
    """Automatic optimization with two optimizers, each of which steps once per window."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.head(self.body(x).relu()), y)

    def configure_optimizers(self) -> Any:
        return [SGD(self.body.parameters(), 0.1), AdamW(self.head.parameters(), 0.01)]


def test_weights_with_several_automatic_optimizers_match_the_plain_loop(tmp_path: Path) -> None:
    seed()
    plain = TwoOptimizers()
    optimizers = plain.configure_optimizers()
    train, _ = Case().loaders()
    for _ in range(EPOCHS):
        for index, batch in enumerate(train):
            if index % 4 == 0:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            length = min(4, BATCHES - index // 4 * 4)
            (plain.training_step(batch, index) / length).backward()
            if index % 4 == 3 or index == BATCHES - 1:
                for optimizer in optimizers:
                    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.2)
                    optimizer.step()
    seed()
    module = TwoOptimizers()
    trainer = trainer_in(tmp_path, accumulate_grad_batches=4, gradient_clip_val=0.2)
    trainer.fit(module, Case().loaders()[0])
    assert_same(module, plain)
    assert trainer.global_step == 9


def test_a_second_fit_keeps_the_weights_and_resets_everything_else(tmp_path: Path) -> None:
    """The optimizer, scheduler and scaler are new, as in a second plain loop."""
    case = Case(adamw, one_cycle, "step", precision="16-mixed", init_scale=2.0**19)
    seed()
    net = network()
    for _ in range(2):
        optimizer = adamw(net.parameters())
        scheduler = one_cycle(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=case.init_scale)
        train, _ = case.loaders()
        for _ in range(EPOCHS):
            for x, y in train:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:
                    scheduler.step()
    plain_draws = draws()
    seed()
    module = Classifier(case)
    trainer = trainer_in(tmp_path, precision=MixedPrecision("16", init_scale=case.init_scale))
    for _ in range(2):
        trainer.fit(module, case.loaders()[0])
    assert_same(module.net, net)
    assert draws() == plain_draws
