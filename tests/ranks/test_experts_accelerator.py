"""Divided experts in loops of the user's own, under Accelerate's names: the losses and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.mixture import PLAN, Mixture, data
from ranks.test_context_accelerator import Found, transformers_trainer, weights_of
from ranks.world import run_world
from same import differences
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from leyden import Accelerator
from leyden.core.errors import ConfigurationError
from leyden.strategies import ExpertBalancer, MeshStrategy
from leyden.utils import MegatronLMPlugin, ParallelismConfig

GLOBAL_BATCH = 8


class Planned(Mixture):
    """The mixture with its plan of experts to divide."""

    def parallel_plan(self) -> dict[str, str]:
        return PLAN

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)[0]


class Mixtral(nn.Module):
    """A mixture of `transformers`, which brings its plan."""

    def __init__(self, implementation: str) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__()
        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        self.model = MixtralForCausalLM(MixtralConfig(**shape, **heads, experts_implementation=implementation))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits  # type: ignore[no-any-return]


def script(
    arguments: Found, kind: str, dtype: torch.dtype = torch.float64, folder: str = "", loads: bool = False
) -> Found:
    """Trains 4 batches in windows of two. Saves after the first window, or begins there. Biases balance own experts.

    Args:
        arguments: of the Accelerator.
        kind: "own", or how a Mixtral runs its experts.
        dtype: of the weights.
        folder: where to save.
        loads: whether to load what another run has saved there.
    """
    torch.manual_seed(1 if loads else 0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **arguments)
    model: Any = (Planned() if kind == "own" else Mixtral(kind)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader: Any = DataLoader(data(32), GLOBAL_BATCH // accelerator.strategy.data_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    balancer = ExpertBalancer(model, accelerator.strategy, rate=0.05) if kind == "own" else None
    if loads:
        accelerator.load_state(folder)
    losses, counts = [], []
    for index, (tokens, labels) in enumerate(accelerator.skip_first_batches(loader, 2) if loads else loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).to(dtype), labels.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
            if balancer is not None and accelerator.sync_gradients:
                counts.append({name: own.tolist() for name, own in balancer.step().items()})
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if folder and index == 1 and not loads:
            accelerator.save_state(folder)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    wrapped = {isinstance(part, FSDPModule) for name, part in model.named_modules() if name.endswith("experts")}
    return {"losses": losses, "counts": counts, "held": held, "wrapped": wrapped, **weights_of(accelerator, model)}


def check(found: Found, expected: Found, tolerance: float = 1e-9) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert found.get("counts") == expected.get("counts")
    for name, value in expected["weights"].items():
        exact = 0.0 if name.endswith("expert_bias") else tolerance
        assert abs(found["weights"][name] - value).max() <= exact, name


CASES = {"own": torch.float64, "own in float32": torch.float32, "eager": torch.float64, "grouped_mm": torch.float32}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def run_cases(arguments: Found) -> Found:
    return {name: script(arguments, name.split()[0], dtype) for name, dtype in CASES.items()}


def on_ranks(sizes: Found, folder: str) -> Found:
    """All cases, by a ParallelismConfig and by Megatron-LM's name; a run that saves, and one that loads."""
    megatron = MegatronLMPlugin(expert_model_parallel_size=sizes["ep_size"], gradient_clipping=0)
    return {
        "cases": run_cases({"parallelism_config": ParallelismConfig(**sizes)}),
        "megatron": script({"megatron_lm_plugin": megatron}, "own"),
        "saved": script({"parallelism_config": ParallelismConfig(**sizes)}, "own", folder=folder),
        "loaded": script({"parallelism_config": ParallelismConfig(**sizes)}, "own", folder=folder, loads=True),
    }


@pytest.mark.parametrize(
    "sizes", [{"ep_size": 2}, pytest.param({"ep_size": 2, "dp_shard_size": 4}, marks=pytest.mark.full)], ids=str
)
def test_loops_train_on_divided_experts_like_one_process(sizes: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    single, ranks = run_cases({}), sizes.get("dp_shard_size", 2)
    for found in run_world(ranks, on_ranks, sizes, str(tmp_path)):
        for name, expected in single.items():
            check(found["cases"][name], expected, TOLERANCE[CASES[name]])
            assert found["cases"][name]["held"] == pytest.approx(expected["held"] / ranks, rel=0.01)
            # FSDP over one rank would only copy.
            assert found["cases"][name]["wrapped"] == {ranks > 2}
        check(found["megatron"], single["own"])
        assert found["loaded"]["losses"] == found["saved"]["losses"][-3:]
        assert not differences(found["loaded"]["weights"], found["saved"]["weights"])
    one = script({}, "own", folder=str(tmp_path), loads=True)
    own = single["own"]
    assert any(value.any() for name, value in own["weights"].items() if name.endswith("expert_bias"))
    check(one, {"losses": own["losses"][-3:], "counts": own["counts"][-1:], "weights": own["weights"]})


class Grouped(nn.Module):
    """The experts of a mixture in two grouped products."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts, self.up, self.down = experts.num_experts, experts.up, experts.down

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=self.num_experts).cumsum(0).to(torch.int32)
        inner = F.gelu(F.grouped_mm(x[order // index.shape[1]], self.up.transpose(1, 2), offs=ends))
        outputs = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        pairs = torch.empty_like(outputs).index_copy(0, order, outputs).view(*index.shape, -1)
        return (pairs * weights.unsqueeze(2)).sum(1)


def train_grouped(arguments: Found, starved: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns the gradients of the experts, of which the first ones get no token."""
    torch.manual_seed(0)
    model = Planned(starved=starved, has_bias=False)
    for block in model.blocks:
        block.experts = Grouped(block.experts)
    accelerator = Accelerator(cpu=True, **arguments)
    prepared: Any = accelerator.prepare(model.to(dtype))
    tokens, labels = (part.chunk(accelerator.num_processes)[accelerator.process_index] for part in data(8).tensors)
    accelerator.backward(F.cross_entropy(prepared(tokens).flatten(0, 1).float(), labels.flatten()))
    gradients = [p.grad for name, p in prepared.named_parameters() if ".experts." in name]
    return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]


def grouped(arguments: Found) -> list[Any]:
    cases = [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)]
    return [[gradient.float().numpy() for gradient in train_grouped(arguments, *case)] for case in cases]


def grouped_on_ranks() -> list[Any]:
    return grouped({"parallelism_config": ParallelismConfig(ep_size=2)})


def test_grouped_products_run_with_experts_and_ranks_that_get_no_token() -> None:
    single = grouped({})
    for rank in run_world(2, grouped_on_ranks):
        for number, (found, expected) in enumerate(zip(rank, single, strict=True)):
            for own, whole in zip(found, expected, strict=True):
                # The first expert, or all of those of rank 0, has no gradient.
                assert not own[: 1 + (number > 0)].any() and own[-1].any()
                assert abs(own - whole).max() < (1e-6 if number < 2 else 0.02 * abs(whole).max())


def mixtral() -> nn.Module:
    return Mixtral("eager").double().model  # type: ignore[return-value]


@pytest.mark.full
def test_transformers_trainer_trains_on_divided_experts_like_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    single = transformers_trainer({}, str(tmp_path), mixtral)
    for rank in run_world(2, transformers_trainer, {"ep_size": 2}, str(tmp_path), mixtral):
        check(rank, single, 1e-6)


def errors_of_loaded(folder: str) -> list[str]:
    """Returns the errors for models whose experts `transformers` has divided on loading."""
    from transformers import MixtralForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    ways: list[tuple[Found, Found]] = [
        ({"fsdp_size": 2, "ep_plan": {"model.layers.*.mlp.experts": "ep_dispatch_experts"}}, {"ep_size": 2}),
        ({"tp_size": 2}, {"tp_size": 2}),
    ]
    found = []
    for on_loading, sizes in ways:
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
        config = DistributedConfig(ep_size=2, **on_loading)
        model = MixtralForCausalLM.from_pretrained(folder, distributed_config=config)
        with pytest.raises(ConfigurationError) as error:
            accelerator.prepare(model)
        found.append(str(error.value))
    return found


def test_experts_that_were_divided_on_loading_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    mixtral().save_pretrained(tmp_path)  # type: ignore[operator]
    for rank in run_world(2, errors_of_loaded, str(tmp_path)):
        for text in rank:
            assert "experts.gate_up_proj' is divided over ep already" in text
            assert "load the model without a distributed_config, and pass MeshStrategy(ep=…)" in text


def test_a_parallelism_config_divides_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    built: Any = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4, tp_size=2, ep_size=2).build()
    assert str(built.layout) == "dp_replicate 2 × dp_shard 4 × tp 2 (experts over ep 2)"
    config = ParallelismConfig(ep_size=4)
    assert (config.dp_shard_size, config.total_size, config.data_parallel_size) == (4, 4, 4)
    assert config.ep_enabled and config.non_data_parallel_size == 1
    assert str(ParallelismConfig(cp_size=2, ep_size=4).layout) == "dp_shard 2 × cp 2 (experts over ep 4)"
    assert str(ParallelismConfig(pp_size=2, ep_size=2).layout) == "pp 2 × dp_shard 2 (experts over ep 2)"
    assert not ParallelismConfig().ep_enabled
    with pytest.raises(ConfigurationError, match="needs 4 ranks .* and for ep_size one that divides dp_shard_size"):
        config.check(8)
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    assert ParallelismConfig().dp_shard_size == 2
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "6")
    assert ParallelismConfig().layout == MeshStrategy(dp_shard=6, ep=2).layout
    monkeypatch.setenv("MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE", "2")
    built = MegatronLMPlugin(tp_degree=2).build()
    assert built.layout == MeshStrategy(-1, 2, tp=2, ep=2).layout
    built = MegatronLMPlugin(use_distributed_optimizer=True).build()
    assert built.layout == MeshStrategy(ep=2).layout


SIZES: dict[str, tuple[Found, str]] = {
    "shards": ({"dp_shard_size": 2, "ep_size": 4}, "ep=4 does not divide dp_shard=2: .* Choose a dp_shard"),
    "replicas": ({"dp_replicate_size": 2, "dp_shard_size": 1, "ep_size": 2}, "dp_replicate=2 copies experts"),
    "zero": ({"ep_size": 0}, "ep_size=0.: use an integer of at least 1"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_divide_experts_are_refused(name: str) -> None:
    sizes, message = SIZES[name]
    with pytest.raises(ConfigurationError, match=message):
        ParallelismConfig(**sizes)
