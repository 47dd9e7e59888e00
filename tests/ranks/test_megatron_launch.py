"""Megatron-LM settings in Accelerate's files lay out a mesh that trains like one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import QUIET
from ranks.mesh_gpt import GPT, PLAN, data
from ranks.world import run_world
from torch.utils.data import DataLoader

from leyden import Trainer
from leyden.cli.launch.plan import ElasticOptions, LaunchPlan, resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import parse
from leyden.core.errors import ConfigurationError


class Planned(GPT):
    def parallel_plan(self) -> dict[str, str]:
        return PLAN


def launch(ranks: int, **section: Any) -> LaunchPlan:
    options = {f"megatron_lm_{name}": value for name, value in section.items()}
    file = {"distributed_type": "MEGATRON_LM", "num_processes": ranks, "use_cpu": True, "megatron_lm_config": options}
    return resolve(parse(file), ElasticOptions(), Machine(cpus=ranks), {})


def train() -> dict[str, Any]:
    torch.manual_seed(0)
    module = Planned(depth=4)
    trainer = Trainer(max_epochs=1, **{**QUIET, "accelerator": "cpu"})
    trainer.fit(module, DataLoader(data(40), 8 // trainer.strategy.data_size))
    state = trainer.strategy.full_state_dict(module, rank0_only=False)
    return {
        "weights": {name: tensor.numpy() for name, tensor in state.items()},
        "details": trainer.strategy.details,
        "clips": trainer.gradient_clip_val,
        "schedule": str(getattr(trainer.strategy, "schedule", "")),
    }


LAYOUTS: list[tuple[int, dict[str, Any], str]] = [
    (2, {"pp_degree": 2, "num_micro_batches": 4}, "pp 2 of 2 ranks"),
    (
        4,
        {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4, "recompute_activations": True},
        "pp 2 × tp 2 of 4 ranks",
    ),
    (4, {"pp_degree": 2, "num_micro_batches": 2, "use_distributed_optimizer": True}, "pp 2 × dp_shard 2 of 4 ranks"),
]


@pytest.mark.parametrize(
    ("ranks", "section", "layout"),
    [pytest.param(*row, marks=[] if row[0] == 2 else pytest.mark.full, id=row[2]) for row in LAYOUTS],
)
def test_megatron_settings_train_like_one_process(ranks: int, section: dict[str, Any], layout: str) -> None:
    plan = launch(ranks, gradient_clipping=1.0, sequence_parallelism=False, **section)
    variables = {name: value for name, value in plan.variables().items() if name.startswith("LEYDEN")}
    torch.manual_seed(0)
    module = Planned(depth=4)
    Trainer(strategy="single_device", max_epochs=1, gradient_clip_val=1.0, **QUIET).fit(module, DataLoader(data(40), 8))
    for rank in run_world(ranks, train, environ=variables):
        assert rank["details"].startswith(layout) and rank["clips"] == 1.0
        assert rank["schedule"] == f"1F1B of {section['num_micro_batches']} micro-batches"
        for name, value in module.state_dict().items():
            assert abs(rank["weights"][name] - value.numpy()).max() < 1e-5, name


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tp_degree": 3}, "megatron_lm_tp_degree: 3, megatron_lm_pp_degree: 1, megatron_lm_cp_degree: 1 share a model"),
    ({"ep_degree": 3}, "megatron_lm_ep_degree: 3 does not divide the 4 ranks that see different tokens: change it"),
]


@pytest.mark.parametrize(("section", "message"), MISTAKES)
def test_impossible_degrees_raise_before_the_launch(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        launch(4, **section)
    assert str(error.value).startswith(message)


def test_settings_without_a_mesh_use_ddp_and_ignored_settings_are_reported() -> None:
    plan = launch(2, gradient_clipping=0.5, sequence_parallelism=True)
    assert (plan.launched.strategy, plan.launched.gradient_clip_val) == ("ddp", 0.5)
    assert "megatron_lm_sequence_parallelism: the model's plan says" in plan.lines("a.py", reasons=True)
