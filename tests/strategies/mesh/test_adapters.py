"""Adapters around layers that a plan splits."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.plan import Plan


class Adapted(nn.Module):
    """A layer with adapters, as peft wraps it."""

    def __init__(self, **others: nn.Module) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2), "second": nn.Linear(8, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8), "second": nn.Linear(2, 8)})
        for name, other in others.items():
            self.add_module(name, other)


def matched(style: Any, **others: nn.Module) -> dict[str, Any]:
    return Plan({"up": style}).matched(nn.ModuleDict({"up": Adapted(**others)}))


@pytest.mark.parametrize(
    ("style", "first", "second"),
    [("colwise", "replicate", "colwise"), ("gather", "replicate", "gather"), ("rowwise", "rowwise", "replicate")],
)
def test_adapters_are_placed_to_match_their_layer(style: str, first: str, second: str) -> None:
    assert matched(style, lora_dropout=nn.Dropout()) == {
        "up.base_layer": style,
        "up.lora_A.default": first,
        "up.lora_A.second": first,
        "up.lora_B.default": second,
        "up.lora_B.second": second,
    }


def test_unsupported_adapters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"an Adapted around a layer with 'lora_magnitude_vector': adapters"):
        matched("colwise", lora_magnitude_vector=nn.Linear(1, 8))
    with pytest.raises(ConfigurationError, match=r"'up' 'sequence', .* Name the inner layers .*: 'up\.base_layer'"):
        matched("sequence")
