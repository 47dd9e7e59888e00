"""A run killed in the middle of an epoch goes on with the next sample, on as many ranks as it had or on others."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule

SAMPLES, SAVED = 103, 5


class Saving(TrainModule):
    """Saves itself in the middle of its first epoch; notes what it was trained on before and after."""

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


def run(ranks: int, path: str | None, resume: str | None, **arguments: Any) -> Any:
    if ranks > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES), x, x.sum(1).sin()), 6, shuffle=True)
    torch.manual_seed(5)
    module = Saving(path)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy="ddp" if ranks > 1 else "auto",
        accelerator="cpu",
        precision="64-true",
        max_epochs=2,
        **quiet,
        **arguments,
    )
    trainer.fit(module, loader, ckpt_path=resume)
    found = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    if ranks > 1:
        gc.collect()
        dist.destroy_process_group()
    assert trainer.progress.samples == 2 * SAMPLES
    return found, module.seen, trainer.global_step


def results_of(ranks: int, *args: Any, **arguments: Any) -> list[Any]:
    return [run(1, *args, **arguments)] if ranks == 1 else run_world(ranks, run_with, ranks, args, arguments)


def run_with(ranks: int, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    return run(ranks, *args, **arguments)


@pytest.mark.parametrize("saved", [1, 2])
def test_a_run_resumes_with_the_next_sample(saved: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    straight = results_of(saved, path, None, global_batch_size=12)
    left = Counter(pair for _, seen, _ in straight for pair in seen)
    assert sorted(left.values()) == [1] * (2 * SAMPLES - 12 * SAVED)
    for ranks in (1, 2, 4):
        resumed = results_of(ranks, None, path, global_batch_size=12)
        assert Counter(pair for _, seen, _ in resumed for pair in seen) == left, ranks
        for found, _, steps in resumed:
            assert steps == straight[0][2]
            if ranks == saved:
                assert found == straight[0][0]
            else:
                assert found == pytest.approx(straight[0][0], rel=0, abs=1e-9), ranks


def test_steps_follow_the_new_global_batch_unless_it_is_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    straight = results_of(2, path, None)
    left = Counter(pair for _, seen, _ in straight for pair in seen)
    resumed = results_of(4, None, path)
    assert Counter(pair for _, seen, _ in resumed for pair in seen) == left
    # 43 samples of the first epoch are left, and 103 of the second: in steps of 24.
    assert {steps for _, _, steps in resumed} == {SAVED + 2 + 5}
