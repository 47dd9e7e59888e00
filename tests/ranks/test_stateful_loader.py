"""torchdata's StatefulDataLoader on ranks: each sample once, and a mid-epoch resume goes on with the next one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from leyden import Trainer, TrainModule

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
SAMPLES, SIZE, SAVED = 45, 4, 3


class Saving(TrainModule):
    """Saves itself in the middle of its first epoch, and notes the samples that follow."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(2, 1).double()
        self.path = path
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        index, x = batch
        self.seen += [(self.current_epoch, number) for number in index.tolist()]
        return (self.net(x).squeeze(-1) - x.sum(1)).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path is not None and self.global_step == SAVED:
            self.trainer.save_checkpoint(self.path)
            self.seen.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def run(path: str | None, resume: str | None, workers: int, strategy: str = "ddp") -> tuple[list[float], list[Any]]:
    x = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    context = {"multiprocessing_context": "fork"} if workers else {}
    loader = stateful.StatefulDataLoader(
        TensorDataset(torch.arange(SAMPLES), x), SIZE, shuffle=True, num_workers=workers, **context
    )
    torch.manual_seed(5)
    module = Saving(path)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision="64-true",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader, ckpt_path=resume)
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist(), module.seen


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_resume_begins_with_the_next_sample(workers: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    straight = run_world(2, run, path, None, workers)
    left = Counter(pair for _, seen in straight for pair in seen)
    assert sorted(left.values()) == [1] * (2 * SAMPLES - 2 * SIZE * SAVED)
    assert run_world(2, run, None, path, workers) == straight
    # On other numbers of ranks, too: the place is one of the stream that all of them read.
    for ranks in (1, 4):
        resumed = (
            run_world(ranks, run, None, path, workers) if ranks > 1 else [run(None, path, workers, "single_device")]
        )
        assert Counter(pair for _, seen in resumed for pair in seen) == left, ranks
