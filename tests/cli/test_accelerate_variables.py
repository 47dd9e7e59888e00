"""`leyden launch` also configures code that runs on Accelerate, such as transformers' Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from leyden.cli.launch.launch import ElasticOptions
from leyden.cli.launch.plan import resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import read_file

GPUS = Machine(cpus=8, gpus=2, bf16=True, fp8=True, numa_nodes=1, slurm=False)
COMMON = "compute_environment: LOCAL_MACHINE\nnum_processes: 2\nnum_machines: 1\nmachine_rank: 0\nuse_cpu: false\n"
FILES = {
    "ddp": "distributed_type: MULTI_GPU\nmixed_precision: bf16\ndebug: true",
    "fp16": "distributed_type: MULTI_GPU\nmixed_precision: fp16\n"
    "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune, "
    "dynamo_use_dynamic: true, dynamo_use_fullgraph: false, dynamo_use_regional_compilation: true}",
    "fp8": "distributed_type: MULTI_GPU\nmixed_precision: fp8\n"
    "fp8_config: {backend: AO, pad_inner_dim: true, override_linear_precision: [true, false, false]}",
    "fsdp": "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {}",
    "fsdp1": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_sharding_strategy: SHARD_GRAD_OP, "
    "fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 2000, fsdp_backward_prefetch: BACKWARD_PRE, "
    "fsdp_state_dict_type: FULL_STATE_DICT, fsdp_offload_params: true, fsdp_use_orig_params: false, "
    "fsdp_cpu_ram_efficient_loading: true, fsdp_sync_module_states: true}",
    "fsdp2": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, "
    "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: 'GPT2Block,Other', "
    "fsdp_state_dict_type: SHARDED_STATE_DICT, fsdp_activation_checkpointing: true, fsdp_ignored_modules: null}",
    "deepspeed": "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3, "
    "gradient_accumulation_steps: 4, gradient_clipping: 1.0, offload_optimizer_device: cpu, "
    "offload_param_device: none, zero3_init_flag: true, zero3_save_16bit_model: true, "
    "deepspeed_moe_layer_cls_names: Block}",
    "megatron": "distributed_type: MEGATRON_LM\n"
    "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 1, "
    "megatron_lm_sequence_parallelism: true, megatron_lm_recompute_activations: false}",
}
# Accelerate sets these from its defaults even when the file does not have them.
DEFAULTED = (
    "ACCELERATE_DYNAMO_",
    "ACCELERATE_MIXED_PRECISION",
    "MEGATRON_LM_",
    "ACCELERATE_FP8_",
    "ACCELERATE_CONFIG_DS_",
)


def accelerate_variables(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns the variables that Accelerate's launcher sets for a file."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils import launch as environments

    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
            patch.delenv(name)
        args = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
        args = launch._validate_launch_command(args)[0]
        args.main_process_port = 0
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ""
            found = environments.prepare_deepspeed_cmd_env(args)[1]
        else:
            found = environments.prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_"))}


@pytest.mark.parametrize("name", FILES)
def test_variables_equal_those_of_accelerates_launcher(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(COMMON + FILES[name])
    ours = resolve(read_file(file), ElasticOptions(), GPUS, {}).variables()
    expected = {key: value.lower() for key, value in accelerate_variables(file, monkeypatch).items()}
    found = {key: value.lower() for key, value in ours.items() if key.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_"))}
    if name.startswith("fsdp"):
        assert (found.pop("FSDP_CPU_RAM_EFFICIENT_LOADING"), expected.pop("FSDP_CPU_RAM_EFFICIENT_LOADING")) == (
            "false",
            "true",
        )
    assert {key: expected.get(key) for key in found} == found
    assert [key for key in expected if key not in found and not key.startswith(DEFAULTED)] == []


def test_mesh_axes_are_set_as_accelerates_variables(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true\nparallelism_config: {parallelism_config_tp_size: 2}\n")
    found = resolve(read_file(file), ElasticOptions(), GPUS, {}).variables()
    assert found["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert found["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert found["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "1"


FSDP_FILE = """\
distributed_type: FSDP
mixed_precision: bf16
use_cpu: true
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
"""
SCRIPT = """\
import json, os
import leyden, torch
from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

class Module(leyden.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = GPT2LMHeadModel.from_pretrained("saved")
    def training_step(self, batch, batch_idx):
        return self.net(input_ids=batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)
    def on_train_start(self):
        self.size = float(sum(p.full_tensor().abs().sum() for p in self.net.parameters()))

module = Module()
ours = leyden.Trainer(max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
ours.fit(module, torch.utils.data.DataLoader(torch.arange(32).reshape(4, 8)))
leydens = {"size": module.size, "strategy": ours.strategy.name}

# Both ranks load the weights of the file.
model = GPT2LMHeadModel.from_pretrained("saved")
size = float(sum(p.detach().abs().sum() for p in model.parameters()))
data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).reshape(16, 4)]
dtypes = []
model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, args, output: dtypes.append(str(output.dtype)))
quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, **quiet)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
transformers = {
    "size": size, "dtype": dtypes[0], "wrapped": type(trainer.model_wrapped).__name__,
    "steps": trainer.state.global_step, "ranks": trainer.args.world_size,
    "weights": float(sum(p.detach().double().sum() for p in trainer.model.parameters())),
}
json.dump({"leyden": leydens, "transformers": transformers}, open(f"rank-{os.environ['RANK']}.json", "w"))
"""


@pytest.fixture(scope="module")
def launched(leyden_in: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, list[dict[str, Any]]]:
    """Returns the sum of a file's absolute weights, and the records of two launched ranks."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers", minversion="5")
    import torch

    folder = tmp_path_factory.mktemp("launched")
    torch.manual_seed(3)
    shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder / "saved")
    (folder / "fsdp.yaml").write_text(FSDP_FILE)
    (folder / "train.py").write_text(SCRIPT)
    done = leyden_in(folder, "launch", "--config_file", "fsdp.yaml", "train.py")
    assert done.returncode == 0, done.stderr
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return float(sum(p.detach().abs().sum() for p in model.parameters())), found


def test_transformers_trainer_uses_the_ranks_and_precision_of_the_launch(launched: Any) -> None:
    size, ranks = launched
    first, second = (found["transformers"] for found in ranks)
    assert first == second
    assert first["dtype"] == "torch.bfloat16"
    # Accelerate shards only on GPUs.
    assert (first["wrapped"], first["ranks"], first["steps"]) == ("DistributedDataParallel", 2, 2)
    assert first["size"] == pytest.approx(size, rel=1e-6)


def test_from_pretrained_under_fsdp_loads_the_weights_on_every_rank(launched: Any) -> None:
    size, ranks = launched
    for found in ranks:
        assert found["leyden"] == {"size": pytest.approx(size, rel=1e-6), "strategy": "fsdp"}
