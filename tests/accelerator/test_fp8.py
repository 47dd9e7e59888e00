"""fp8 in a custom loop: parity with the Trainer, Accelerate's recipes, and the settings of `leyden launch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import QUIET, Regression
from torch import nn

from leyden import (
    Accelerator,
    AORecipeKwargs,
    ConfigurationError,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    Trainer,
)
from leyden.core.errors import MissingExtraError
from leyden.strategies.precision import Float8Precision
from leyden.trainer.launched import LaunchSettings

BATCHES = [(torch.randn(6, 16, generator=torch.Generator().manual_seed(n)), torch.ones(6, 16)) for n in range(5)]


class Net(Regression):
    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        super().__init__(net, lambda module: torch.optim.AdamW(module.parameters(), lr=0.01))


def train_epoch(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x).float(), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def test_an_fp8_loop_matches_the_trainer_and_resumes_exactly(tmp_path: Path) -> None:
    expected = Net()
    Trainer(
        **QUIET,
        max_epochs=2,
        precision="fp8",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=tmp_path,
    ).fit(expected, BATCHES)
    found = []
    for resumes in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", gradient_accumulation_steps=2)
        net = Net()
        names = list(net.state_dict())
        model, optimizer = accelerator.prepare(net, net.configure_optimizers())
        loader = accelerator.prepare_data_loader(BATCHES)
        if resumes:
            accelerator.load_state(tmp_path / "state")
        else:
            train_epoch(accelerator, model, optimizer, loader)
            accelerator.save_state(tmp_path / "state")
        train_epoch(accelerator, model, optimizer, loader)
        unwrapped = accelerator.unwrap_model(model)
        assert accelerator.mixed_precision == "fp8" and list(unwrapped.state_dict()) == names
        found.append(unwrapped)
    for net in found:
        for (name, ours), theirs in zip(net.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name


def precision_of(*handlers: Any, mixed_precision: Any = "fp8") -> Any:
    return Accelerator(cpu=True, mixed_precision=mixed_precision, kwargs_handlers=list(handlers)).precision


def test_recipe_kwargs_configure_the_precision() -> None:
    from torchao.float8 import Float8LinearConfig

    made = precision_of(AORecipeKwargs(pad_inner_dim=False, enable_fsdp_float8_all_gather=True))
    assert isinstance(made, Float8Precision) and (made.pad_inner_dim, made.gathers) == (False, True)
    config = Float8LinearConfig(round_scales_to_power_of_2=True)
    filtered = precision_of(AORecipeKwargs(config=config, module_filter_func=lambda module, name: name == "2"))
    net = filtered.convert_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)))
    assert [hasattr(part, "linear_mm_config") for part in net] == [False, False, True]
    assert net[2].config.round_scales_to_power_of_2
    assert precision_of(FP8RecipeKwargs(backend="AO", use_autocast_during_eval=False)).in_evaluation is False
    assert isinstance(precision_of(FP8RecipeKwargs()), Float8Precision)


def test_invalid_recipes_raise_with_the_fix() -> None:
    with pytest.raises(ConfigurationError, match="MSAMPRecipeKwargs: MS-AMP.*AO"):
        MSAMPRecipeKwargs(opt_level="O2")
    with pytest.raises(ConfigurationError, match="fp8_backend: MSAMP: MS-AMP"):
        precision_of(FP8RecipeKwargs(backend="MSAMP"))
    with pytest.raises(ConfigurationError, match="AORecipeKwargs needs mixed_precision='fp8', but it is 'bf16'"):
        precision_of(AORecipeKwargs(), mixed_precision="bf16")
    with pytest.raises(ConfigurationError, match="AORecipeKwargs and FP8RecipeKwargs. Pass one fp8 recipe"):
        precision_of(FP8RecipeKwargs(), AORecipeKwargs())
    with pytest.raises(ConfigurationError, match=r"AORecipeKwargs\(config=…\) already contains pad_inner_dim"):
        precision_of(AORecipeKwargs(config=object(), pad_inner_dim=True))
    for handler in (TERecipeKwargs(), FP8RecipeKwargs(margin=0)):
        with pytest.raises(MissingExtraError, match=r"pip install transformer-engine\[pytorch\]"):
            precision_of(handler)


def test_fp8_settings_of_the_launch_apply_unless_the_script_sets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"fp8_backend": "AO", "fp8_pad_inner_dim": False}
    for name, value in LaunchSettings("fp8.yaml", accelerator="cpu", precision="fp8", fp8=keys).variables().items():
        monkeypatch.setenv(name, value)
    assert json.loads(dict(LaunchSettings("a", fp8=keys).variables())["LEYDEN_FP8"]) == keys
    for made in (
        Trainer(**QUIET).strategy.precision,
        # A script that only sets fp8 takes the recipe of the launch.
        Trainer(**QUIET, precision="fp8").strategy.precision,
        Accelerator().precision,
        Accelerator(mixed_precision="fp8").precision,
    ):
        assert isinstance(made, Float8Precision) and not made.pad_inner_dim
    assert "precision='fp8'" in capsys.readouterr().out
    # A script's own precision or recipe overrides the launch.
    assert Trainer(**QUIET, precision="bf16").precision == "bf16-mixed"
    own: Any = Trainer(**QUIET, precision=Float8Precision("rowwise")).strategy.precision
    assert own.recipe == "rowwise" and own.pad_inner_dim
    handled: Any = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(pad_inner_dim=True)]).precision
    assert handled.pad_inner_dim
