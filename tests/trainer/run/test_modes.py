"""Warnings about submodules trained in eval mode by mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from models import QUIET, Squares
from torch import nn

from leyden import Trainer


def mode_warnings(
    change: Callable[[Squares], object], trained: Callable[[Squares], object] = Squares.parameters
) -> list[str]:
    """Returns the mode warnings of a fit, for a net of two blocks with dropout and batch norm."""
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)) for _ in range(2)]
    module = Squares(nn.Sequential(*blocks), lambda m: torch.optim.SGD(trained(m), lr=0.1))
    change(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**QUIET, max_steps=1).fit(module, [torch.randn(4, 2)])
    return [str(found.message) for found in caught if "in eval mode" in str(found.message)]


def test_a_submodule_in_eval_mode_warns_with_the_fix() -> None:
    [words] = mode_warnings(lambda module: module.net.eval())
    assert words.startswith("Squares trains net in eval mode") and "call self.net.train() in __init__" in words
    [words] = mode_warnings(lambda module: module.net[1].eval())
    assert "trains net.1 in" in words


def freeze(module: Squares) -> None:
    module.net[0].eval().requires_grad_(False)


def freeze_norms(module: Squares) -> None:
    for block in module.net:
        block[1].eval()
        block[2].eval()


def without_modes(module: Squares) -> None:
    module.net[0].eval()
    module.net[0][1], module.net[0][2] = nn.Identity(), nn.Dropout(0.0)


@pytest.mark.parametrize("change", [lambda module: None, freeze, freeze_norms, without_modes])
def test_intended_or_harmless_eval_modes_do_not_warn(change: Callable[[Squares], object]) -> None:
    assert mode_warnings(change) == []


def test_a_submodule_without_an_optimizer_does_not_warn() -> None:
    assert mode_warnings(lambda module: module.net[0].eval(), lambda module: module.net[1].parameters()) == []


def test_a_whole_module_in_eval_mode_warns_once() -> None:
    [words] = mode_warnings(lambda module: module.eval())
    assert words.startswith("Squares is in eval mode, and fit will train it in that mode")
