"""A fit given a Lightning `.ckpt` continues as the run that saved it would have."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_files import PlainRun, entries, loops
from models import QUIET, Regression, Squares
from ranks.world import run_world
from same import same_weights, whole
from samples import numbered, pairs
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from leyden import Callback, CheckpointError, ConfigurationError, DataModule, Trainer
from leyden.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)

DATA = list(DataLoader(pairs(24), 4))
HELD_OUT = list(DataLoader(pairs(8, seed=1), 4))
MONITOR = "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': 0}"


def adam(module: nn.Module) -> Any:
    """Returns Adam with a group per parameter, a scheduler of steps, and one of epochs that monitors the validation."""
    optimizer = torch.optim.Adam(
        [{"params": [part], "lr": 0.05 * (1 + n)} for n, part in enumerate(module.parameters())]
    )
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
    return [optimizer], [
        {"scheduler": StepLR(optimizer, 4, 0.9), "interval": "step"},
        {"scheduler": plateau, "monitor": "val_loss"},
    ]


def regression(configure: Any = adam) -> Regression:
    torch.manual_seed(3)
    return Regression(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), configure)


def plain(window: int = 1) -> PlainRun:
    module = regression()
    [optimizer], [step_lr, plateau] = adam(module)
    return PlainRun(module, optimizer, step_lr["scheduler"], plateau["scheduler"], window)


def resume(module: Any, path: Path, epochs: int = 4, **arguments: Any) -> tuple[Trainer, str]:
    """Resumes from a file; returns the Trainer and the warning about what cannot be restored."""
    trainer = Trainer(**{**QUIET, "max_epochs": epochs, **arguments})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DATA, HELD_OUT, ckpt_path=path, trust=True)
    [message] = [str(one.message) for one in caught if "Lightning" in str(one.message)]
    return trainer, message


@pytest.mark.parametrize("window", [1, 3])
def test_a_fit_resumes_from_every_moment_at_which_lightning_saves(tmp_path: Path, window: int) -> None:
    run, files = plain(window), []

    def save(moment: str, epoch: int, done: int) -> None:
        if epoch in (1, 2):
            files.append(tmp_path / f"{epoch}-{done}-{moment}.ckpt")
            values = {MONITOR: {"monitor": "val_loss", "current_score": run.val_loss}}
            run.write(files[-1], moment, epoch, done, len(DATA), callbacks=values)

    run.train(DATA, HELD_OUT, 4, save)
    assert len(files) == 18
    for path in files:
        module = regression()
        trainer, message = resume(module, path, accumulate_grad_batches=window)
        assert same_weights(module, run.module), path.name
        assert (trainer.global_step, trainer.current_epoch, trainer.progress.batches) == (24 // window, 4, 24)
        inside = path.name.split("-")[1] in ("1", "2", "4", "5") and window == 3
        assert ("the gradients of an open window" in message) == inside
        assert (
            "random numbers (Lightning does not save them" in message and "a step of ReduceLROnPlateau" not in message
        )


def test_a_plateau_without_its_value_misses_a_step_with_a_warning(tmp_path: Path) -> None:
    run = plain()
    run.train(DATA, HELD_OUT, 2, lambda *at: run.write(tmp_path / f"{at[0]}.ckpt", *at, len(DATA)))
    for moment in ("validation", "epoch"):
        trainer, message = resume(regression(), tmp_path / f"{moment}.ckpt", epochs=3)
        assert "a step of ReduceLROnPlateau (no callback has saved 'val_loss')" in message
        assert trainer.current_epoch == 3 and trainer.lr_schedulers[1].last_epoch == 2
    run.write(tmp_path / "old.ckpt", "end", 1, 6, 6)
    found = torch.load(tmp_path / "old.ckpt")
    torch.save({**found, "loops": None}, tmp_path / "old.ckpt")
    trainer, message = resume(regression(), tmp_path / "old.ckpt", epochs=3)
    assert "the position in the epoch (the file has no loops)" in message and trainer.global_step == 18


class Adversaries(Squares):
    """Two optimizers, stepped by hand once per batch."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
        self.automatic_optimization, self.seen = False, 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for part in self.net]


class CountsLoads(DataModule):
    """A data module whose number grows by one with each load of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"] + 1

    def train_dataloader(self) -> Any:
        return numbered(4, start=1)


class Counted(Callback):
    """A user's callback, whose state has the same form in Lightning and Leyden."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_manual_optimization_the_datamodule_and_user_entries_are_restored(tmp_path: Path) -> None:
    module, path = Adversaries(), tmp_path / "gan.ckpt"
    optimizers = module.configure_optimizers()
    for number, batch in enumerate(numbered(4, start=1) * 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
        if number == 1:
            more: Any = {
                "seen": 5,
                "CountsLoads": {"number": 3},
                "callbacks": {"Counted": {"number": 9}, "Gone": {"x": 1}},
            }
            found = entries(module, optimizers, [], step=4, epoch=0, **more)
            torch.save({**found, "loops": loops("batch", 0, 2, 4)}, path)
    again, data, counted = Adversaries(), CountsLoads(), Counted()
    trainer = Trainer(**QUIET, max_epochs=2, callbacks=[counted])
    with pytest.warns(UserWarning, match=r"the state of Gone \(this fit has no such callback\)"):
        trainer.fit(again, datamodule=data, ckpt_path=path, trust=True)
    assert same_weights(again, module)
    assert (trainer.global_step, again.seen, data.number, counted.number) == (8, 5, 4, 9)


def test_checkpoints_and_early_stopping_continue_and_other_callbacks_start_anew(tmp_path: Path) -> None:
    run, path = plain(), tmp_path / "run.ckpt"
    run.train(DATA, HELD_OUT, 2)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.ckpt").write_bytes(b"weights")
    ranking = {
        "monitor": "val_loss",
        "dirpath": str(tmp_path),
        "best_model_path": str(tmp_path / "a.ckpt"),
        "best_model_score": torch.tensor(0.001),
        "current_score": torch.tensor(9.0),
        "best_k_models": {str(tmp_path / "a.ckpt"): torch.tensor(0.001), str(tmp_path / "b.ckpt"): torch.tensor(1e6)},
        "last_model_path": str(tmp_path / "c.ckpt"),
    }
    stopping = {"wait_count": 2, "stopped_epoch": 0, "best_score": torch.tensor(0.001), "patience": 5}
    callbacks = {
        "ModelCheckpoint{'monitor': None, 'mode': 'min'}": {"monitor": None, "dirpath": "/elsewhere"},
        MONITOR: ranking,
        "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": stopping | {"stopping_reason": 0},
        "Timer": {"time_elapsed": {"train": 1000.0, "test": 2}},
    }
    run.write(path, "end", 1, 6, 6, callbacks=callbacks)
    best, latest = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2), ModelCheckpoint(tmp_path / "latest")
    stop, timer = EarlyStopping("val_loss", patience=5), Timer()
    arguments = {**QUIET, "enable_checkpointing": True, "callbacks": [latest, best, stop, timer]}
    trainer, message = resume(regression(), path, epochs=3, **arguments)
    assert "ModelCheckpoint" not in message and "the state of Timer" in message
    assert best.best_model_path == str(tmp_path / "a.ckpt") and float(best.best_model_score) == pytest.approx(0.001)
    # The new checkpoint replaces b in the ranking; b is not deleted, since Lightning wrote it.
    assert str(tmp_path / "b.ckpt") not in best.best_k_models and (tmp_path / "b.ckpt").exists()
    assert len(best.best_k_models) == 2
    assert stop.wait_count == 3 and float(stop.best_score) == pytest.approx(0.001)
    assert timer.time_elapsed("train") < 1000 and trainer.progress.seconds < 1000
    elsewhere = ModelCheckpoint(tmp_path / "elsewhere", monitor="val_loss")
    _, message = resume(regression(), path, epochs=3, callbacks=[elsewhere], **QUIET | {"enable_checkpointing": True})
    assert "set dirpath to rank them too" in message and str(tmp_path) not in elsewhere.best_model_path[:1]


def averaged(path: Path) -> nn.Module:
    """Runs Lightning's EMAWeightAveraging and saves after step 5; returns the final weights."""
    run = plain()
    ema = AveragedModel(run.module.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]

    def save(moment: str, epoch: int, done: int) -> None:
        if moment != "batch":
            return
        ema.update_parameters(run.module.net)
        if (epoch, done) == (0, 5):
            names = [f"net.{name}" for name in run.module.net.state_dict()]
            average = dict(zip(names, [t.clone() for t in ema.module.state_dict().values()], strict=True))
            more = {
                "current_model_state": {name: t.clone() for name, t in run.module.state_dict().items()},
                "averaging_state": {"n_averaged": ema.n_averaged.clone()},
                "callbacks": {"EMAWeightAveraging": {"latest_update_step": 5}},
            }
            run.write(path, "batch", 0, 5, 6, **more)
            found = torch.load(path)
            torch.save({**found, "state_dict": average}, path)

    run.train(DATA, HELD_OUT, 2, save)
    return run.module


class TrainedWeights(Callback):
    """Keeps the trained weights of the last batch, before averages replace them."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.last = deepcopy(module.state_dict())


def test_the_trained_weights_continue_and_averages_start_anew(tmp_path: Path) -> None:
    trained, path = averaged(tmp_path / "ema.ckpt"), tmp_path / "ema.ckpt"
    for averaging in ([], [EMAWeightAveraging(decay=0.5)]):
        kept = TrainedWeights()
        _, message = resume(regression(), path, epochs=2, callbacks=[*averaging, kept])
        assert all(torch.equal(tensor, kept.last[name]) for name, tensor in trained.state_dict().items())
        assert "the averaged weights" in message and "EMAWeightAveraging" in message
    # Evaluation uses the averages.
    module, saved = regression(), torch.load(path)["state_dict"]
    Trainer(**QUIET).validate(module, HELD_OUT, ckpt_path=path, trust=True, verbose=False)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())


def test_unrestorable_state_warns_and_mismatched_state_raises(tmp_path: Path) -> None:
    run, path = plain(), tmp_path / "run.ckpt"
    run.train(DATA, HELD_OUT, 1)
    swa = {"n_averaged": 0, "latest_update_epoch": 0, "scheduler_state": {"last_epoch": 1}, "average_model_state": {}}
    more: Any = {"callbacks": {"StochasticWeightAveraging": swa}, "MixedPrecision": {"scale": 2.0}}
    run.write(path, "end", 0, 6, 6, hyper_parameters={"width": 5}, **more)
    run.write(tmp_path / "plain.ckpt", "end", 0, 6, 6)

    def one(module: Any) -> Any:
        return adam(module)[0]

    def one_scheduler(module: Any) -> Any:
        [optimizer], [step_lr, _] = adam(module)
        return [optimizer], [step_lr]

    with pytest.raises(ConfigurationError, match="the checkpoint has 2 schedulers, and configure_optimizers made 1"):
        resume(regression(one_scheduler), tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match="is a pickle, which can run any code.*pass trust=True"):
        Trainer(**QUIET).fit(regression(), DATA, ckpt_path=path)
    found = torch.load(path)
    torch.save({**found, "global_step": "three"}, tmp_path / "bad.ckpt")
    with pytest.raises(CheckpointError, match="global_step is 'three', and must be a whole number"):
        resume(regression(), tmp_path / "bad.ckpt")

    class Wide(Regression):
        def __init__(self, width: int) -> None:
            super().__init__(regression().net, one)
            self.save_hyperparameters()

    averaging = StochasticWeightAveraging(0.1, swa_epoch_start=3)
    torch.save({**found, "lr_schedulers": []}, path)
    with pytest.raises(CheckpointError, match=r"optimizer_states\[0\].*groups of \[1, 1, 1, 1\] parameters.*of \[4\]"):
        resume(regression(lambda module: torch.optim.Adam(module.parameters())), path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(**QUIET, max_epochs=2, callbacks=[averaging]).fit(Wide(6), DATA, ckpt_path=path, trust=True)
    message = " ".join(str(one.message) for one in caught)
    assert "the state of StochasticWeightAveraging" in message and "the state of schedulers" in message
    assert "the gradient scaler (this fit's precision has none)" in message
    assert "the hyperparameter width was 5 and is 6" in message


def test_a_weights_only_file_starts_a_new_run_with_a_warning(tmp_path: Path) -> None:
    run, path = plain(), tmp_path / "weights.ckpt"
    run.train(DATA, HELD_OUT, 1)
    run.write(path, "end", 0, 6, 6)
    kept = ("state_dict", "epoch", "global_step", "pytorch-lightning_version", "loops")
    torch.save({key: value for key, value in torch.load(path).items() if key in kept}, path)
    module = regression()
    with pytest.warns(UserWarning, match="has no optimizer_states.*fit loads its weights"):
        Trainer(**QUIET, limit_train_batches=0).fit(module, DATA, ckpt_path=path, trust=True)
    assert same_weights(module, run.module)
    run.write(path, "batch", 0, 2, 6)
    for restore, steps in (("weights", 6), ({"weights", "loaders"}, 6), ({"weights", "progress"}, 12)):
        trainer = Trainer(**QUIET, max_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(regression(), DATA, HELD_OUT, ckpt_path=path, trust=True, restore=restore)
        assert (trainer.global_step, trainer.progress.batch) == (steps, 6)


def test_the_gradient_scaler_is_restored(tmp_path: Path) -> None:
    run, path = plain(), tmp_path / "run.ckpt"
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=9)
    scaler.scale(torch.ones(1))
    more = {"MixedPrecision": scaler.state_dict(), "callbacks": None}
    run.train(DATA, HELD_OUT, 1, lambda *at: run.write(path, *at, 6, **more) if at[0] == "end" else None)
    trainer, message = resume(regression(), path, epochs=2, precision="16-mixed")
    state = trainer.strategy.precision.state_dict()["scaler"]
    assert (state["scale"], state["growth_interval"], state["_growth_tracker"]) == (256.0, 9, 6)
    assert "the gradient scaler (" not in message


class StatefulLoader:
    """A loader with a state, like torchdata's StatefulDataLoader, and an order that no seed reproduces."""

    def __init__(self) -> None:
        self.order, self.at = [5, 2, 0, 4, 1, 3], 0

    def __iter__(self) -> Any:
        while self.at < 6:
            self.at += 1
            yield DATA[self.order[self.at - 1]]
        self.at = 0

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


def test_a_stateful_loader_resumes_in_its_own_order(tmp_path: Path) -> None:
    run, path, order = plain(), tmp_path / "run.ckpt", [3, 1, 5, 0, 4, 2]
    batches = [DATA[number] for number in order]
    run.train(batches, HELD_OUT, 1, lambda *at: run.write(path, *at, 6) if at[2] == 4 else None)
    found = torch.load(path)
    found["loops"]["fit_loop"]["state_dict"] = {"combined_loader": [{"order": order, "at": 4}]}
    found["callbacks"] = {MONITOR: {"monitor": "val_loss", "current_score": run.val_loss}}
    torch.save(found, path)
    module = regression()
    with pytest.warns(UserWarning, match="a Lightning checkpoint"):
        Trainer(**QUIET, max_epochs=1).fit(module, StatefulLoader(), HELD_OUT, ckpt_path=path, trust=True)
    assert same_weights(module, run.module)


def test_a_plugin_can_read_lightning_files(tmp_path: Path) -> None:
    class Reading:
        def load_checkpoint(self, path: Any) -> Any:
            return torch.load(f"{path}.ckpt")

        def save_checkpoint(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError

        remove_checkpoint = save_checkpoint

    run = plain()
    run.train(DATA, HELD_OUT, 2, lambda *at: run.write(tmp_path / f"{at[0]}.ckpt", *at, 6) if at[1] == 0 else None)
    module = regression()
    _, message = resume(module, tmp_path / "end", epochs=2, plugins=Reading())
    assert same_weights(module, run.module) and "random numbers" in message


def test_a_plateau_ignores_the_value_of_another_checkpoint_callback(tmp_path: Path) -> None:
    """Only the value of the ModelCheckpoint that saved the file is from that moment."""
    run, path = plain(), tmp_path / "epoch.ckpt"

    def save(*at: Any) -> None:
        own = {"monitor": "val_loss", "current_score": run.val_loss, "best_k_models": {f"/far/{path.name}": 0}}
        other = {"monitor": "loss", "current_score": torch.tensor(-5.0), "best_k_models": {"/far/other.ckpt": 0}}
        run.write(path, *at, 6, callbacks={"ModelCheckpoint{'monitor': 'loss'}": other, MONITOR: own})
        path.with_name("renamed.ckpt").write_bytes(path.read_bytes())

    run.train(DATA, HELD_OUT, 3, lambda *at: save(*at) if at[:2] == ("epoch", 1) else None)
    module = regression()
    trainer, _ = resume(module, path, epochs=3)
    assert same_weights(module, run.module) and "loss" in trainer.callback_metrics
    _, message = resume(regression(), path.with_name("renamed.ckpt"), epochs=3)
    assert "a step of ReduceLROnPlateau (no callback has saved 'val_loss')" in message


def adamw_with_step_lr(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


def resumed_under_ddp_and_fsdp(path: str) -> Any:
    """Resumes from a file under both strategies; returns weights, step and number of warnings of each."""
    found = []
    for strategy in ("ddp", "fsdp"):
        module = regression(adamw_with_step_lr).double()
        trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=3, precision="64-true")
        data = DataLoader([(x.double(), y.double()) for x, y in pairs(24)], 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, data, ckpt_path=path, trust=True)
        warned = sum("a Lightning checkpoint" in str(one.message) for one in caught)
        found.append(([whole(tensor).tolist() for tensor in module.state_dict().values()], trainer.global_step, warned))
    return found


def test_two_ranks_resume_under_ddp_and_fsdp(tmp_path: Path) -> None:
    module, path = regression(adamw_with_step_lr).double(), tmp_path / "run.ckpt"
    [optimizer], [step_lr] = adamw_with_step_lr(module)
    run = PlainRun(module, optimizer, step_lr["scheduler"])
    data = [(x.double(), y.double()) for x, y in DATA]

    def save(moment: str, epoch: int, done: int) -> None:
        if (moment, epoch, done) == ("batch", 1, 4):
            more = {"current_model_state": deepcopy(module.state_dict())}
            run.write(path, moment, epoch, done, 6, **more)
            averages = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
            torch.save({**torch.load(path), "state_dict": averages}, path)

    run.train(data, data[:1], 3, save)
    ranks = run_world(2, resumed_under_ddp_and_fsdp, str(path))
    for rank, found in enumerate(ranks):
        for weights, step, warned in found:
            assert step == 18 and warned == (rank == 0)
            for own, theirs in zip(weights, module.state_dict().values(), strict=True):
                torch.testing.assert_close(torch.tensor(own, dtype=torch.float64), theirs, rtol=0, atol=1e-12)
