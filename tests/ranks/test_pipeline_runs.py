"""Whole runs through a pipeline: fp16, several optimizers, weight averages, validation, short runs, steady memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, data
from ranks.test_pipeline_logs import rows
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.callbacks import Callback
from leyden.callbacks.loggers.csv_logger import CSVLogger
from leyden.strategies import MeshStrategy
from leyden.strategies.precision import MixedPrecision


def strategy_of(piped: bool, **arguments: Any) -> Any:
    return MeshStrategy(pp=2, microbatches=4, **arguments) if piped else "single_device"


def trained(module: GPT, piped: bool, **arguments: Any) -> Trainer:
    trainer = Trainer(strategy=strategy_of(piped), **{**QUIET, "max_epochs": 2, **arguments})
    trainer.fit(module, DataLoader(data(24), 8))
    return trainer


def weights(trainer: Trainer, module: GPT) -> Any:
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {name: tensor.float().numpy() for name, tensor in state.items()}


def seeded(kind: Callable[..., GPT] = GPT) -> GPT:
    torch.manual_seed(0)
    return kind(depth=4)


class Overflowing(GPT):
    """Gradients are inf in two steps: only those of the embedding, which the first stage holds, and all of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        if x.requires_grad and self.trainer.global_step == 1:
            x.register_hook(lambda grad: grad * torch.inf)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * (torch.inf if self.training and self.trainer.global_step == 3 else 1.0)


def in_fp16(piped: bool, folder: str) -> Any:
    module = seeded(Overflowing)
    precision = MixedPrecision("16", init_scale=2.0**8, growth_interval=2)
    trainer = trained(module, piped, precision=precision, gradient_clip_val=1.0)
    scaler: Any = precision.scaler
    steps = (trainer.progress.global_step, trainer.progress.stepped)
    return {"scale": scaler.get_scale(), "steps": steps, "weights": weights(trainer, module)}


class Halves(GPT):
    """An optimizer for the embeddings and the first block, and one for the rest."""

    def configure_optimizers(self) -> Any:
        first = [*self.places.parameters(), *self.blocks[0].parameters()]
        rest = [p for p in self.parameters() if all(p is not other for other in first)]
        return [torch.optim.SGD(first, lr=0.3), torch.optim.AdamW(rest, lr=0.01)]


def by_two_optimizers(piped: bool, folder: str) -> Any:
    module = seeded(Halves)
    return {"weights": weights(trained(module, piped), module)}


class Average(Callback):
    """Keeps moving averages of the parameters."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: GPT, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            self.kept.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.5)


def averaged(piped: bool, folder: str) -> Any:
    module, average = seeded(), Average()
    trained(module, piped, callbacks=[average])
    # Averages of other stages are nan.
    return {name: value.numpy() for name, value in average.kept.items() if not value.isnan().all()}


class Validated(GPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val_mean", logits.mean(), on_step=True, on_epoch=True)


def logged_in_validation(piped: bool, folder: str) -> Any:
    module = seeded(Validated)
    logger = CSVLogger(folder, name="logs", version="only")
    trainer = Trainer(
        strategy=strategy_of(piped), **{**QUIET, "max_epochs": 1, "logger": logger, "default_root_dir": folder}
    )
    trainer.fit(module, DataLoader(data(8), 8), DataLoader(data(16), 8))
    return {"metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}


def val_rows(folder: Path) -> list[float]:
    return [float(row["val_mean_step"]) for row in rows(folder) if row["val_mean_step"]]


def warned(piped: bool, folder: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(seeded(), piped, max_epochs=1)
    return {"warnings": [str(warning.message) for warning in caught]}


def shortened(piped: bool, folder: str) -> Any:
    limited, quick = seeded(), seeded()
    trained(limited, piped, limit_train_batches=2)
    trained(quick, piped, fast_dev_run=2)
    return {"limited": limited.losses, "quick": quick.losses}


class MemoryRecorder(GPT):
    """Records the bytes of all live tensors after steps 6 and 30."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.bytes: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step not in (6, 30):
            return
        # Its values stay on the device until somebody reads them.
        _ = self.trainer.history
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
        self.bytes.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))


def memory_used(piped: bool, folder: str) -> Any:
    module = seeded(MemoryRecorder)
    trained(module, piped, max_epochs=10)
    return {"bytes": module.bytes}


CASES = {
    function.__name__: function
    for function in (in_fp16, by_two_optimizers, averaged, logged_in_validation, shortened, memory_used, warned)
}


def run_all(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"folder": Path(folder)}
    for name, case in CASES.items():
        found[name] = case(True, f"{folder}/{name}")
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, run_all, str(tmp_path_factory.mktemp("runs")))


def check_weights(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert abs(found[name] - value).max() < tolerance, name


def test_all_stages_skip_a_step_that_overflows_on_one(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    single = in_fp16(False, str(tmp_path))
    assert single["steps"] == (6, 4)
    for rank in ranks:
        found = rank["in_fp16"]
        assert (found["scale"], found["steps"]) == (single["scale"], single["steps"])
        check_weights(found["weights"], single["weights"], 5e-3)


def test_optimizers_of_different_parts_step_like_one_process(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    single = by_two_optimizers(False, str(tmp_path))
    for rank in ranks:
        check_weights(rank["by_two_optimizers"]["weights"], single["weights"], 1e-4)


def test_weight_averages_match_one_process(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    single = averaged(False, str(tmp_path))
    for rank in ranks:
        check_weights(rank["averaged"], {name: single[name] for name in rank["averaged"]})
    assert {name for rank in ranks for name in rank["averaged"]} == single.keys()


def test_validation_logs_step_values(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    single = logged_in_validation(False, str(tmp_path / "single"))
    for rank in ranks:
        assert rank["logged_in_validation"]["metrics"] == pytest.approx(single["metrics"], abs=1e-5)
    expected = val_rows(tmp_path / "single")
    assert len(expected) == 2 and val_rows(ranks[0]["folder"] / "logged_in_validation") == pytest.approx(
        expected, abs=1e-5
    )


def test_short_runs_match_one_process(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    single = shortened(False, str(tmp_path))
    assert (len(single["limited"]), len(single["quick"])) == (4, 2)
    for kind, losses in single.items():
        assert ranks[1]["shortened"][kind] == pytest.approx(losses, abs=1e-5)


def test_placeholders_of_other_stages_are_not_taken_for_weights_that_are_nan(ranks: list[dict[str, Any]]) -> None:
    assert not [text for rank in ranks for text in rank["warned"]["warnings"] if "nan" in text]


def test_memory_does_not_grow_with_steps(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        early, late = rank["memory_used"]["bytes"]
        assert late <= early
