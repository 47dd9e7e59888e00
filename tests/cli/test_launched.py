"""A Trainer under `leyden launch` takes its settings for arguments left at their defaults, and prints them."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from models import QUIET, Line
from torch import nn

from leyden import Accelerator, ConfigurationError, Trainer
from leyden.callbacks import GradientAccumulation
from leyden.strategies import SingleDeviceStrategy
from leyden.trainer.launched import DEBUG, SOURCE, TEXTS, VALUES, LaunchSettings, filled_by_launch, read_launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LaunchSettings(
        "config.yaml", accelerator="cpu", precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=0.5
    )
    for name, value in settings.variables().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("launched")
def test_launch_settings_fill_arguments_left_at_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(logger=False)
    assert trainer.precision == "bf16-mixed"
    assert trainer.accumulate_grad_batches == 4
    assert trainer.arguments.gradient_clip_val == 0.5
    assert trainer.given == {"logger"}
    assert capsys.readouterr().out.splitlines() == [
        "leyden launch sets accelerator='cpu', precision='bf16-mixed', accumulate_grad_batches=4, "
        "gradient_clip_val=0.5 (from config.yaml)"
    ]


@pytest.mark.usefixtures("launched")
def test_the_scripts_arguments_override_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(precision="32-true", callbacks=GradientAccumulation(2), gradient_clip_val=None)
    assert trainer.precision == "32-true"
    assert trainer.accumulate_grad_batches == 2
    assert trainer.arguments.gradient_clip_val is None
    assert "the script sets precision, accumulate_grad_batches, gradient_clip_val itself" in capsys.readouterr().out
    # A strategy object has its own precision.
    assert Trainer(strategy=SingleDeviceStrategy()).precision == "32-true"


def test_launch_settings_compile_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphs() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        Trainer(max_steps=2, **QUIET).fit(Line(), [torch.ones(2, 2)] * 2)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert graphs() == 0
    for name, value in LaunchSettings("flags", compile={"backend": "eager"}).variables().items():
        monkeypatch.setenv(name, value)
    assert graphs() > 0


class GraphBreak(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


def test_an_accelerator_compiles_with_the_options_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch sets mode, dynamic and fullgraph as well as the backend."""
    for name, value in LaunchSettings("file", compile={"backend": "eager", "fullgraph": True}).variables().items():
        monkeypatch.setenv(name, value)
    model = Accelerator(cpu=True).prepare(GraphBreak())
    with pytest.raises(Exception, match="graph_break"):
        model(torch.ones(1))


@pytest.mark.usefixtures("launched")
def test_only_rank_0_prints_the_launch_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert filled_by_launch({})["precision"] == "bf16-mixed"
    assert capsys.readouterr().out == ""


def test_a_section_of_the_file_configures_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block,Head"}
    options |= {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}
    made = filled_by_launch({}, LaunchSettings("file", strategy="fsdp", options=options).variables())["strategy"]
    assert made.name == "fsdp"
    settings = {name: made.settings[name] for name in ("auto_wrap_policy", "reshard_after_forward", "cpu_offload")}
    assert settings == {"auto_wrap_policy": {"Block", "Head"}, "reshard_after_forward": False, "cpu_offload": True}
    # A strategy that this version lacks raises.
    for name, value in LaunchSettings("file", strategy="horovod", options={"tree": 2}).variables().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="'horovod' is not known in this version"):
        Trainer(logger=False)


def test_without_a_launch_its_variables_have_no_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEYDEN_PRECISION", "bf16-mixed")
    assert Trainer(logger=False).precision == "32-true"
    assert capsys.readouterr().out == ""


def test_every_launch_setting_survives_a_round_trip_through_variables() -> None:
    full = LaunchSettings(*("x",) * 3, {"a": 1}, "x", 1, 1.0, {"a": 1}, {"a": 1}, True, "auto", 90.0, ["x"])
    assert set(full.variables()) == {SOURCE, DEBUG, *TEXTS.values(), *VALUES.values()}
    assert read_launched(full.variables()) == full
