"""`Accelerator.gradient_state`, by which libraries read the accumulation window."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import Accelerator, ConfigurationError
from leyden.accelerator.loop.gradient_state import GradientState


def test_gradient_state_tracks_the_window_and_the_active_loader() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, DataLoader(torch.ones(3, 1)))
    state = accelerator.gradient_state
    assert (state.in_dataloader, state.active_dataloader, state.remainder, state.end_of_dataloader) == (
        False,
        None,
        -1,
        False,
    )
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            seen.append((state.sync_gradients, state.end_of_dataloader, state.active_dataloader is loader))
    assert seen == [(False, False, True), (True, False, True), (True, True, True)]
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (2, True, True)
    assert state.plugin_kwargs["sync_each_batch"] is False


def test_setting_sync_gradients_controls_when_optimizers_step() -> None:
    """transformers' Trainer sets it for each batch."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.clone()
    accelerator.sync_gradients = False
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(model.weight, before) and model.weight.grad is not None
    accelerator.gradient_state._set_sync_gradients(True)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert torch.equal(model.weight, before - 2.0)


def test_constructing_a_global_gradient_state_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"accelerator\.gradient_state"):
        GradientState()
