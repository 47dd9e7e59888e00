"""Random numbers: states, seeds, and isolated blocks."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from leyden.core.errors import ConfigurationError
from leyden.data.generators import Generators, is_random_source, random_state, set_random_state
from leyden.data.rng import SEED_VARIABLE, isolated_rng, rng_state, seed_everything, set_rng_state


@pytest.fixture(autouse=True)
def restored_rng() -> Iterator[None]:
    state = rng_state()
    yield
    set_rng_state(state)


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()


def test_restoring_a_state_repeats_the_same_numbers() -> None:
    random.gauss(0, 1), np.random.randn()  # both cache a second number
    state = rng_state()
    numbers = [draw() for _ in range(3)]
    set_rng_state(state)
    assert [draw() for _ in range(3)] == numbers
    assert [draw() for _ in range(3)] != numbers


def test_numpys_state_is_left_out_unless_numpy_random_is_imported() -> None:
    code = (
        "import sys, random; sys.modules.pop('numpy.random', None)\n"
        "from leyden.data.rng import rng_state, set_rng_state\n"
        "state = rng_state(); print('numpy' in state); set_rng_state(state)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    "source",
    [
        torch.Generator().manual_seed(1),
        random.Random(1),
        np.random.default_rng(1),
        np.random.Generator(np.random.MT19937(1)),
        np.random.Generator(np.random.Philox(1)),
        np.random.Generator(np.random.SFC64(1)),
        np.random.RandomState(1),
    ],
    ids=lambda source: type(source).__name__ + type(getattr(source, "bit_generator", None)).__name__,
)
def test_a_single_generators_state_is_restored(source: object) -> None:
    def number() -> float:
        if isinstance(source, torch.Generator):
            return torch.rand((), generator=source).item()
        return float(source.random())  # type: ignore[attr-defined]

    assert is_random_source(source)
    state = random_state(source)
    numbers = [number() for _ in range(5)]
    set_random_state(source, state)
    assert [number() for _ in range(5)] == numbers


def test_other_objects_are_not_random_sources() -> None:
    assert not any(is_random_source(item) for item in (1, "a", torch.zeros(1), np.zeros(1), random, torch.Generator))


def test_each_generator_is_found_once_under_its_path() -> None:
    class Data(list):  # type: ignore[type-arg]
        rng: random.Random

    data = Data(range(4))
    data.rng = random.Random(1)
    shared = torch.Generator()
    owned = Generators(DataLoader(data, shuffle=True, generator=shared))
    assert set(owned.states()) == {"loader.generator", "loader.dataset.rng"}


def test_an_isolated_block_leaves_global_generators_unchanged() -> None:
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with pytest.raises(KeyError), isolated_rng():
        draw()
        raise KeyError
    assert draw() == expected


def test_an_isolated_block_restores_loaders_and_ends_their_workers() -> None:
    shared = torch.Generator().manual_seed(1)
    numbers: Any = range(4)
    loader = DataLoader(numbers, shuffle=True, generator=shared, num_workers=1, persistent_workers=True)
    before = shared.get_state()
    with isolated_rng([loader]):
        list(loader)
    assert torch.equal(shared.get_state(), before)
    assert loader._iterator is None


def test_a_seed_seeds_all_libraries() -> None:
    assert seed_everything(7) == 7
    numbers = draw()
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    assert draw() == numbers
    assert seed_everything(2**32 - 1) == 2**32 - 1


def test_a_seed_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(SEED_VARIABLE, raising=False)
    assert seed_everything() == 0
    monkeypatch.setenv(SEED_VARIABLE, "12")
    assert seed_everything(verbose=True) == 12
    assert capsys.readouterr().out == "Seed set to 12\n"
    monkeypatch.setenv(SEED_VARIABLE, "twelve")
    with pytest.raises(ConfigurationError, match="LEYDEN_SEED='twelve' is not an integer"):
        seed_everything()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to 4294967295"):
        seed_everything(seed)


class Gpus:
    """Simulates torch's generators of three GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
        self.states = {index: torch.full((16,), index, dtype=torch.uint8) for index in range(3)}
        self.current = current
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: self.states[index])
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: self.states.update({index: state}))

    def numbers(self) -> list[int]:
        return [int(state[0]) for state in self.states.values()]


def test_a_ranks_gpu_state_resumes_under_another_gpu_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on cuda:2 that resumes as cuda:0, on another machine or under another launcher, draws the same numbers."""
    gpus = Gpus(monkeypatch, current=2)
    state = rng_state()
    gpus.states = {index: torch.full((16,), 9, dtype=torch.uint8) for index in range(3)}
    set_rng_state(state)
    assert gpus.numbers() == [0, 1, 2]
    gpus.current = 0
    set_rng_state(state)
    assert gpus.numbers() == [2, 0, 1]
    # A machine with fewer GPUs.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.states = {0: torch.full((16,), 9, dtype=torch.uint8)}
    set_rng_state(state)
    assert gpus.numbers() == [2]


def test_restoring_a_state_does_not_initialize_an_unused_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, current=0)
    state = rng_state()
    gpus.states = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_rng_state(state)
    assert gpus.states == {} and "cuda" not in rng_state()
