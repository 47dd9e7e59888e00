"""Muon: torch's updates on whole matrices, the same bits on shards, and runs of the Trainer."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import ModelCheckpoint
from leyden.optim import Muon, split_parameters
from leyden.optim.muon import orthogonalize
from leyden.strategies import MeshStrategy


class Net(nn.Module):
    """Matrices whose rows do not divide among ranks, wide and tall ones, and a batch of matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(7, 12), nn.Linear(12, 5)
        self.c = nn.Linear(5, 40, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 6, 5))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.ndim == 1], "algorithm": "adamw", "weight_decay": 0.3},
    ]


def give_gradients(model: nn.Module, seed: int) -> None:
    """Gives each parameter a random gradient, or this rank's shard of it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            own = grad[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]
            grad = DTensor.from_local(
                own.contiguous(), mesh, placements, shape=parameter.shape, stride=parameter.stride()
            )
        parameter.grad = grad


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_whole_parameters_are_updated_as_by_torch(nesterov: bool, adjust_lr_fn: str | None) -> None:
    own, reference = Net(), Net()
    parts = groups(reference)
    matrices = [p for p in parts[0]["params"] if p.ndim == 2]
    optimizer = Muon(groups(own), lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn)
    references = [
        torch.optim.Muon(matrices, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn),
        torch.optim.AdamW(parts[1]["params"], lr=0.02, weight_decay=0.3),
    ]
    for seed in range(4):
        give_gradients(own, seed)
        give_gradients(reference, seed)
        for one in (optimizer, *references):
            one.step()
    for (name, value), expected in zip(own.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(value, expected) == (name != "experts"), name


def test_a_state_of_torchs_muon_is_loaded() -> None:
    own, reference = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    own.load_state_dict(reference.state_dict())
    before, optimizer = torch.optim.Muon(reference.parameters()), Muon(own.parameters())
    for seed in range(3):
        give_gradients(reference, seed)
        before.step()
    own.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    for model, one in ((own, optimizer), (reference, before)):
        give_gradients(model, 9)
        one.step()
    assert torch.equal(own.weight, reference.weight)


def test_a_batch_of_matrices_is_orthogonalized_one_by_one() -> None:
    batch = torch.randn(3, 8, 5)
    assert torch.equal(orthogonalize(batch), torch.stack([orthogonalize(matrix) for matrix in batch]))
    values = torch.linalg.svdvals(orthogonalize(batch).float())
    assert values.min() > 0.5 and values.max() < 1.5


def differing(shape: tuple[int, ...]) -> list[str]:
    """Returns the names of the parameters that differ between shards and whole matrices after three steps."""
    own, reference = Net(), Net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    if len(shape) == 2:
        parallelize_module(own, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        mesh = mesh["dp"]
    fully_shard(own.a, mesh=mesh)
    fully_shard(own, mesh=mesh)
    optimizers = Muon(groups(own), lr=0.02), Muon(groups(reference), lr=0.02)
    for seed in range(3):
        give_gradients(own, seed)
        give_gradients(reference, seed)
        for optimizer in optimizers:
            optimizer.step()
    return [
        name
        for (name, value), expected in zip(own.named_parameters(), reference.parameters(), strict=True)
        if not torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected)
    ]


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["fsdp 3", "fsdp 2 and tp 2"])
def test_shards_are_updated_as_whole_matrices_bit_for_bit(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    assert run_world(size, differing_in_world, shape) == [[]] * size


def differing_in_world(shape: tuple[int, ...]) -> list[str]:
    torch.distributed.init_process_group("gloo")
    try:
        return differing(shape)
    finally:
        torch.distributed.destroy_process_group()


class MuonGPT(GPT):
    def configure_optimizers(self) -> Any:
        return Muon(split_parameters(self), lr=0.02, adjust_lr_fn="match_rms_adamw")


def trained(strategy: Any, folder: str | None = None, resumes: bool = False, steps: int = 8) -> dict[str, Any]:
    """Returns the weights after some steps with the same global batches, whatever the strategy."""
    torch.manual_seed(0)
    module = MuonGPT()
    saves = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4)] if folder and not resumes else []
    arguments = {**QUIET, "enable_checkpointing": bool(saves)}
    trainer = Trainer(strategy=strategy, max_steps=steps, callbacks=saves, **arguments)
    loader = DataLoader(data(40), 4 // trainer.strategy.data_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=f"{folder}/step=4" if resumes else None)
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {name: value.numpy() for name, value in state.items()}


def train_everywhere(folder: str) -> dict[str, dict[str, Any]]:
    found = {name: trained(name) for name in ("ddp", "fsdp")}
    found["tp"] = trained(MeshStrategy(tp=2, plan=PLAN))
    trained("fsdp", folder, steps=4)
    found["fsdp, resumed"] = trained("fsdp", folder, resumes=True)
    return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(abs(value - other[name]).max()) for name, value in one.items())


def test_every_strategy_trains_like_one_process_and_resumes(tmp_path: Path) -> None:
    single = trained("single_device")
    [ranks, _] = run_world(2, train_everywhere, str(tmp_path))
    assert distance(ranks["fsdp"], ranks["ddp"]) == 0
    assert distance(ranks["fsdp, resumed"], ranks["fsdp"]) == 0
    ranks["one process, resumed"] = trained("single_device", str(tmp_path), resumes=True)
    for name, weights in ranks.items():
        # Newton-Schulz runs in bfloat16, so gradients that differ in their last bits give updates that differ by 2⁻⁸.
        assert distance(weights, single) < 5e-3, name


def test_wrong_arguments_are_refused() -> None:
    vector, matrix = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ConfigurationError, match=r"shape \(3,\).*split_parameters"):
        Muon([vector])
    with pytest.raises(ConfigurationError, match="adjust_lr_fn='rms'.*match_rms_adamw"):
        Muon([matrix], adjust_lr_fn="rms")
    with pytest.raises(ConfigurationError, match="algorithm='adam'.*adamw"):
        Muon([{"params": [matrix], "algorithm": "adam"}])
    optimizer = Muon([matrix])
    with pytest.raises(ConfigurationError, match="split_parameters"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigurationError, match="lr=-1"):
        Muon([matrix], lr=-1)
    with pytest.raises(ConfigurationError, match="ns_steps=0"):
        Muon([matrix], ns_steps=0)
