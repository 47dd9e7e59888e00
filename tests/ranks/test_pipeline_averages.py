"""Averages of weights in a pipeline are those of one process, and so are its buffers; resumes on every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import PLAN, Block
from ranks.test_context import LongGPT, texts
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from leyden.checkpoint.format.tensors import local_part
from leyden.checkpoint.reader import CheckpointReader
from leyden.strategies import MeshStrategy, sequence_positions

MESHES: dict[str, dict[str, Any]] = {
    "fsdp 2": {"dp_shard": 2},
    "pp 2": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "Interleaved1F1B", "microbatches": 2},
    "pp × fsdp": {"dp_shard": 2, "pp": 2},
    "pp × tp": {"pp": 2, "tp": 2, "plan": PLAN},
    "cp × pp": {"cp": 2, "pp": 2},
    "pp × tp × fsdp": {"dp_shard": 2, "pp": 2, "tp": 2, "plan": PLAN},
}
GLOBAL_BATCH, SAVED_AT = 8, 4


class CountingBlock(Block):
    """Counts samples in a buffer, and computes with the count in evaluation."""

    share = 1

    def __init__(self) -> None:
        super().__init__(32, 4, 2, 0.0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.shape[0] * self.share
        else:
            x = x * (1 + self.seen / 1000)
        return super().forward(x)


class Counting(LongGPT):
    """Tied weights; buffers of blocks, and buffers that all stages change, or the last one."""

    def __init__(self) -> None:
        super().__init__(counts_items=True)
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(4))
        self.register_buffer("begun", torch.zeros(()))
        self.register_buffer("ended", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.val_losses: list[float] = []

    def setup(self, stage: str) -> None:
        # Each data rank counts for all, so that one rank's buffers are those of one process.
        strategy = self.trainer.strategy
        CountingBlock.share = strategy.data_size
        # A rank runs the code before the blocks once for each of its stages.
        self.runs = strategy.schedule.stages_per_rank if isinstance(strategy, MeshStrategy) else 1

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens.shape[0] * CountingBlock.share
        if self.training:
            self.begun += rows / self.runs
        x = self.tokens(tokens) + self.places(sequence_positions(tokens.shape[1]))
        if not self.training:
            # On the first stage, which has not reached the end of a training step.
            x = x * (1 + (self.begun + self.ended + self.batches) / 1000)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.ended += rows
        return self.head(self.norm(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_train_epoch_end(self) -> None:
        self.val_losses.append(float(self.trainer.callback_metrics["val_loss"]))


class EMA(EMAWeightAveraging):
    """Records how many elements of each tensor a resume has read."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.read = {name: local_part(tensor).numel() for name, tensor in state["current"].items()}


AVERAGES: dict[str, Any] = {
    "none": list,
    "ema": lambda: [EMA(decay=0.8)],
    "swa": lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2)],
}


def train(layout: str, kind: str, folder: str, start: str | None = None) -> dict[str, Any]:
    """Trains for three epochs of four steps; saves within the second.

    Args:
        layout: a key of `MESHES`, or "one" for a single process.
        kind: a key of `AVERAGES`.
        folder: the folder of this test.
        start: the layout whose checkpoint is resumed; None trains from the start, and saves one.
    """
    torch.manual_seed(0)
    dims: dict[str, Any] = {"sequence_dims": {0: 1, 1: 1}, "sequence_padding": {0: 0, 1: -100}}
    mesh = {"dp_shard": 1, **MESHES[layout], **(dims if "cp" in layout else {})} if layout != "one" else None
    place = f"{folder}/{kind}/{layout}" if start is None else None
    saves = [] if place is None else [ModelCheckpoint(place, every_n_train_steps=2, save_top_k=-1, filename="{step}")]
    averages = AVERAGES[kind]()
    trainer = Trainer(
        strategy="single_device" if mesh is None else MeshStrategy(**mesh),
        callbacks=[*averages, *saves],
        **{**QUIET, "enable_checkpointing": place is not None, "max_epochs": 3, "precision": "64-true"},
    )
    module, size = Counting(), GLOBAL_BATCH // trainer.strategy.data_size
    checkpoint = None if start is None else f"{folder}/{kind}/{start}/step=6"
    trainer.fit(module, DataLoader(texts(32), size), DataLoader(texts(16), size), ckpt_path=checkpoint)
    predicted = trainer.predict(module, DataLoader(texts(GLOBAL_BATCH), size)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    held = {id(p) for p in trainer.strategy.held(module.parameters())} if mesh else {}
    return {
        "losses": module.losses[-6:],
        "val_losses": module.val_losses[-2:],
        "weights": {name: tensor.tolist() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).tolist(),
        "updates": [average.n_averaged for average in averages],
        # Both copies of the tied weight: the last stage's is not among the gathered ones.
        "tied": local_part(module.head.weight).tolist() if id(module.head.weight) in held else None,
        "read": [
            (sum(average.read.values()), sum(local_part(p).numel() for p in module.parameters() if id(p) in held))
            for average in averages
            if hasattr(average, "read")
        ],
    }


def train_all(jobs: list[tuple[str, str, str, str | None]]) -> list[dict[str, Any]]:
    return [train(*job) for job in jobs]


def check_like(found: dict[str, Any], single: dict[str, Any]) -> None:
    assert found["updates"] == single["updates"]
    assert found["val_losses"] == pytest.approx(single["val_losses"], rel=1e-9)
    differ = (torch.tensor(found["predicted"]) - torch.tensor(single["predicted"])).abs().max()
    assert differ < 1e-8
    assert found["weights"].keys() == single["weights"].keys()
    for name, value in single["weights"].items():
        own = torch.tensor(found["weights"][name], dtype=torch.float64)
        assert (own - torch.tensor(value, dtype=torch.float64)).abs().max() < 3e-9, name


def same_bits(resumed: dict[str, Any], straight: dict[str, Any]) -> bool:
    return all(resumed[key] == straight[key] for key in straight if key != "read")


def check_checkpoint(folder: Path, layout: str, kind: str) -> None:
    """Compares the averages and the current weights in a checkpoint with those that one process saves."""
    found, single = (CheckpointReader(folder / kind / name / "step=6") for name in (layout, "one"))
    [state], [expected] = (
        [entry for entry in reader.state("callbacks").values() if "n_averaged" in entry] for reader in (found, single)
    )
    assert state["n_averaged"] == expected["n_averaged"] > 0
    current = next(key for key in ("current", "held") if key in expected)
    for own, other in ((found.model(), single.model()), (state[current], expected[current])):
        assert own.keys() == other.keys()
        for name, tensor in other.items():
            torch.testing.assert_close(own[name], tensor, rtol=0, atol=3e-9, msg=name)
    if kind == "ema":
        assert any(not torch.equal(found.model()[name], tensor) for name, tensor in state[current].items())
    assert "callbacks-00002-of-" in " ".join(path.name for path in (folder / kind / layout / "step=6").iterdir())


@pytest.mark.parametrize(
    "layouts",
    [
        ["pp 2", "interleaved", "fsdp 2"],
        ["cp × pp"],
        pytest.param(["pp × fsdp"], marks=pytest.mark.full),
        pytest.param(["pp × tp"], marks=pytest.mark.full),
        pytest.param(["pp × tp × fsdp"], marks=pytest.mark.full),
    ],
    ids=" | ".join,
)
def test_averages_in_a_pipeline_are_those_of_one_process(layouts: list[str], tmp_path: Path) -> None:
    folder, first = str(tmp_path), layouts[0]
    single = train("one", "ema", folder)
    assert single["updates"] == [12]
    jobs = [(layout, "ema", folder, start) for layout in layouts for start in (None, layout, "one")]
    if "fsdp 2" in layouts:
        jobs += [("fsdp 2", "ema", folder, first), (first, "ema", folder, "fsdp 2")]
        # Of the same number of ranks, with blocks at other ranks.
        jobs += [("interleaved", "ema", folder, first), (first, "ema", folder, "interleaved")]
    size = math.prod(v for k, v in MESHES[first].items() if k in ("pp", "dp_shard", "tp", "cp"))
    ranks = run_world(size, train_all, jobs)
    for rank in ranks:
        found = dict(zip(jobs, rank, strict=True))
        for (layout, _, _, start), run in found.items():
            check_like(run, single)
            if start == layout:
                assert same_bits(run, found[layout, "ema", folder, None]), f"a resume on the same layout: {layout}"
    if first == "pp 2":
        assert ranks[0][0]["tied"] == ranks[1][0]["tied"] != None  # noqa: E711
        # A rank reads the current weights of its own stages, and all buffers.
        for rank in ranks:
            [(elements, held)] = dict(zip(jobs, rank, strict=True))["pp 2", "ema", folder, "pp 2"]["read"]
            assert held <= elements <= held + 7
    check_like(train("one", "ema", folder, first), single)
    check_checkpoint(tmp_path, first, "ema")


def test_stochastic_averages_in_a_pipeline_are_those_of_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    single = train("one", "swa", folder)
    assert single["updates"] == [2]
    jobs = [("pp 2", "swa", folder, None), ("pp 2", "swa", folder, "pp 2"), ("pp 2", "swa", folder, "one")]
    for straight, resumed, elsewhere in run_world(2, train_all, jobs):
        assert same_bits(resumed, straight)
        check_like(straight, single)
        check_like(elsewhere, single)
    check_like(train("one", "swa", folder, "pp 2"), single)


def test_a_validation_leaves_each_buffer_as_its_stage_has_changed_it(tmp_path: Path) -> None:
    single = train("one", "none", str(tmp_path))
    for schedule in ("pp 2", "interleaved"):
        for found in run_world(2, train, schedule, "none", str(tmp_path)):
            check_like(found, single)
    assert single["weights"]["blocks.3.seen"] == single["weights"]["ended"] == 96
