"""Damaged and hostile checkpoints of real runs: `fit` never loads one, runs its code, or changes the module."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import Bomb, forge
from models import QUIET, Squares
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, CheckpointError, Trainer, TrainModule
from leyden.callbacks import EarlyStopping, ModelCheckpoint
from leyden.checkpoint.format import safefile
from leyden.checkpoint.format.manifest import MANIFEST, FileEntry, Manifest, read_manifest

NAMES = [
    *(
        "manifest.json",
        "progress.json",
        "layout.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer-0.safetensors",
    ),
    *("schedulers.json", "callbacks.json", "callbacks.safetensors", "user.json", "user.safetensors"),
    *("rank-0.json", "rank-0.safetensors", "hparams.json", "identity.json", "command.json"),
]

UNREAD = ("hparams.json", "command.json")
"""Files that a resume does not read."""


def scheduled(module: torch.nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Module(Squares):
    """A module with hyperparameters, a scheduler, dropout, and an entry of its own in checkpoints."""

    def __init__(self, width: int = 4) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1))
        super().__init__(net, scheduled)
        self.save_hyperparameters("width")
        self.loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = torch.ones(2)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint


def trainer(folder: Path, epochs: int = 3, callbacks: Any = None) -> Trainer:
    saving = [
        ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1),
        EarlyStopping("loss", patience=99),
    ]
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder}
    return Trainer(**options, max_epochs=epochs, callbacks=callbacks or saving)


def loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(8, 3)), 2, shuffle=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a real run with a checkpoint of each of its three epochs."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    trainer(folder).fit(Module(), loader())
    assert sorted(os.listdir(folder / "checkpoints")) == ["epoch=0", "epoch=1", "epoch=2"]
    return folder


@pytest.fixture
def run_folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / "epoch=2"


def state_of(module: Module, run: Trainer) -> tuple[dict[str, torch.Tensor], Any]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, run.progress.to_dict()


def assert_rejected(folder: Path, name: str) -> None:
    """Asserts that the path raises an error that names the file, and "last" and "auto" load the previous one."""
    module, run = Module(), trainer(folder, epochs=4)
    before = state_of(module, run)
    with pytest.raises(CheckpointError) as caught:
        run.fit(module, loader(), ckpt_path=newest(folder))
    assert str(newest(folder) / name) in str(caught.value)
    after = state_of(module, run)
    assert after[1] == before[1]
    for key, tensor in before[0].items():
        assert torch.equal(tensor, after[0][key]), key
    assert module.loaded is None
    assert not (folder / "code-was-run").exists()

    for path in ("last", "auto"):
        module, run = Module(), trainer(folder, epochs=2)
        with pytest.warns(UserWarning, match=rf"skipping a damaged checkpoint: .*{name}"):
            # Two epochs are already done, so nothing is trained or saved after loading.
            run.fit(module, loader(), ckpt_path=path)
        assert run.progress.epoch == 1
        assert torch.equal(module.state_dict()["net.0.weight"], weights_of(folder / "checkpoints" / "epoch=1"))
        assert not (folder / "code-was-run").exists()


def weights_of(path: Path) -> torch.Tensor:
    weights: torch.Tensor = Module.load_from_checkpoint(path).state_dict()["net.0.weight"]
    return weights


def test_an_intact_checkpoint_has_all_listed_files_and_loads(run_folder: Path) -> None:
    assert sorted(os.listdir(newest(run_folder))) == sorted(NAMES)
    module, run = Module(), trainer(run_folder, epochs=3)
    run.fit(module, loader(), ckpt_path=newest(run_folder))
    assert torch.equal(module.state_dict()["net.0.weight"], weights_of(newest(run_folder)))
    assert module.loaded is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_detected(run_folder: Path, name: str) -> None:
    path = newest(run_folder) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert_rejected(run_folder, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file_is_detected(run_folder: Path, name: str) -> None:
    path = newest(run_folder) / name
    os.truncate(path, path.stat().st_size // 2)
    assert_rejected(run_folder, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_detected(run_folder: Path, name: str) -> None:
    (newest(run_folder) / name).unlink()
    assert_rejected(run_folder, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_pickle_in_place_of_a_file_is_never_loaded(run_folder: Path, name: str) -> None:
    bomb = Bomb(run_folder / "code-was-run")
    (newest(run_folder) / name).write_bytes(pickle.dumps(bomb))
    assert_rejected(run_folder, name)
    torch.save({"state_dict": bomb}, newest(run_folder) / name)
    assert_rejected(run_folder, name)
    pickle.loads(pickle.dumps(bomb))  # proves that the payload works
    assert (run_folder / "code-was-run").exists()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (MANIFEST, *UNREAD)])
def test_a_pickle_with_a_valid_checksum_is_never_loaded(run_folder: Path, name: str) -> None:
    """A checksum is no signature: an invalid JSON or safetensors file raises before the weights change."""
    forge(newest(run_folder), name, pickle.dumps(Bomb(run_folder / "code-was-run")))
    module, run = Module(), trainer(run_folder, epochs=4)
    before = state_of(module, run)[0]
    with pytest.raises(CheckpointError, match=name):
        run.fit(module, loader(), ckpt_path=newest(run_folder))
    assert not (run_folder / "code-was-run").exists()
    for key, tensor in before.items():
        assert torch.equal(tensor, module.state_dict()[key]), key


@pytest.mark.parametrize("name", ["../epoch=1/model.safetensors", "/etc/passwd", "a/../../x"])
def test_a_manifest_entry_outside_the_folder_is_rejected(run_folder: Path, name: str) -> None:
    manifest = read_manifest(newest(run_folder))
    files = {**manifest.files, name: FileEntry(0, ())}
    data = Manifest(files, manifest.save_counter, manifest.saved_at, {}, 1, "x").to_bytes()
    (newest(run_folder) / MANIFEST).write_bytes(data)
    assert_rejected(run_folder, MANIFEST)


def test_a_layout_path_outside_the_folder_is_rejected(run_folder: Path) -> None:
    text = (newest(run_folder) / "layout.json").read_text()
    assert "model.safetensors" in text
    forge(newest(run_folder), "layout.json", text.replace("model.safetensors", "../epoch=1/model.safetensors").encode())
    with pytest.raises(CheckpointError, match="not part of this checkpoint"):
        trainer(run_folder).fit(Module(), loader(), ckpt_path=newest(run_folder))


@pytest.mark.parametrize("length", [2**63, safefile.MAX_HEADER + 1, 10_000])
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".safetensors")])
def test_an_oversized_header_is_rejected(run_folder: Path, name: str, length: int) -> None:
    forge(newest(run_folder), name, length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=name):
        trainer(run_folder).fit(Module(), loader(), ckpt_path=newest(run_folder))


def test_a_folder_with_only_damaged_checkpoints_raises(run_folder: Path) -> None:
    for epoch in range(3):
        os.truncate(run_folder / "checkpoints" / f"epoch={epoch}" / "model.safetensors", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            trainer(run_folder).fit(Module(), loader(), ckpt_path="last")
        with pytest.raises(CheckpointError, match="only damaged checkpoints"):
            trainer(run_folder).fit(Module(), loader(), ckpt_path="auto")


def test_a_pickle_file_needs_trust(tmp_path: Path) -> None:
    torch.save({"state_dict": Bomb(tmp_path / "code-was-run")}, tmp_path / "x.ckpt")
    module = Module()
    before = module.state_dict()["net.0.weight"].clone()
    with pytest.raises(CheckpointError, match="trust=True"):
        trainer(tmp_path).fit(module, loader(), ckpt_path=tmp_path / "x.ckpt")
    assert not (tmp_path / "code-was-run").exists()
    assert torch.equal(module.state_dict()["net.0.weight"], before)


# failing saves --------------------------------------------------------------------------------------------------------
@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Returns a function that limits the size of files: the kernel then fails writes, like a full disk."""
    resource = pytest.importorskip("resource")
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Without this the kernel kills the process instead of failing the write.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_earlier_checkpoints_intact(tmp_path: Path, full_disk: Callable[[int], None]) -> None:
    """The second epoch's checkpoint cannot be written: the run ends with an error, the first one stays intact."""

    class Full(Callback):
        def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.current_epoch == 1:
                full_disk(700)

    saving = ModelCheckpoint(tmp_path / "checkpoints", filename="{epoch}", save_top_k=1)
    run = trainer(tmp_path, callbacks=[Full(), saving])
    with pytest.raises(CheckpointError) as caught:
        run.fit(Module(), loader())
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert str(tmp_path / "checkpoints" / "epoch=1") in str(caught.value)
    assert "earlier ones are whole" in str(caught.value)
    full_disk(2**30)

    assert os.listdir(tmp_path / "checkpoints") == ["epoch=0"]
    again = trainer(tmp_path, epochs=2)
    again.fit(Module(), loader(), ckpt_path="last")
    assert again.progress.batches == 8


def test_the_error_for_a_folder_below_a_file_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    run = trainer(tmp_path, epochs=1, callbacks=[ModelCheckpoint(tmp_path / "file" / "checkpoints")])
    with pytest.raises(CheckpointError, match=r"cannot be created \(Not a directory\)") as caught:
        run.fit(Module(), loader())
    assert str(tmp_path / "file" / "checkpoints") in str(caught.value)
    assert isinstance(caught.value.__cause__, NotADirectoryError)


def test_a_failing_manual_save_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    run = trainer(tmp_path, epochs=1)
    run.fit(Module(), loader())
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run.save_checkpoint(tmp_path / "file" / "x")
    assert run.last_checkpoint == tmp_path / "checkpoints" / "epoch=0"
    assert json.loads((tmp_path / "checkpoints" / "epoch=0" / "progress.json").read_text())["global_step"] == 4
