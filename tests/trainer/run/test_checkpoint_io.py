"""Checkpoints stored by a `CheckpointIO` plugin: saving, ranking and resuming work as with folders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Regression
from ranks.world import run_world
from same import same_weights, whole
from samples import pairs
from torch import nn
from torch.utils.data import DataLoader

from leyden import ConfigurationError, LeydenError, Trainer
from leyden.callbacks import EMAWeightAveraging, ModelCheckpoint
from leyden.checkpoint.reader import CheckpointReader
from leyden.trainer import AsyncCheckpointIO, CheckpointIO


class FileStore(CheckpointIO):
    """A plugin that stores each checkpoint as one file, and records its calls.

    Args:
        folder: of the files.
        broken: names of the checkpoints whose saves fail.
    """

    def __init__(self, folder: Path, broken: tuple[str, ...] = ()) -> None:
        self.folder, self.broken, self.calls = folder, broken, list[str]()
        folder.mkdir(exist_ok=True)

    def _file(self, path: Any) -> Path:
        return self.folder / f"{Path(path).name}.pt"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        name = Path(path).name
        if name in self.broken:
            raise OSError("the store is full")
        torch.save(checkpoint, self._file(path))
        self.calls.append(f"save {name}" + (f" {storage_options}" if storage_options else ""))

    def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:
        self.calls.append(f"load {Path(path).name}")
        return torch.load(self._file(path), map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(f"remove {Path(path).name}")
        self._file(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        self.calls.append("teardown")


class Duck:
    """A duck-typed plugin: it has the methods but not the base class, like one written for Lightning."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.kept[str(path)] = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None) -> dict[str, Any]:
        return self.kept[str(path)]

    def remove_checkpoint(self, path: Any) -> None:
        del self.kept[str(path)]


def regression() -> Regression:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    return Regression(net, lambda module: torch.optim.Adam(module.parameters(), lr=0.05))


def fit(plugin: Any, callbacks: Any, epochs: int, path: Any = None, **arguments: Any) -> tuple[Trainer, Regression]:
    module = regression()
    torch.manual_seed(7)
    own = {"enable_checkpointing": bool(callbacks), "callbacks": callbacks, "plugins": plugin, "max_epochs": epochs}
    trainer = Trainer(**{**QUIET, **own, **arguments})
    trainer.fit(module, DataLoader(pairs(16), 4, shuffle=True), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plugin_saves_ranks_removes_and_resumes_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    _, uninterrupted = fit(None, [EMAWeightAveraging(decay=0.5)], 3, enable_checkpointing=False)
    store = FileStore(tmp_path / "store")
    saving = ModelCheckpoint(tmp_path / "runs", filename="{step}", every_n_train_steps=3, save_top_k=2)
    plugin = AsyncCheckpointIO(store) if asynchronous else store
    trainer, _ = fit(plugin, [saving, EMAWeightAveraging(decay=0.5)], 3, default_root_dir=tmp_path)
    saves = [f"save step={step}" for step in (3, 6, 9, 12)]
    removals = [f"remove step={step}" for step in (3, 6)]
    assert [one for one in store.calls if one.startswith("save")] == saves and store.calls[-1] == "teardown"
    assert [one for one in store.calls if one.startswith("remove")] == removals
    # The oldest is removed only after the newest is stored.
    assert store.calls.index("remove step=3") > store.calls.index("save step=9")
    assert sorted(file.name for file in store.folder.iterdir()) == ["step=12.pt", "step=9.pt"]
    assert saving.best_model_path == saving.last_model_path == str(tmp_path / "runs" / "step=12")
    # Nothing else is left, not even a temporary folder.
    assert sorted(one.name for one in tmp_path.iterdir()) == ["runs", "store"] and not any(
        (tmp_path / "runs").iterdir()
    )

    again = ModelCheckpoint(tmp_path / "runs", filename="{step}", every_n_train_steps=3, save_top_k=2)
    checkpoint = tmp_path / "runs" / "step=9"
    trainer, module = fit(plugin, [again, EMAWeightAveraging(decay=0.5)], 3, checkpoint, default_root_dir=tmp_path)
    assert (
        same_weights(module, uninterrupted) and trainer.global_step == 12 and str(trainer.ckpt_path) == str(checkpoint)
    )
    # The ranking is restored: step 6 was kept together with 9, and is removed when 12 is saved.
    assert store.calls.count("remove step=6") == 2
    module = regression()
    trainer.validate(module, DataLoader(pairs(4), 4), ckpt_path="best", verbose=False)
    assert same_weights(module, uninterrupted)


def test_the_stored_dict_has_weights_by_name_and_can_be_edited(tmp_path: Path) -> None:
    duck = Duck()
    trainer, module = fit(duck, [], 1, default_root_dir=tmp_path)
    path = trainer.save_checkpoint(tmp_path / "one")
    found = duck.kept[str(path)]
    assert {"epoch", "global_step", "leyden_version", "state_dict", "files"} == set(found)
    assert (found["epoch"], found["global_step"]) == (0, 4)
    assert all(torch.equal(found["state_dict"][name], tensor) for name, tensor in module.state_dict().items())
    torch.save(found, tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt", weights_only=True)["global_step"] == 4
    # Weights changed in the dict are the ones loaded.
    found["state_dict"] = {name: torch.zeros_like(tensor) for name, tensor in found["state_dict"].items()}
    trainer, module = fit(duck, [], 1, path, default_root_dir=tmp_path)
    assert all(not parameter.any() for parameter in module.parameters())
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert not any(name.startswith("optimizer") for name in duck.kept[str(tmp_path / "weights")]["files"])
    for name in ("../x.json", "model.safetensors"):
        duck.kept["bad"] = {**found, "files": {**found["files"], name: torch.zeros(1, dtype=torch.uint8)}}
        with pytest.raises(LeydenError, match="bad: files has .*which is not a file of a checkpoint"):
            fit(duck, [], 1, "bad", default_root_dir=tmp_path)
    # A dict without Leyden's entries is loaded as another trainer's checkpoint.
    duck.kept["plain"] = {"state_dict": regression().state_dict()}
    assert fit(duck, [], 1, "plain", default_root_dir=tmp_path)[0].global_step == 4
    # Outside a fit, an asynchronous plugin too has stored the checkpoint when the call returns.
    around = AsyncCheckpointIO(Duck())
    trainer, _ = fit(around, [], 1, default_root_dir=tmp_path)
    assert str(trainer.save_checkpoint(tmp_path / "two")) in around.checkpoint_io.kept
    # A checkpoint folder is read without the plugin.
    fit(None, [ModelCheckpoint(tmp_path / "folders", filename="{step}")], 1)
    fit(duck, [], 2, tmp_path / "folders" / "step=4", default_root_dir=tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plugin_error_ends_the_run_and_removes_nothing(tmp_path: Path, asynchronous: bool) -> None:
    store = FileStore(tmp_path / "store", broken=("step=8",))
    saving = ModelCheckpoint(tmp_path / "runs", filename="{step}", every_n_train_steps=4, save_top_k=1)
    with pytest.raises(OSError, match="the store is full"):
        fit(AsyncCheckpointIO(store) if asynchronous else store, [saving], 2, default_root_dir=tmp_path)
    assert [file.name for file in store.folder.iterdir()] == ["step=4.pt"]
    assert not any(one.startswith("remove") for one in store.calls)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]


def test_unsupported_plugin_uses_raise(tmp_path: Path) -> None:
    duck = Duck()
    with pytest.raises(
        ConfigurationError, match="plugins has several that store checkpoints, Duck and Duck: pass only one"
    ):
        Trainer(**QUIET, plugins=[duck, Duck()])
    with pytest.raises(
        ConfigurationError, match=r"both Duck and AsyncCheckpointIO: pass AsyncCheckpointIO\(Duck\(…\)\)"
    ):
        Trainer(**QUIET, plugins=[duck, "AsyncCheckpointIO"])
    with pytest.raises(ConfigurationError, match="resume='auto' searches for the newest checkpoint.*Duck cannot list"):
        Trainer(**QUIET, plugins=duck, resume="auto")
    for word in ("auto", "last"):
        with pytest.raises(ConfigurationError, match=f"ckpt_path='{word}': Duck cannot list its checkpoints"):
            fit(duck, [], 1, word, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="wrap it in AsyncCheckpointIO"):
        fit(duck, [ModelCheckpoint(tmp_path, every_n_train_steps=1, asynchronous=True)], 1)
    with pytest.raises(ConfigurationError, match=r"storage_options=\{'a': 1\} needs a CheckpointIO"):
        fit(None, [], 1)[0].save_checkpoint(tmp_path / "x", storage_options={"a": 1})
    with pytest.raises(ConfigurationError, match="checkpoint_io=.*pass a CheckpointIO"):
        AsyncCheckpointIO(object())  # type: ignore[arg-type]
    store = FileStore(tmp_path / "store")
    trainer, _ = fit(store, [], 1, default_root_dir=tmp_path)
    trainer.save_checkpoint(tmp_path / "y", storage_options={"a": 1})
    assert store.calls[-1] == "save y {'a': 1}"


def sharded(folder: str, path: str | None, epochs: int) -> Any:
    """Fits on every rank; returns the plugin's calls and the final weights."""
    store = FileStore(Path(folder) / "store")
    saving = ModelCheckpoint(Path(folder) / "runs", filename="{step}", every_n_train_steps=2, save_top_k=1)
    _trainer, module = fit(store, [saving], epochs, path, strategy="fsdp", devices=2, default_root_dir=folder)
    with pytest.raises(
        ConfigurationError, match="to_torchscript needs whole weights, but this module's weights are sharded"
    ):
        module.to_torchscript()
    return store.calls, [whole(one).tolist() for one in module.parameters()]


def interrupted_and_uninterrupted(folder: str) -> Any:
    first = sharded(folder, None, 1)
    return first, sharded(folder, f"{folder}/runs/step=2", 2), sharded(folder + "-uninterrupted", None, 2)


def test_two_fsdp_ranks_store_one_dict_and_resume_from_it(tmp_path: Path) -> None:
    Path(f"{tmp_path}/run").mkdir()
    Path(f"{tmp_path}/run-uninterrupted").mkdir()
    (first, resumed, uninterrupted), (other_first, other_resumed, _) = run_world(
        2, interrupted_and_uninterrupted, f"{tmp_path}/run"
    )
    assert first[0] == ["save step=2", "teardown"] and other_first[0] == ["teardown"]
    assert resumed[0][0] == "load step=2" and other_resumed[0] == ["teardown"]
    assert resumed[1] == uninterrupted[1] == other_resumed[1]
    whole = torch.load(tmp_path / "run" / "store" / "step=4.pt", weights_only=True)["state_dict"]
    assert [tensor.tolist() for tensor in whole.values()] == resumed[1]


def test_a_folder_unpacked_from_a_dict_verifies(tmp_path: Path) -> None:
    from leyden.checkpoint.checkpoint_io import unpack

    duck = Duck()
    trainer, _ = fit(duck, [], 1, default_root_dir=tmp_path)
    path = str(trainer.save_checkpoint(tmp_path / "one"))
    reader = CheckpointReader(unpack(duck.kept[path], path, tmp_path / "made"))
    reader.verify()
    assert reader.progress()["global_step"] == 4 and reader.manifest.strategy == "single_device"
