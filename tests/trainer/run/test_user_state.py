"""User state in checkpoints: supported values survive a round trip, others raise before the first step."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import math
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forged import forge_json
from models import QUIET, Line
from same import differences
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, DataModule, Trainer, TrainModule
from leyden.callbacks import EarlyStopping, ModelCheckpoint, Timer
from leyden.checkpoint.format.errors import UnsupportedStateError


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


@dataclasses.dataclass
class Settings:
    rate: float
    names: list[str]
    weight: Tensor


TIED = torch.arange(4.0)

KINDS: dict[str, Any] = {
    "tensors": [torch.randn(2, 3), torch.tensor(1), torch.empty(0), torch.tensor([True]), torch.tensor([1 + 2j])],
    "half tensors": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float16)],
    "a parameter": {"of a module": torch.nn.Parameter(torch.ones(2))},
    "tied tensors": [TIED, TIED, TIED[1:]],
    "numbers": [0, -3, 2**40, 2**70, True, False, None, 0.1, 1e-300, -0.0],
    "nan and inf": [math.nan, math.inf, -math.inf],
    "complex": 1 - 2j,
    "bytes": b"\x00\xff",
    "strings": ["", "ü∆\n", "$"],
    "lists and tuples": ([1, (2, [3, ()])], []),
    "sets": [{1, 2}, frozenset({"a"}), set()],
    "dicts": {"a": {"b": {}}, "$": 1},
    "dicts with int keys": {1: "a", -2: {3: 4.0}},
    "numpy scalars": [np.float32(0.5), np.int64(3), np.bool_(True)],
    "numpy arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 2), np.float32), np.array([True])],
    "a path": Path("some") / "where",
    "enums": [Color.RED, Color.BLUE],
    "a namespace": argparse.Namespace(rate=0.1, deep=argparse.Namespace(x=[1])),
    "a dataclass": Settings(0.1, ["a"], torch.ones(3)),
    "collections": [collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.deque([1], maxlen=3)],
    "torch's own": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
}


class Module(Line):
    """Adds a value to its checkpoints."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value, self.loaded, self.steps = value, None, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.value

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]


class Keeper(Callback):
    def __init__(self, value: Any = None, name: str = "keeper") -> None:
        self.value, self.name, self.loaded, self.seen = value, name, None, None

    @property
    def state_key(self) -> str:
        return f"Keeper({self.name})"

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["mine"]

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.name] = self.value

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint[self.name]


class Data(DataModule):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value, self.loaded = value, None

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 2)), 2)

    def state_dict(self) -> dict[str, Any]:
        return {"mine": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["mine"]


def trainer(folder: Path, *callbacks: Callback, epochs: int = 1) -> Trainer:
    return Trainer(**QUIET, max_epochs=epochs, callbacks=list(callbacks), default_root_dir=folder)


@pytest.mark.parametrize("kind", KINDS)
def test_every_supported_kind_survives_a_round_trip(kind: str, tmp_path: Path) -> None:
    value = KINDS[kind]
    first = trainer(tmp_path, Keeper(value))
    first.fit(Module(value), datamodule=Data(value))
    path = first.save_checkpoint(tmp_path / "saved")
    assert not [file for file in path.rglob("*") if file.suffix not in (".json", ".safetensors")]

    # As users build them for a resume: with state of the same classes, but other values.
    module, keeper, data = Module(fresh(value)), Keeper(fresh(value)), Data(fresh(value))
    trainer(tmp_path, keeper, epochs=2).fit(module, datamodule=data, ckpt_path=path)
    for loaded in (module.loaded, keeper.loaded, keeper.seen, data.loaded):
        assert differences(loaded, value) == []


def fresh(value: Any) -> Any:
    if isinstance(value, Settings):
        return Settings(0.0, [], torch.zeros(1))
    return value if isinstance(value, list) and any(isinstance(item, enum.Enum) for item in value) else None


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.fit(Module(KINDS["tied tensors"]), datamodule=Data())
    module = Module()
    path = first.save_checkpoint(tmp_path / "saved")
    trainer(tmp_path, epochs=2).fit(module, datamodule=Data(), ckpt_path=path)
    a, b, c = module.loaded
    a[1] = 7.0
    assert b[1] == c[0] == 7.0


class Custom:
    pass


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "a function": ({"deep": [1, {"f": len}]}, r"\['deep'\]\[1\]\['f'\] is a builtin"),
    "an object": ([Custom()], r"\[0\] is of the kind .*Custom"),
    "a class": ((Custom,), r"\[0\] is the class Custom"),
    "a lambda": ({3: lambda: 1}, r"\[3\] is a function"),
    "a lock": ({"lock": threading.Lock()}, r"\['lock'\] is"),
    "a module": ([torch.nn.Linear(1, 1)], r"\[0\] is a module, Linear.*state_dict"),
    "a meta tensor": ([torch.empty(2, device="meta")], r"\[0\] is a tensor on the meta device"),
    "an object array": (np.array([None]), "dtype object"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.parametrize("where", ["module", "callback", "datamodule", "hook"])
def test_unsupported_values_raise_before_the_first_step(kind: str, where: str, tmp_path: Path) -> None:
    value, message = UNSUPPORTED[kind]
    make: dict[str, Callable[[], tuple[Module, list[Callback], Data, str]]] = {
        "module": lambda: (Module(value), [], Data(), r"user\['checkpoint'\]\['mine'\]"),
        "callback": lambda: (Module(), [Keeper(value)], Data(), r"callbacks\['Keeper\(keeper\)'\]\['mine'\]"),
        "datamodule": lambda: (Module(), [], Data(value), r"user\['datamodule'\]\['mine'\]"),
        "hook": lambda: (Module(), [OnlyHook(value)], Data(), r"user\['checkpoint'\]\['hooked'\]"),
    }
    module, callbacks, data, place = make[where]()
    with pytest.raises(UnsupportedStateError, match=place + ".*" + message) as caught:
        trainer(tmp_path, *callbacks).fit(module, datamodule=data)
    assert module.steps == 0
    assert "pickle" in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


class OnlyHook(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["hooked"] = self.value


def test_two_callbacks_of_one_class_keep_separate_state(tmp_path: Path) -> None:
    first = trainer(tmp_path, Keeper(1, "one"), Keeper(2, "two"))
    first.fit(Module(), datamodule=Data())
    path = first.save_checkpoint(tmp_path / "saved")
    one, two = Keeper(0, "one"), Keeper(0, "two")
    trainer(tmp_path, two, one, epochs=2).fit(Module(), datamodule=Data(), ckpt_path=path)
    assert (one.loaded, two.loaded) == (1, 2)


def test_a_value_that_becomes_unsupported_raises_at_the_save_and_leaves_no_files(tmp_path: Path) -> None:
    class BecomesUnsupported(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            module.value = len
            trainer.save_checkpoint(tmp_path / "saved")

    with pytest.raises(UnsupportedStateError, match=r"\['mine'\]"):
        trainer(tmp_path, BecomesUnsupported()).fit(Module(1), datamodule=Data())
    assert list(tmp_path.iterdir()) == []


def test_a_barebones_run_does_not_check_user_state(tmp_path: Path) -> None:
    module = Module(len)
    Trainer(accelerator="cpu", barebones=True, max_epochs=1).fit(module, datamodule=Data())
    assert module.steps == 2


class Average(Callback):
    """Creates its state in on_train_start, and has none before."""

    def __init__(self, called: list[str]) -> None:
        self.called, self.weights = called, None

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.called.append("on_train_start")
        if self.weights is None:
            self.weights = {name: value.clone() for name, value in module.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        assert self.weights is not None
        return dict(self.weights.items())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called.append("load_state_dict")
        self.weights = state

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        self.called.append("on_save_checkpoint")
        checkpoint["mean"] = self.weights["layer.weight"].mean()  # type: ignore[index]


def test_state_created_in_on_train_start_is_saved_and_restored(tmp_path: Path) -> None:
    called: list[str] = []
    first = trainer(tmp_path, Average(called))
    first.fit(Module(), datamodule=Data())
    path = first.save_checkpoint(tmp_path / "saved")
    assert called == ["on_train_start", "on_save_checkpoint", "on_save_checkpoint"]
    average = Average(resumed := [])
    module = Module()
    trainer(tmp_path, average, epochs=2).fit(module, datamodule=Data(), ckpt_path=path)
    assert resumed == ["load_state_dict", "on_train_start", "on_save_checkpoint"] and module.steps == 2
    # Another fit without a checkpoint loads nothing.
    first.fit(Module(), datamodule=Data())
    assert called[3:] == ["on_train_start", "on_save_checkpoint"]


def test_random_draws_in_on_save_checkpoint_do_not_change_a_resumed_run(tmp_path: Path) -> None:
    class Draws(Module):
        drawn: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            torch.rand(3)
            super().on_save_checkpoint(checkpoint)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.drawn = torch.rand(1)
            return super().training_step(batch, batch_idx)

    def run(module: Draws, *callbacks: Callback, path: Any = None) -> Any:
        torch.manual_seed(1)
        trainer(tmp_path, *callbacks, epochs=2).fit(module, datamodule=Data(), ckpt_path=path)
        return module.drawn

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "saved")

    uninterrupted = run(Draws(), Saves())
    assert torch.equal(run(Draws(), path=tmp_path / "saved"), uninterrupted)


@dataclasses.dataclass
class Point:
    x: float


class SavesPoint(Module):
    """Has a dataclass in its checkpoint, but in no attribute."""

    fails = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fails and not self.trainer.optimizers:
            raise AttributeError("nothing yet")
        checkpoint["mine"] = Point(1.0)


def test_a_dataclass_known_only_from_on_save_checkpoint_is_restored(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.fit(SavesPoint(), datamodule=Data())
    path = first.save_checkpoint(tmp_path / "saved")
    module = SavesPoint()
    trainer(tmp_path, epochs=2).fit(module, datamodule=Data(), ckpt_path=path)
    assert module.loaded == Point(1.0)
    module = SavesPoint()
    module.fails = True
    with pytest.warns(
        UserWarning, match=r"values of type Point, which load as plain values.*AttributeError: nothing yet"
    ):
        trainer(tmp_path, epochs=2).fit(module, datamodule=Data(), ckpt_path=path)
    assert module.loaded == types.SimpleNamespace(x=1.0)


def test_a_second_fit_that_fails_in_setup_saves_its_own_progress(tmp_path: Path) -> None:
    class FailsLater(Callback):
        def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
            if trainer.last_checkpoint is not None:
                trainer.save_checkpoint(tmp_path / "second")
                raise RuntimeError("no second time")

    trainer = Trainer(accelerator="cpu", max_epochs=1, barebones=True, callbacks=FailsLater())
    module, loader = Line(), DataLoader(TensorDataset(torch.ones(4, 2)))
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "first")
    with pytest.raises(RuntimeError, match="no second time"):
        trainer.fit(module, loader)
    steps = [json.loads((tmp_path / name / "progress.json").read_text())["global_step"] for name in ("first", "second")]
    assert steps == [4, 0] and trainer.global_step == 0


def test_state_keys_have_lightnings_form() -> None:
    best = {"monitor": "val_acc", "mode": "max", "every_n_train_steps": 0, "every_n_epochs": 1}
    best["train_time_interval"] = None
    assert ModelCheckpoint(monitor="val_acc", mode="max").state_key == f"ModelCheckpoint{best}"
    assert EarlyStopping("val_loss").state_key == "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}"
    assert Callback().state_key == "Callback"
    others = [
        ModelCheckpoint(monitor="val_acc", mode="max"),
        ModelCheckpoint(monitor="val_acc", mode="max", filename="a"),
        ModelCheckpoint(monitor="val_acc", mode="max", save_weights_only=True),
    ]
    assert len({other.state_key for other in others}) == 3


def test_states_under_the_keys_of_earlier_versions_are_loaded(tmp_path: Path) -> None:
    class Logs(Module):
        def on_train_epoch_end(self) -> None:
            self.log("draw", 1.0)

    def callbacks() -> tuple[EarlyStopping, Timer, ModelCheckpoint]:
        return EarlyStopping("draw", patience=99), Timer("00:09:00:00"), ModelCheckpoint(tmp_path / "kept")

    former = {
        "EarlyStopping": "EarlyStopping(monitor='draw', mode='min')",
        "Timer": "Timer(duration=32400.0, interval='step')",
        "ModelCheckpoint": "ModelCheckpoint(monitor=None, mode='min', filename='{epoch}-{step}', "
        "every_n_train_steps=0, every_n_epochs=1, train_time_interval=None, save_weights_only=False)",
    }

    def rename(content: Any) -> None:
        content["tree"] = {former[key.partition("{")[0]]: state for key, state in content["tree"].items()}

    def fit(epochs: int, ckpt_path: Any = None) -> tuple[EarlyStopping, Timer, ModelCheckpoint]:
        used = callbacks()
        arguments = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path}
        running = Trainer(**arguments, max_epochs=epochs, callbacks=list(used))
        running.fit(Logs(), datamodule=Data(), ckpt_path=ckpt_path)
        running.save_checkpoint(tmp_path / "saved")
        return used

    first = fit(3)
    assert first[0].wait_count == 2
    forge_json(tmp_path / "saved", "callbacks.json", rename)
    stopping, timer, checkpoint = fit(3, tmp_path / "saved")
    assert stopping.wait_count == 2
    assert timer.time_elapsed() >= first[1].time_elapsed() > 0
    assert checkpoint.best_model_path == first[2].best_model_path != ""
