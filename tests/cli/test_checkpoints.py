"""`leyden checkpoint`, `leyden merge` and `leyden convert` on real checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import QUIET, Line, Squares
from safetensors.torch import load_file, save_file
from torch import nn

from leyden import Trainer
from leyden.checkpoint.reader import CheckpointReader


class Net(Line):
    """A module with hyperparameters."""

    def __init__(self, width: int = 4, name: str = "net") -> None:
        super().__init__(4, width)
        self.save_hyperparameters("width", "name")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with two checkpoints, the second of which holds only weights."""
    trainer = Trainer(**QUIET, max_steps=2)
    trainer.fit(Net(), [torch.ones(2, 4)] * 2)
    folder = tmp_path / "checkpoints"
    trainer.save_checkpoint(folder / "one")
    trainer.save_checkpoint(folder / "two", weights_only=True)
    return folder


def test_ls_marks_damaged_checkpoints(saved: Path, invoke: Any) -> None:
    done = invoke("checkpoint", "ls")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["name", "one", "two"]
    assert rows[1][2] == "2"
    assert [" ".join(row[-3:]) for row in rows[1:]] == ["× single_device whole", "whole, weights only"]
    assert done.returncode == 0
    (saved / "one" / "model.safetensors").unlink()
    done = invoke("checkpoint", "ls", saved)
    assert done.returncode == 1
    assert "damaged: " in done.stdout.splitlines()[-1] and "model.safetensors" in done.stdout.splitlines()[-1]
    assert "holds no checkpoints" in invoke("checkpoint", "ls", saved / "two").stdout
    assert invoke("checkpoint", "ls", "nowhere").returncode == 2


def test_verify_detects_a_flipped_bit(saved: Path, invoke: Any) -> None:
    assert invoke("checkpoint", "verify", saved).stdout.count("whole ") == 2
    weights = saved / "one" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    # ls compares only sizes, which have not changed.
    assert invoke("checkpoint", "ls", saved).returncode == 0
    done = invoke("checkpoint", "verify", saved)
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["damaged", "whole"]
    assert invoke("checkpoint", "verify", saved / "two").returncode == 0


def test_show_lists_counters_hyperparameters_and_tensors(saved: Path, invoke: Any) -> None:
    shown = invoke("checkpoint", "show", saved / "one", "--tensors").stdout
    assert "global_step" in shown and "hyperparameters of the module" in shown
    assert "weights: 2 tensors with 20 elements" in shown
    assert "layer.weight  float32 (4, 4)" in shown
    assert "layer.weight" not in invoke("checkpoint", "show", saved / "one").stdout


def test_merge_writes_one_file(saved: Path, invoke: Any, tmp_path: Path) -> None:
    done = invoke("merge", saved / "one", tmp_path / "whole.safetensors")
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "whole.safetensors")
    weights = CheckpointReader(saved / "one").model()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    assert invoke("merge-weights", saved / "one", tmp_path, "--module", "layer").returncode == 0
    # The folder is created.
    assert invoke("merge", saved / "one", f"{tmp_path}/new/folder/").returncode == 0
    assert load_file(tmp_path / "new" / "folder" / "model.safetensors").keys() == weights.keys()
    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


class CustomObject:
    """An object that torch.load refuses with weights_only=True."""


def save_lightning_checkpoint(path: Path, **hyper_parameters: Any) -> dict[str, Any]:
    weights = {"layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}
    loaded = {"epoch": 3, "global_step": 40, "pytorch-lightning_version": "2.5.0", "state_dict": weights}
    loaded |= {"optimizer_states": [{"state": {}}], "loops": {"fit_loop": {}}, "hyper_parameters": hyper_parameters}
    torch.save(loaded, path)
    return weights


def test_a_lightning_checkpoint_is_converted(invoke: Any, tmp_path: Path) -> None:
    weights = save_lightning_checkpoint(tmp_path / "model.ckpt", width=4, name="theirs")
    done = invoke("convert", "model.ckpt")
    assert done.returncode == 0, done.stderr
    assert "2 tensors, 2 hyperparameters, step 40" in done.stdout
    assert "not converted: optimizer 0, which is not the state of an optimizer" in done.stdout
    net = Net.load_from_checkpoint(tmp_path / "model-leyden")
    assert net.hparams == {"width": 4, "name": "theirs"}
    assert all(torch.equal(net.state_dict()[name], weights[name]) for name in weights)
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.ones(2, 4)], ckpt_path=tmp_path / "model-leyden", restore="weights")


def test_a_pickle_with_code_is_converted_only_with_trust(invoke: Any, tmp_path: Path) -> None:
    save_lightning_checkpoint(tmp_path / "model.ckpt", width=4, thing=CustomObject())
    done = invoke("convert", "model.ckpt")
    assert done.returncode == 2
    assert "--trust" in done.stderr
    assert not (tmp_path / "model-leyden").exists()
    with pytest.warns(UserWarning, match="unpickled in full"):
        done = invoke("convert", "model.ckpt", "out", "--trust", "--prefix", "net")
    assert done.returncode == 0, done.stderr
    assert "not converted: the hyperparameter thing" in done.stdout
    assert set(CheckpointReader(tmp_path / "out").model()) == {"net.layer.weight", "net.layer.bias"}


def test_an_accelerate_folder_is_converted(invoke: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    first, second = {"weight": torch.ones(2)}, {"weight": torch.zeros(3)}
    save_file(first, folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.bin")
    (folder / "random_states_0.pkl").write_bytes(b"never opened")
    done = invoke("convert", "state")
    assert "not converted: optimizer.bin (safetensors does not record the order of parameters" in done.stdout
    assert "not converted: random_states_0.pkl (random numbers; a pickle, see --trust)" in done.stdout
    assert torch.equal(CheckpointReader(tmp_path / "state-leyden").model()["weight"], first["weight"])
    torch.save(second, folder / "pytorch_model_1.bin")
    assert "holds 2 models: choose one with --model 0 to --model 1" in invoke("convert", "state").stderr
    assert invoke("convert", "state", "second", "--model", "1").returncode == 0
    assert torch.equal(CheckpointReader(tmp_path / "second").model()["weight"], second["weight"])
    assert "has no model 7" in invoke("convert", "state", "--model", "7").stderr


class BatchNormNet(Squares):
    """A module with buffers between its parameters, which records its losses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


BATCH_NORM_NET = """
from torch import nn

class BatchNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
"""


def plain_loop(steps: int) -> tuple[BatchNormNet, Any, Any, list[float]]:
    """Trains a plain torch loop in epochs of two batches; returns its objects and losses."""
    module = BatchNormNet()
    [optimizer], [scheduler] = module.configure_optimizers()
    for step in range(steps):
        module.training_step(step_data()[step % 2], 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            scheduler.step()
    return module, optimizer, scheduler, module.losses


def step_data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("after_fit", [False, True])
def test_a_converted_lightning_run_resumes(after_fit: bool, invoke: Any, tmp_path: Path) -> None:
    """Optimizer, scheduler and counters are converted too: the losses equal those of the uninterrupted run.

    Lightning counts the last epoch as completed after fit, but not yet in callbacks that save at the epoch's end.
    """
    expected = plain_loop(8)[3]
    module, optimizer, scheduler, _ = plain_loop(4)
    epochs = {"ready": 2, "started": 2, "processed": 2, "completed": 2 if after_fit else 1}
    loaded = {
        "epoch": 2 if after_fit else 1,
        "global_step": 4,
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "loops": {
            "fit_loop": {
                "epoch_loop.batch_progress": {"total": counter(4), "current": counter(2), "is_last_batch": True},
                "epoch_progress": {"current": epochs},
            }
        },
    }
    torch.save(loaded, tmp_path / "run.ckpt")
    done = invoke("convert", "run.ckpt")
    assert "step 4, 1 optimizer, 1 scheduler" in done.stdout and "not converted" not in done.stdout, done.stderr
    again = BatchNormNet()
    trainer = Trainer(**QUIET, max_epochs=4)
    parts = {"weights", "optimizers", "progress"}
    trainer.fit(again, step_data(), ckpt_path=tmp_path / "run-leyden", restore=parts)
    assert again.losses == expected[4:] and trainer.global_step == 8


def test_a_lightning_checkpoint_saved_at_a_batchs_end_counts_that_batch(invoke: Any, tmp_path: Path) -> None:
    """Lightning counts a batch as completed only after the callbacks that save at its end."""
    module, optimizer, _, _ = plain_loop(1)
    batches = {"total": {**counter(1), "completed": 0}, "current": {**counter(1), "completed": 0}}
    loops = {"epoch_loop.batch_progress": batches, "epoch_progress": {"current": {**counter(1), "processed": 0}}}
    loaded = {"epoch": 0, "global_step": 1, "state_dict": module.state_dict(), "loops": {"fit_loop": loops}}
    torch.save({**loaded, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "run.ckpt")
    done = invoke("convert", "run.ckpt")
    assert "the position in epoch 0 (batch 1): the epoch starts from the beginning" in done.stdout, done.stderr
    assert CheckpointReader(tmp_path / "run-leyden").progress()["batches"] == 1


def test_invalid_counters_are_not_converted(invoke: Any, tmp_path: Path) -> None:
    torch.save({"model": plain_loop(1)[0].state_dict(), "epoch": "best"}, tmp_path / "run.pt")
    done = invoke("convert", "run.pt")
    assert done.returncode == 0 and "not converted: the counters: epoch" in done.stdout, done.stderr


def counter(batches: int) -> dict[str, int]:
    """Returns one of Lightning's progress counters."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), batches)


def test_a_converted_accelerate_run_resumes(invoke: Any, tmp_path: Path) -> None:
    from leyden import Accelerator

    expected = plain_loop(8)[3]
    module, optimizer, scheduler, _ = plain_loop(4)
    folder = tmp_path / "state"
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.manual_seed(77)
    states = {"step": 4, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    torch.save({**states, "numpy_random_seed": np.random.get_state()}, folder / "random_states_0.pkl")
    (folder / "sampler.bin").write_bytes(b"never opened")
    done = invoke("convert", "state")
    assert (
        "not converted: optimizer.bin (safetensors does not record the order of parameters; give --like" in done.stdout
    ), done.stderr
    (tmp_path / "their_model.py").write_text(BATCH_NORM_NET)
    like = ("--like", "their_model:BatchNormNet")
    done = invoke("convert", "state", "safe", *like)
    assert "1 optimizer, 1 scheduler" in done.stdout and "not converted: sampler.bin" in done.stdout, done.stderr
    assert "not converted: random_states_0.pkl (random numbers; a pickle, see --trust)" in done.stdout
    with pytest.warns(UserWarning, match="unpickled in full"):
        done = invoke("convert", "state", "trusted", "--trust", *like)
    assert "step 4, 1 optimizer, 1 scheduler, random numbers" in done.stdout

    accelerator = Accelerator(cpu=True)
    again = BatchNormNet()
    [optimizer], [scheduler] = again.configure_optimizers()
    _, optimizer, loader, scheduler = accelerator.prepare(again, optimizer, step_data(), scheduler)
    accelerator.load_state(tmp_path / "trusted")
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(77)))
    for _ in range(2):
        for batch in loader:
            accelerator.backward(again.training_step(batch, 0))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    assert again.losses == expected[4:] and accelerator.steps == 8


def test_an_optimizer_that_does_not_match_the_weights_is_not_converted(invoke: Any, tmp_path: Path) -> None:
    module, optimizer, _, _ = plain_loop(2)
    layers = [{"params": module.net[2].parameters()}, {"params": module.net[0].parameters()}]
    for number, (state, words) in enumerate(
        (
            (torch.optim.AdamW(layers).state_dict(), "has 2 groups of parameters, and does not record their names"),
            (torch.optim.AdamW(module.net[0].parameters()).state_dict(), "has 2 parameters, and the weights 6"),
            (
                rotate_states(optimizer.state_dict()),
                "has exp_avg of shape (4,) where net.0.weight has (4, 4): its parameters",
            ),
        )
    ):
        loaded = {"epoch": 1, "global_step": 2, "state_dict": module.state_dict(), "optimizer_states": [state]}
        torch.save(loaded, tmp_path / f"run{number}.ckpt")
        done = invoke("convert", f"run{number}.ckpt")
        assert done.returncode == 0 and f"not converted: optimizer 0, which {words}" in done.stdout, done.stdout


def rotate_states(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {place: state["state"][(place + 1) % 6] for place in range(6)}}


def test_a_sharded_safetensors_folder_is_converted(invoke: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert "2 tensors" in invoke("convert", "state").stdout
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "leads out of its folder" in invoke("convert", "state", "other").stderr


def test_convert_rejects_paths_without_a_checkpoint(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no model.safetensors" in invoke("convert", "empty").stderr
    torch.save({"epoch": 1}, tmp_path / "odd.pt")
    assert "no dict of tensors" in invoke("convert", "odd.pt").stderr
    assert "does not exist" in invoke("convert", "none.ckpt").stderr


def test_converting_a_distributed_checkpoint_requires_trust(invoke: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weights = {"weight": torch.arange(4.0)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "state" / "pytorch_model_fsdp_0", no_dist=True)
    assert "--trust" in invoke("convert", "state").stderr
    done = invoke("convert", "state", "out", "--trust")
    assert done.returncode == 0, done.stderr
    assert torch.equal(CheckpointReader(tmp_path / "out").model()["weight"], weights["weight"])


def test_a_folder_without_a_checkpoint_is_not_called_damaged(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "random_states_0.pkl").touch()
    for name, words in (("empty", "is an empty folder"), ("theirs", "was saved by Accelerate: `leyden convert`")):
        done = invoke("checkpoint", "verify", name)
        assert done.returncode == 1 and done.stdout.startswith("none ") and words in done.stdout
        done = invoke("merge", name)
        assert done.returncode == 2 and words in done.stderr and "damaged" not in done.stderr


def test_merge_requires_the_safetensors_extension(saved: Path, invoke: Any) -> None:
    done = invoke("merge", saved / "one", "model.pt")
    assert done.returncode == 2 and "End its name with .safetensors" in done.stderr
    assert not Path("model.pt").exists()
