"""`leyden launch` with Accelerate's fp8 files: torchao trains, Transformer Engine may be missing, MS-AMP is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FILE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
{section}fp8_config:
{fp8}machine_rank: 0
main_training_function: main
mixed_precision: fp8
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: true
"""
FSDP = """\
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
"""
SCRIPT = """\
import torch
from torch import nn
from leyden import Accelerator, Trainer, TrainModule

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 16))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def weight_types(module):
    return [type(part.up.weight._local_tensor).__name__ for part in module.net if isinstance(part, Block)]

data = [torch.ones(4, 16) for _ in range(2)]
trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
module = Net()
trainer.fit(module, data)
trainer.print("fit", weight_types(module))

accelerator = Accelerator()
net = Net()
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
loss = model(data[0]).float().pow(2).mean()
accelerator.backward(loss)
optimizer.step()
accelerator.print("custom loop", accelerator.mixed_precision, weight_types(model))
"""


def write_config(folder: Path, keys: dict[str, Any], kind: str = "FSDP") -> Path:
    path = folder / "fp8.yaml"
    lines = "".join(f"  {name}: {value}\n" for name, value in keys.items())
    path.write_text(FILE.format(kind=kind, section=FSDP if kind == "FSDP" else "", fp8=lines))
    return path


@pytest.mark.full
def test_torchao_trains_on_two_ranks_with_the_recipe_of_the_file(leyden: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    file = write_config(tmp_path, {"backend": "AO", "enable_fsdp_float8_all_gather": "true", "pad_inner_dim": "true"})
    done = leyden("launch", "--config_file", file, "train.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    cast = "['WeightWithDynamicFloat8CastTensor', 'WeightWithDynamicFloat8CastTensor']"
    assert f"fit {cast}" in lines and f"custom loop fp8 {cast}" in lines
    assert any(
        "precision fp8: 2 Block + root over 2 ranks" in line and "4 of 6 Linear layers" in line for line in lines
    )
    assert "also        fp8 (fp8_backend AO, fp8_enable_fsdp_float8_all_gather True, fp8_pad_inner_dim True)" in lines


def test_a_missing_transformer_engine_is_named(leyden: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    keys = {"backend": "TE", "fp8_format": "HYBRID", "amax_history_length": 16, "amax_compute_algo": "max", "margin": 0}
    file = write_config(tmp_path, {**keys, "interval": 1, "override_linear_precision": "false"}, "MULTI_CPU")
    done = leyden("launch", "--config_file", file, "--num_processes", 1, "train.py")
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "precision='transformer-engine' needs the package 'transformer-engine[pytorch]'" in output
    assert (
        "fp8 (fp8_backend TE, fp8_format HYBRID, fp8_amax_history_len 16, fp8_amax_compute_algo max, fp8_margin 0)"
        in output
    )


@pytest.mark.parametrize("keys", [{"backend": "MSAMP", "optimization_level": "O2"}, {"fp8_opt_level": "O1"}])
def test_ms_amp_is_refused_before_launching(invoke: Any, tmp_path: Path, keys: dict[str, Any]) -> None:
    done = invoke("launch", "--config_file", write_config(tmp_path, keys, "MULTI_CPU"), "--dry_run", "train.py")
    assert done.returncode != 0
    assert "fp8_backend: MSAMP: MS-AMP" in done.stderr


def test_fp8_keys_without_effect_are_listed(invoke: Any, tmp_path: Path) -> None:
    file = write_config(tmp_path, {"backend": "AO", "margin": 2, "enable_fsdp_float8_all_gather": "true"}, "MULTI_CPU")
    done = invoke("launch", "--config_file", file, "--dry_run", "train.py")
    assert "no effect   fp8_margin: it belongs to the backend TE, and this one is AO." in done.stdout
    assert "no effect   fp8_enable_fsdp_float8_all_gather: only FSDP gathers weights." in done.stdout
    assert 'LEYDEN_FP8={"fp8_backend": "AO"}' in done.stdout
    plain = invoke("launch", "--config_file", file, "--mixed_precision", "bf16", "--dry_run", "train.py")
    assert "no effect   fp8_margin: mixed_precision is not fp8." in plain.stdout and "LEYDEN_FP8" not in plain.stdout
