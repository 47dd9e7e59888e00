"""Ranks forked or spawned from a test, a REPL or a notebook: what they return to the caller, and how a run ends."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import QUIET
from programs import run_program
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leyden import ConfigurationError, DataModule, Trainer, TrainModule, seed_everything
from leyden.callbacks import EarlyStopping, ModelCheckpoint
from leyden.core.errors import LeydenError
from leyden.launch.functions import packed, unpacked


class Module(TrainModule):
    def __init__(self, fail: str = "") -> None:
        super().__init__()
        self.net, self.fail = nn.Linear(3, 1), fail

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            if self.fail == "raise":
                raise ZeroDivisionError("of rank one")
            if self.fail == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])[:, 0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(count: int = 12) -> DataLoader[Any]:
    data = torch.arange(3.0 * count).view(count, 3) / (3 * count)
    return DataLoader(TensorDataset(data), batch_size=3)


def make(tmp_path: Path, strategy: str = "ddp_fork", devices: int = 2, **arguments: Any) -> Trainer:
    settings = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 2}
    return Trainer(strategy=strategy, devices=devices, **{**settings, **arguments})


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.full)])
def test_weights_metrics_and_callback_states_return_to_the_caller(strategy: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss")
    stopping = EarlyStopping("val_loss", patience=5)
    torch.manual_seed(1)
    module = Module()
    before = module.net.weight.detach().clone()
    trainer = make(tmp_path, strategy, callbacks=[checkpoint, stopping], enable_checkpointing=True)
    trainer.fit(module, loader(), loader(6))
    assert not torch.equal(module.net.weight, before)
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    assert Path(checkpoint.best_model_path).is_dir()
    assert checkpoint.best_model_score is not None
    assert float(checkpoint.best_model_score) == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert stopping.best_score == checkpoint.best_model_score
    # New ranks validate with the weights that the fit returned.
    [values] = trainer.validate(module, loader(6), verbose=False)
    assert values["val_loss"] == pytest.approx(float(checkpoint.best_model_score))  # type: ignore[arg-type]
    predictions = trainer.predict(module, loader(6))
    assert predictions is not None
    with torch.no_grad():
        expected = module.net(next(iter(DataLoader(loader(6).dataset, batch_size=6)))[0])[:, 0]
    assert torch.allclose(torch.cat(predictions), expected)


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]


class Draws(Module):
    drawn: Any = None

    def setup(self, stage: str) -> None:
        # Only rank 0's attributes return to the caller, so it gathers the numbers of both.
        self.drawn = self.all_gather(torch.tensor(draw(), dtype=torch.float64)).tolist()


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.full)])
def test_ranks_start_with_the_callers_random_state(strategy: str, tmp_path: Path) -> None:
    module = Draws()
    seed_everything(11)
    expected = draw()
    seed_everything(11)
    make(tmp_path, strategy, max_epochs=1, limit_train_batches=1).fit(module, loader())
    assert module.drawn == [expected, expected]


def test_a_ranks_error_is_raised_in_the_caller_with_its_traceback_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="of rank one") as caught:
        make(tmp_path).fit(Module("raise"), loader())
    assert "in training_step" in str(caught.value.__cause__)
    if sys.version_info >= (3, 11):
        assert "leyden: raised on rank 1, step 1 (epoch 0, batch 1) in fit" in caught.value.__notes__[0]


def test_a_killed_rank_raises_an_error_with_its_number_and_signal(tmp_path: Path) -> None:
    with pytest.raises(LeydenError, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        make(tmp_path).fit(Module("kill"), loader())


def test_forking_after_cuda_initialization_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for strategy in ("ddp_fork", "ddp_notebook"):
        with pytest.raises(ConfigurationError, match="GPU is already initialized.*Restart the kernel"):
            make(tmp_path, strategy).fit(Module(), loader())


def fork_after_a_run_with_a_group(folder: str) -> None:
    make(Path(folder), "fsdp", devices=1).fit(Module(), loader())
    make(Path(folder)).fit(Module(), loader())


def test_forking_with_an_open_process_group_raises(tmp_path: Path) -> None:
    code = f"import {Path(__file__).stem} as tests; tests.fork_after_a_run_with_a_group({str(tmp_path)!r})"
    done = run_program(["-c", code], environ={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])})
    assert re.search(r"a process group of 1 rank\(s\), but the run has 2.*start_method='spawn'", done.stderr), (
        done.stderr
    )


def test_an_unpicklable_module_is_refused(tmp_path: Path) -> None:
    class Local(Module): ...

    with pytest.raises(ConfigurationError, match="could not pickle.*Local.*ddp_fork"):
        make(tmp_path, "ddp_spawn").fit(Local(), loader())


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_run_whose_ranks_have_exited_resumes_only_from_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    trainer, module = make(tmp_path, strategy), Module()
    # First with a Trainer that has run nothing, then with one whose ranks have exited.
    for number in range(2):
        before = module.net.weight.detach().clone()
        with pytest.raises(
            ConfigurationError, match="ckpt_path='current' needs the optimizers.*save a checkpoint and pass its path"
        ):
            trainer.fit(module, loader(), ckpt_path="current")
        assert torch.equal(module.net.weight, before) and trainer.global_step == 4 * number
        if strategy == "ddp_spawn":
            break
        trainer.fit(module, loader())
    if strategy == "ddp_fork":
        path = tmp_path / "saved"
        saving = make(tmp_path, strategy, callbacks=[ModelCheckpoint(path, filename="end")], enable_checkpointing=True)
        saving.fit(module, loader())
        again = make(tmp_path, strategy)
        again.fit(module, loader(), ckpt_path=path / "end", max_epochs=3)
        assert again.global_step == 6


def test_several_machines_need_a_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one machine.*num_nodes=2.*strategy='ddp'"):
        make(tmp_path, num_nodes=2).fit(Module(), loader())


def test_ddp_cannot_rerun_a_script_under_pytest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pytest is running this process.*ddp_notebook.*ddp_spawn"):
        make(tmp_path, "ddp").fit(Module(), loader())


class Interrupts(Module):
    """Sends Ctrl-C to the caller only, as a notebook does; each rank writes a file when its training ends."""

    def __init__(self, caller: int, folder: Path) -> None:
        super().__init__()
        self.caller, self.folder = caller, folder

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 0 and self.trainer.global_step == 2:
            os.kill(self.caller, signal.SIGINT)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        (self.folder / f"ended-{self.trainer.global_rank}").touch()


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_ends_all_ranks_gracefully(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, max_epochs=-1).fit(Interrupts(os.getpid(), tmp_path), loader())
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-0", "ended-1"]


SESSION = """
import torch
from leyden import Trainer, TrainModule
class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

module = Module()
before = float(module.net.weight.detach().sum())
quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1)
try:
    Trainer(devices=2, strategy="ddp", **quiet).fit(module, [torch.ones(2, 2)] * 4)
except ValueError as error:
    print("REFUSED", error)

trainer = Trainer(devices=2, strategy=STRATEGY, **quiet)
trainer.fit(module, [torch.ones(2, 2)] * 4)
print("DONE", trainer.world_size, trainer.global_step, before != float(module.net.weight.detach().sum()))
"""


@pytest.mark.parametrize(
    ("arguments", "strategy", "reason"),
    [
        pytest.param(["-i"], "auto", "this is an interactive session", id="REPL"),
        pytest.param(["-c"], "ddp_notebook", "there is no script file", id="-c", marks=pytest.mark.full),
    ],
)
def test_sessions_without_a_script_refuse_ddp_but_run_ddp_notebook(
    arguments: list[str], strategy: str, reason: str, tmp_path: Path
) -> None:
    program = SESSION.replace("STRATEGY", repr(strategy))
    command = [sys.executable, *arguments, *([program] if arguments == ["-c"] else [])]
    found = subprocess.run(
        command,
        input=None if arguments == ["-c"] else program,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert f"REFUSED strategy='ddp' starts its ranks by running the script again, but {reason}" in found.stdout, (
        found.stderr
    )
    assert "DONE 2" in found.stdout and "True" in found.stdout, found.stderr


def test_gpu_tensors_are_unpacked_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every rank would load them onto the caller's GPU, and the caller onto rank 0's."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    data = packed({"x": torch.arange(3)})
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(io.BytesIO(data))
    found = unpacked(data)["x"]
    assert found.device.type == "cpu" and found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_trainers_of_any_precision_can_be_sent_to_ranks(precision: str) -> None:
    trainer = unpacked(packed(Trainer(strategy="ddp_spawn", accelerator="cpu", devices=2, precision=precision)))
    plugin = trainer.strategy.precision
    plugin.check(torch.device("cpu"))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    for _ in range(2):
        plugin.register(optimizer)
    assert plugin.name == precision and len(optimizer._optimizer_step_post_hooks) == (precision == "16-mixed")


def test_data_modules_from_datasets_can_be_sent_to_ranks() -> None:
    data = DataModule.from_datasets(TensorDataset(torch.arange(6)), batch_size=2)
    data.note = "kept"  # type: ignore[attr-defined]
    found = unpacked(packed(data))
    assert isinstance(found, DataModule) and found.note == "kept"  # type: ignore[attr-defined]
    assert len(found.train_dataloader()) == 3 and found.train_dataloader().batch_size == 2


ORPHAN = """
import multiprocessing, os, signal, sys
from leyden.core.environment import STARTER
from leyden.launch.failure import end_with_parent

def rank(starter):
    while os.getppid() == starter:
        os.sched_yield()
    os.environ[STARTER] = "fork"
    end_with_parent()
    print("still running", flush=True)

def start():
    context.Process(target=rank, args=(os.getpid(),)).start()
    os.kill(os.getpid(), signal.SIGKILL)

context = multiprocessing.get_context("fork")
starter = context.Process(target=start)
starter.start()
starter.join()
print("starter", starter.exitcode, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_rank_exits_if_its_parent_was_killed_before_the_first_check() -> None:
    # Returns when all processes have closed the pipe.
    done = run_program(["-c", ORPHAN])
    assert done.stdout.split() == ["starter", "-9"], done.stdout + done.stderr
