"""Machines without a shared folder, simulated by separate folders and torchrun's variables."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import BUCKET, serving
from models import QUIET, SAVED, Regression
from ranks.world import run_world
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
from leyden.checkpoint import nodes
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import newest
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST, read_manifest
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError
from leyden.strategies.ddp import DDPStrategy


class Net(Regression):
    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        super().__init__(net, lambda module: AdamW(module.parameters(), 0.01))


def on_machines(count: int) -> int:
    """Sets torchrun's variables as on `count` machines with equal shares of the ranks; returns this one's number."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = size // count
    os.environ.update(
        LOCAL_RANK=str(rank % here),
        LOCAL_WORLD_SIZE=str(here),
        GROUP_RANK=str(rank // here),
        GROUP_WORLD_SIZE=str(count),
    )
    return rank // here


def fit(folder: Path, steps: int, strategy: str, ckpt_path: str | None = None, **saving: Any) -> Trainer:
    torch.manual_seed(1)
    x = torch.randn(32, 4)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=strategy,
        default_root_dir=folder,
        max_epochs=-1,
        max_steps=steps,
        callbacks=[ModelCheckpoint(filename="{step}", every_n_train_steps=1, save_last=True, save_top_k=2, **saving)],
    )
    trainer.fit(Net(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4), ckpt_path=ckpt_path)
    return trainer


def error_of_fit(folder: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        fit(Path(folder, f"machine {on_machines(2)}"), 1, "ddp")
    return str(error.value)


def test_folders_that_are_not_shared_raise(tmp_path: Path) -> None:
    # The first rank to raise ends the other.
    found = [text for text in run_world(2, error_of_fit, str(tmp_path), may_fail=True) if isinstance(text, str)]
    assert found and all("machine" in text and "save_on_each_node=True" in text for text in found)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "a token file remains"


def fit_and_resume(folder: str, strategy: str) -> tuple[str, dict[str, Any]]:
    machine = on_machines(2)
    own = Path(folder, f"machine {machine}")
    fit(own, 3, strategy, save_on_each_node=True)
    trainer = fit(own, 5, strategy, "last", save_on_each_node=True)
    assert trainer.global_step == 5
    checkpoint = trainer.checkpoint_callback
    assert checkpoint is not None
    return checkpoint.last_model_path, {name: t.numpy() for name, t in trainer.module.state_dict().items()} if (
        strategy == "ddp"
    ) else {}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_every_machine_keeps_complete_checkpoints(tmp_path: Path, strategy: str) -> None:
    size = 4 if strategy == "ddp" else 2
    found = run_world(size, fit_and_resume, str(tmp_path), strategy)
    folders = [tmp_path / f"machine {machine}" / SAVED for machine in (0, 1)]
    for rank, (last, _) in enumerate(found):
        assert last == str(folders[rank * 2 // size] / "step=5")
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["last", "step=4", "step=5"]
    for name in ("step=4", "step=5"):
        one, other = (CheckpointReader(folder / name) for folder in folders)
        assert one.manifest == other.manifest
        assert {f"rank-{rank}.json" for rank in range(size)} <= set(one.manifest.files)
        one.verify()
        other.verify()
    # One machine's copy is enough.
    shutil.rmtree(folders[0])
    module = Net.load_from_checkpoint(folders[1] / "last")
    for name, value in found[0][1].items():
        assert value.tobytes() == module.state_dict()[name].numpy().tobytes()


def resume_with_damage(folder: str, what: str) -> tuple[int, int]:
    machine = on_machines(2)
    own = Path(folder, f"machine {machine}")
    fit(own, 3, "ddp", save_on_each_node=True)
    if machine == 1 and what == "of another save":
        path = own / SAVED / "step=3"
        manifest = dataclasses.replace(read_manifest(path), saved_at="2020-01-01T00:00:00+00:00")
        (path / MANIFEST).write_bytes(manifest.to_bytes())
    elif machine == 1:
        file = own / SAVED / "step=3" / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(own, 2, "ddp", "last", save_on_each_node=True)
    return trainer.global_step, sum("skipping a damaged" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("what", ["damaged", "of another save"])
def test_a_checkpoint_that_one_machine_lacks_is_skipped_by_all(tmp_path: Path, what: str) -> None:
    assert run_world(2, resume_with_damage, str(tmp_path), what) == [(2, 1), (2, 0)]


def fit_in_shared_folder(folder: str) -> str:
    on_machines(2)
    trainer = fit(Path(folder), 2, "ddp", save_on_each_node=True)
    assert not trainer.saves_on_each_node
    return str(trainer.last_checkpoint)


def test_a_shared_folder_disables_saving_on_each_node(tmp_path: Path) -> None:
    assert set(run_world(2, fit_in_shared_folder, str(tmp_path))) == {str(tmp_path / SAVED / "step=2")}
    assert sorted(path.name for path in (tmp_path / SAVED).iterdir()) == [
        "last",
        "step=1",
        "step=2",
    ]


def fit_into_a_bucket_too(folder: str) -> None:
    machine = on_machines(2)
    bucket = f"s3://{BUCKET}"
    local = ModelCheckpoint(f"{folder}/{machine}", save_on_each_node=True, every_n_train_steps=1)
    for callbacks in ([ModelCheckpoint(f"{bucket}/first"), local], [local, ModelCheckpoint(f"{bucket}/second")]):
        arguments = {**QUIET, "enable_checkpointing": True, "max_epochs": 1, "default_root_dir": f"{folder}/{machine}"}
        Trainer(strategy="ddp", callbacks=callbacks, **arguments).fit(
            Net(), DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), 4)
        )


def test_folders_of_each_machine_do_not_divide_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as server:
        run_world(2, fit_into_a_bucket_too, str(tmp_path), environ=server.environ)
        for place in (f"s3://{BUCKET}/first", f"s3://{BUCKET}/second", tmp_path / "0", tmp_path / "1"):
            path = newest(place, strict=True)
            assert path is not None
            assert {"rank-0.json", "rank-1.json"} <= set(CheckpointReader(path).manifest.files)


def save_to_full_disk(folder: str) -> str:
    machine = on_machines(2)
    own = Path(folder, f"machine {machine}")
    trainer = fit(own, 1, "ddp", save_on_each_node=True)
    plain = nodes.write_file

    def full(path: Path, pieces: Any, *rest: Any) -> Any:
        if path.name == "optimizer-0.safetensors":
            next(iter(pieces))
            raise OSError(28, "No space left on device")
        return plain(path, pieces, *rest)

    nodes.write_file = full
    with pytest.raises(CheckpointError, match="No space left") as error:
        trainer.save_checkpoint(own / SAVED / "broken")
    nodes.write_file = plain
    trainer.strategy.ranks.barrier()
    assert not list((own / SAVED).glob("*broken*"))
    trainer.save_checkpoint(own / SAVED / "after")
    return str(error.value)


def test_a_full_disk_on_one_machine_stops_the_save(tmp_path: Path) -> None:
    messages = run_world(2, save_to_full_disk, str(tmp_path))
    assert all("machine of rank 1" in message for message in messages)
    for machine in (0, 1):
        CheckpointReader(tmp_path / f"machine {machine}" / SAVED / "after").verify()


def write_unseen(folder: str) -> str:
    machine = on_machines(2)
    strategy = DDPStrategy()
    strategy.setup_environment()
    if machine == 1:
        # Simulates another disk.
        Path.is_dir = lambda self: False  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="not visible to every rank") as error:
        CheckpointWriter(Path(folder, "one"), ranks=CheckpointRanks(strategy, folder))
    strategy.teardown()
    return str(error.value)


def test_a_writer_raises_at_once_if_other_ranks_do_not_see_its_folder(tmp_path: Path) -> None:
    first, second = run_world(2, write_unseen, str(tmp_path))
    assert "rank 1 could not do its part" in first and "save_on_each_node=True" in second
    assert list(tmp_path.iterdir()) == []
