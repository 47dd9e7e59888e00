"""Models of `transformers` built in configure_model start from the values of a plain build, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch import nn

from leyden import Trainer, TrainModule
from leyden.strategies import FSDPStrategy, MeshStrategy

pytest.importorskip("transformers", minversion="5")

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=4))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


EMBEDDINGS = {"llama": "embed_tokens.weight", "bert": "word_embeddings.weight", "t5": "shared.weight"}
MODELS: dict[str, Any] = {"llama": llama, "bert": bert, "t5": t5}


class Late(TrainModule):
    """A language model that is built in configure_model; its learning rate is 0, so that its weights stay."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = MODELS[self.kind]()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def state_of(strategy: Any, kind: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    module, trainer = Late(kind), Trainer(strategy=strategy, **QUIET)
    trainer.fit(module, list(torch.arange(16).view(2, 2, 4)), max_epochs=1)
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {name: value.double().flatten().tolist() for name, value in state.items()}


def states(kinds: list[str], strategy: str, sizes: dict[str, int]) -> dict[str, Any]:
    return {kind: state_of(FSDPStrategy() if strategy == "fsdp" else MeshStrategy(**sizes), kind) for kind in kinds}


LAYOUTS: dict[str, tuple[list[str], str, dict[str, int]]] = {
    "fsdp": (["llama", "bert", "t5"], "fsdp", {}),
    "dp_shard": (["llama", "bert", "t5"], "mesh", {"dp_shard": 2}),
    "tp": (["llama"], "mesh", {"tp": 2, "dp_shard": 1}),
    "pp": (["llama"], "mesh", {"pp": 2, "dp_shard": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_start_from_the_values_of_a_plain_build(layout: str) -> None:
    kinds, strategy, sizes = LAYOUTS[layout]
    found, _ = run_world(2, states, kinds, strategy, sizes)
    for kind in kinds:
        assert found[kind] == state_of("single_device", kind), f"{kind} starts from other values"
        [weights] = (value for name, value in found[kind].items() if name.endswith(EMBEDDINGS[kind]))
        assert torch.tensor(weights).std() < 2, "the model's own initialization did not run"


def differ_after_init_module(kinds: list[str]) -> dict[str, list[str]]:
    """Builds models in init_module; returns the names of tensors with other values than in a plain build."""
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        expected = MODELS[kind]().state_dict()
        torch.manual_seed(0)
        trainer = Trainer(strategy="fsdp", **QUIET)
        trainer.strategy.setup_environment()
        with trainer.init_module():
            model = MODELS[kind]()
        [sharded] = trainer.strategy.setup_modules([model])
        state = trainer.strategy.full_state_dict(sharded, rank0_only=False)
        found[kind] = [name for name, value in expected.items() if not torch.equal(state[name], value)]
    return found


def test_init_module_keeps_the_values_of_a_plain_build() -> None:
    assert run_world(2, differ_after_init_module, list(MODELS)) == [{kind: [] for kind in MODELS}] * 2
