"""The loss in chunks: that of whole logits, without their memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import STRATEGIES, make_model, rows
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.hf import HFModule

transformers = pytest.importorskip("transformers", minversion="5")


def train(strategy: str, chunked: bool, tied: bool = False, **arguments: Any) -> dict[str, Any]:
    """Returns the last losses and the weights after some steps."""
    torch.manual_seed(0)
    module = HFModule(make_model("llama", tie_word_embeddings=tied), lr=1e-3, chunked_loss=chunked, weight_decay=0.1)
    limits: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0, **arguments}
    trainer = Trainer(strategy=STRATEGIES[strategy](), verbose=False, **limits, **QUIET)
    data = rows("llama", 24)
    size = 4 // trainer.strategy.data_size
    trainer.fit(module, DataLoader(data, size), DataLoader(data[:7], size))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    losses = {name: float(trainer.callback_metrics[name]) for name in ("loss", "val_loss")}
    return {**losses, **{name: value.float().numpy() for name, value in state.items()}}


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float(np.max(abs(value - other[name]))) for name, value in one.items())


@pytest.mark.parametrize("tied", [False, True])
def test_chunks_train_like_whole_logits(tied: bool) -> None:
    assert distance(train("single", True, tied), train("single", False, tied)) < 5e-6


def test_under_autocast_the_loss_has_the_precision_of_whole_logits() -> None:
    found = train("single", True, precision="bf16-mixed"), train("single", False, precision="bf16-mixed")
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=5e-3)


def on_ranks() -> dict[str, float]:
    return {name: distance(train(name, True), train(name, False)) for name in ("ddp", "fsdp")}


def test_ranks_and_shards_train_like_whole_logits() -> None:
    for distances in run_world(2, on_ranks):
        assert max(distances.values()) < 5e-6


def test_tensor_parallel_is_refused() -> None:
    assert "chunked_loss needs the whole weight" in str(run_world(2, train, "tp", True, may_fail=True))


def test_packed_rows_and_given_shifts_keep_their_labels() -> None:
    model = make_model("llama")
    batch = {name: value[None] for name, value in rows("llama", 1)[0].items()}
    plain, chunked = HFModule(model), HFModule(model, chunked_loss=True)
    shifted = batch["labels"].roll(-1)
    for inputs in (batch, {**batch, "shift_labels": shifted}):
        items = plain.count_items(inputs)
        expected, _ = plain.compute_loss(inputs, items)
        plain.eval()
        assert float(chunked.compute_loss(inputs, items)[0]) == pytest.approx(float(expected), abs=1e-6)


def test_logits_are_there_for_metrics_and_prediction() -> None:
    shapes = []

    def note(evaluated: Any) -> dict[str, float]:
        shapes.append(evaluated.predictions.shape)
        return {}

    module = HFModule(make_model("llama"), chunked_loss=True, compute_metrics=note)
    trainer = Trainer(max_steps=1, **QUIET)
    data = rows("llama", 4)
    trainer.fit(module, DataLoader(data, 2), DataLoader(data, 2))
    assert len(shapes[0]) == 3
    assert trainer.predict(module, DataLoader(data, 2))[0]["logits"].ndim == 3  # type: ignore[index]


def test_what_the_chunks_would_lose_is_refused() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(num_attention_heads=2, num_key_value_heads=2, **sizes)
    )
    with pytest.raises(ConfigurationError, match="changes the logits after its head"):
        Trainer(max_steps=1, **QUIET).fit(HFModule(gemma, chunked_loss=True), DataLoader(rows("llama", 4), 2))
    with pytest.raises(ConfigurationError, match="causal models"):
        HFModule(make_model("bert"), chunked_loss=True)
    with pytest.raises(ConfigurationError, match="label_smoothing"):
        HFModule(make_model("llama"), chunked_loss=True, label_smoothing=0.1)
    with pytest.raises(ConfigurationError, match="auxiliary loss"):
        HFModule(make_model("mixtral", output_router_logits=True), chunked_loss=True)


PROGRAM = r"""
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from leyden.hf import HFModule
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
module = HFModule(LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes)), chunked_loss=sys.argv[1] == "True")
ids = torch.randint(0, 32_000, (1, 1024))
batch = {"input_ids": ids, "labels": ids}


def peak():
    # Not ru_maxrss, which a new process inherits from the one that started it.
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])


before = peak()
loss, _ = module.compute_loss(batch, module.count_items(batch))
loss.backward()
print(peak() - before)
"""


def test_the_logits_of_a_batch_are_never_in_memory() -> None:
    used = [
        int(subprocess.check_output([sys.executable, "-c", PROGRAM, str(chunked)], text=True))
        for chunked in (False, True)
    ]
    # In KiB. One copy of the logits takes 128 MB, and whole ones need three.
    assert used[1] < 100_000 < 300_000 < used[0]
