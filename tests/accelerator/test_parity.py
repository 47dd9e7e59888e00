"""Custom loops with the Accelerator end with the weights of the plain torch loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import Stream, pairs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Accelerator, GradScalerKwargs

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return model, optimizer, scheduler, DataLoader(pairs(9), 2, shuffle=True)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def plain_loop(precision: str, accumulation: int, init_scale: float) -> tuple[list[Tensor], list[float]]:
    model, optimizer, scheduler, loader = build()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=init_scale)
    dtype, rates = DTYPES[precision], []
    for _ in range(3):
        for index, (x, y) in enumerate(loader):
            length = min(accumulation, len(loader) - index // accumulation * accumulation)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.mse_loss(model(x), y)
            scaler.scale(loss / length if length > 1 else loss).backward()
            if (index + 1) % accumulation == 0 or index + 1 == len(loader):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= before:
                    scheduler.step()
                optimizer.zero_grad()
                rates.append(scheduler.get_last_lr()[0])
    return weights_of(model), rates


@pytest.mark.parametrize(
    ("precision", "accumulation", "init_scale"),
    [("no", 1, 1.0), ("no", 2, 1.0), ("bf16", 2, 1.0), ("fp16", 1, 2.0**10), ("fp16", 3, 2.0**30)],
)
def test_weights_and_learning_rates_match_the_plain_loop(precision: str, accumulation: int, init_scale: float) -> None:
    """9 samples in batches of 2, so the last window and the last batch are short."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=init_scale)],
    )
    model, optimizer, scheduler, loader = build()
    scheduler, loader, model, optimizer = accelerator.prepare(scheduler, loader, model, optimizer)
    rates, skips = [], 0
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(scheduler.get_last_lr()[0])
                skips += accelerator.optimizer_step_was_skipped
    plain, plain_rates = plain_loop(precision, accumulation, init_scale)
    assert_same(weights_of(accelerator.unwrap_model(model)), plain)
    assert rates == plain_rates
    assert (skips > 0) == (init_scale > 2.0**20)


def gan_parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    steps = torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    return generator, critic, *steps, DataLoader(pairs(9), 3, shuffle=True)


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Returns WGAN-GP's penalty, which pulls the critic's gradient between real and fake samples to norm 1."""
    weight = torch.rand(len(real), 1)
    between = (weight * real + (1 - weight) * fake).requires_grad_()
    [gradient] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def train_gan(parts: Any, backward: Callable[..., None], step: Callable[[Any], None]) -> list[Tensor]:
    generator, critic, optimizer_g, optimizer_c, loader = parts
    for _ in range(2):
        for real, _ in loader:
            fake = generator(torch.randn(len(real), 3))
            loss = (
                critic(fake.detach()).mean() - critic(real).mean() + 10 * gradient_penalty(critic, real, fake.detach())
            )
            backward(loss)
            step(optimizer_c)
            optimizer_c.zero_grad()
            backward(-critic(fake).mean())
            step(optimizer_g)
            optimizer_g.zero_grad()
            optimizer_c.zero_grad()
    return weights_of(generator) + weights_of(critic)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_gan_with_gradient_penalty_matches_the_plain_loop(precision: str) -> None:
    """Two models and optimizers share one scaler, and backward runs through a gradient."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    generator, critic, optimizer_g, optimizer_c, loader = gan_parts()
    critic, loader, generator = accelerator.prepare(critic, loader, generator)
    optimizer_c, optimizer_g = accelerator.prepare(optimizer_c, optimizer_g)
    parts = (generator, critic, optimizer_g, optimizer_c, loader)
    ours = train_gan(parts, accelerator.backward, lambda optimizer: optimizer.step())

    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def step(optimizer: torch.optim.Optimizer) -> None:
        scaler.step(optimizer)
        scaler.update()

    plain = gan_parts()
    for model in plain[:2] if precision == "fp16" else ():
        model.forward = torch.autocast("cpu", torch.float16)(model.forward)  # type: ignore[method-assign]
    assert_same(ours, train_gan(plain, lambda loss: scaler.scale(loss).backward(), step))
    if precision == "fp16":
        assert accelerator.scaler.get_scale() == scaler.get_scale()


def test_one_backward_for_two_optimizers_updates_the_scale_once() -> None:
    """The scale is updated after both steps, as in torch's recipe for several optimizers."""

    def parts() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        return model, [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]

    scaling = {"init_scale": 8.0, "growth_interval": 1}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**scaling)])
    model, optimizers = parts()
    model, *optimizers = accelerator.prepare(model, *optimizers)
    plain, steps = parts()
    scaler = torch.amp.GradScaler("cpu", **scaling)
    for x, y in DataLoader(pairs(9), 3):
        with accelerator.autocast():
            loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(plain(x), y)
        scaler.scale(loss).backward()
        for step in steps:
            scaler.step(step)
            step.zero_grad()
        scaler.update()
    assert_same(weights_of(model), weights_of(plain))
    assert accelerator.scaler.get_scale() == scaler.get_scale() == 64.0


@pytest.mark.parametrize("sized", [True, False])
def test_a_short_last_window_is_divided_by_its_length(sized: bool) -> None:
    """7 batches in windows of 4: gradients are the mean over the window's batches, with sized and unsized loaders."""
    data: Any = pairs(7) if sized else Stream(pairs(7))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(4, 1)
    model, loader, optimizer = accelerator.prepare(
        model, DataLoader(data, 1), torch.optim.SGD(model.parameters(), lr=0.0)
    )
    windows, gradients = [], []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                windows.append(accelerator.window.index + 1)
            optimizer.step()
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.clone())
            optimizer.zero_grad()
    assert windows == [4, 3]
    for start, stop, gradient in ((0, 4, gradients[0]), (4, 7, gradients[1])):
        x, y = pairs(7)[start:stop]
        [expected] = torch.autograd.grad(F.mse_loss(model(x), y), [model.weight])
        torch.testing.assert_close(gradient, expected)


def test_num_items_averages_a_summed_loss_over_its_window() -> None:
    """Batches of 1, 3 and 2 items, such as tokens, make one step whose gradient is the mean over 6."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = nn.Linear(4, 1)
    x, y = pairs(6)[:]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x[rows]), y[rows], reduction="sum")
            accelerator.backward(loss, num_items=len(x[rows]))
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
    [expected] = torch.autograd.grad(F.mse_loss(model(x), y), [model.weight])
    torch.testing.assert_close(model.weight.grad, expected)
    assert norm >= expected.norm()


def test_an_optimizer_step_accepts_a_closure() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = build()
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = pairs(9)[:]
    before = weights_of(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)
    assert not torch.equal(before[0], weights_of(model)[0])


def test_windows_span_epochs_without_sync_with_dataloader() -> None:
    from leyden import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(pairs(4), 1)
    )
    closes = []
    for _ in range(2):
        for x, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                closes.append(accelerator.sync_gradients)
    assert closes == [False, False, True, False, False, True, False, False]


def test_nested_accumulate_blocks_are_one_batch() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, optimizer, loader = accelerator.prepare(first, second, optimizer, DataLoader(pairs(5), 1))
    closes = []
    for x, _ in loader:
        with accelerator.accumulate(first), accelerator.accumulate(second):
            accelerator.backward(first(x).mean() + second(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            closes.append(accelerator.sync_gradients)
    assert closes == [False, True, False, True, True]


@pytest.mark.parametrize("chosen", ["all", "one", "several"])
def test_unscale_gradients_is_not_repeated_by_the_step(chosen: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    before = first.weight.item()
    accelerator.backward(first(torch.ones(1, 1)).sum() * 2 + second(torch.ones(1, 1)).sum() * 4)
    assert (first.weight.grad.item(), second.weight.grad.item()) == (2048.0, 4096.0)
    accelerator.unscale_gradients({"all": None, "one": optimizers[0], "several": optimizers}[chosen])
    assert (first.weight.grad.item(), second.weight.grad.item()) == (2.0, 4096.0 if chosen == "one" else 4.0)
    optimizers[0].step()
    assert first.weight.item() == pytest.approx(before - 2.0)


def test_unscale_gradients_inside_a_window_does_nothing() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=2,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    gradients = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            accelerator.unscale_gradients()
            gradients.append(model.weight.grad.item())
            optimizer.step()
    assert gradients == [512.0, 1.0]


def test_device_placement_false_yields_batches_unmoved() -> None:
    accelerator = Accelerator(cpu=True)
    batches = [torch.ones(1), torch.zeros(1)]
    unmoved = accelerator.prepare_data_loader(batches, device_placement=False)
    assert all(ours is given for ours, given in zip(unmoved, batches, strict=True))
    # A second call with the same list prepares it again, with its own placement.
    assert [batch.item() for batch in accelerator.prepare_data_loader(batches)] == [1.0, 0.0]
