"""A registered backend is an accelerator like torch's own: names, indices, random states, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy

from leyden import ConfigurationError
from leyden.core import devices
from leyden.data.rng import rng_state, seed_everything, set_rng_state
from leyden.strategies.mesh.rng import generators_of

TOY = torch.device("toy", 0)


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "toy"])
def test_the_machines_accelerator_is_found(accelerator: str) -> None:
    assert devices.find_devices(accelerator) == [TOY]
    with pytest.raises(ConfigurationError, match="there is no toy:1, this machine has 1 GPU"):
        devices.find_devices(accelerator, 2)


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        ("cuda", "finds no such device"),
        ("xpu", "finds no such device"),
        ("mps", "finds no such device"),
        ("toi", "'toi' is not known.*'toy'"),
        ("meta", "not known"),
        ("nn", "not known"),
        ("xla", "strategy='xla'"),
    ],
)
def test_other_names_raise(accelerator: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        devices.find_device(accelerator)


def test_a_device_without_an_index_gets_the_current_one() -> None:
    assert devices.with_index("toy") == TOY
    assert str(devices.with_index("meta")) == "meta"


def test_the_devices_random_state_is_saved_seeded_and_restored() -> None:
    seed_everything(5)
    state: Any = rng_state()
    drawn = torch.randn(3, device="toy").cpu()
    assert len(state["toy"]) == 1 and "cuda" not in state
    set_rng_state(state)
    assert torch.equal(torch.randn(3, device="toy").cpu(), drawn)
    seed_everything(5)
    assert torch.equal(torch.randn(3, device="toy").cpu(), drawn)
    # A state of a device that this machine lacks is left alone.
    set_rng_state({**state, "cuda": state["toy"], "mps": state["toy"][0]})
    assert generators_of(TOY) == [torch.default_generator, toy.GENERATOR]


def test_memory_is_that_of_the_device() -> None:
    used = devices.used_memory(TOY)
    assert used is not None and used[2] == 2**30
    kept = torch.zeros(1000, device="toy")
    devices.reset_peak_memory(TOY)
    before = devices.peak_memory(TOY)
    assert before == toy.MEMORY.used >= 4000
    del kept
    assert toy.MEMORY.used == before - 4000
    assert devices.name_of(TOY) == "Toy" and not devices.lacks_bfloat16(TOY)
    assert devices.used_memory(torch.device("cpu")) is None
