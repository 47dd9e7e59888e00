"""Common mistakes in custom loops: the errors and warnings that name them and the fix."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from leyden import (
    Accelerator,
    AutocastKwargs,
    ConfigurationError,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from leyden.utils import MegatronLMPlugin, ParallelismConfig


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixed_precision": "bf61"}, "Did you mean 'bf16'"),
        ({"gradient_accumulation_steps": 0}, "an integer of at least 1"),
        ({"deepspeed_plugin": object()}, "pass a DeepSpeedPlugin"),
        ({"parallelism_config": object()}, "Pass a ParallelismConfig"),
        ({"megatron_lm_plugin": object()}, "Pass a MegatronLMPlugin"),
        ({"fsdp_plugin": {"min_num_params": 1000}}, "Pass a FullyShardedDataParallelPlugin"),
        ({"megatron_lm_plugin": MegatronLMPlugin(), "strategy": "ddp"}, "Pass one of them"),
        ({"megatron_lm_plugin": MegatronLMPlugin(), "parallelism_config": ParallelismConfig()}, "Pass one of them"),
        ({"dynamo_backend": "inductr"}, "Did you mean 'inductor'"),
        ({"rng_types": ["torchh"]}, "Did you mean 'torch'"),
        ({"log_with": "tensorbord"}, "Did you mean 'tensorboard'"),
        ({"log_with": 3}, "Pass names"),
        ({"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]}, "GradScalerKwargs twice"),
        ({"kwargs_handlers": ["scaler"]}, "Pass objects such as"),
        ({"strategy": "dpp"}, "Did you mean 'ddp'"),
        ({"even_batches": True, "dataloader_config": DataLoaderConfiguration()}, "Pass one of them"),
        ({"project_config": ProjectConfiguration(automatic_checkpoint_naming=True)}, "project_dir"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)},
            "Pass one of them",
        ),
    ],
)
def test_invalid_arguments_raise_with_the_fix(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigurationError, TypeError), match=words):
        Accelerator(cpu=True, **arguments)


def test_invalid_settings_raise_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        InitProcessGroupKwargs(init_method="tcp://host:1")
    with pytest.raises(ConfigurationError, match="1 or more"):
        ProjectConfiguration(total_limit=0)


def test_a_strategy_for_ranks_that_were_not_launched_raises() -> None:
    from leyden.strategies.ddp import DDPStrategy

    strategy = DDPStrategy(devices=[torch.device("cpu")] * 2)
    with pytest.raises(ConfigurationError, match="leyden launch --num_processes 2"):
        Accelerator(cpu=True, strategy=strategy)


def test_an_unprepared_model_is_reported() -> None:
    model, optimizer = model_and_optimizer()
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(optimizer)
    with pytest.warns(UserWarning, match="no model was prepared"):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.warns(UserWarning, match="holds no parameter of a prepared model"):
        optimizer.step()
    with (
        pytest.raises(ConfigurationError, match=r"model = accelerator.prepare\(model\)"),
        accelerator.accumulate(model),
    ):
        pass
    mixed = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(ConfigurationError, match="no model was prepared"):
        mixed.backward(model(torch.ones(1, 2)).sum())


def test_an_unprepared_optimizer_is_reported() -> None:
    model, _ = model_and_optimizer()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.warns(UserWarning, match="no optimizer was prepared"):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.backward(model(torch.ones(1, 2)).sum())
    scaled = Accelerator(cpu=True, mixed_precision="fp16")
    model = scaled.prepare(nn.Linear(2, 1))
    scaled.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigurationError, match="no optimizer was prepared"):
        scaled.backward(model(torch.ones(1, 2)).sum())


def test_an_optimizer_of_another_model_raises() -> None:
    model, _ = model_and_optimizer()
    _, other_optimizer = model_and_optimizer()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, other_optimizer = accelerator.prepare(model, other_optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigurationError, match="create it from the parameters of the model that you train"):
        other_optimizer.step()
    both = torch.optim.SGD([*model.parameters(), *nn.Linear(3, 1).parameters()], lr=0.1)
    with pytest.raises(ConfigurationError, match="2 of SGD's 4 parameters belong to no prepared model"):
        accelerator.prepare(both).step()


def test_moving_a_model_after_prepare_raises() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(2, 1), DataLoader(torch.ones(1, 2)))
    model.to("meta")
    with pytest.raises(ConfigurationError, match=r"was moved to meta after prepare.*Remove .to\(...\)"):
        next(iter(loader))


def test_a_scheduler_without_its_optimizer_warns() -> None:
    _, optimizer = model_and_optimizer()
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="Prepare the optimizer too"):
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_prepare_accepts_any_order_repeated_calls_and_other_objects() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    text, made, stepped, own = accelerator.prepare("text", scheduler, optimizer, model)
    assert text == "text" and own is model and accelerator.prepare(model) is model
    assert stepped is accelerator.prepare(optimizer) is accelerator.prepare(stepped)
    assert made is accelerator.prepare(scheduler)
    assert made.optimizers == [stepped]
    after = torch.optim.lr_scheduler.StepLR(stepped, 1)
    assert accelerator.prepare(after).optimizers == [stepped]
    assert accelerator.unwrap_model(own) is model
    with pytest.raises(ConfigurationError, match="2 entries for 1 objects"):
        accelerator.prepare(model, device_placement=[True, False])
    one, two = accelerator.free_memory(model, optimizer)
    assert one is two is None and accelerator.prepared_models == []


def test_mixed_precision_keeps_parameter_names() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (x @ x.T).dtype == torch.float32
    with accelerator.autocast():
        assert (x @ x.T).dtype == torch.bfloat16
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare is model and bare(x).dtype == torch.float32


def test_compiled_models_keep_parameter_names() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    bare = nn.Linear(2, 1)
    model = accelerator.prepare(bare)
    assert type(model).__name__ == "OptimizedModule"
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is bare
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]
    assert torch.equal(model(torch.ones(1, 2)), bare(torch.ones(1, 2)))


def test_debug_mode_prints_the_setup_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    accelerator.prepare(nn.Linear(2, 1), DataLoader(torch.ones(1, 2)))
    first, model, loader = capsys.readouterr().err.splitlines()
    assert first.startswith("leyden: rank 0 of 1 (local 0), device cpu, ")
    assert first.endswith("precision bf16-mixed, accumulation 2")
    assert model == "leyden: rank 0: model Linear no wrapper, Parameter of torch.float32 on cpu"
    assert loader == "leyden: rank 0: loader of 1 batches by BatchSampler, batch_size 1"


def test_launch_settings_fill_arguments_left_at_their_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from leyden.trainer.launched import LaunchSettings

    settings = LaunchSettings("a.yaml", accelerator="cpu", precision="bf16-mixed", accumulate_grad_batches=4)
    for name, value in settings.variables().items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 4)
    assert "leyden launch sets mixed_precision='bf16-mixed', gradient_accumulation_steps=4, cpu=True (from a.yaml)" in (
        capsys.readouterr().out
    )
    own = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)
    assert (own.mixed_precision, own.gradient_accumulation_steps) == ("no", 2)
