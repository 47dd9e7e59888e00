"""Modules built on the meta device receive, tensor by tensor, the values of a plain build."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden.core.errors import ConfigurationError
from leyden.strategies import SingleDeviceStrategy
from leyden.strategies.fsdp.deferred import Deferred
from leyden.strategies.fsdp.values import Values


class Rope(nn.Module):
    """Computed buffers, constants from Python, and a random parameter that is scaled."""

    def __init__(self) -> None:
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("cos", torch.outer(torch.arange(16).float(), inverse).cos(), persistent=False)
        self.register_buffer("constant", torch.tensor([1.0, 2.0, 3.0]) * 2)
        self.scale = nn.Parameter(torch.randn(5) * 0.02)


class Everything(nn.Module):
    """Draws random numbers in many ways: in __init__, again by apply, by rejection sampling, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.rope, self.conv, self.norm = Rope(), nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.free = nn.Linear(6, 6)
        nn.init.orthogonal_(self.free.weight)
        nn.init.trunc_normal_(self.free.bias)
        nn.init.dirac_(self.conv.weight)
        nn.init.sparse_(nn.Parameter(self.free.weight.new_empty(4, 4)), 0.5)
        self.gate = nn.Parameter(torch.empty(3, 3).normal_(generator=torch.Generator().manual_seed(1)))
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / math.sqrt(4), a=-0.01, b=0.01)
        with torch.no_grad():
            self.gate[1].fill_(3.0)
            self.gate.copy_(torch.eye(3) * self.gate)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not self.free:
            nn.init.normal_(module.weight, std=0.02)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("seed", [3, 4])
def test_tensors_materialized_one_by_one_match_a_plain_build(seed: int) -> None:
    torch.manual_seed(seed)
    plain, after = Everything(), torch.rand(3)
    torch.manual_seed(seed)
    deferred = Deferred()
    with deferred.recording():
        late = Everything()
    assert torch.equal(after, torch.rand(3)), "the generator's state differs from that after a plain build"
    state = torch.get_rng_state()
    assert all(tensor.is_meta for tensor in tensors(late).values())
    assert late.head.weight is late.embed.weight
    # In reverse order, since no value depends on those materialized before it.
    for name, expected in reversed(tensors(plain).items()):
        recipe = deferred.recipe(tensors(late)[name])
        assert recipe is not None, name
        assert torch.equal(expected, deferred.values([recipe])[recipe]), name
    assert torch.equal(torch.get_rng_state(), state)


def test_filling_in_values_keeps_ties_and_attributes() -> None:
    values = Values()
    torch.manual_seed(0)
    with values.deferred.recording():
        late = Everything()
    late.embed.weight.decays = False  # type: ignore[attr-defined]
    values.remember(late)
    late.to(torch.bfloat16)
    values.fill(
        [(m, name) for m in late.modules() for name in (*m._parameters, *m._buffers) if getattr(m, name) is not None]
    )
    torch.manual_seed(0)
    plain = Everything().to(torch.bfloat16)
    for name, expected in tensors(plain).items():
        assert torch.equal(expected, tensors(late)[name]), name
        assert type(expected) is type(tensors(late)[name])
    assert late.head.weight is late.embed.weight and late.embed.weight.decays is False


def test_recording_without_draws_replays_only_computed_tensors() -> None:
    deferred = Deferred()
    state = torch.get_rng_state()
    with deferred.recording(draws=False):
        late = Rope(), nn.Linear(3, 4), Everything()
    assert torch.equal(torch.get_rng_state(), state)
    recipe = deferred.recipe(late[0].cos)  # type: ignore[arg-type]
    assert recipe is not None and torch.equal(deferred.values([recipe])[recipe], Rope().cos)  # type: ignore[arg-type]


def test_tensors_created_outside_recording_have_no_recipe() -> None:
    deferred = Deferred()
    assert deferred.recipe(torch.ones(2)) is None and deferred.recipe(torch.ones(2, device="meta")) is None


def sample_by_value() -> Any:
    return torch.multinomial(torch.ones(4), 2)


def test_draws_that_depend_on_tensor_values_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="draws random numbers that depend on values"), Deferred().recording():
        sample_by_value()


def rejection_sampled() -> nn.Module:
    layer = nn.Linear(3, 4)
    nn.init.trunc_normal_(layer.weight)
    nn.init.orthogonal_(layer.weight)
    return layer


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 4), lambda: nn.Embedding(3, 4), rejection_sampled])
def test_empty_init_on_one_device_draws_no_random_numbers(make: Callable[[], nn.Module]) -> None:
    state = torch.get_rng_state()
    with SingleDeviceStrategy("cpu").init_module(empty_init=True):
        module = make()
    assert torch.equal(torch.get_rng_state(), state) and module.weight.device.type == "cpu"
    with SingleDeviceStrategy("cpu").init_module():
        make()
    assert not torch.equal(torch.get_rng_state(), state)
    with SingleDeviceStrategy("cpu").init_module(empty_init=True):
        assert bool((nn.LayerNorm(3).weight == 1).all())
