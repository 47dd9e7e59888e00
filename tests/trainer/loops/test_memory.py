"""Nothing outlives its step: no batch, output or graph, which would add to peak memory."""

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
def without_garbage_collector() -> Iterator[None]:
    """Turns the garbage collector off: a cycle that only it frees counts as kept, since on a GPU it runs too late."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Module(Squares):
    """Counts the tensors of its steps that are still alive."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 1))
        self.seen: list[weakref.ref[Any]] = []
        self.alive_at_start: list[int] = []

    def record(self, *tensors: torch.Tensor) -> None:
        self.seen += [weakref.ref(tensor) for tensor in tensors]

    def alive(self) -> int:
        return sum(reference() is not None for reference in self.seen)

    def step(self, batch: Any) -> torch.Tensor:
        self.alive_at_start.append(self.alive())
        hidden = self(batch[0])
        loss: torch.Tensor = hidden.square().mean()
        self.record(batch[0], hidden, loss)
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


class RecordsGraphs(Callback):
    """Records whether the outputs passed to a hook hold a graph."""

    def __init__(self) -> None:
        self.graphs: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.graphs.append(outputs["loss"].requires_grad)


class RecordsGraphsLast(RecordsGraphs):
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
        {"callbacks": [RecordsGraphs(), RecordsGraphsLast()]},
        {"barebones": True},
    ],
    ids=["default", "max_steps", "accumulation", "autocast", "callbacks", "barebones"],
)
def test_fit_keeps_no_batch_output_or_graph(arguments: dict[str, Any], tmp_path: Path) -> None:
    module = Module()
    trainer = Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **arguments)
    trainer.fit(module, loader(), loader())
    assert len(module.seen) >= 9
    assert set(module.alive_at_start) <= {0}, "a tensor of an earlier step was alive when a step began"
    assert module.alive() == 0
    for callback in arguments.get("callbacks", []):
        assert callback.graphs == [False] * trainer.progress.batches


class RecordsAlive(TensorDataset):
    """Records at each sample how many tensors of earlier steps are alive."""

    def __init__(self, module: Module) -> None:
        super().__init__(torch.randn(10, 4))
        self.module, self.alive_at_load = module, list[int]()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.alive_at_load.append(self.module.alive())
        return super().__getitem__(index)


@pytest.mark.parametrize("logger", [True, False])
def test_a_batch_is_freed_before_the_next_one_is_loaded(logger: bool, tmp_path: Path) -> None:
    module = Module()
    data = RecordsAlive(module)
    trainer = Trainer(accelerator="cpu", max_epochs=2, logger=logger, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(data, 2), loader())
    assert len(data.alive_at_load) == 20 and set(data.alive_at_load) == {0}


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_keeps_no_batch_or_output(stage: str, tmp_path: Path) -> None:
    module = Module()
    getattr(Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), stage)(module, loader())
    # `enumerate` and prefetching release the last batch only once they have the next.
    assert max(module.alive_at_start) == 0
    assert module.alive() == 0


def test_a_failed_fit_frees_its_batch(tmp_path: Path) -> None:
    class FailsInStep(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise ValueError("the user's own error")
            return outputs

    module = FailsInStep()
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=tmp_path)
    try:
        trainer.fit(module, loader())
    except ValueError as error:
        # The traceback holds the frames, which hold their variables.
        error.with_traceback(None)
    assert module.alive() == 0
