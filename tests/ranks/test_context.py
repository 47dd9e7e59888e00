"""Context parallelism on real ranks: the losses and weights of one process, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, data
from ranks.world import run_world
from torch import Tensor
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.strategies import MeshStrategy, sequence_positions

GLOBAL_BATCH = 4
TUPLE = {"sequence_dims": {0: 1, 1: 1}, "sequence_padding": {0: 0, 1: -100}}


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
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = GPT.training_step(self, batch, batch_idx)
        self.log("val_loss", outputs["loss"] / outputs["num_items"], batch_size=outputs["num_items"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(sizes: dict[str, int] | None, plan: Any = None, **arguments: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {
        name: arguments.pop(name)
        for name in ("cp_method", "activation_checkpointing_policy", "compile")
        if name in arguments
    }
    module = LongGPT(counts_items=True, n_kv_heads=arguments.pop("n_kv_heads", 2))
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes, **options, **TUPLE, plan=plan)
    trainer = Trainer(
        strategy=strategy, max_epochs=2, gradient_clip_val=1.0, **{"precision": "64-true"} | QUIET | arguments
    )
    readers = trainer.strategy.data_size
    trainer.fit(module, DataLoader(data(39), GLOBAL_BATCH // readers), DataLoader(data(7), GLOBAL_BATCH // readers))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, DataLoader(data(GLOBAL_BATCH), GLOBAL_BATCH // readers)) or []
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "losses": module.losses,
        "metrics": metrics,
        "data_rank": trainer.strategy.data_rank,
        "weights": {name: tensor.double().numpy() for name, tensor in state.items()},
        "predicted": torch.cat(predicted).double().numpy(),
    }


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize(
    "sizes", [{"dp_shard": 1, "cp": 2}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 1, "cp": 4}], ids=str
)
def test_context_parallel_trains_like_one_process(sizes: dict[str, int], method: str) -> None:
    single = train(None)
    ranks = run_world(sizes["dp_shard"] * sizes["cp"], cp, sizes, method)
    own = {name: value for name, value in single["metrics"].items() if name != "loss_step"}
    for rank in ranks:
        if sizes["dp_shard"] == 1:
            assert rank["losses"] == pytest.approx(single["losses"], rel=1e-9)
        # A data rank's own value.
        del rank["metrics"]["loss_step"]
        assert rank["metrics"] == pytest.approx(own, rel=1e-9)
        assert abs(rank["predicted"] - single["predicted"]).max() < 1e-9
        for name, value in single["weights"].items():
            assert abs(rank["weights"][name] - value).max() < 1e-9, name


def cp(sizes: dict[str, int], method: str) -> dict[str, Any]:
    return train(sizes, cp_method=method)
