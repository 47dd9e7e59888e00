"""How `devices=` and `accelerator=` choose devices on CPUs, GPUs and Macs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leyden import ConfigurationError, Trainer
from leyden.core.devices import find_devices
from leyden.strategies import SingleDeviceStrategy, find_strategy
from leyden.strategies.ddp import DDPStrategy
from leyden.strategies.precision import MixedPrecision
from leyden.strategies.precision.true import DoublePrecision
from leyden.strategies.process_group import _arrived, travelling
from leyden.trainer.datamodule import DataModule

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reports four GPUs: enough for planning, which starts nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", fail_to_start_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def fail_to_start_cuda() -> bool:
    """Replaces torch's is_available(), after which a forked process cannot use a GPU (seen with torch 2.9 for CUDA)."""
    raise AssertionError("is_available() initializes CUDA in the process that forks ranks")


@pytest.mark.parametrize(
    ("devices", "count"),
    [("auto", 1), (-1, 1), ("-1", 1), (1, 1), (3, 3), ("2", 2), ([0, 1], 2), ("0,1", 2), ("1,", 1)],
)
def test_devices_sets_the_number_of_processes_on_the_cpu(devices: Any, count: int) -> None:
    assert find_devices("cpu", devices) == [CPU] * count


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        *(("auto", [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), (2, [0, 1]), ("2", [0, 1])),
        *(([1, 3], [1, 3]), ("1,3", [1, 3]), ("3,", [3])),
    ],
)
def test_devices_chooses_gpus_by_count_or_index(devices: Any, indices: list[int]) -> None:
    assert [device.index for device in find_devices("auto", devices)] == indices


@pytest.mark.usefixtures("gpus")
def test_the_index_of_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"devices=\[0, 7\]: there is no cuda:7, this machine has 4 GPUs"):
        find_devices("gpu", [0, 7])


@pytest.mark.usefixtures("gpus")
def test_several_gpus_default_to_ddp() -> None:
    trainer = Trainer(logger=False)
    assert (trainer.strategy.name, trainer.world_size, trainer.num_devices, trainer.device_ids) == (
        "ddp",
        4,
        4,
        [0, 1, 2, 3],
    )
    assert trainer.is_global_zero and trainer.strategy.ranks.are_planned
    assert Trainer(logger=False, devices=1).strategy.name == "single_device"
    assert Trainer(logger=False, devices=[2]).strategy.root_device == torch.device("cuda", 2)
    assert Trainer(logger=False, devices=2, num_nodes=3).world_size == 6


def test_several_cpu_processes_default_to_ddp() -> None:
    assert Trainer(accelerator="cpu", devices=2, logger=False).strategy.name == "ddp"
    assert Trainer(accelerator="cpu", logger=False).strategy.name == "single_device"


@pytest.mark.usefixtures("gpus")
def test_interactive_sessions_default_to_one_device_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    assert find_strategy("auto", "auto").name == "single_device"
    assert "runs on one device by default. Pass devices=" in capsys.readouterr().out
    named = find_strategy("ddp_notebook", "auto")
    assert (named.name, named.world_size, named.ranks.are_planned) == ("ddp", 1, False)
    assert "runs on one device" in capsys.readouterr().out
    asked = find_strategy("auto", "auto", 2)
    assert (asked.name, asked.ranks.start_method, asked.world_size) == ("ddp", "notebook", 2)


@pytest.mark.usefixtures("gpus")
def test_planning_a_run_does_not_initialize_cuda() -> None:
    """The fixture's is_available() raises."""
    strategy = find_strategy("ddp_fork", "gpu", precision=MixedPrecision("16"))
    assert strategy.ranks.are_planned and strategy.root_device == torch.device("cuda", 0)
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    assert DataModule.from_datasets(data, batch_size=2).train_dataloader().pin_memory


@pytest.mark.parametrize(
    ("count", "visible", "ranks", "devices", "indices"),
    [
        # torchrun on all GPUs of a machine, and on some of them.
        (8, None, 8, "auto", list(range(8))),
        (8, None, 2, "auto", [0, 1]),
        (8, None, 2, [2, 3], [2, 3]),
        (8, "4,5", 2, 2, [0, 1]),
        # SLURM's --gpus-per-task=1: each rank sees only its GPU, as number 0.
        (1, "3", 4, "auto", [0, 0, 0, 0]),
        (1, "3", 4, 4, [0, 0, 0, 0]),
        (1, None, 1, 1, [0]),
    ],
)
def test_each_rank_gets_its_gpu(
    count: int,
    visible: str | None,
    ranks: int,
    devices: Any,
    indices: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count if visible is None else min(count, len(visible)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    variables = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible  # type: ignore[assignment]
    for rank in range(ranks):
        for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        strategy = DDPStrategy()
        strategy.place_on("auto", devices, 1)
        assert strategy.root_device == torch.device("cuda", indices[rank])


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="started 4 ranks on a machine with 2 GPUs. Start one rank per GPU"):
        DDPStrategy().place_on("auto", "auto", 1)
    # devices=4 matches the 4 ranks, but the machine has 2 GPUs.
    with pytest.raises(ConfigurationError, match="there is no cuda:2"):
        DDPStrategy().place_on("auto", 4, 1)


def test_a_device_without_an_index_gets_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device rejects a device without an index, and no tensor's device equals one."""
    assert SingleDeviceStrategy("cuda").root_device == torch.device("cuda", 0)
    assert SingleDeviceStrategy("mps").root_device == torch.device("mps", 0)
    assert SingleDeviceStrategy("cpu").root_device == CPU
    assert DDPStrategy(devices=[torch.device("cuda")]).root_device == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert SingleDeviceStrategy("cuda").root_device == torch.device("cuda", 2)


def test_the_device_is_set_before_bf16_support_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """is_bf16_supported() queries the current device and allocates memory on it."""
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: order.append("bf16") or True)
    SingleDeviceStrategy("cuda:1", MixedPrecision("bf16")).setup_environment()
    assert order == [torch.device("cuda", 1), "bf16"]


def test_a_rank_forked_after_cuda_initialization_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ConfigurationError, match="GPU is already initialized.*is_available.*ddp_spawn"):
        DDPStrategy(devices=[torch.device("cuda", 0)]).setup_environment()


def test_a_mac_has_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for accelerator in ("auto", "gpu", "mps"):
        assert find_devices(accelerator, "auto") == [torch.device("mps", 0)]
        with pytest.raises(ConfigurationError, match="devices=2: MPS has one device. Use accelerator='cpu'"):
            find_devices(accelerator, 2)
    with pytest.raises(ConfigurationError, match="Several ranks need accelerator='cpu'"):
        DDPStrategy().place_on("auto", 1, 1)
    assert find_devices("cpu", 2) == [CPU, CPU]
    with pytest.raises(ConfigurationError, match="mps does not support float64"):
        DoublePrecision().check(torch.device("mps", 0))


def test_gpu_tensors_in_objects_arrive_on_the_receivers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Any] = []

    class RecordMoves(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is Tensor.to:
                places.append(args[1])
                return args[0]
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with RecordMoves():
        found = _arrived(torch.arange(2.0), "cuda")
    assert places == [torch.device("cuda", 3)]
    assert found.tolist() == [0.0, 1.0]
    host = torch.ones(1)
    assert travelling(host) is host
