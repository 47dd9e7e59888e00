"""Weights that several parts of a module share, under FSDP and manual optimization, where each part is its own root."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN
from ranks.mesh_gpt import data as tokens
from ranks.world import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.core.errors import ConfigurationError
from leyden.strategies import MeshStrategy
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy
from leyden.strategies.fsdp.sharding import whole


class ManualGPT(GPT):
    """Token embedding and head, both children of the module, share a weight."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        inputs, labels = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class FrozenGPT(ManualGPT):
    """The shared weight is frozen for the first two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.weight.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tokens.weight.requires_grad_(batch_idx >= 2)


class Part(nn.Module):
    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.deep = encoder, nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.out = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.deep(self.encoder(x)))


class Shares(TrainModule):
    """A generator and a critic, with an optimizer each, which share an encoder or weights.

    Args:
        what: "encoder" for a module inside both and inside the module itself; "deep" for weights inside both, one of
            them also used by a third part in a list; "alias" for a part registered under three names.
        plain: whether it calls loss.backward() instead of manual_backward.
        twice: whether the critic runs twice before its backward pass.
    """

    def __init__(self, what: str, plain: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain, self.twice = plain, twice
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.generator = Part(encoder, 4)
        self.critic = Part(encoder if what == "encoder" else nn.Linear(4, 4), 1)
        self.more = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        if what == "encoder":
            self.encoder = encoder
        elif what == "deep":
            self.critic.deep[0].weight = self.generator.deep[0].weight
            self.more[0].weight = self.generator.deep[0].weight
            self.critic.encoder.bias = self.generator.out.bias
        else:
            self.again, self.both = self.critic, nn.ModuleDict({"critic": self.critic})

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()  # type: ignore[misc]
        if self.plain:
            # Autocast and scaling do not matter in float32, and the ranks exchange these gradients too.
            run: Any = torch.Tensor.backward
        else:
            run = self.manual_backward
        first.zero_grad()
        run(F.mse_loss(self.more[1](self.more[0](self.generator(x))), y))
        self.clip_gradients(first, 0.3, "norm")
        first.step()
        second.zero_grad()
        made = self.generator(x).detach()
        out = self.critic(made)
        run((F.mse_loss(out, y) + self.critic(x).square().mean()) if self.twice else F.mse_loss(out, y))
        second.step()

    def configure_optimizers(self) -> Any:
        first = [*self.generator.parameters(), *self.more.parameters()]
        return [
            torch.optim.SGD(dict.fromkeys(first), lr=0.3),
            torch.optim.SGD(self.critic.parameters(), lr=0.2, momentum=0.5),
        ]


def numbers() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))


MODULES: dict[str, tuple[type[TrainModule], dict[str, Any]]] = {
    "tied": (ManualGPT, {}),
    "frozen": (FrozenGPT, {}),
    "encoder": (Shares, {"what": "encoder"}),
    "encoder, plain": (Shares, {"what": "encoder", "plain": True}),
    "deep": (Shares, {"what": "deep", "twice": True}),
    "alias": (Shares, {"what": "alias", "twice": True}),
}
HSDP = {"device_mesh": (2, 2)}
RUNS: dict[int, list[tuple[str, dict[str, Any], int, bool]]] = {
    2: [
        *((name, {}, 1, False) for name in MODULES),
        ("tied", {"auto_wrap_policy": None, "cpu_offload": True}, 1, False),
        ("tied", {}, 2, False),
        ("tied", {}, 1, True),
        ("deep", {"auto_wrap_policy": {"Linear"}, "reshard_after_forward": False}, 2, False),
        ("encoder", {"auto_wrap_policy": {"Linear"}}, 2, False),
    ],
    4: [(name, HSDP, 1, False) for name in ("tied", "encoder", "deep")],
}
"""Number of ranks → (module, arguments of FSDPStrategy, calls of fit, whether it is built on the meta device)."""


def train(name: str, strategy: Any, fits: int = 1, deferred: bool = False) -> tuple[dict[str, Any], str]:
    """Returns the weights after four steps per fit, on the same global batches, and the strategy's line."""
    kind, arguments = MODULES[name]
    module, details = None, ""
    for _ in range(fits):
        trainer = Trainer(strategy=strategy, max_epochs=1, limit_train_batches=4, **QUIET)
        if module is None:
            torch.manual_seed(0)
            with trainer.init_module() if deferred else nullcontext():
                module = kind(**arguments)
            assert deferred is any(p.is_meta for p in module.parameters())
        samples = tokens(32) if issubclass(kind, GPT) else numbers()
        trainer.fit(module, DataLoader(samples, 4 // trainer.strategy.data_size, shuffle=True))
        details = trainer.strategy.details
    assert module is not None
    return {key: whole(value.detach()).clone().numpy() for key, value in module.state_dict().items()}, details


def trained(size: int) -> tuple[list[Any], Any, list[Any]]:
    """Returns the results of each run, those of DDP for the tied weights, and of a tensor-parallel mesh."""
    mesh = MeshStrategy(dp_shard=1, tp=2, plan=PLAN) if size == 2 else MeshStrategy(dp_replicate=2, dp_shard=2)
    found = [train(name, FSDPStrategy(**options), *others) for name, options, *others in RUNS[size]]
    return found, train("tied", "ddp"), [train("tied", mesh), refusals(size)]


def refusals(size: int) -> list[str]:
    """Returns the errors of setting up modules that share weights which cannot be trained."""
    if size == 4:
        return [refusal(MeshStrategy(dp_shard=2, tp=2, plan=PLAN), ManualGPT())]
    found = []
    for what in ("child", "module", "weight"):
        encoder = nn.Linear(4, 4)
        other = Part(nn.Linear(4, 4) if what == "weight" else encoder, 1)
        other.encoder.weight = encoder.weight
        found.append(refusal(FSDPStrategy(), Part(encoder, 1), encoder if what == "child" else other))
    return found


def refusal(strategy: Any, *modules: nn.Module) -> str:
    strategy.setup_environment()
    try:
        for module in modules:
            strategy.add_module(module)
    except ConfigurationError as error:
        return str(error)
    finally:
        strategy.teardown()
    return "no error"


@pytest.mark.parametrize("size", RUNS)
def test_shared_weights_train_as_in_one_process(size: int) -> None:
    expected = {(name, fits): train(name, "auto", fits)[0] for name, _, fits, _ in RUNS[size]}
    for found, (ddp, _), (mesh, errors) in run_world(size, trained, size):
        for run, (weights, details) in zip(RUNS[size], found, strict=True):
            name, _, fits, _ = run
            for key, value in expected[name, fits].items():
                np.testing.assert_allclose(weights[key], value, rtol=0, atol=2e-6, err_msg=f"{key} of {run}")
            if name == "tied":
                assert details.endswith("fp32 shards, tokens.weight unsharded")
        for weights in (ddp, mesh[0]):
            np.testing.assert_allclose(found[0][0]["tokens.weight"], weights["tokens.weight"], rtol=0, atol=2e-6)
        if size == 4:
            assert "'tokens.weight' is shared by several children of ManualGPT" in errors[0]
        else:
            assert [error.split(" is shared")[0] for error in errors] == [
                "'weight' of Linear",
                "'encoder.weight' of Part",
                "'encoder.weight' of Part",
            ]
