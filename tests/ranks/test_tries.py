"""find_executable_batch_size on ranks: all restart with the smaller size, wherever the others wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F
from ranks.world import run_world
from torch import nn

from leyden import Accelerator, ConfigurationError, find_executable_batch_size, notebook_launcher

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from leyden import Accelerator, find_executable_batch_size, notebook_launcher

def main(how="backward"):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)

    @find_executable_batch_size(starting_batch_size=8, accelerator=accelerator)
    def train(batch_size):
        accelerator.free_memory()
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        data = TensorDataset(torch.ones(96, 3), torch.ones(96, 1))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size)
        )
        for step, (x, y) in enumerate(loader):
            if step == 2 and batch_size > 2 and accelerator.is_last_process:
                raise MemoryError("only here")
            if step == 2 and how == "late" and batch_size > 2:
                # The other ranks have finished the function when one runs out of memory.
                break
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    found = train()
    ranks = accelerator.reduce(torch.tensor(1.0), "sum")
    steps = accelerator.gradient_accumulation_steps
    sys.stdout.write(f"RANK {accelerator.process_index} {found} {ranks:.0f} {steps}\\n")

if __name__ == "__main__":
    if sys.argv[1] in ("fork", "spawn"):
        notebook_launcher(main, num_processes=2, start_method=sys.argv[1])
    else:
        main(*sys.argv[1:])
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )


LAUNCH = ("-m", "leyden", "launch", "--cpu", "-q", "--num_processes")


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        pytest.param((*LAUNCH, "2", "script.py", "backward"), 2, marks=pytest.mark.full, id="leyden launch"),
        pytest.param((*LAUNCH, "3", "script.py", "backward"), 3, marks=pytest.mark.full, id="three ranks"),
        pytest.param(
            (*LAUNCH, "2", "script.py", "late"), 2, marks=pytest.mark.full, id="after the others have finished"
        ),
        pytest.param(("script.py", "fork"), 2, marks=pytest.mark.full, id="fork"),
        pytest.param(("script.py", "spawn"), 2, marks=pytest.mark.full, id="spawn"),
    ],
)
def test_all_ranks_restart_with_the_smaller_size(command: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    # With a quarter of the batch, accumulation grows from 1 to 4.
    assert lines == [f"RANK {rank} 2 {ranks} 4" for rank in range(ranks)]
    for size, smaller in ((8, 4), (4, 2)):
        assert f"memory of rank {ranks - 1} with batch size {size} (MemoryError: only here)" in done.stderr
        assert f"All ranks restart with batch size {smaller}." in done.stderr
    assert "Traceback" not in done.stderr


BY_TRAINER = """
import torch
from leyden import Trainer, TrainModule, find_executable_batch_size
from torch.utils.data import DataLoader, TensorDataset

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 2 and len(batch[0]) > 4:
            raise MemoryError("only here")
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

@find_executable_batch_size(starting_batch_size=8)
def train(batch_size):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(64, 3)), batch_size))
    print(f"RANK {trainer.global_rank} {batch_size} {trainer.global_step}\\n", end="")

for _ in range(2):
    # The second call starts with the size that the first one found.
    train()
"""


@pytest.mark.full
def test_a_fit_that_starts_its_ranks_restarts_them_with_the_smaller_size(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_TRAINER)
    done = run(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    assert lines == ["RANK 0 4 8"] * 2 + ["RANK 1 4 8"] * 2
    # Nine tenths each time, as Accelerate does.
    assert re.findall(r"All ranks restart with batch size (\d+)", done.stderr) == ["7", "6", "5", "4"]
    assert "Traceback" not in done.stderr


def test_running_out_of_memory_at_every_batch_size_ends_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"nowhere does not fit into memory with any batch size down to 1 \(MemoryErr"
    ):
        notebook_launcher(fits_nowhere, num_processes=2)


def fits_nowhere() -> None:
    accelerator = Accelerator(cpu=True)
    layer = accelerator.prepare(nn.Linear(1, 1))

    @find_executable_batch_size(starting_batch_size=2)
    def nowhere(batch_size: int) -> None:
        if accelerator.is_last_process:
            raise MemoryError("of any size")
        F.mse_loss(layer(next(layer.parameters())), layer.module.bias).backward()

    nowhere()


def error_under_torchrun() -> str:
    try:
        find_executable_batch_size(lambda batch_size: batch_size)()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_ranks_that_cannot_be_restarted_raise_with_the_fix() -> None:
    for message in run_world(2, error_under_torchrun):
        assert "2 ranks that torchrun started" in message and "leyden launch --num_processes 2 script.py" in message
