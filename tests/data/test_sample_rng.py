"""SampleRNG: random transforms that depend only on seed, epoch and index."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from samples import Stream
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from leyden.core.errors import ConfigurationError
from leyden.data.combined import CombinedLoader
from leyden.data.cursor import LoaderCursor
from leyden.data.rng import rng_state, set_rng_state
from leyden.data.sample_rng import SampleRNG, with_sample_rng


class Transformed(Dataset[Tensor]):
    """Random transforms from all three libraries."""

    name = "transformed"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        raise AssertionError("__getitems__ bypasses the per-sample seeds")


def samples(loader: Any, epoch: int) -> dict[int, list[float]]:
    return {int(row[0]): row[1:].tolist() for batch in LoaderCursor(loader).start(epoch) for row in batch}


def test_a_sample_depends_only_on_seed_epoch_and_index() -> None:
    data = SampleRNG(Transformed(), seed=5)
    direct = {index: data[index][1:].tolist() for index in range(20)}
    assert len({tuple(row) for row in direct.values()}) == 20
    for options in ({}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}):
        loader = DataLoader(data, 3, shuffle=True, **options)  # type: ignore[arg-type]
        assert samples(loader, 0) == direct
        assert samples(loader, 1) != direct
        assert samples(loader, 0) == direct
    assert SampleRNG(Transformed(), seed=6)[0][1] != direct[0][0]
    assert torch.equal(data[np.int64(3)], data[torch.tensor(3)])


def test_a_sample_that_is_first_to_import_numpy_random_is_seeded() -> None:
    program = """
import sys
from leyden.data.sample_rng import SampleRNG

class Lazy:
    def __getitem__(self, index):
        import numpy
        return numpy.random.rand()

first = "numpy.random" not in sys.modules
data = SampleRNG(Lazy(), seed=5)
print(first, data[0] == data[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "True", done.stdout


def test_the_global_generators_stay_untouched() -> None:
    np.random.seed(0)
    data = SampleRNG(Transformed(), seed=5)
    state = rng_state()
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    set_rng_state(state)
    data[3]
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_random_transforms_in_workers_resume_exactly(options: dict[str, Any]) -> None:
    def make() -> LoaderCursor:
        return LoaderCursor(DataLoader(Transformed(), 3, shuffle=True, **options), sample_rng=True)

    torch.manual_seed(1)
    cursor, batches, states = make(), [], []
    for epoch in range(2):
        for count, batch in enumerate(cursor.start(epoch), 1):
            batches.append(batch.tolist())
            states.append((epoch, copy.deepcopy(cursor.state_dict(count)), rng_state()))
    for done in (1, 4, 7, 9):
        epoch, state, rng = states[done - 1]
        torch.manual_seed(99)
        cursor = make()
        iterator = cursor.resume(epoch, state)
        set_rng_state(rng)
        rest = [batch.tolist() for batch in iterator]
        if epoch == 0:
            rest += [batch.tolist() for batch in cursor.start(1)]
        assert rest == batches[done:], done


def test_the_wrapped_loader_keeps_its_class_and_settings() -> None:
    class CustomLoader(DataLoader[Any]):
        def __init__(self, size: int) -> None:
            super().__init__(Transformed(), size, shuffle=True)

    loader = CustomLoader(4)
    wrapped = with_sample_rng(loader)
    assert type(wrapped) is CustomLoader and type(wrapped.dataset) is SampleRNG and type(loader.dataset) is Transformed
    assert wrapped.batch_sampler is loader.batch_sampler
    assert wrapped.dataset.name == "transformed" and len(wrapped.dataset) == 20
    assert with_sample_rng(wrapped) is wrapped
    both = with_sample_rng(CombinedLoader([loader, CustomLoader(2)], "max_size"))
    assert both.mode == "max_size" and all(type(part.dataset) is SampleRNG for part in both.flattened)


def test_loaders_without_sample_indices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Stream is not indexed"):
        with_sample_rng(DataLoader(Stream(range(3))))
    with pytest.raises(ConfigurationError, match="not a list"):
        with_sample_rng([1, 2])
