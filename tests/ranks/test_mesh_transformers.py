"""Models of `transformers` on the mesh, split by their own plans: one process's losses and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import Trainer, TrainModule
from leyden.strategies import MeshStrategy
from leyden.strategies.fsdp.sharding import local

pytest.importorskip("transformers", minversion="5")

VOCABULARY, TOKENS, GLOBAL_BATCH, STEPS = 64, 12, 4, 20
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**{**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, **changes}))


def qwen(**changes: Any) -> nn.Module:
    """Normalises the queries and keys of each head, of which a rank has some."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))


MODELS = {"llama": llama, "mixtral": mixtral, "qwen": qwen}


class Causal(TrainModule):
    """Trains a language model by its own loss, from a batch of tokens, attention masks and labels."""

    def __init__(self, kind: str, recomputes: bool = False, **changes: Any) -> None:
        super().__init__()
        self.model: Any = MODELS[kind](**changes)
        if recomputes:
            self.model.gradient_checkpointing_enable()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, mask, labels = batch
        return self.model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def data() -> TensorDataset:
    """Every sample begins with two padding tokens, and its last three labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, TOKENS), generator=generator)
    mask, labels = torch.ones_like(tokens), tokens.clone()
    mask[:, :2], labels[:, :2], labels[:, -3:] = 0, -100, -100
    return TensorDataset(tokens, mask, labels)


def train(sizes: dict[str, int] | None, kind: str, arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Trains for 20 steps, without a plan but the model's own; `sizes=None` for one process."""
    torch.manual_seed(0)
    module = Causal(kind, **changes)
    strategy: Any = "single_device" if sizes is None else MeshStrategy(**sizes)
    trainer = Trainer(strategy=strategy, max_epochs=1, gradient_clip_val=1.0, **QUIET, **arguments)
    trainer.fit(module, DataLoader(data(), GLOBAL_BATCH // trainer.strategy.data_size))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "losses": module.losses,
        "weights": {name: tensor.detach().float().numpy() for name, tensor in state.items()},
        "bytes": sum(local(p).untyped_storage().nbytes() for p in set(module.parameters())),
        "without a gradient": [name for name, p in module.named_parameters() if p.grad is None],
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True, "attn_implementation": "eager"}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "normed heads": ("qwen", {}),
    "recomputed": ("llama", {"tie_word_embeddings": False, "recomputes": True}),
    "experts": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "experts one by one": ("mixtral", {"experts_implementation": "eager"}),
}


def train_all(sizes: dict[str, int] | None, cases: dict[str, Any]) -> dict[str, Any]:
    return {name: train(sizes, kind, {}, **changes) for name, (kind, changes) in cases.items()}


def check_like_one_process(found: dict[str, Any], expected: dict[str, Any], name: str, tolerance: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance), name
    assert not found["without a gradient"], name
    for key, value in expected["weights"].items():
        assert abs(found["weights"][key] - value).max() < tolerance, (name, key)


def test_models_split_by_their_own_plans_train_as_on_one_process() -> None:
    single = train_all(None, CASES)
    norms_and_routers = 2048
    for rank in run_world(2, train_all, {"tp": 2}, CASES):
        for name, expected in single.items():
            check_like_one_process(rank[name], expected, name)
            assert rank[name]["bytes"] < expected["bytes"] / 2 + norms_and_routers, name
