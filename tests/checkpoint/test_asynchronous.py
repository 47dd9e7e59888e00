"""Asynchronous checkpoints hold exactly the step at which they were requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from ranks import late
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.data import DataLoader

from leyden import Accelerator, Trainer
from leyden.callbacks import Callback, ModelCheckpoint
from leyden.checkpoint import staged
from leyden.checkpoint import writer as writing
from leyden.checkpoint.copies import Copies, HostMemory, addresses_of
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.staging import is_staging
from leyden.trainer import AsyncCheckpointIO
from leyden.utils import ProjectConfiguration

CHECKPOINTING = {**QUIET, "enable_checkpointing": True}
"""Arguments of a quiet Trainer with a ModelCheckpoint."""
TIMED_FILES = {"manifest.json", "progress.json"}
"""Files that hold the time of day, or the seconds that training took."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1))


class Net(Squares):
    """A net with dropout, batch norm, and averaged weights that no optimizer steps."""

    def __init__(self, optimizer: Callable[..., Any] = AdamW, **options: Any) -> None:
        super().__init__()
        self.net, self.average = net(), net().requires_grad_(False)
        self.make, self.options = optimizer, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mean, own in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mean.data.lerp_(own.data, 0.1)

    def configure_optimizers(self) -> Any:
        return self.make(self.net.parameters(), lr=0.01, **self.options)


class Swapping(Callback):
    """Writes the weights in a hook, through `.data`, whose writes torch does not count."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for parameter in module.parameters():
            parameter.data.add_(1.0)
            parameter.data.sub_(1.0)
            parameter.data.mul_(1.0)


class Normalizing(Net):
    """Writes a weight in each training step, as SwAV does with its prototypes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            weight = self.net[0].weight
            weight.data.copy_(nn.functional.normalize(weight.data))
        return super().training_step(batch, batch_idx)


class Adversarial(Net):
    """Manual optimization of two optimizers, the weights of one clipped after its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()
            for parameter in self.net[0].parameters():
                parameter.data.clamp_(-0.1, 0.1)

    def configure_optimizers(self) -> Any:
        return SGD(self.net[0].parameters(), lr=0.1), AdamW(self.net[1:].parameters(), lr=0.01)


class Validating(Net):
    """Logs the value that a ModelCheckpoint monitors, which saves inside the validation's inference mode."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(8, 8), batch_size=4)


class Clamping(Net):
    """Clamps a weight to bounds that it never leaves: torch counts a write, but no bit changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.net[0].weight.clamp_(-100.0, 100.0)
        return super().training_step(batch, batch_idx)


class Decaying(Net):
    """Writes weights in its own `backward`, starting only after the second save."""

    def backward(self, loss: Any) -> None:
        if self.trainer.global_step >= 4:
            for parameter in self.net.parameters():
                parameter.data.mul_(0.9)
        loss.backward()


CASES: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "adamw": (Net, {}),
    "foreach": (lambda: Net(foreach=True), {}),
    "fused": (lambda: Net(fused=True), {"precision": "bf16-mixed"}),
    "scaler": (Net, {"precision": "16-mixed"}),
    "accumulation": (Net, {"accumulate_grad_batches": 2}),
    "closure": (lambda: Net(LBFGS), {}),
    "momentum": (lambda: Net(SGD, momentum=0.9), {"precision": "bf16-true"}),
    "hooks": (Net, {"callbacks": Swapping()}),
    "writes in the step": (Normalizing, {}),
    "writes nothing new in the step": (Clamping, {}),
    "writes in backward": (Decaying, {}),
    "manual": (Adversarial, {}),
    "at the end of a validation": (Validating, {"val_check_interval": 2, "monitor": "val_loss"}),
}


def fit(folder: Path, make: Callable[[], Net], asynchronous: bool, **arguments: Any) -> ModelCheckpoint:
    torch.manual_seed(1)
    module, data = make(), torch.randn(44, 8)
    checkpoint = ModelCheckpoint(
        folder,
        monitor=arguments.pop("monitor", None),
        every_n_train_steps=2,
        save_top_k=-1,
        save_last=True,
        asynchronous=asynchronous,
    )
    callbacks = [checkpoint, *([arguments.pop("callbacks")] if "callbacks" in arguments else [])]
    arguments = {**CHECKPOINTING, "max_steps": 9, "callbacks": callbacks, **arguments}
    Trainer(**arguments).fit(module, DataLoader(data, batch_size=4))
    return checkpoint


def files(checkpoint: Path) -> dict[str, Any]:
    """Returns the bytes of every file, without the times that some hold."""
    found: dict[str, Any] = {}
    for path in sorted(checkpoint.iterdir()):
        found[path.name] = None if path.name in TIMED_FILES else path.read_bytes()
    callbacks = json.loads(found["callbacks.json"])
    found["callbacks.json"] = [
        {key: value for key, value in state.items() if key not in ("dirpath", "seconds_since_save", "doomed")}
        for state in callbacks["tree"].values()
    ]
    return found


@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_asynchronous_saves_write_the_same_files_as_synchronous_ones(
    case: str, begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, arguments = CASES[case]
    fit(tmp_path / "sync", make, False, **dict(arguments))
    late.delay_copies(monkeypatch, begun)
    checkpoint = fit(tmp_path / "async", make, True, **dict(arguments))
    names = sorted(path.name for path in (tmp_path / "sync").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "async").iterdir())
    assert len(names) > 4
    for name in names:
        assert files(tmp_path / "sync" / name) == files(tmp_path / "async" / name)
    assert checkpoint.last_model_path.endswith("step=9")


def test_old_checkpoints_are_deleted_only_after_the_new_one_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[str], str]] = []
    commit = writing.CheckpointWriter._commit

    def record(self: Any, *args: Any, **kwargs: Any) -> Path:
        before = [name for name in sorted(os.listdir(tmp_path)) if not is_staging(name)]
        path = commit(self, *args, **kwargs)
        seen.append((before, path.name))
        assert threading.current_thread().name == "leyden-save"
        return path

    monkeypatch.setattr(writing.CheckpointWriter, "_commit", record)
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, asynchronous=True)
    Trainer(**CHECKPOINTING, max_steps=6, callbacks=checkpoint).fit(Net(), DataLoader(torch.randn(44, 8), batch_size=4))
    assert seen == [([], "step=2"), (["step=2"], "step=4"), (["step=4"], "step=6")]
    assert os.listdir(tmp_path) == ["step=6"]
    assert checkpoint.best_model_path == str(tmp_path / "step=6")


def test_a_failed_save_raises_at_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise OSError(28, "No space left on device")

    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                trainer.finish_saving()
                monkeypatch.setattr(staged, "write_file", fail)
                monkeypatch.setattr(writing.CheckpointWriter, "_commit", fail)
            if trainer.pending_save is not None and trainer.global_step > 4:
                trainer.pending_save.join()

    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, asynchronous=True)
    trainer = Trainer(**CHECKPOINTING, max_steps=20, callbacks=[checkpoint, Failing()])
    with pytest.raises(CheckpointError, match="step=4: was not saved") as found:
        trainer.fit(Net(), DataLoader(torch.randn(88, 8), batch_size=4))
    assert isinstance(found.value.__cause__, OSError)
    assert trainer.global_step < 7
    assert checkpoint.best_model_path == str(tmp_path / "step=2")
    assert os.listdir(tmp_path) == ["step=2"]


def test_a_failed_last_save_raises_from_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Callback):
        order = 300

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "file" / "step=5", asynchronous=True)
                (tmp_path / "file").rename(tmp_path / "moved")

    trainer = Trainer(**QUIET, max_steps=5, callbacks=Failing())
    with pytest.raises(CheckpointError, match="was not saved"):
        trainer.fit(Net(), DataLoader(torch.randn(44, 8), batch_size=4))


def test_an_error_in_training_lets_a_pending_save_finish(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 2:
                raise ValueError("the data is bad")
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, asynchronous=True)
    with pytest.raises(ValueError, match="the data is bad"):
        Trainer(**CHECKPOINTING, callbacks=checkpoint).fit(Failing(), DataLoader(torch.randn(44, 8), batch_size=4))
    assert os.listdir(tmp_path) == ["step=2"]
    fit(tmp_path / "again", Net, True)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_only_the_first_save_copies_everything_at_once(
    accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(Callback):
        """Finishes each save before the next batch, as a fast disk does within a window of several batches."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.finish_saving()

    firsts: list[bool] = []
    begin = Copies.begin

    def record(copies: Copies) -> None:
        firsts.append(copies.is_first)
        begin(copies)

    monkeypatch.setattr(Copies, "begin", record)
    fit(tmp_path, Net, True, callbacks=Waiting(), accumulate_grad_batches=accumulated)
    assert firsts == [True, False, False, False]


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_a_save_in_on_exception_or_teardown_is_complete_when_it_returns(hook: str, tmp_path: Path) -> None:
    class Failing(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise ValueError("the disk is full")

    complete: list[bool] = []

    def save(trainer: Any, *args: Any) -> None:
        path = trainer.save_checkpoint(tmp_path / hook)
        complete.append((path / "manifest.json").is_file())

    saving = type("Saving", (Callback,), {hook: lambda self, trainer, *args: save(trainer)})()
    trainer = Trainer(**QUIET, max_steps=4, callbacks=saving, plugins=AsyncCheckpointIO())
    with pytest.raises(ValueError, match="the disk is full"):
        trainer.fit(Failing(), DataLoader(torch.randn(44, 8), batch_size=4))
    assert complete == [True]


def test_an_interrupt_while_waiting_for_copies_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Copies.finish

    def interrupted(copies: Copies) -> None:
        if not copies.is_first:
            raise KeyboardInterrupt
        finish(copies)

    monkeypatch.setattr(Copies, "finish", interrupted)
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, asynchronous=True)
    trainer = Trainer(**CHECKPOINTING, max_steps=9, callbacks=checkpoint)
    with pytest.warns(UserWarning, match="step=4 was not saved"), pytest.raises(KeyboardInterrupt):
        trainer.fit(Net(), DataLoader(torch.randn(44, 8), batch_size=4))
    assert "leyden-save" not in [thread.name for thread in threading.enumerate()]
    assert os.listdir(tmp_path) == ["step=2"]


def test_the_error_for_a_weight_written_during_a_save_names_it(tmp_path: Path) -> None:
    class Late(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 4:
                with torch.no_grad():
                    self.net[0].weight.mul_(2.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(CheckpointError, match=r"net\.0\.weight.*finish_copies"):
        fit(tmp_path, Late, True)
    assert sorted(os.listdir(tmp_path)) == ["epoch=0-step=2", "last"]


def test_weights_may_be_written_after_finish_copies(tmp_path: Path) -> None:
    class Late(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 4:
                self.trainer.finish_copies()
                self.net[0].weight.data.mul_(2.0)
            return super().training_step(batch, batch_idx)

    fit(tmp_path / "sync", Late, False)
    fit(tmp_path / "async", Late, True)
    for name in os.listdir(tmp_path / "sync"):
        assert files(tmp_path / "sync" / name) == files(tmp_path / "async" / name)


def test_a_plugin_makes_every_save_asynchronous(tmp_path: Path) -> None:
    pending: list[bool] = []

    class RecordsPending(Callback):
        order = 300

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pending.append(trainer.pending_save is not None)

    for plugin in (AsyncCheckpointIO(), "AsyncCheckpointIO", None):
        callbacks = [ModelCheckpoint(tmp_path / str(len(pending)), every_n_train_steps=1), RecordsPending()]
        trainer = Trainer(**CHECKPOINTING, max_steps=1, callbacks=callbacks, plugins=plugin)
        trainer.fit(Net(), DataLoader(torch.randn(44, 8), batch_size=4))
    assert pending == [True, True, False]


def test_saves_outside_of_fit_are_synchronous(tmp_path: Path) -> None:
    trainer = Trainer(**QUIET, max_steps=1)
    trainer.fit(Net(), DataLoader(torch.randn(44, 8), batch_size=4))
    assert (trainer.save_checkpoint(tmp_path / "one", asynchronous=True) / "manifest.json").is_file()
    assert trainer.pending_save is None


def test_optimizer_hooks_are_removed_when_no_save_is_pending(tmp_path: Path) -> None:
    has_hooks: dict[int, bool] = {}

    class RecordsStepHooks(Callback):
        order = 300

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.finish_saving()
            has_hooks[trainer.global_step] = bool(trainer.optimizers[0]._optimizer_step_pre_hooks)

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=2, asynchronous=True)
    trainer = Trainer(**CHECKPOINTING, max_steps=5, callbacks=[checkpoint, RecordsStepHooks()])
    trainer.fit(Net(), DataLoader(torch.randn(44, 8), batch_size=4))
    # The first save's hook watches the next step for other writes, and stays until the second save.
    assert has_hooks == {1: False, 2: True, 3: True, 4: False, 5: False}


def test_host_memory_is_reused_between_saves() -> None:
    optimizer, memory = SGD([nn.Parameter(torch.ones(3))], lr=0.1), HostMemory()
    stepped = addresses_of([optimizer])
    [parameter] = optimizer.param_groups[0]["params"]
    addresses = []
    for _ in range(3):
        copies = Copies(memory, stepped, ())
        content = copies.of("model", writing.Tensors({"weight": parameter.detach(), "other": torch.zeros(2)}))
        copies.begin()
        copies.finish()
        assert isinstance(content, writing.Tensors)
        addresses.append({name: tensor.data_ptr() for name, tensor in content.tensors.items()})
        assert torch.equal(content.tensors["weight"], torch.ones(3))
    assert addresses[0] == addresses[1] == addresses[2]


def run_custom_loop(folder: Path, asynchronous: bool) -> Accelerator:
    torch.manual_seed(1)
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = net()
    model, optimizer, loader = accelerator.prepare(
        model, AdamW(model.parameters(), lr=0.01), DataLoader(torch.randn(24, 8), batch_size=4)
    )
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        accelerator.save_state(asynchronous=asynchronous)
        # Weights change and change back, as when averages are swapped in for an evaluation.
        for parameter in model.parameters():
            parameter.data.add_(1.0).sub_(1.0)
    accelerator.end_training()
    return accelerator


def test_asynchronous_saves_of_a_custom_loop_equal_synchronous_ones(tmp_path: Path) -> None:
    for asynchronous in (False, True):
        run_custom_loop(tmp_path / str(asynchronous), asynchronous)
    for number in (4, 5):
        sync, background = (tmp_path / str(kind) / "checkpoints" / f"checkpoint_{number}" for kind in (False, True))
        names = sorted(path.name for path in sync.iterdir())
        assert names == sorted(path.name for path in background.iterdir())
        for name in set(names) - TIMED_FILES:
            assert (sync / name).read_bytes() == (background / name).read_bytes(), name
    assert sorted(os.listdir(tmp_path / "True" / "checkpoints")) == ["checkpoint_4", "checkpoint_5"]


def test_a_script_waits_for_its_last_save_before_it_exits(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from leyden import Accelerator; a = Accelerator(cpu=True);"
        "m = torch.nn.Linear(2000, 2000); a.prepare(m); a.save_state(sys.argv[1], asynchronous=True)"
    )
    # A real process, since the exit of the interpreter is under test.
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "one"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one" / "manifest.json").is_file()


def test_a_failed_save_of_a_custom_loop_raises_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(writing.CheckpointWriter, "_commit", fail)
    accelerator.save_state(tmp_path / "one", asynchronous=True)
    pending = accelerator.saves.pending
    assert pending is not None
    pending.join()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(CheckpointError, match="was not saved") as found:
        optimizer.step()
    assert isinstance(found.value.__cause__, OSError)
    optimizer.step()
    assert os.listdir(tmp_path) == []
