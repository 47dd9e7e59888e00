"""Context parallelism on real ranks: the losses and weights of one process, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, data
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer
from leyden.callbacks import ModelCheckpoint, WeightAveraging
from leyden.strategies import MeshStrategy, sequence_positions

GLOBAL_BATCH = 4
LENGTH = 13
"""A length that no number of ranks divides."""


class LongGPT(GPT):
    """The GPT of the mesh's tests, with the positions of its part of a sequence."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(sequence_positions(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.log("loss", outputs["loss"] / outputs["num_items"], on_step=True, on_epoch=True)
        self.log("tokens", float(outputs["num_items"]), on_step=False, on_epoch=True, reduce_fx="sum")
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = GPT.training_step(self, batch, batch_idx)
        self.log("val_loss", outputs["loss"] / outputs["num_items"], batch_size=outputs["num_items"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def texts(samples: int) -> TensorDataset:
    return TensorDataset(*(tensor[:, :LENGTH] for tensor in data(samples).tensors))


RUNS: dict[str, dict[str, Any]] = {
    "gather": {},
    "ulysses": {"cp_method": "ulysses"},
    "accumulated": {"accumulate_grad_batches": 3},
    "checkpointed": {"activation_checkpointing_policy": {"Block"}},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "bf16": {"precision": "bf16-mixed"},
    "averaged": {"callbacks": ["average"]},
}
OF_STRATEGY = ("cp_method", "activation_checkpointing_policy", "compile")


def train(sizes: dict[str, int] | None, plan: Any = None, **arguments: Any) -> dict[str, Any]:
    """Trains for two epochs, whose last global batch has 3 samples, then predicts."""
    torch.manual_seed(0)
    options = {name: arguments.pop(name) for name in OF_STRATEGY if name in arguments}
    dims = {"sequence_dims": {0: 1, 1: 1}, "sequence_padding": {0: 0, 1: -100}}
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, **options, **dims, plan=plan)
    callbacks = [WeightAveraging() for _ in arguments.pop("callbacks", ())]
    given = {"precision": "64-true", "max_epochs": 2} | QUIET | arguments
    trainer = Trainer(strategy=strategy, gradient_clip_val=1.0, callbacks=callbacks, **given)
    size = GLOBAL_BATCH // trainer.strategy.data_size
    module = LongGPT(counts_items=True)
    trainer.fit(module, DataLoader(texts(39), size, shuffle=True), DataLoader(texts(7), size))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, DataLoader(texts(GLOBAL_BATCH), size)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "losses": module.losses,
        "metrics": metrics,
        "data_rank": trainer.strategy.data_rank,
        "weights": {name: tensor.double().numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).double().numpy(),
    }


def all_runs(sizes: dict[str, int] | None, plan: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(sizes, plan, **RUNS[name]) for name in names}


LAYOUTS: list[Any] = [
    ({"dp_shard": 1, "cp": 2}, None, list(RUNS)),
    ({"dp_shard": 1, "cp": 4}, None, ["gather", "ulysses"]),
    ({"dp_shard": 2, "cp": 2}, None, ["gather", "accumulated", "averaged"]),
    ({"dp_shard": 1, "cp": 2, "tp": 2}, PLAN, ["gather", "ulysses", "checkpointed"]),
]


@pytest.mark.parametrize(("sizes", "plan", "names"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_context_parallel_trains_like_one_process(sizes: dict[str, int], plan: Any, names: list[str]) -> None:
    single = all_runs(None, None, names)
    size = sizes["dp_shard"] * sizes["cp"] * sizes.get("tp", 1)
    for rank in run_world(size, all_runs, sizes, plan, names):
        for name in names:
            check(rank[name], single[name], 2e-2 if name == "bf16" else 1e-9, sizes["dp_shard"] == 1)


def check(rank: dict[str, Any], single: dict[str, Any], tolerance: float, has_all: bool) -> None:
    if has_all:
        assert rank["losses"] == pytest.approx(single["losses"], rel=tolerance)
    # On each data rank, this is the value of its own batch.
    own, expected = ({k: v for k, v in found["metrics"].items() if k != "loss_step"} for found in (rank, single))
    assert own == pytest.approx(expected, rel=tolerance)
    assert abs(rank["predicted"] - single["predicted"]).max() < 10 * tolerance
    for name, value in single["weights"].items():
        assert abs(rank["weights"][name] - value).max() < tolerance, name
