"""transformers models prepared by the Accelerator: transformers loads the saved files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from same import same_weights

from leyden import Accelerator

transformers = pytest.importorskip("transformers")


@pytest.fixture
def prepared() -> tuple[Accelerator, Any]:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.arange(12).view(2, 6)).pooler_output.square().mean())
    optimizer.step()
    return accelerator, model


@pytest.mark.parametrize("size", ["10GB", "4KB"])
def test_transformers_loads_the_files_of_save_model(size: str, prepared: Any, tmp_path: Path) -> None:
    accelerator, model = prepared
    accelerator.save_model(model, tmp_path, max_shard_size=size)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.config.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "4KB")
    assert same_weights(unwrapped, transformers.BertModel.from_pretrained(tmp_path))


def test_save_pretrained_works_on_a_prepared_model(prepared: Any, tmp_path: Path) -> None:
    accelerator, model = prepared
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    assert same_weights(accelerator.unwrap_model(model), transformers.BertModel.from_pretrained(tmp_path))
