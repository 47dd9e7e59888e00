"""gather_for_metrics on one process: as many rows as samples, just as on several ranks."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from leyden import Accelerator, ConfigurationError


@pytest.mark.parametrize("samples", [9, 10, 12])
def test_a_loss_repeated_to_the_full_batch_size_is_trimmed_on_a_short_batch(samples: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(float(samples)), 8))
    losses = torch.cat([accelerator.gather_for_metrics(batch.mean().repeat(8)) for batch in loader])
    assert len(losses) == samples
    assert losses.mean().item() == pytest.approx((samples - 1) / 2)


def test_a_short_batch_with_several_rows_per_sample_is_not_trimmed() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(12.0), 8))
    pairs = [len(accelerator.gather_for_metrics(batch.repeat_interleave(2))) for batch in loader]
    assert pairs == [16, 8]


def test_gather_for_metrics_after_the_loop_does_not_trim() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare(DataLoader(torch.arange(9.0), 8)):
        pass
    assert len(accelerator.gather_for_metrics(torch.ones(8))) == 8


def test_skipping_more_batches_than_the_loader_has_raises() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(9.0), 8))
    assert list(accelerator.skip_first_batches(loader, 2)) == []
    with pytest.raises(ConfigurationError, match=r"skip_first_batches\(loader, 20\): the loader has 2 batches"):
        list(accelerator.skip_first_batches(loader, 20))
