"""Transformers folders as weights of a module: the tensors equal those that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.hugging_face import HuggingFaceFolder
from leyden.core.errors import ConfigurationError

transformers = pytest.importorskip("transformers", minversion="5")

SHAPE = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def model(kind: str) -> Any:
    if kind == "Mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, num_local_experts=12))
    if kind == "Qwen3Moe":
        config = transformers.Qwen3MoeConfig(**SHAPE, head_dim=4, moe_intermediate_size=4, num_experts=4)
        return transformers.Qwen3MoeForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


class Trained(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scale, self.net = nn.Linear(1, 1), model(kind)


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("shard_size", ["1GB", "2KB"], ids=["one file", "several files"])
def test_a_submodule_loads_weights_that_transformers_saved(kind: str, shard_size: str, tmp_path: Path) -> None:
    module = Trained(kind)
    expected = module.net.state_dict()
    module.net.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() is (shard_size == "1GB")
    found = HuggingFaceFolder(tmp_path).within(module).model()
    assert found.keys() == {f"net.{name}" for name in expected}
    assert all(torch.equal(found[f"net.{name}"], value) for name, value in expected.items())


def test_weights_that_fit_two_submodules_raise(tmp_path: Path) -> None:
    first = model("Llama")
    first.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"fit several submodules \(student, teacher\)"):
        HuggingFaceFolder(tmp_path).within(nn.ModuleDict({"student": first, "teacher": model("Llama")}))


def test_the_error_for_a_missing_weights_file_names_it(tmp_path: Path) -> None:
    model("Llama").save_pretrained(tmp_path, max_shard_size="2KB")
    missing = sorted(tmp_path.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(CheckpointError, match=missing.name):
        HuggingFaceFolder(tmp_path)
