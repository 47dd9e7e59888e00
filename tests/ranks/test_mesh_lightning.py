"""Scripts for Lightning's ModelParallelStrategy, as in its documentation, train like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, VOCABULARY, data
from ranks.world import run_world
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies import ModelParallelStrategy

WIDTH, GLOBAL_BATCH = 8, 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.w1, self.w3 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.w2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Net(TrainModule):
    """A net that splits no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(FeedForward(), FeedForward())
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        loss = (self.model(x) * self.scale - x.flip(1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        readers = self.trainer.strategy.data_size
        return DataLoader(TensorDataset(torch.randn(32, WIDTH, generator=generator)), GLOBAL_BATCH // readers)


class Split(Net):
    """Splits its layers over one dimension of the mesh, and shards them over the other."""

    def configure_model(self) -> None:
        tp_mesh, dp_mesh = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        for block in self.model:
            parallelize_module(block, tp_mesh, plan)
            if dp_mesh.size() > 1:
                fully_shard(block, mesh=dp_mesh)
        if dp_mesh.size() > 1:
            fully_shard(self.model, mesh=dp_mesh)


class LanguageNet(Net):
    """Classifies tokens, in a model that configure_model builds."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = self.build()

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), FeedForward(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = self.loss(self.model(tokens), labels)
        self.losses.append(loss.item())
        return loss

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def train_dataloader(self) -> Any:
        readers = self.trainer.strategy.data_size
        return DataLoader(TensorDataset(*(part.clamp(min=0) for part in data(24).tensors)), GLOBAL_BATCH // readers)


class SplitLanguageNet(LanguageNet):
    """Lightning's transformer example: built on the meta device, with split sequences and a split loss."""

    def build(self) -> nn.Module:
        tp_mesh, dp_mesh = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        with torch.device("meta"):
            model = super().build()
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "1.norm": SequenceParallel(),
            "1.w1": ColwiseParallel(input_layouts=Shard(1)),
            "1.w3": ColwiseParallel(input_layouts=Shard(1)),
            "1.w2": RowwiseParallel(output_layouts=Shard(1)),
            "2": SequenceParallel(),
            "3": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, tp_mesh, plan)
        if dp_mesh.size() > 1:
            fully_shard(model[1], mesh=dp_mesh)
            fully_shard(model, mesh=dp_mesh)
        return model

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        with loss_parallel():
            return super().loss(logits, labels)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(loss, *args, **kwargs)


def train(kind: type[Net], strategy: Any) -> dict[str, Any]:
    module = kind()
    trainer = Trainer(strategy=strategy, max_epochs=2, gradient_clip_val=0.5, **QUIET)
    trainer.fit(module)
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "losses": module.losses,
        "data_rank": trainer.strategy.data_rank,
        "placements": [str(getattr(p, "placements", None)) for p in module.parameters()],
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
    }


def train_split(kind: type[Net], sizes: dict[str, int]) -> dict[str, Any]:
    return train(kind, ModelParallelStrategy(**sizes))  # type: ignore[arg-type]


def train_whole() -> dict[str, Any]:
    return train(Net, ModelParallelStrategy())


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return train(Net, "single_device")


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param({"data_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param({"data_parallel_size": 2, "tensor_parallel_size": 1}, marks=pytest.mark.full),
    ],
    ids=["tensor parallel", "within fsdp", "fsdp"],
)
def test_configure_model_that_splits_by_hand_trains_like_one_process(
    sizes: dict[str, int], single: dict[str, Any]
) -> None:
    world = sizes.get("data_parallel_size", 1) * sizes.get("tensor_parallel_size", 2)
    check_like_one_process(run_world(world, train_split, Split, sizes), single)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{}, {"data_parallel_size": 2, "tensor_parallel_size": 2}], ids=["alone", "in fsdp"])
def test_a_model_built_on_the_meta_device_with_a_split_loss_trains_like_one_process(sizes: dict[str, int]) -> None:
    world = sizes.get("data_parallel_size", 1) * 2
    single = train(LanguageNet, "single_device")
    check_like_one_process(run_world(world, train_split, SplitLanguageNet, sizes), single)


def check_like_one_process(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    readers = {rank["data_rank"]: rank["losses"] for rank in ranks}
    losses = [sum(column) / len(column) for column in zip(*readers.values(), strict=True)]
    assert losses == pytest.approx(single["losses"], abs=1e-5)
    for rank in ranks:
        assert "None" not in rank["placements"], "a parameter is not on the mesh, so one AdamW cannot step them all"
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-5, name


@pytest.mark.full
def test_a_module_that_splits_no_layer_raises() -> None:
    found = run_world(2, train_whole, may_fail=True)
    assert any("splits no layer: call parallelize_module" in str(failure) for failure in found)


class Mixed(Split):
    """Multiplies a DTensor, which w1 returns, by a plain tensor, which w3 returns."""

    def configure_model(self) -> None:
        tp_mesh = self.device_mesh["tensor_parallel"]
        plan = {"w1": ColwiseParallel(use_local_output=False), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        for block in self.model:
            parallelize_module(block, tp_mesh, plan)


@pytest.mark.full
def test_mixing_dtensors_and_plain_tensors_raises_with_the_fix() -> None:
    found = run_world(2, train_split, Mixed, {}, may_fail=True)
    assert any(
        "An operation mixed a plain tensor and a DTensor. A split layer with use_local_output=False" in str(failure)
        and "use_local_output=True" in str(failure)
        and "got mixed torch.Tensor and DTensor" in str(failure)
        for failure in found
    ), found


def train_by_name(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Planned()
    trainer = Trainer(strategy=name, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(data(8), 2))
    return {"details": trainer.strategy.details, "losses": module.losses, "name": trainer.strategy.name}


class Planned(GPT):
    def parallel_plan(self) -> dict[str, str]:
        return PLAN


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "world", "layout"), [("tp", 2, "tp 2 of 2 ranks"), ("fsdp_tp", 4, "dp_shard 2 × tp 2 of 4 ranks")]
)
def test_a_mesh_by_name_fits_the_number_of_ranks(name: str, world: int, layout: str) -> None:
    ranks = run_world(world, train_by_name, name)
    assert all(rank["name"] == "mesh" and rank["details"].startswith(layout) for rank in ranks)
    assert ranks[0]["losses"] == ranks[1]["losses"]
