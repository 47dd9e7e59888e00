"""Modules with Accelerate's names: each import a script makes works, or its error suggests the replacement."""

from __future__ import annotations

import importlib
import importlib.util
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import leyden
from leyden import (
    Accelerator,
    AutocastKwargs,
    ConfigurationError,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
)
from leyden.data_loader import SeedableRandomSampler
from leyden.state import AcceleratorState, GradientState, PartialState
from leyden.tracking import TensorBoardTracker
from leyden.utils import (
    DDPCommunicationHookType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    broadcast,
    broadcast_object_list,
    extract_model_from_parallel,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    synchronize_rng_states,
    tqdm,
)


@pytest.mark.parametrize("name", leyden._MODULES)
def test_every_exported_name_exists(name: str) -> None:
    module = importlib.import_module(f"leyden.{name}")
    assert all(getattr(module, entry) is not None for entry in getattr(module, "__all__", ()))
    assert operator.attrgetter(name)(leyden) is module


def test_modules_have_the_names_of_accelerates_modules() -> None:
    pytest.importorskip("accelerate")
    assert all(importlib.util.find_spec(f"accelerate.{name}") is not None for name in leyden._MODULES)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from leyden import init_empty_weights", "torch.device"),
        ("from leyden.big_modeling import dispatch_model", "from_pretrained"),
        ("from leyden.utils.modeling import infer_auto_device_map", "from_pretrained"),
        ("from leyden.inference import prepare_pippy", r"MeshStrategy\(pp="),
        ("from leyden.tracking import register_tracker_class", "log_with"),
        ("from leyden.test_utils.testing import torch_device", "default_device"),
        ("from leyden.utils import synchronize_rng_state", "leyden import synchronize_rng_states`.*from-accelerate.md"),
        ("from leyden.hooks import add_hook_to_module", "leyden.hooks has no add_hook_to_module.*from-accelerate.md"),
        ("from leyden import EarlyStopping", "from leyden.callbacks import EarlyStopping"),
        ("from leyden import send_to_device", "from leyden.utils import send_to_device"),
    ],
)
def test_importing_an_absent_name_suggests_another(line: str, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        exec(line)


@pytest.mark.parametrize("module", ["leyden", "leyden.hooks", "leyden.utils"])
def test_modules_can_be_probed_for_absent_names(module: str) -> None:
    assert not hasattr(importlib.import_module(module), "init_empty_weights")
    with pytest.raises(AttributeError, match="torch.device"):
        operator.attrgetter("init_empty_weights")(importlib.import_module(module))


def test_submodules_are_imported_from_packages() -> None:
    exec(
        "from leyden import checkpoint, compat; from leyden.utils import modeling; from leyden.accelerator import loop"
    )


def test_is_available_functions_report_libraries_and_devices() -> None:
    from leyden.utils import is_tensorboard_available, is_xpu_available  # type: ignore[attr-defined]

    assert is_tensorboard_available() is True
    assert is_xpu_available() is torch.xpu.is_available()


def test_collectives_on_one_process_return_their_input() -> None:
    tensor = torch.arange(2.0)
    assert gather(tensor) is tensor and gather_object([1, "a"]) == [1, "a"]
    assert broadcast({"x": tensor})["x"] is tensor and broadcast_object_list([1, 2]) == [1, 2]
    assert torch.equal(reduce(tensor, scale=2.0), tensor * 2) and torch.equal(pad_across_processes(tensor), tensor)
    assert send_to_device({"x": tensor, "y": tensor}, "meta", skip_keys="y")["y"] is tensor
    assert send_to_device([tensor], "meta")[0].is_meta
    synchronize_rng_states(["torch", "generator"], torch.Generator())
    assert list(tqdm(range(2), disable=True)) == [0, 1]
    assert extract_model_from_parallel(nn.DataParallel(nn.Identity())).__class__ is nn.Identity


def test_state_classes_work_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (AcceleratorState().num_processes, AcceleratorState().mixed_precision) == (1, "no")
    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert AcceleratorState().mixed_precision == "fp16"
    assert PartialState().is_main_process


def test_modules_share_their_names_as_accelerates_do() -> None:
    """Accelerate's modules import from each other, so scripts find a name in several of them."""
    for line in (
        "from leyden.accelerator import AcceleratedOptimizer, AcceleratorState, LoggerType, get_logger",
        "from leyden.data_loader import GradientState, PartialState, send_to_device",
        "from leyden.utils.operations import PartialState, gather",
    ):
        exec(line, {})
    with pytest.raises(ImportError, match="nonsense"):
        exec("from leyden.accelerator import nonsense", {})
    with pytest.raises(ImportError):
        exec("from leyden import send_to_device", {})


def test_distributed_types_are_accelerates() -> None:
    theirs = pytest.importorskip("accelerate").DistributedType
    assert set(theirs.__members__) <= set(leyden.DistributedType.__members__)
    assert leyden.DistributedType.MULTI_XPU == "MULTI_XPU"


def test_states_have_the_members_that_scripts_read() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    state = accelerator.state
    assert (state.backend, state.debug, state.initialized, state.fork_launched) == (None, False, True, False)
    assert state.default_device.type == torch.empty(0, device=state.default_device).device.type
    assert (state.is_fsdp2, state.deepspeed_plugins, state.device_mesh, state.parallelism_config) == (
        *(False, None, None, None),
    )
    assert state.dynamo_plugin.backend is DynamoBackend.EAGER
    assert accelerator.gradient_state.dataloader_references == [None]
    # Scripts and tests reset Accelerate's states between two runs.
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    assert accelerator.is_main_process


def test_accelerates_variables_choose_the_device_and_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert Accelerator().device.type == PartialState().device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:99")
    with pytest.raises(ConfigurationError, match="cuda"):
        Accelerator()
    assert Accelerator(cpu=True).device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "True")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.options.backend, accelerator.options.compile_options) == ("eager", {"fullgraph": True})
    assert type(accelerator.prepare(nn.Linear(1, 1))).__name__ == "OptimizedModule"
    assert Accelerator(cpu=True, dynamo_backend="no").options.backend is None
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    with pytest.raises(ConfigurationError, match="block by block"):
        Accelerator(cpu=True)


def test_enum_members_are_accepted_as_strings(tmp_path: Path) -> None:
    assert str(PrecisionType.BF16) == "bf16"
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=PrecisionType.BF16,
        dynamo_backend=DynamoBackend.EAGER,
        log_with=LoggerType.TENSORBOARD,
        project_dir=tmp_path,
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)],
    )
    assert (accelerator.mixed_precision, accelerator.options.backend) == ("bf16", "eager")
    assert AutocastKwargs(cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    assert DistributedDataParallelKwargs().to_kwargs() == {}


def test_a_dynamo_plugin_passes_its_arguments_to_torch_compile() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True))
    assert (accelerator.options.backend, accelerator.options.compile_options) == ("eager", {"fullgraph": True})
    assert type(accelerator.prepare(nn.Linear(1, 1))).__name__ == "OptimizedModule"
    with pytest.raises(ConfigurationError, match="Pass one of them"):
        Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"), dynamo_backend="eager")
    with pytest.raises(ConfigurationError, match="FSDPStrategy"):
        TorchDynamoPlugin(use_regional_compilation=True)


def test_a_parallelism_config_builds_ddp_fsdp_hsdp_or_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    built: Any = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2).build(
        FullyShardedDataParallelPlugin(min_num_params=3)
    )
    assert (built.name, built.settings["device_mesh"], built.settings["auto_wrap_policy"]) == ("hsdp", (2, 2), 3)
    assert ParallelismConfig(dp_shard_size=2).build().name == "fsdp"  # type: ignore[union-attr]
    assert (ParallelismConfig(dp_replicate_size=2).build(), ParallelismConfig().build()) == ("ddp", "auto")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    assert ParallelismConfig().total_size == 4
    staged = ParallelismConfig(dp_replicate_size=1, dp_shard_size=1, tp_size=1, pp_size=4)
    assert (staged.total_size, staged.non_data_parallel_size, staged.non_dp_dim_names) == (4, 4, ["pp"])
    assert staged.build().layout.pp == 4  # type: ignore[union-attr]
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="but there are 1"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    with pytest.raises(ConfigurationError, match="Pass a ParallelismConfig"):
        Accelerator(cpu=True, parallelism_config={"dp_shard_size": 2})


def test_a_seedable_samplers_order_depends_only_on_seed_and_epoch() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=3)
    first = [batch.tolist() for batch in DataLoader(torch.arange(20), 4, sampler=sampler)]
    assert sampler.epoch == 1
    torch.manual_seed(7)
    sampler.set_epoch(0)
    assert [batch.tolist() for batch in DataLoader(torch.arange(20), 4, sampler=sampler)] == first
    assert [batch.tolist() for batch in DataLoader(torch.arange(20), 4, sampler=sampler)] != first


def test_tensorboard_writes_to_the_project_folder_without_versions(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    accelerator = Accelerator(cpu=True, log_with=TensorBoardTracker("alone", tmp_path))
    accelerator.init_trackers("ignored")
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    for name in ("digits", "alone"):
        assert list((tmp_path / name).glob("events.out.tfevents.*"))
        assert not list((tmp_path / name).glob("version_*"))
