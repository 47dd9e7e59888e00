"""A run saved under one strategy resumes under any other, with the same samples and losses."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED
from ranks.numbered import Block, blocks, global_batches, numbered_samples
from ranks.world import run_world
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from leyden import Trainer, TrainModule
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint

# Number of ranks, and batch size of each; the global batch is always 8 samples.
LAYOUTS = {"single": (1, 8), "ddp": (2, 4), "fsdp 2": (2, 4), "fsdp 4": (4, 2), "hsdp": (4, 2)}
QUICK = (("ddp", "ddp"), ("fsdp 2", "fsdp 2"), ("single", "ddp"), ("ddp", "fsdp 2"), ("fsdp 2", "single"))
# 86 samples make ten batches and one of 6, which four ranks cannot split evenly.
SIZE, SAVED_AT, NEXT = 86, 4, 10


class Net(TrainModule):
    """Records the samples of each batch, and the loss of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(32)
        self.seen: list[tuple[list[int], list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        losses = cross_entropy(self.blocks(x), y, reduction="none")
        self.seen.append((index.tolist(), losses.detach().tolist()))
        self.log("loss", losses.mean(), on_step=False, on_epoch=True)
        return losses.mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), 0.05, momentum=0.9)


def strategy_of(layout: str) -> Any:
    if layout in ("single", "ddp"):
        return "single_device" if layout == "single" else "ddp"
    from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy

    return FSDPStrategy(auto_wrap_policy={Block}, device_mesh=(2, 2) if layout == "hsdp" else None)


def fit(layout: str, folder: str, path: str | None, accumulate: int) -> dict[str, Any]:
    torch.manual_seed(3)
    # With windows of two batches a save is always due, and happens at the end of a window.
    when: dict[str, Any] = {"every_n_train_steps": SAVED_AT}
    if accumulate > 1:
        when = {"train_time_interval": timedelta(microseconds=1)}
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=strategy_of(layout),
        default_root_dir=folder,
        max_epochs=-1,
        max_steps=SAVED_AT + NEXT,
        accumulate_grad_batches=accumulate,
        callbacks=[ModelCheckpoint(filename="{step}", save_top_k=-1, **when)],
    )
    module = Net()
    trainer.fit(module, DataLoader(numbered_samples(SIZE), LAYOUTS[layout][1], shuffle=True), ckpt_path=path)
    return {"seen": module.seen, "epoch loss": float(trainer.callback_metrics["loss"])}


def save(layout: str, folder: str, accumulate: int) -> dict[str, Any]:
    return fit(layout, folder, None, accumulate)


def resume(layout: str, folder: str, paths: dict[str, str], accumulate: int) -> dict[str, Any]:
    return {
        source: fit(layout, f"{folder}/{number}", path, accumulate)
        for number, (source, path) in enumerate(paths.items())
    }


def count(start: int, end: int, accumulate: int) -> int:
    """Returns the number of batches between two steps; the last window of an epoch is shorter."""
    epoch = -(-SIZE // 8)
    lengths = [min(accumulate, epoch - first) for first in range(0, epoch, accumulate)]
    return sum(lengths[step % len(lengths)] for step in range(start, end))


def check(tmp_path: Path, pairs: dict[str, list[str]], accumulate: int) -> None:
    """Saves under some layouts, and resumes under others.

    Args:
        pairs: the layouts that save, by the layout that resumes.
    """
    straight = {}
    for source in sorted({source for sources in pairs.values() for source in sources}):
        straight[source] = run_world(LAYOUTS[source][0], save, source, str(tmp_path / source), accumulate)
        assert len(global_batches(straight[source])) == count(0, SAVED_AT + NEXT, accumulate)
    for layout, sources in pairs.items():
        paths = {source: str(tmp_path / source / SAVED / f"step={SAVED_AT}") for source in sources}
        resumed = run_world(LAYOUTS[layout][0], resume, layout, str(tmp_path / f"on {layout}"), paths, accumulate)
        for source in sources:
            ranks = [rank[source] for rank in resumed]
            whole, rest = global_batches(straight[source]), global_batches(ranks)
            whole = whole[-len(rest) :]
            assert len(rest) == count(SAVED_AT, SAVED_AT + NEXT, accumulate)
            assert [samples for samples, _ in rest] == [samples for samples, _ in whole], (source, layout)
            assert [loss for _, loss in rest] == pytest.approx([loss for _, loss in whole], rel=1e-5, abs=1e-6)
            if source == layout:
                for before, after in zip(straight[source], ranks, strict=True):
                    assert after["seen"] == before["seen"][-len(rest) :], (
                        "a rank's samples or losses are not bit-identical"
                    )
                    assert after["epoch loss"] == before["epoch loss"]
            # The epoch's mean includes the batches before the checkpoint.
            assert ranks[0]["epoch loss"] == pytest.approx(straight[source][0]["epoch loss"], rel=1e-5)


def sources_by_layout(pairs: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for source, layout in pairs:
        found.setdefault(layout, []).append(source)
    return found


def test_layouts_resume_checkpoints_of_other_layouts(tmp_path: Path) -> None:
    check(tmp_path, sources_by_layout(QUICK), accumulate=1)
    # A single process also assembles the shards, without a Trainer.
    path = tmp_path / "fsdp 2" / SAVED / f"step={SAVED_AT}"
    found = Net.load_from_checkpoint(path).state_dict()
    other = Net.load_from_checkpoint(tmp_path / "ddp" / SAVED / f"step={SAVED_AT}").state_dict()
    assert len(list(path.glob("model-*.safetensors"))) == 2
    for name, value in Net().state_dict().items():
        torch.testing.assert_close(found[name], other[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(found[name], value)


def test_layouts_resume_a_checkpoint_requested_inside_an_accumulation_window(tmp_path: Path) -> None:
    check(tmp_path, sources_by_layout([("ddp", "ddp"), ("ddp", "single")]), accumulate=2)


@pytest.mark.full
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_layout_resumes_every_other(tmp_path: Path, accumulate: int) -> None:
    check(tmp_path, {layout: list(LAYOUTS) for layout in LAYOUTS}, accumulate)
