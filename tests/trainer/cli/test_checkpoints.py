"""`leyden checkpoint`, `merge` and `convert`, on real checkpoints."""

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
from leyden.trainer.checkpoint.reader import CheckpointReader


class Net(Line):
    """Has hyperparameters."""

    def __init__(self, width: int = 4, name: str = "net") -> None:
        super().__init__(4, width)
        self.save_hyperparameters("width", "name")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with two checkpoints, the second of weights alone."""
    trainer = Trainer(**QUIET, max_steps=2)
    trainer.fit(Net(), [torch.ones(2, 4)] * 2)
    folder = tmp_path / "checkpoints"
    trainer.save_checkpoint(folder / "one")
    trainer.save_checkpoint(folder / "two", weights_only=True)
    return folder


def test_ls_marks_damaged_checkpoints(saved: Path, here: Any) -> None:
    done = here("checkpoint", "ls")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["name", "one", "two"]
    assert rows[1][2] == "2"
    assert [" ".join(row[-3:]) for row in rows[1:]] == ["× single_device whole", "whole, weights only"]
    assert done.returncode == 0
    (saved / "one" / "model.safetensors").unlink()
    done = here("checkpoint", "ls", saved)
    assert done.returncode == 1
    assert "damaged: " in done.stdout.splitlines()[-1] and "model.safetensors" in done.stdout.splitlines()[-1]
    assert "holds no checkpoints" in here("checkpoint", "ls", saved / "two").stdout
    assert here("checkpoint", "ls", "nowhere").returncode == 2


def test_verify_reads_every_byte(saved: Path, here: Any) -> None:
    assert here("checkpoint", "verify", saved).stdout.count("whole ") == 2
    weights = saved / "one" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    # The sizes are what they were.
    assert here("checkpoint", "ls", saved).returncode == 0
    done = here("checkpoint", "verify", saved)
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["damaged", "whole"]
    assert here("checkpoint", "verify", saved / "two").returncode == 0


def test_show_lists_the_contents(saved: Path, here: Any) -> None:
    shown = here("checkpoint", "show", saved / "one", "--tensors").stdout
    assert "global_step" in shown and "hyperparameters of the module" in shown
    assert "weights: 2 tensors with 20 elements" in shown
    assert "layer.weight  float32 (4, 4)" in shown
    assert "layer.weight" not in here("checkpoint", "show", saved / "one").stdout


def test_merge_writes_one_file(saved: Path, here: Any, tmp_path: Path) -> None:
    done = here("merge", saved / "one", tmp_path / "whole.safetensors")
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "whole.safetensors")
    weights = CheckpointReader(saved / "one").model()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    assert here("merge-weights", saved / "one", tmp_path, "--module", "layer").returncode == 0
    # A folder that is not there yet.
    assert here("merge", saved / "one", f"{tmp_path}/new/folder/").returncode == 0
    assert load_file(tmp_path / "new" / "folder" / "model.safetensors").keys() == weights.keys()
    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


class Plain:
    """What a Lightning checkpoint may hold that no safe loader takes."""


def lightning(path: Path, **hyper_parameters: Any) -> dict[str, Any]:
    weights = {"layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}
    loaded = {"epoch": 3, "global_step": 40, "pytorch-lightning_version": "2.5.0", "state_dict": weights}
    loaded |= {"optimizer_states": [{"state": {}}], "loops": {"fit_loop": {}}, "hyper_parameters": hyper_parameters}
    torch.save(loaded, path)
    return weights


def test_a_lightning_checkpoint_is_converted(here: Any, tmp_path: Path) -> None:
    weights = lightning(tmp_path / "model.ckpt", width=4, name="theirs")
    done = here("convert", "model.ckpt")
    assert done.returncode == 0, done.stderr
    assert "2 tensors, 2 hyperparameters, step 40" in done.stdout
    assert "not converted: optimizer 0, which is not the state of an optimizer" in done.stdout
    net = Net.load_from_checkpoint(tmp_path / "model-leyden")
    assert net.hparams == {"width": 4, "name": "theirs"}
    assert all(torch.equal(net.state_dict()[name], weights[name]) for name in weights)
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(net, [torch.ones(2, 4)], ckpt_path=tmp_path / "model-leyden", restore="weights")


def test_code_in_a_file_is_not_run_unless_trusted(here: Any, tmp_path: Path) -> None:
    lightning(tmp_path / "model.ckpt", width=4, thing=Plain())
    done = here("convert", "model.ckpt")
    assert done.returncode == 2
    assert "--trust" in done.stderr
    assert not (tmp_path / "model-leyden").exists()
    with pytest.warns(UserWarning, match="unpickled in full"):
        done = here("convert", "model.ckpt", "out", "--trust", "--prefix", "net")
    assert done.returncode == 0, done.stderr
    assert "not converted: the hyperparameter thing" in done.stdout
    assert set(CheckpointReader(tmp_path / "out").model()) == {"net.layer.weight", "net.layer.bias"}


def test_folders_of_accelerate_are_converted(here: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    first, second = {"weight": torch.ones(2)}, {"weight": torch.zeros(3)}
    save_file(first, folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.bin")
    (folder / "random_states_0.pkl").write_bytes(b"never opened")
    done = here("convert", "state")
    assert "not converted: optimizer.bin (safetensors does not record the order of parameters" in done.stdout
    assert "not converted: random_states_0.pkl (random numbers; a pickle, see --trust)" in done.stdout
    assert torch.equal(CheckpointReader(tmp_path / "state-leyden").model()["weight"], first["weight"])
    torch.save(second, folder / "pytorch_model_1.bin")
    assert "holds 2 models: choose one with --model 0 to --model 1" in here("convert", "state").stderr
    assert here("convert", "state", "second", "--model", "1").returncode == 0
    assert torch.equal(CheckpointReader(tmp_path / "second").model()["weight"], second["weight"])
    assert "has no model 7" in here("convert", "state", "--model", "7").stderr


class Normed(Squares):
    """A buffer stands among its parameters, and its losses are kept."""

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


NORMED = """
from torch import nn

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
"""


def by_hand(steps: int) -> tuple[Normed, Any, Any, list[float]]:
    """The plain loop, in epochs of two batches."""
    module = Normed()
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
def test_a_lightning_run_resumes(after_fit: bool, here: Any, tmp_path: Path) -> None:
    """Optimizer, scheduler and counters come too: the losses are those of the run that was never converted.

    Saved after fit, Lightning has counted the last epoch as done; saved by a callback at its end, it has not yet.
    """
    whole = by_hand(8)[3]
    module, optimizer, scheduler, _ = by_hand(4)
    epochs = {"ready": 2, "started": 2, "processed": 2, "completed": 2 if after_fit else 1}
    loaded = {
        "epoch": 2 if after_fit else 1,
        "global_step": 4,
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "loops": {
            "fit_loop": {
                "epoch_loop.batch_progress": {"total": counted(4), "current": counted(2), "is_last_batch": True},
                "epoch_progress": {"current": epochs},
            }
        },
    }
    torch.save(loaded, tmp_path / "run.ckpt")
    done = here("convert", "run.ckpt")
    assert "step 4, 1 optimizer, 1 scheduler" in done.stdout and "not converted" not in done.stdout, done.stderr
    again = Normed()
    trainer = Trainer(**QUIET, max_epochs=4)
    parts = {"weights", "optimizers", "progress"}
    trainer.fit(again, step_data(), ckpt_path=tmp_path / "run-leyden", restore=parts)
    assert again.losses == whole[4:] and trainer.global_step == 8


def test_a_lightning_file_of_a_batchs_end_counts_that_batch(here: Any, tmp_path: Path) -> None:
    """Lightning counts a batch as completed only after the callbacks that save at its end."""
    module, optimizer, _, _ = by_hand(1)
    batches = {"total": {**counted(1), "completed": 0}, "current": {**counted(1), "completed": 0}}
    loops = {"epoch_loop.batch_progress": batches, "epoch_progress": {"current": {**counted(1), "processed": 0}}}
    loaded = {"epoch": 0, "global_step": 1, "state_dict": module.state_dict(), "loops": {"fit_loop": loops}}
    torch.save({**loaded, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "run.ckpt")
    done = here("convert", "run.ckpt")
    assert "the position in epoch 0 (batch 1): the epoch starts from the beginning" in done.stdout, done.stderr
    assert CheckpointReader(tmp_path / "run-leyden").progress()["batches"] == 1


def test_counters_that_no_trainer_wrote_are_left_out(here: Any, tmp_path: Path) -> None:
    torch.save({"model": by_hand(1)[0].state_dict(), "epoch": "best"}, tmp_path / "run.pt")
    done = here("convert", "run.pt")
    assert done.returncode == 0 and "not converted: the counters: epoch" in done.stdout, done.stderr


def counted(batches: int) -> dict[str, int]:
    """One of Lightning's counters."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), batches)


def test_an_accelerate_run_resumes(here: Any, tmp_path: Path) -> None:
    from leyden import Accelerator

    whole = by_hand(8)[3]
    module, optimizer, scheduler, _ = by_hand(4)
    folder = tmp_path / "state"
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.manual_seed(77)
    states = {"step": 4, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    torch.save({**states, "numpy_random_seed": np.random.get_state()}, folder / "random_states_0.pkl")
    (folder / "sampler.bin").write_bytes(b"never opened")
    done = here("convert", "state")
    assert (
        "not converted: optimizer.bin (safetensors does not record the order of parameters; give --like" in done.stdout
    ), done.stderr
    (tmp_path / "their_model.py").write_text(NORMED)
    like = ("--like", "their_model:Normed")
    done = here("convert", "state", "safe", *like)
    assert "1 optimizer, 1 scheduler" in done.stdout and "not converted: sampler.bin" in done.stdout, done.stderr
    assert "not converted: random_states_0.pkl (random numbers; a pickle, see --trust)" in done.stdout
    with pytest.warns(UserWarning, match="unpickled in full"):
        done = here("convert", "state", "trusted", "--trust", *like)
    assert "step 4, 1 optimizer, 1 scheduler, random numbers" in done.stdout

    accelerator = Accelerator(cpu=True)
    again = Normed()
    [own], [rates] = again.configure_optimizers()
    _, own, loader, rates = accelerator.prepare(again, own, step_data(), rates)
    accelerator.load_state(tmp_path / "trusted")
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(77)))
    for _ in range(2):
        for batch in loader:
            accelerator.backward(again.training_step(batch, 0))
            own.step()
            own.zero_grad()
        rates.step()
    assert again.losses == whole[4:] and accelerator.steps == 8


def test_an_optimizer_whose_names_are_unknown_is_left_out(here: Any, tmp_path: Path) -> None:
    module, optimizer, _, _ = by_hand(2)
    layers = [{"params": module.net[2].parameters()}, {"params": module.net[0].parameters()}]
    for number, (state, words) in enumerate(
        (
            (torch.optim.AdamW(layers).state_dict(), "has 2 groups of parameters, and does not record their names"),
            (torch.optim.AdamW(module.net[0].parameters()).state_dict(), "has 2 parameters, and the weights 6"),
            (
                reordered(optimizer.state_dict()),
                "has exp_avg of shape (4,) where net.0.weight has (4, 4): its parameters",
            ),
        )
    ):
        loaded = {"epoch": 1, "global_step": 2, "state_dict": module.state_dict(), "optimizer_states": [state]}
        torch.save(loaded, tmp_path / f"run{number}.ckpt")
        done = here("convert", f"run{number}.ckpt")
        assert done.returncode == 0 and f"not converted: optimizer 0, which {words}" in done.stdout, done.stdout


def reordered(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {place: state["state"][(place + 1) % 6] for place in range(6)}}


def test_a_folder_with_an_index_is_converted(here: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert "2 tensors" in here("convert", "state").stdout
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "leads out of its folder" in here("convert", "state", "other").stderr


def test_what_is_no_checkpoint_is_named(here: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no model.safetensors" in here("convert", "empty").stderr
    torch.save({"epoch": 1}, tmp_path / "odd.pt")
    assert "no dict of tensors" in here("convert", "odd.pt").stderr
    assert "does not exist" in here("convert", "none.ckpt").stderr


def test_a_sharded_folder_needs_trust(here: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weights = {"weight": torch.arange(4.0)}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "state" / "pytorch_model_fsdp_0", no_dist=True)
    assert "--trust" in here("convert", "state").stderr
    done = here("convert", "state", "out", "--trust")
    assert done.returncode == 0, done.stderr
    assert torch.equal(CheckpointReader(tmp_path / "out").model()["weight"], weights["weight"])


def test_a_folder_that_never_was_a_checkpoint_is_not_called_damaged(here: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "random_states_0.pkl").touch()
    for name, words in (("empty", "is an empty folder"), ("theirs", "was saved by Accelerate: `leyden convert`")):
        done = here("checkpoint", "verify", name)
        assert done.returncode == 1 and done.stdout.startswith("none ") and words in done.stdout
        done = here("merge", name)
        assert done.returncode == 2 and words in done.stderr and "damaged" not in done.stderr


def test_merge_refuses_a_name_that_is_not_of_safetensors(saved: Path, here: Any) -> None:
    done = here("merge", saved / "one", "model.pt")
    assert done.returncode == 2 and "End its name with .safetensors" in done.stderr
    assert not Path("model.pt").exists()
