"""Checkpoints of a mesh: the same layout resumes bit for bit, any other with the same losses and samples."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, SAVED
from ranks.mesh_gpt import GPT, PLAN, Block, data
from ranks.share import counting
from ranks.world import kill_every_rank, run_world
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint.folder import newest
from leyden.checkpoint.format.tensors import local_part
from leyden.checkpoint.reader import CheckpointReader
from leyden.strategies import FSDPStrategy, MeshStrategy, Strategy

# Sizes of each mesh, and ranks of each layout. The global batch is always 8 samples.
MESHES = {
    "tp 2": {"tp": 2},
    "tp × fsdp 4": {"dp_shard": 2, "tp": 2},
    "tp × hsdp 8": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "pp 2": {"dp_shard": 1, "pp": 2},
    "pp 4": {"dp_shard": 1, "pp": 4},
    "pp × fsdp 4": {"dp_shard": 2, "pp": 2},
    "pp × tp × fsdp 8": {"dp_shard": 2, "pp": 2, "tp": 2},
}
WORLD = {"single": 1, "ddp": 2, "fsdp": 2, **{name: math.prod(sizes.values()) for name, sizes in MESHES.items()}}
# 44 samples are five batches and one of 4, in each of three epochs; the save lies within the first.
SAMPLES, GLOBAL_BATCH, SAVED_AT, NEXT = 44, 8, 3, 10
# Runs that are killed save in the middle of each epoch, and end in the middle of the third.
EVERY, END = 4, 14


class Numbered(GPT):
    """Records the samples of each batch."""

    def __init__(self, **sizes: Any) -> None:
        # A block for each stage of the longest pipeline.
        super().__init__(**{"depth": 4, **sizes})
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[-1].tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[:2], batch_idx)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-3)


class Doomed(Numbered):
    """Kills all ranks within a step, once `dies_at` steps are done."""

    def __init__(self, dies_at: int | None) -> None:
        super().__init__(dropout=0.1)
        self.dies_at = dies_at

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == self.dies_at:
            kill_every_rank()


def strategy_of(layout: str) -> Any:
    if layout in MESHES:
        plan = PLAN if "tp" in layout else None
        sizes: Any = MESHES[layout]
        return MeshStrategy(**sizes, plan=plan, auto_wrap_policy={Block}, microbatches=sizes.get("pp"))
    return {"single": "single_device", "ddp": "ddp", "fsdp": FSDPStrategy(auto_wrap_policy={Block})}[layout]


def samples_of(strategy: Strategy) -> DataLoader[Any]:
    tokens, labels = data(SAMPLES).tensors
    samples = TensorDataset(tokens, labels, torch.arange(SAMPLES))
    return DataLoader(samples, GLOBAL_BATCH // strategy.data_size, shuffle=True)


def state_of(trainer: Trainer, module: Numbered) -> dict[str, Any]:
    """Returns what a run leaves on this rank: the epoch's loss, full weights, the next random number."""
    full = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "epoch loss": float(trainer.callback_metrics["loss_epoch"]),
        "weights": {name: tensor.tolist() for name, tensor in full.items()},
        "random": float(torch.rand(())),
    }


def fit(layout: str, path: str, resumes: bool, dropout: float = 0.0) -> dict[str, Any]:
    """Trains from a checkpoint, or from the start, saving one on the way; returns the steps after it."""
    torch.manual_seed(99 if resumes else 3)
    module = Numbered(dropout=dropout)
    trainer = Trainer(strategy=strategy_of(layout), max_epochs=-1, **QUIET)
    loader = samples_of(trainer.strategy)
    if not resumes:
        trainer.fit(module, loader, max_steps=SAVED_AT)
        trainer.save_checkpoint(path)
    trainer.fit(module, loader, ckpt_path=path if resumes else "current", max_steps=SAVED_AT + NEXT)
    return {
        "data rank": trainer.strategy.data_rank,
        "losses": module.losses[-NEXT:],
        "seen": module.seen[-NEXT:],
        **state_of(trainer, module),
    }


def fit_all(jobs: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [fit(*job) for job in jobs]


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the ranks' results as of one process; asserts that ranks that share samples agree."""
    readers: dict[int, dict[str, Any]] = {}
    # In a pipeline the last stage has the losses.
    for rank in [rank for rank in ranks if rank["losses"]]:
        first = readers.setdefault(rank["data rank"], rank)
        assert (rank["losses"], rank["seen"]) == (first["losses"], first["seen"])
        assert rank["epoch loss"] == first["epoch loss"]
    ordered = [readers[number] for number in sorted(readers)]
    losses = []
    for step in range(NEXT):
        counts = [len(reader["seen"][step]) for reader in ordered]
        total = sum(reader["losses"][step] * count for reader, count in zip(ordered, counts, strict=True))
        losses.append(total / sum(counts))
    seen = [[index for reader in ordered for index in reader["seen"][step]] for step in range(NEXT)]
    return {"losses": losses, "seen": seen, "epoch loss": ordered[0]["epoch loss"]}


def check_same_run(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    """Asserts that global batches have the same samples in the same order, and losses agree up to rounding."""
    assert resumed["seen"] == whole["seen"]
    assert resumed["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert resumed["epoch loss"] == pytest.approx(whole["epoch loss"], abs=1e-5)


@pytest.mark.parametrize(
    "layout",
    ["tp 2", "pp 2", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("tp × fsdp 4", "pp × fsdp 4"))],
)
def test_a_mesh_resumes_bit_for_bit_and_on_one_process(layout: str, tmp_path: Path) -> None:
    plain, dropped = str(tmp_path / "plain"), str(tmp_path / "dropped")
    jobs = [(layout, plain, False), (layout, dropped, False, 0.1), (layout, dropped, True, 0.1)]
    ranks = run_world(WORLD[layout], fit_all, jobs)
    for whole, uninterrupted, resumed in ranks:
        assert resumed == uninterrupted, "losses, weights or random numbers are not bit-identical"
        assert uninterrupted["weights"] != whole["weights"]
    whole = merged([rank[0] for rank in ranks])
    first = [index for batch in whole["seen"][: 6 - SAVED_AT] for index in batch]
    assert len(set(first)) == len(first) == SAMPLES - SAVED_AT * GLOBAL_BATCH, (
        "the rest of the epoch misses or repeats a sample"
    )
    check_same_run(merged([fit("single", plain, True)]), whole)
    manifest = CheckpointReader(plain).manifest
    groups = {"tp × fsdp 4": (0, 0, 1, 1), "pp × fsdp 4": (0, 1, 0, 1)}
    assert manifest.data_ranks == groups.get(layout, (0, 0)) and manifest.format == 3
    check_written_once(CheckpointReader(plain))


def run_on(layout: str, folder: str, seed: int, dies_at: int | None = None) -> dict[str, Any]:
    """Trains in a folder, from its newest checkpoint if there is one, to the end or until killed."""
    torch.manual_seed(seed)
    module = Doomed(dies_at)
    saves = ModelCheckpoint(every_n_train_steps=EVERY)
    settings = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "callbacks": saves}
    trainer = Trainer(strategy=strategy_of(layout), max_steps=END, max_epochs=-1, **settings)
    trainer.fit(module, samples_of(trainer.strategy), ckpt_path="auto")
    return {"losses": module.losses, "seen": module.seen, **state_of(trainer, module)}


def resume_and_run_whole(layout: str, folder: str) -> list[dict[str, Any]]:
    return [run_on(layout, f"{folder}/killed", seed=99), run_on(layout, f"{folder}/whole", seed=3)]


# Killed in the step after a save, so that this step is repeated; or two steps later, so that three steps are.
@pytest.mark.parametrize(
    ("layout", "deaths"),
    [
        pytest.param("tp 2", [10], marks=pytest.mark.full),
        ("pp 2", [10]),
        pytest.param("tp × fsdp 4", [4, 10], marks=[pytest.mark.full, pytest.mark.timeout(900)]),
        pytest.param("pp × tp × fsdp 8", [4], marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
    ids=["tp 2", "pp 2", "tp × fsdp 4", "pp × tp × fsdp 8"],
)
def test_a_killed_mesh_run_ends_like_an_uninterrupted_one(layout: str, deaths: list[int], tmp_path: Path) -> None:
    ranks, killed = WORLD[layout], str(tmp_path / "killed")
    for number, step in enumerate(deaths):
        codes = run_world(ranks, run_on, layout, killed, 3 + number, step, may_fail=True)
        assert codes == [-signal.SIGKILL] * ranks
        newest_step = CheckpointReader(newest(tmp_path / "killed" / SAVED)).progress()["global_step"]
        assert newest_step == step // EVERY * EVERY
    for resumed, whole in run_world(ranks, resume_and_run_whole, layout, str(tmp_path)):
        for steps in ("losses", "seen"):
            assert len(whole[steps]) in (END, 0) and (whole[steps] or "pp" in layout)
            assert resumed.pop(steps) == whole.pop(steps)[newest_step:]
        assert resumed == whole, "weights, the epoch's loss or random numbers are not bit-identical"


def check_written_once(reader: CheckpointReader) -> None:
    layout = reader.layout()
    assert layout["head.weight"] == {"alias_of": "tokens.weight"}
    elements = sum(torch.Size(spec["shape"]).numel() for spec in layout.values() if "shape" in spec)
    files = {name: entry.size for name, entry in reader.manifest.files.items() if name.endswith(".safetensors")}
    model = sum(size for name, size in files.items() if name.startswith("model"))
    states = sum(size for name, size in files.items() if name.startswith("optimizer"))
    headers = 8192 * len(files)
    assert 4 * elements < model < 4 * elements + headers
    assert 8 * elements < states < 8 * elements + headers


def read(layout: str, folder: str) -> tuple[float, float]:
    """Returns the bytes that this rank reads of a checkpoint of its layout, relative to its share of parameters."""
    torch.manual_seed(3)
    module = Numbered(width=256)
    trainer = Trainer(strategy=strategy_of(layout), max_steps=1, **QUIET)
    tokens, labels = data(8).tensors
    trainer.fit(module, DataLoader(TensorDataset(tokens, labels, torch.arange(8)), 4))
    reader = CheckpointReader(trainer.save_checkpoint(f"{folder}/saved"))
    share = sum(local_part(parameter).nbytes for parameter in module.parameters())
    with counting() as weights:
        trainer.strategy.load_module(reader, module)
    with counting() as states:
        reader.optimizers(like=dict(module.named_parameters()))
    return weights["bytes"] / share, states["bytes"] / (2 * share)


def test_a_rank_of_a_mesh_reads_only_its_share(tmp_path: Path) -> None:
    found = run_world(4, read, "tp × fsdp 4", str(tmp_path))
    assert all(1 <= figure < 1.10 for figures in found for figure in figures), found


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", MESHES)
def test_a_mesh_resumes_on_every_layout(layout: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    whole = merged(run_world(WORLD[layout], fit, layout, path, False))
    longer = ["pp 4"] if "pp" in layout else []
    for other in dict.fromkeys((layout, "single", "ddp", "fsdp", "tp 2", "pp 2", *longer)):
        check_same_run(merged(run_world(WORLD[other], fit, other, path, True)), whole)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "tp 2"])
def test_a_checkpoint_of_any_layout_resumes_on_a_mesh(layout: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    whole = merged(run_world(WORLD[layout], fit, layout, path, False))
    for other in ("tp 2", "tp × fsdp 4", "pp 2"):
        check_same_run(merged(run_world(WORLD[other], fit, other, path, True)), whole)
