"""HFModule from a folder, on two ranks: the weights of one process under every strategy, read back by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import STRATEGIES, make_model, rows
from models import QUIET
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.core.errors import ConfigurationError
from leyden.hf import HFModule
from leyden.hf.loss import router_correction
from leyden.strategies import MeshStrategy, SingleDeviceStrategy

transformers = pytest.importorskip("transformers", minversion="5")


def order(evaluated: Any) -> dict[str, float]:
    """Returns metrics that tell how many rows there are, and in which order."""
    return {"rows": len(evaluated.predictions), **{f"first_{i}": row[0] for i, row in enumerate(evaluated.label_ids)}}


def train(strategy: str, folder: str, out: str) -> dict[str, float]:
    torch.manual_seed(1)
    # The stages of a pipeline do not return logits.
    module = HFModule(folder, lr=1e-3, compute_metrics=None if strategy == "pp" else order)
    trainer = Trainer(strategy=STRATEGIES[strategy](), max_steps=6, verbose=False, **QUIET)
    data = rows("llama", 24)
    per_rank = 2 if strategy in ("ddp", "fsdp") else 4
    trainer.fit(module, DataLoader(data, per_rank), DataLoader(data[:7], 2))
    module.save_pretrained(out)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}


def pretrained(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is transformers.LlamaForCausalLM
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a pretrained folder, the metrics of one process and its final weights."""
    folder, out = tmp_path_factory.mktemp("pretrained"), tmp_path_factory.mktemp("single")
    make_model("llama").save_pretrained(folder)
    return folder, train("single", str(folder), str(out)), pretrained(out)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pp"])
def test_two_ranks_end_like_one_process(strategy: str, single: Any, tmp_path: Path) -> None:
    folder, expected, weights = single
    answers = run_world(2, train, strategy, str(folder), str(tmp_path))
    assert answers[0] == answers[1]
    for name, value in answers[0].items():
        assert value == pytest.approx(expected[name], abs=1e-5), name
    assert strategy == "pp" or answers[0]["val_rows"] == 7
    found = pretrained(tmp_path)
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-5) for name, value in weights.items())
    assert not torch.equal(found["lm_head.weight"], make_model("llama").state_dict()["lm_head.weight"])


def start(strategy: str, folder: str, out: str) -> None:
    module = HFModule(folder, lr=0.0, scheduler=None)
    Trainer(strategy=STRATEGIES[strategy](), max_steps=1, verbose=False, **QUIET).fit(
        module, DataLoader(rows("llama", 8), 2)
    )
    module.save_pretrained(out)


@pytest.mark.parametrize("strategy", ["fsdp", "tp", pytest.param("mesh", marks=pytest.mark.full)])
def test_shards_start_from_the_pretrained_weights_bit_for_bit(strategy: str, single: Any, tmp_path: Path) -> None:
    run_world(4 if strategy == "mesh" else 2, start, strategy, str(single[0]), str(tmp_path))
    found = pretrained(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in make_model("llama").state_dict().items())


def few_rows(strategy: str, folder: str) -> dict[str, float]:
    module = HFModule(folder, lr=1e-3, compute_metrics=order)
    trainer = Trainer(strategy=STRATEGIES[strategy](), verbose=False, **QUIET)
    data = rows("llama", 8)
    trainer.validate(module, [DataLoader(data[:1], 2), DataLoader(data[1:], 2)], verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "rows" in name}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_without_a_sample_takes_part_in_metrics(strategy: str, single: Any) -> None:
    expected = {"val_rows/dataloader_idx_0": 1.0, "val_rows/dataloader_idx_1": 7.0}
    assert run_world(2, few_rows, strategy, str(single[0])) == [expected, expected]


def balanced(strategy: str) -> dict[str, Any]:
    """Trains a mixture whose own loss balances its experts, in windows of batches with uneven lengths."""
    model = make_model("mixtral", router_aux_loss_coef=0.5, experts_implementation="eager")
    module = HFModule(model, lr=0.1, optimizer="SGD", scheduler=None)
    layouts: dict[str, Any] = {"ep": lambda: MeshStrategy(ep=2), "hsdp": lambda: MeshStrategy(2, 1)}
    chosen = {**STRATEGIES, **layouts}[strategy]()
    trainer = Trainer(strategy=chosen, max_epochs=1, accumulate_grad_batches=2, precision="64-true", **QUIET)
    # The last batch has 3 rows.
    trainer.fit(module, DataLoader(rows("mixtral", 19), 4 // trainer.strategy.data_size))
    return {name: t.numpy() for name, t in trainer.strategy.full_state_dict(module, rank0_only=False).items()}


def balanced_on_ranks() -> dict[str, dict[str, Any]]:
    return {strategy: balanced(strategy) for strategy in ("ep", "fsdp", "hsdp", "tp")}


def test_a_mixture_balances_its_experts_over_the_tokens_of_all_ranks() -> None:
    single = balanced("single")
    for found in run_world(2, balanced_on_ranks):
        for strategy, weights in found.items():
            for name, value in single.items():
                # transformers computes its balance loss in float32.
                assert abs(weights[name] - value).max() < 1e-7, (strategy, name)


def test_a_balance_loss_of_each_rank_alone_is_refused() -> None:
    message = "with strategy='ddp' it would be that of each rank's own tokens. Use strategy='fsdp'"
    assert any(message in str(answer) for answer in run_world(2, balanced, "ddp", may_fail=True))


def test_a_balance_loss_of_another_kind_is_refused() -> None:
    model = make_model("mixtral")
    outputs = model(**{name: torch.stack([row[name] for row in rows("mixtral", 2)]) for name in rows("mixtral", 1)[0]})
    outputs.aux_loss = 2 * outputs.aux_loss
    with pytest.raises(ConfigurationError, match="MixtralForCausalLM computes the balance loss"):
        router_correction(model, outputs, None, torch.tensor(4), SingleDeviceStrategy(), checks=True)


def test_a_model_without_the_names_of_a_balance_loss_is_refused() -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "num_experts": 4}
    config = transformers.SwitchTransformersConfig(**sizes, decoder_start_token_id=0, output_router_logits=True)
    model, ids = transformers.SwitchTransformersForConditionalGeneration(config), torch.arange(2, 10)[None]
    outputs = model(input_ids=ids, labels=ids)
    with pytest.raises(ConfigurationError, match="Set model.router_aux_loss_coef = 0"):
        router_correction(model, outputs, None, torch.tensor(4), SingleDeviceStrategy(), checks=True)
