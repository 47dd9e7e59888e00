"""`devices=` and `accelerator=`: what they mean on machines of several kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leyden import ConfigurationError, Trainer
from leyden.strategies import find_strategy
from leyden.strategies.devices import find_devices

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has four GPUs: enough for a plan, which starts nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("devices", "count"),
    [("auto", 1), (-1, 1), ("-1", 1), (1, 1), (3, 3), ("2", 2), ([0, 1], 2), ("0,1", 2), ("1,", 1)],
)
def test_cpu(devices: Any, count: int) -> None:
    assert find_devices("cpu", devices) == [CPU] * count


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        *(("auto", [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), (2, [0, 1]), ("2", [0, 1])),
        *(([1, 3], [1, 3]), ("1,3", [1, 3]), ("3,", [3])),
    ],
)
def test_gpus(devices: Any, indices: list[int]) -> None:
    assert [device.index for device in find_devices("auto", devices)] == indices


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"devices=\[0, 7\]: there is no cuda:7, this machine has 4 GPUs"):
        find_devices("gpu", [0, 7])


@pytest.mark.usefixtures("gpus")
def test_several_gpus_without_a_named_strategy_are_ddp() -> None:
    trainer = Trainer(logger=False)
    assert (trainer.strategy.name, trainer.world_size, trainer.num_devices, trainer.device_ids) == (
        "ddp",
        4,
        4,
        [0, 1, 2, 3],
    )
    assert trainer.is_global_zero and trainer.strategy.awaits_ranks
    assert Trainer(logger=False, devices=1).strategy.name == "single_device"
    assert Trainer(logger=False, devices=[2]).strategy.root_device == torch.device("cuda", 2)
    assert Trainer(logger=False, devices=2, num_nodes=3).world_size == 6


def test_several_ranks_on_the_cpu_are_ddp_too() -> None:
    assert Trainer(accelerator="cpu", devices=2, logger=False).strategy.name == "ddp"
    assert Trainer(accelerator="cpu", logger=False).strategy.name == "single_device"


@pytest.mark.usefixtures("gpus")
def test_auto_means_one_device_in_an_interactive_session_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    assert find_strategy("auto", "auto").name == "single_device"
    assert "runs on one device; give devices=" in capsys.readouterr().out
    named = find_strategy("ddp_notebook", "auto")
    assert (named.name, named.world_size, named.awaits_ranks) == ("ddp", 1, False)
    assert "runs on one device" in capsys.readouterr().out
    asked = find_strategy("auto", "auto", 2)
    assert (asked.name, asked.start_method, asked.world_size) == ("ddp", "notebook", 2)
