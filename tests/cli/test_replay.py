"""`leyden replay` on real runs, in which a sample with an infinite value makes step 137 nan."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.cli.checkpoint.replay import checkpoint_before
from leyden.trainer.reporting.command import Command

BAD_STEP, LAST = 137, 150
ORDER = torch.randperm(LAST * 8, generator=torch.Generator().manual_seed(5)).tolist()
SCRIPT = """
import argparse, math
import torch
from torch.utils.data import DataLoader, Dataset
from leyden import Trainer, TrainModule, seed_everything
from leyden.callbacks import CSVLogger, ModelCheckpoint, NonFiniteGuard

class Data(Dataset):
    def __init__(self, bad, size):
        self.bad, self.size = bad, size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * (index + 1))
        return {"x": x.index_fill(0, torch.tensor([1]), math.inf) if index == self.bad else x, "y": x.sum()}

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(4, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        loss = (self.last(self.drop(self.first(batch["x"])))[:, 0] - batch["y"]).square().mean()
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("drawn", torch.rand(()))
    def configure_callbacks(self):
        return [ModelCheckpoint(every_n_train_steps=25, save_top_k=-1)]
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int, default=-1)
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--order", type=lambda text: [int(word) for word in text.split(",")])
    args = parser.parse_args()
    seed_everything(1)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 1}
    trainer = Trainer(
        **quiet, devices=args.devices, max_epochs=1, val_check_interval=10, default_root_dir="run",
        callbacks=[NonFiniteGuard()] if args.guard else None, logger=CSVLogger("run"), digest_every_n_steps=1,
    )
    data = Data(args.bad, len(args.order))
    trainer.fit(Net(), DataLoader(data, 8 // args.devices, sampler=args.order), DataLoader(Data(-1, 8), 4))
    trainer.save_checkpoint("run/final")
"""


def train(folder: Path, environ: dict[str, str], *words: str, launcher: tuple[str, ...] = ()) -> Path:
    """Trains with the script; returns the run's folder."""
    (folder / "train.py").write_text(SCRIPT)
    order = ",".join(map(str, ORDER))
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", "--order", order, *words],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (folder / "run" / "logs" / "version_0" / "checkpoints").is_dir(), done.stderr
    return folder / "run"


def checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() + str(path.stat().st_mtime_ns) for path in files}


def replay(folder: Path, environ: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """Runs `leyden replay run …`, and checks that it changes no file of the run."""
    before = checksums(folder)
    command = [sys.executable, "-m", "leyden", "replay", "run", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240)
    assert checksums(folder) == before
    return done


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, module_environ: dict[str, str]) -> tuple[Path, int]:
    """Returns the folder of a run that NonFiniteGuard ended at the bad step, and the bad sample's index."""
    folder = tmp_path_factory.mktemp("guarded")
    bad = ORDER[(BAD_STEP - 1) * 8 + 3]
    train(folder, module_environ, "--guard", "--bad", str(bad))
    return folder, bad


def test_replaying_a_bad_step_names_its_sample_and_parameters(
    guarded: tuple[Path, int], environ: dict[str, str]
) -> None:
    folder, bad = guarded
    done = replay(folder, environ, "--step", BAD_STEP, "--yes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout
    assert "train.py" in done.stderr
    assert f"{BAD_STEP} (epoch 0, batch {BAD_STEP - 1}), from run/logs/version_0/checkpoints/epoch=0-step=125" in lines
    assert re.search(r"^loss +(nan|inf)$", lines, re.M)
    samples = ", ".join(map(str, ORDER[(BAD_STEP - 1) * 8 : BAD_STEP * 8]))
    assert f"samples    {samples}\n" in lines
    assert f"sample {bad} is not finite in batch['x']" in lines
    assert "not finite in 4 of 4 parameters" in lines and "the step was not taken" in lines
    assert re.search(r"^first.weight +(nan|inf) .* 12$", lines, re.M)
    assert re.search(r"^error +NonFiniteError: the gradients of step 137", lines, re.M)


def test_replaying_a_good_step_compares_weights_with_the_recorded_digests(
    guarded: tuple[Path, int], environ: dict[str, str], tmp_path: Path
) -> None:
    folder, _ = guarded
    done = replay(folder, environ, "--step", 112, "--", sys.executable, "train.py", *recorded_arguments(folder))
    assert done.returncode == 0 and "equal to those that the run recorded" in done.stdout, done.stdout + done.stderr
    [recorded] = (folder / "run").rglob("digests.jsonl")
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    names = list(lines[0]["tensors"])
    [line] = [line for line in lines if line.get("step") == 112]
    line["digests"][names.index("last.bias")] = "0" * 16
    (tmp_path / "digests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = replay(folder, environ, "--step", 112, "--yes", "--digests", tmp_path)
    assert "differ from those that the run recorded: last.bias" in done.stdout


def recorded_arguments(folder: Path) -> list[str]:
    command = Command.read(checkpoint_before(folder / "run", 1000))
    assert command is not None and command.words[1] == "train.py"
    return command.words[2:]


def test_an_impossible_replay_is_refused_with_the_reason(
    guarded: tuple[Path, int], invoke: Any, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = guarded
    done = invoke("replay", folder / "run", "--step", 25)
    assert done.returncode == 2 and "no valid checkpoint before step 25, only of step 25, 50" in (done.stderr)
    done = invoke("replay", folder / "nothing", "--step", 25)
    assert "is not a folder. Give the run's folder" in done.stderr
    (folder / "empty").mkdir()
    done = invoke("replay", folder / "empty", "--step", 25)
    assert "holds no checkpoint from which a run can continue" in done.stderr
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    done = invoke("replay", folder / "run", "--step", 26)
    assert "running this needs confirmation, and there is no terminal. Pass --yes" in done.stderr
    done = invoke("replay", folder / "run", "--step", 26, "--", "no-such-program")
    assert "no-such-program cannot be started" in done.stderr
    done = invoke("replay", folder / "run", "--step", 26, "--", sys.executable, "-c", "raise SystemExit(3)")
    assert "ended with exit code 3 before step 26" in done.stderr
    done = invoke("replay", folder / "run", "--step", 26, "--", sys.executable, "-c", "")
    assert "ended without a fit: give the command that trains" in done.stderr


@pytest.mark.full
def test_replaying_a_step_after_the_error_or_the_end_is_refused(
    guarded: tuple[Path, int], environ: dict[str, str], tmp_path: Path
) -> None:
    done = replay(guarded[0], environ, "--step", BAD_STEP + 1, "--yes")
    assert done.returncode == 2 and "failed in step 137, before step 138: NonFiniteError" in done.stderr
    train(tmp_path, environ)
    done = replay(tmp_path, environ, "--step", LAST + 1, "--yes")
    assert done.returncode == 2 and f"the run ends at step {LAST}, before step {LAST + 1}" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("launcher", [(), ("-m", "leyden", "launch", "--cpu", "--num_processes", "2")])
def test_replay_starts_as_many_ranks_as_the_run(
    launcher: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    bad = ORDER[(BAD_STEP - 1) * 8 + 6]
    train(tmp_path, environ, "--bad", str(bad), "--devices", "2", launcher=launcher)
    done = replay(tmp_path, environ, "--step", BAD_STEP, "--yes")
    assert done.returncode == 0, done.stderr
    assert f"sample {bad} is not finite in batch['x']" in done.stdout
    assert "not finite after the step: first.weight, first.bias, last.weight, last.bias" in done.stdout
    halves = (ORDER[(BAD_STEP - 1) * 8 :][:4], ORDER[(BAD_STEP - 1) * 8 + 4 :][:4])
    assert "; ".join(", ".join(map(str, half)) for half in halves) in done.stdout
    done = replay(tmp_path, environ, "--step", BAD_STEP - 1, "--yes")
    assert "equal to those that the run recorded" in done.stdout and "norm nan" not in done.stdout


def test_the_recorded_command_is_the_launch_command_with_secrets_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--api_key", "abcdef123", "--lr", "0.1"])
    command = Command.here({})
    assert command is not None and command.words == [sys.executable, "train.py", "--api_key", "***", "--lr", "0.1"]
    assert not command.is_whole
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert Command.here(rank) is None
    started_by_script = Command.here({**rank, "LEYDEN_STARTER": "script"})
    assert started_by_script is not None and started_by_script.words == command.words
    launched = Command.here({**rank, "LEYDEN_COMMAND": '["leyden", "launch", "x.py"]'})
    assert launched is not None and launched.words == ["leyden", "launch", "x.py"] and launched.is_whole


def test_control_characters_in_a_recorded_command_are_escaped() -> None:
    shown = str(Command(["python", "-c", "print(1)\x1b[2K\rpython train.py"], "/x"))
    assert shown == "python -c 'print(1)\\x1b[2K\\rpython train.py'" and shown.isprintable()
