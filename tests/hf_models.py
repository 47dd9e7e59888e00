"""Small models of transformers with random weights, and data for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leyden.strategies import FSDPStrategy, MeshStrategy

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LENGTH = 12
"""The tokens of a row; shorter ones are padded."""


STRATEGIES: dict[str, Any] = {
    "single": lambda: "single_device",
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "tp": lambda: MeshStrategy(tp=2, dp_shard=1),
    "pp": lambda: MeshStrategy(pp=2, dp_shard=1),
    "mesh": lambda: MeshStrategy(tp=2, dp_shard=2),
}
"""Layouts by name: of one process, of four ranks ("mesh"), and of two."""


def make_model(kind: str, **config: Any) -> Any:
    """Returns a model whose weights are the same at every call. Without dropout, unless the configuration sets it.

    Args:
        kind: "llama", "bert" (a classifier with three classes), "t5" or "mixtral".
        **config: further entries of its configuration.
    """
    import transformers as hf

    torch.manual_seed(0)
    sizes = SIZES | {"num_attention_heads": 4}
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes | {"num_key_value_heads": 2} | config))
    if kind == "bert":
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
        return hf.BertForSequenceClassification(hf.BertConfig(**sizes | still | config))
    if kind == "t5":
        t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        t5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        return hf.T5ForConditionalGeneration(hf.T5Config(**t5 | config))
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes | experts | config))


def rows(kind: str, count: int) -> list[dict[str, Tensor]]:
    """Returns samples of 3 to 12 tokens, padded; the labels of padding are -100."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(count):
        length = int(torch.randint(3, LENGTH, (1,), generator=generator))
        ids = torch.randint(2, 64, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        labels = torch.where(mask.bool(), ids, -100)
        sample = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if kind == "bert":
            sample["labels"] = ids[0] % 3
        if kind == "t5":
            sample["decoder_input_ids"] = torch.cat([torch.zeros(1).long(), labels[:-1].clamp(min=0)])
        samples.append(sample)
    return samples
