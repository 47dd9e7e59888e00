"""Forged state in checkpoints whose checksums are right: each owner refuses what it cannot have saved, and names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from leyden import CheckpointError, Trainer, TrainModule
from leyden.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
from leyden.callbacks.checkpoint_books import read_books
from leyden.trainer.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from leyden.trainer.checkpoint.safefile import write_file


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val"}
        step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        return [optimizer], [step, plateau]


def trainer(folder: Path) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=CSVLogger(),
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(monitor="loss_step", every_n_train_steps=3, save_top_k=2, save_last=True),
            EarlyStopping("val", patience=99),
        ],
        default_root_dir=folder,
        log_every_n_steps=1,
    )


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.ones(16, 3))
    return DataLoader(data, 4, shuffle=True, generator=generator), DataLoader(data, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run, which saved its last checkpoint in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    trainer(folder).fit(Module(), *loaders())
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def saved(folder: Path) -> Path:
    return folder / "checkpoints" / "epoch=1-step=6"


def forge(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes a JSON file of a checkpoint, and the manifest with it, as somebody who means harm would."""
    tree = json.loads((path / name).read_text())
    change(tree)
    (path / name).unlink()
    entry = write_file(path / name, [json.dumps(tree).encode()])
    old = read_manifest(path)
    files = {**old.files, name: entry}
    new = Manifest(files, old.save_counter, old.saved_at, old.progress, old.world_size, old.strategy, old.versions)
    (path / MANIFEST).write_bytes(new.to_bytes())


def resume(folder: Path) -> None:
    trainer(folder).fit(Module(), *loaders(), ckpt_path=saved(folder))


def books(tree: Any) -> Any:
    return next(state for key, state in tree["tree"].items() if key.startswith("ModelCheckpoint"))


def log(tree: Any) -> Any:
    return next(state for key, state in tree["tree"].items() if key.startswith("CSVLogger"))


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# paths from a checkpoint --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("entry", ["recent", "doomed", "best_k_models", "last_model_path"])
@pytest.mark.parametrize("kind", ["absolute", "upwards", "link"])
def test_a_checkpoint_deletes_nothing_outside_of_its_folder(folder: Path, entry: str, kind: str) -> None:
    """Another run's checkpoint is named as one that this run may delete."""
    other = folder.parent / "other" / "precious"
    shutil.copytree(saved(folder), other)
    manifest = read_manifest(other)
    (folder / "checkpoints" / "away").symlink_to(other.parent)
    name = {"absolute": str(other), "upwards": "../../other/precious", "link": "away/precious"}[kind]

    def change(tree: Any) -> None:
        identity = f"{manifest.save_counter} {manifest.saved_at}"
        value: Any = {"recent": [name], "doomed": {name: identity}, "best_k_models": {name: 1e9}}.get(entry, name)
        books(tree)[entry] = value

    forge(saved(folder), "callbacks.json", change)
    before = everything_in(other)
    with pytest.raises(CheckpointError, match=rf"callbacks\.json: .*ModelCheckpoint.*{entry} names a path outside"):
        resume(folder)
    assert everything_in(other) == before


def test_absolute_names_of_older_checkpoints_are_read_where_they_lie_in_the_folder(tmp_path: Path) -> None:
    here = str(tmp_path / "now")
    names = {"best_model_path": "a", "last_model_path": "b", "recent": ["a"], "best_k_models": {"b": 1.0}, "doomed": {}}
    before = {"dirpath": str(tmp_path / "then"), **names}
    absolute = {
        **before,
        "best_model_path": f"{tmp_path}/then/a",
        "last_model_path": f"{tmp_path}/then/b",
        "recent": [f"{here}/a"],
        "best_k_models": {f"{tmp_path}/then/b": 1.0},
    }
    assert read_books(absolute, here) == read_books(before, here)
    assert read_books(before, here).recent == (f"{here}/a",)
    # Earlier versions kept the best one of another folder; it is forgotten.
    assert read_books({**before, "best_model_path": f"{tmp_path}/elsewhere/a"}, here).best_model_path == ""


@pytest.mark.parametrize("version", ["../../../other", "/{}/other", "..", -1])
def test_a_logger_goes_to_no_folder_outside_of_its_own(folder: Path, version: Any) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder / "logs" / "version_0", other)
    version = version.format(other.parent) if isinstance(version, str) else version
    forge(saved(folder), "callbacks.json", lambda tree: log(tree).update(version=version, rows=0))
    before = everything_in(other)
    with pytest.raises(CheckpointError, match=r"callbacks\.json: .*CSVLogger.*version"):
        resume(folder)
    assert everything_in(other) == before
