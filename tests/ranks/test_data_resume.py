"""A run killed in the middle of an epoch resumes at the next sample, on the same or another number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule

SAMPLES, SAVED = 103, 5


class Saving(TrainModule):
    """Saves a checkpoint in the middle of its first epoch; records the samples that follow the save or the resume."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.path = path
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        index, x, y = batch
        self.seen += [(self.current_epoch, number) for number in index.tolist()]
        return ((self.net(x).squeeze(-1) - y) ** 2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and self.global_step == SAVED:
            self.trainer.save_checkpoint(self.path)
            self.seen.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def loader(workers: int | None) -> DataLoader[Any]:
    """Returns torch's own loader, or torchdata's if a number of workers is passed."""
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    data = TensorDataset(torch.arange(SAMPLES), x, x.sum(1).sin())
    if workers is None:
        return DataLoader(data, 6, shuffle=True)
    from torchdata.stateful_dataloader import StatefulDataLoader

    context = {"multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(data, 6, shuffle=True, num_workers=workers, **context)  # type: ignore[no-any-return]


def run(ranks: int, path: str | None, resume: str | None, workers: int | None, arguments: dict[str, Any]) -> Any:
    """Returns the weights, the samples that follow the save or the resume, and the number of steps."""
    torch.manual_seed(5)
    module = Saving(path)
    strategy = "ddp" if ranks > 1 else "single_device"
    trainer = Trainer(**QUIET, strategy=strategy, precision="64-true", max_epochs=2, **arguments)
    trainer.fit(module, loader(workers), ckpt_path=resume)
    assert trainer.progress.samples == 2 * SAMPLES
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return weights, module.seen, trainer.global_step


def results_of(
    ranks: int, path: str | None, resume: str | None, workers: int | None = None, **arguments: Any
) -> list[Any]:
    run_arguments = (ranks, path, resume, workers, arguments)
    return [run(*run_arguments)] if ranks == 1 else run_world(ranks, run, *run_arguments)


def samples_of(results: list[Any]) -> Counter[tuple[int, int]]:
    return Counter(pair for _, seen, _ in results for pair in seen)


@pytest.mark.parametrize("saved", [1, 2])
def test_a_run_resumes_at_the_next_sample(saved: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    straight = results_of(saved, path, None, global_batch_size=12)
    left = samples_of(straight)
    assert sorted(left.values()) == [1] * (2 * SAMPLES - 12 * SAVED)
    for ranks in (1, 2, 4):
        resumed = results_of(ranks, None, path, global_batch_size=12)
        assert samples_of(resumed) == left, ranks
        for found, _, steps in resumed:
            assert steps == straight[0][2]
            if ranks == saved:
                assert found == straight[0][0]
            else:
                assert found == pytest.approx(straight[0][0], rel=0, abs=1e-9), ranks


def test_steps_follow_the_new_global_batch_size(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    left = samples_of(results_of(2, path, None))
    resumed = results_of(4, None, path)
    assert samples_of(resumed) == left
    # 43 samples of the first epoch are left, and 103 of the second: in steps of 24.
    assert {steps for _, _, steps in resumed} == {SAVED + 2 + 5}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_torchdatas_stateful_loader_resumes_at_the_next_sample(workers: int, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    path = str(tmp_path / "saved")
    straight = results_of(2, path, None, workers)
    left = samples_of(straight)
    assert sorted(left.values()) == [1] * (2 * SAMPLES - 12 * SAVED)
    assert results_of(2, None, path, workers) == straight
    # On other numbers of ranks, too: the position is that of the global stream.
    for ranks in (1, 4):
        assert samples_of(results_of(ranks, None, path, workers)) == left, ranks
