"""What users put into a checkpoint comes back as it was, and what cannot is refused before the first step."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, DataModule, Trainer, TrainModule
from leyden.trainer.checkpoint.errors import UnsupportedStateError


class Colour(enum.Enum):
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
    "enums": [Colour.RED, Colour.BLUE],
    "a namespace": argparse.Namespace(rate=0.1, deep=argparse.Namespace(x=[1])),
    "a dataclass": Settings(0.1, ["a"], torch.ones(3)),
    "collections": [collections.OrderedDict(b=1, a=2), collections.Counter("aab"), collections.deque([1], maxlen=3)],
    "torch's own": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
}


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a == b).all()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif dataclasses.is_dataclass(a) or isinstance(a, argparse.Namespace):
        assert_same(vars(a), vars(b))
    elif isinstance(a, float):
        assert repr(a) == repr(b)
    else:
        assert a == b


class Module(TrainModule):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.value, self.loaded, self.steps = value, None, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

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
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back(kind: str, tmp_path: Path) -> None:
    value = KINDS[kind]
    first = trainer(tmp_path, Keeper(value))
    first.fit(Module(value), datamodule=Data(value))
    path = first.save_checkpoint(tmp_path / "saved")
    assert not [file for file in path.rglob("*") if file.suffix not in (".json", ".safetensors")]

    # Built as a user builds them for a resume: with state of the same classes, and other values.
    module, keeper, data = Module(fresh(value)), Keeper(fresh(value)), Data(fresh(value))
    trainer(tmp_path, keeper, epochs=2).fit(module, datamodule=data, ckpt_path=path)
    for loaded in (module.loaded, keeper.loaded, keeper.seen, data.loaded):
        assert_same(loaded, value)


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


class Own:
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "a function": ({"deep": [1, {"f": len}]}, r"\['deep'\]\[1\]\['f'\] is a builtin"),
    "an object": ([Own()], r"\[0\] is of the kind .*Own"),
    "a class": ((Own,), r"\[0\] is the class Own"),
    "a lambda": ({3: lambda: 1}, r"\[3\] is a function"),
    "a lock": ({"lock": threading.Lock()}, r"\['lock'\] is"),
    "a module": ([torch.nn.Linear(1, 1)], r"\[0\] is a module, Linear.*state_dict"),
    "a meta tensor": ([torch.empty(2, device="meta")], r"\[0\] is a tensor on the meta device"),
    "an object array": (np.array([None]), "dtype object"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("where", ["module", "callback", "datamodule", "hook"])
def test_what_cannot_be_saved_is_named_before_the_first_step(kind: str, where: str, tmp_path: Path) -> None:
    value, message = REFUSED[kind]
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


def test_state_of_two_callbacks_of_one_class(tmp_path: Path) -> None:
    first = trainer(tmp_path, Keeper(1, "one"), Keeper(2, "two"))
    first.fit(Module(), datamodule=Data())
    path = first.save_checkpoint(tmp_path / "saved")
    one, two = Keeper(0, "one"), Keeper(0, "two")
    trainer(tmp_path, two, one, epochs=2).fit(Module(), datamodule=Data(), ckpt_path=path)
    assert (one.loaded, two.loaded) == (1, 2)


def test_what_becomes_unsavable_later_raises_at_the_save_and_leaves_no_half(tmp_path: Path) -> None:
    class Turns(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            module.value = len
            trainer.save_checkpoint(tmp_path / "saved")

    with pytest.raises(UnsupportedStateError, match=r"\['mine'\]"):
        trainer(tmp_path, Turns()).fit(Module(1), datamodule=Data())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_composed_for_a_bare_run(tmp_path: Path) -> None:
    module = Module(len)
    Trainer(accelerator="cpu", barebones=True, max_epochs=1).fit(module, datamodule=Data())
    assert module.steps == 2
