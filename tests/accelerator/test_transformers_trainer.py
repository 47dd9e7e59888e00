"""transformers' Trainer with Leyden's Accelerator instead of Accelerate's: the same losses and weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leyden import Accelerator, FullyShardedDataParallelPlugin

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import json, os, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from leyden import Accelerator

shape = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
shape |= {"bos_token_id": 0, "eos_token_id": 0}
plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
rows = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]

class Theirs(Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)

class Ours(Theirs):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(cpu=True, mixed_precision=self.args.mixed_precision)
        self.is_fsdp_enabled = self.accelerator.state.fsdp_plugin is not None
        self.gather_function = self.accelerator.gather_for_metrics

def run(kind, folder, **arguments):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape, **plain))
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(folder, max_steps=4, per_device_train_batch_size=2, **{**quiet, **arguments})
    trainer = kind(model, args, train_dataset=data, eval_dataset=data[:7])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in trainer.model.parameters()]
    loss = trainer.evaluate()["eval_loss"]
    return losses, weights, loss, trainer.predict(data[:5]).predictions.shape, trainer.accelerator

for arguments in json.loads(sys.argv[1]):
    theirs, ours = run(Theirs, "theirs", **arguments), run(Ours, "ours", **arguments)
    # FSDP sums gradients in another order.
    exact = ours[4].state.fsdp_plugin is None
    print("kind", ours[4].distributed_type.value)
    close = torch.equal if exact else lambda a, b: torch.allclose(a, b, atol=1e-6)
    assert len(ours[0]) == 4 and (theirs[0] == ours[0] or not exact)
    assert all(close(a, b) for a, b in zip(theirs[1], ours[1], strict=True))
    assert abs(theirs[2] - ours[2]) < 1e-5 and theirs[3] == ours[3] == (5, 8, 64)
"""


def test_the_accelerator_has_the_attributes_that_transformers_trainer_reads() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.state.fsdp_plugin is None
    assert accelerator.state.deepspeed_plugin is None
    assert (accelerator.parallelism_config, accelerator.torch_device_mesh) == (None, None)
    assert accelerator._models == accelerator._optimizers == accelerator._schedulers == accelerator._dataloaders == []
    with accelerator.maybe_context_parallel(buffers=[], buffer_seq_dims=[]):
        pass
    sharded = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=True))
    found = sharded.state.fsdp_plugin
    # FSDP 2, and full state dicts unless shards are requested.
    assert (found.fsdp_version, found.state_dict_type, found.activation_checkpointing) == (2, "FULL_STATE_DICT", True)


def run(folder: Path, arguments: list[dict[str, object]], *flags: str) -> str:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers", minversion="5")
    (folder / "train.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LEYDEN_", "PYTEST_"))}
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, *(["-m", "leyden", "launch", "-q", *flags] if flags else []), "train.py"]
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        cwd=folder,
        env={**clean, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_saving_and_evaluation_on_one_process_match_accelerate(tmp_path: Path) -> None:
    saves = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    run(tmp_path, [{}, {"bf16": True}, {**saves, "eval_steps": 2}])
    assert (tmp_path / "ours" / "checkpoint-4" / "model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.parametrize(("flag", "kind"), [("", "MULTI_CPU"), ("--use_fsdp", "FSDP")])
def test_training_on_two_ranks_matches_accelerate(flag: str, kind: str, tmp_path: Path) -> None:
    flags = ["--cpu", "--num_processes", "2", *([flag] if flag else [])]
    assert f"kind {kind}" in run(tmp_path, [{}, {"gradient_accumulation_steps": 2}], *flags)
