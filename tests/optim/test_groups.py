"""Groups of parameters and the schedule with a stable phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leyden import ConfigurationError
from leyden.optim import parameter_groups, split_parameters, warmup_stable_decay

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def names_of(model: nn.Module, group: dict[str, Any]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in group["params"]]


def muon_names(model: nn.Module, **options: Any) -> set[str]:
    return {
        name
        for group in split_parameters(model, **options)
        if group["algorithm"] == "muon"
        for name in names_of(model, group)
    }


def test_every_trainable_parameter_is_in_one_group() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.lm_head.weight.requires_grad_(False)
    for make in (parameter_groups, split_parameters):
        names = [name for group in make(model) for name in names_of(model, group)]
        assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)


def test_muon_gets_the_matrices_of_the_blocks() -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert muon_names(llama) == {name for name, p in llama.named_parameters() if "layers" in name and p.ndim == 2}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    expected = {name for name, p in bert.named_parameters() if "encoder.layer" in name and p.ndim == 2}
    assert muon_names(bert) == {*expected, "bert.pooler.dense.weight"}
    tied = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=2, num_heads=2, d_kv=4)
    )
    chosen = muon_names(tied)
    assert len(chosen) == 32 and not any("shared" in name or "bias" in name for name in chosen)


def test_muon_gets_experts_as_batches_and_leaves_out_what_is_excluded() -> None:
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=4, num_key_value_heads=2, **SIZES)
    )
    chosen = muon_names(model, exclude=["mlp.gate."])
    assert "model.layers.0.mlp.experts.gate_up_proj" in chosen
    assert "model.layers.0.mlp.gate.weight" in muon_names(model) - chosen


def test_tables_convolutions_and_positions_are_not_for_muon() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.zeros(1, 4, 8))
            self.patches = nn.Conv2d(3, 8, 2)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1)) for _ in range(2))
            self.head = nn.Linear(8, 3)

    assert muon_names(Vision()) == {"blocks.0.0.weight", "blocks.1.0.weight"}


def test_encoder_and_decoder_blocks_of_two_classes_both_count() -> None:
    transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    matrices = {name for name, p in transformer.named_parameters() if p.ndim == 2}
    assert muon_names(transformer) == matrices
    config = transformers.BartConfig(
        vocab_size=32,
        d_model=8,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    bart = transformers.BartForConditionalGeneration(config)
    groups = parameter_groups(bart, lr=1.0, layer_decay=0.5)
    found = {name: group["lr"] for group in groups for name in names_of(bart, group)}
    depths = [f"model.{part}.layers.{i}.fc1.weight" for part in ("encoder", "decoder") for i in (0, 1)]
    assert [found[name] for name in depths] == [0.0625, 0.125, 0.25, 0.5]


def test_an_encoder_without_an_output_layer_and_a_single_block_keep_their_matrices() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(3, 8)
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16)])
            self.scale = nn.Parameter(torch.ones(1, 1, 8))

    assert {"project.weight", "blocks.0.linear2.weight", "blocks.0.self_attn.in_proj_weight"} < muon_names(Encoder())
    assert "scale" not in muon_names(Encoder())


def test_names_to_exclude_are_a_list() -> None:
    with pytest.raises(ConfigurationError, match="exclude='router'"):
        split_parameters(nn.Linear(2, 2), exclude="router")


def test_settings_of_adamw_reach_its_groups() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = split_parameters(model, adamw={"lr": 0.5}, lr=0.1, weight_decay=0.2)
    assert [(g["algorithm"], g["lr"], g["weight_decay"]) for g in groups] == [
        *(("muon", 0.1, 0.2), ("adamw", 0.5, 0.2), ("adamw", 0.5, 0.0)),
    ]


def test_learning_rates_shrink_towards_the_input() -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    groups = parameter_groups(model, lr=1.0, layer_decay=0.5, weight_decay=0.1)
    rates = {name: group["lr"] for group in groups for name in names_of(model, group)}
    assert rates["classifier.weight"] == rates["bert.pooler.dense.bias"] == 1.0
    assert rates["bert.encoder.layer.1.output.dense.weight"] == 0.5
    assert rates["bert.encoder.layer.0.output.dense.weight"] == 0.25
    assert rates["bert.embeddings.word_embeddings.weight"] == 0.125
    decays = {name: group["weight_decay"] for group in groups for name in names_of(model, group)}
    assert decays["classifier.weight"] == 0.1 and decays["classifier.bias"] == 0.0


def test_layer_decay_needs_blocks_and_a_learning_rate() -> None:
    with pytest.raises(ConfigurationError, match="no blocks"):
        parameter_groups(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), lr=1.0, layer_decay=0.5)
    with pytest.raises(ConfigurationError, match="needs lr"):
        parameter_groups(nn.Linear(2, 2), layer_decay=0.5)
    with pytest.raises(ConfigurationError, match="layer_decay=1.5"):
        parameter_groups(nn.Linear(2, 2), lr=1.0, layer_decay=1.5)


def rates(steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = warmup_stable_decay(optimizer, steps, **options)
    found = []
    for _ in range(steps + 2):
        found.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        schedule.step()
    return found


def test_the_schedule_warms_up_stays_and_decays() -> None:
    phases = {"warmup_steps": 2, "decay_steps": 0.4}
    assert rates(10, decay="linear", **phases) == [0, 0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(10, decay="sqrt", min_lr_ratio=0.1, **phases)[6:] == [1, 0.55, 0.364, 0.221, 0.1, 0.1]
    assert rates(10, decay="cosine", **phases)[6:] == [1, 0.854, 0.5, 0.146, 0, 0]
    assert rates(4, warmup_steps=0, decay_steps=0) == [1] * 6


def test_a_run_that_is_too_short_for_both_phases_decays_in_fewer_steps() -> None:
    assert rates(1)[0] == 0
    assert rates(3, warmup_steps=0.5, decay_steps=0.5, decay="linear") == [0, 0.5, 1, 0, 0]
    with pytest.warns(UserWarning, match="warmup_steps=8 and decay_steps=4 are more than the 10 steps"):
        assert rates(10, warmup_steps=8, decay_steps=4, decay="linear")[7:] == [0.875, 1, 0.5, 0, 0]


def test_wrong_arguments_of_a_schedule_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="warmup_steps=-1"):
        rates(10, warmup_steps=-1)
    with pytest.raises(ConfigurationError, match="'cosinus'.*cosine"):
        rates(10, decay="cosinus")
    with pytest.raises(ConfigurationError, match="max_steps"):
        warmup_stable_decay(torch.optim.SGD([torch.zeros(1)], lr=1.0), float("inf"))
