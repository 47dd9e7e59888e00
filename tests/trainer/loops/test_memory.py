"""Nothing of a step outlives it: no batch, no output and no graph, which would add to the peak of memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Squares
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, Trainer


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """A cycle that only the collector frees counts as kept: on a GPU nobody calls it in time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Module(Squares):
    """Counts the tensors of its steps that are alive."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 1))
        self.seen: list[weakref.ref[Any]] = []
        self.alive_at_start: list[int] = []

    def note(self, *tensors: torch.Tensor) -> None:
        self.seen += [weakref.ref(tensor) for tensor in tensors]

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)

    def step(self, batch: Any) -> torch.Tensor:
        self.alive_at_start.append(self.alive())
        hidden = self(batch[0])
        loss: torch.Tensor = hidden.square().mean()
        self.note(batch[0], hidden, loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss, "batch": batch}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.step(batch))
        return batch

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        self.step(batch)
        return 1


class Listens(Callback):
    """Notes whether the outputs that a hook gets hold a graph."""

    def __init__(self) -> None:
        self.graphs: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.graphs.append(outputs["loss"].requires_grad)


class ListensLast(Listens):
    order = 100


def loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(10, 4)), 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_steps": 3},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"callbacks": [Listens(), ListensLast()]},
        {"barebones": True},
    ],
    ids=["default", "a limit", "accumulation", "autocast", "listeners", "barebones"],
)
def test_fit_keeps_no_batch_output_or_graph(arguments: dict[str, Any], tmp_path: Path) -> None:
    module = Module()
    trainer = Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **arguments)
    trainer.fit(module, loader(), loader())
    assert len(module.seen) >= 9
    assert set(module.alive_at_start) <= {0}, "something of an earlier step was there when a step began"
    assert module.alive() == 0
    for listener in arguments.get("callbacks", []):
        assert listener.graphs == [False] * trainer.progress.batches


class Watched(TensorDataset):
    """Notes at each sample what the module's earlier steps have left."""

    def __init__(self, module: Module) -> None:
        super().__init__(torch.randn(10, 4))
        self.module, self.alive_at_load = module, list[int]()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.alive_at_load.append(self.module.alive())
        return super().__getitem__(index)


@pytest.mark.parametrize("logger", [True, False])
def test_a_batch_is_gone_when_the_next_one_is_loaded(logger: bool, tmp_path: Path) -> None:
    module = Module()
    data = Watched(module)
    trainer = Trainer(accelerator="cpu", max_epochs=2, logger=logger, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(data, 2), loader())
    assert len(data.alive_at_load) == 20 and set(data.alive_at_load) == {0}


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_keeps_no_batch_or_output(stage: str, tmp_path: Path) -> None:
    module = Module()
    getattr(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), stage)(module, loader())
    # `enumerate` and the fetching of the next batch let go of the last one only when they have the next.
    assert max(module.alive_at_start) == 0
    assert module.alive() == 0


def test_a_fit_that_failed_lets_go_of_its_batch(tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise ValueError("no")
            return outputs

    module = Fails()
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path)
    try:
        trainer.fit(module, loader())
    except ValueError as error:
        # The traceback holds the frames, and they hold their variables.
        error.with_traceback(None)
    assert module.alive() == 0
