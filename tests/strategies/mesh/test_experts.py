"""Plans that split parameters of experts, and the errors for transformers' unsupported styles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.experts import Experts, check_experts, check_split, split_of
from leyden.strategies.mesh.plan import Plan, plan_of


class Mixture(nn.Module):
    def __init__(self, inner: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(4, 2 * inner, 6)), nn.Parameter(torch.zeros(4, 6, inner))


SPLIT = {"up": "packed_colwise", "down": "rowwise"}


def test_a_rank_gets_a_part_of_each_matrix_in_a_packed_weight() -> None:
    placement: Any = split_of("packed_colwise", torch.zeros(4, 8, 2))
    (first, second), _ = placement._split_tensor(torch.arange(8).view(1, 8, 1), 2, with_padding=False)
    assert (first.flatten().tolist(), second.flatten().tolist()) == ([0, 1, 4, 5], [2, 3, 6, 7])


@pytest.mark.parametrize(
    ("module", "style", "size", "message"),
    [
        (Mixture(), Experts(splits={"up": "packed_colwise"}), 2, r"does not split experts\.down, .* count 2 times"),
        (Mixture(inner=6), Experts(splits=SPLIT), 4, r"experts\.up has 12 outputs, which tp=4 does not divide into"),
        (Mixture(), Experts(splits=SPLIT), 3, r"experts\.up has 16 outputs, which tp=3 does not divide"),
        (Mixture(), Experts(splits=SPLIT, sequence=True), 2, "'experts' and has 'sequence' layers"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(module: nn.Module, style: Experts, size: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_experts("experts", module, style, size)


def test_parameters_are_split_only_in_modules_of_experts() -> None:
    with pytest.raises(ConfigurationError, match="nothing sums .* add 'mlp': 'experts'"):
        check_split("mlp.up", Mixture(), "packed_colwise", owner_style=None)
    with pytest.raises(ConfigurationError, match="makes the parameter 'mlp.up' 'sequence'"):
        check_split("mlp.up", Mixture(), "sequence", owner_style="experts")


@pytest.mark.parametrize("style", ["mla_kv_a_proj", "packed_rowwise", "local_params", "grouped_gemm"])
def test_unsupported_transformers_styles_are_refused(style: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the style '{style}' of transformers, for .* with tp=1"):
        Plan({"layers.*.attention": style})


def test_entries_of_a_transformers_plan_for_missing_layers_are_dropped() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.Qwen3MoeConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=4, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = nn.Sequential(transformers.Qwen3MoeForCausalLM(config))
    plan = plan_of(model)
    assert plan is not None
    assert "model.layers.*.mlp.gate_proj" in model[0].tp_plan, "written for dense layers, which this model lacks"
    assert set(plan.entries) == {f"0.{name}" for name in model[0].tp_plan if ".mlp." not in name or "experts" in name}
    assert plan.matched(model)["0.model.layers.0.mlp.experts.down_proj"] == "rowwise"
