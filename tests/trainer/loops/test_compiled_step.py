"""`Trainer(compile="step")`: the weights of an ordinary run, exact resume, and refusals that name the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from same import differences, same_weights, weights_of
from samples import labeled
from torch import Tensor, nn, optim
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.callbacks import Callback, CSVLogger, GradNormMonitor, LearningRateMonitor, ModelCheckpoint, WeightAveraging
from leyden.trainer.loops import compiled_step
from leyden.trainer.profilers import SimpleProfiler

TRACED = {"backend": "aot_eager"}
"""Traces the graph as for inductor, and runs it without generating code."""


class Net(TrainModule):
    """A classifier with two parameter groups.

    Args:
        make: makes the optimizer from parameter groups.
        schedule: makes the scheduler, stepped every step.
    """

    def __init__(
        self, make: Callable[[Any], optim.Optimizer] = optim.AdamW, schedule: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.make, self.schedule = make, schedule

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.last(torch.tanh(self.first(batch[0]))), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make([{"params": self.first.parameters()}, {"params": self.last.parameters()}])
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


def loader(count: int = 80) -> DataLoader[Any]:
    return DataLoader(labeled(count), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def apart(one: nn.Module, other: nn.Module) -> float:
    """Returns the largest difference of two modules' weights."""
    return max(float((p - q).detach().abs().max()) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, 0.1, momentum=0.9, weight_decay=0.05)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize(("make", "clipping"), [(sgd, None), (optim.AdamW, 0.5)])
def test_the_graph_trains_like_an_ordinary_step(make: Any, clipping: Any, precision: str, quiet: Any) -> None:
    """Inductor generates the code. Weight decay of a linear layer is where it drops a factor (`ExplicitAlpha`)."""
    for steps, most in ((1, 1e-6), (20, 1e-5)):
        modules = Net(make), Net(make)
        for module, compiles in zip(modules, (None, "step"), strict=True):
            arguments = {**quiet, "gradient_clip_val": clipping, "precision": precision, "compile": compiles}
            Trainer(max_steps=steps, **arguments).fit(module, loader())
        assert apart(*modules) <= (5e-3 if precision == "bf16-mixed" else most)
        assert apart(modules[0], Net(make)) > 1e-4


KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda groups: optim.SGD(groups, 0.1),
    "dampened": lambda groups: optim.SGD(groups, 0.1, momentum=0.9, dampening=0.1),
    "Adam": lambda groups: optim.Adam(groups, amsgrad=True),
    "Adagrad": optim.Adagrad,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "NAdam": optim.NAdam,
    "RMSprop": lambda groups: optim.RMSprop(groups, momentum=0.9, weight_decay=0.1),
    "Rprop": optim.Rprop,
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_torch_are_traced(kind: str, quiet: Any) -> None:
    modules = Net(KINDS[kind]), Net(KINDS[kind])
    Trainer(max_steps=3, **quiet).fit(modules[0], loader())
    Trainer(max_steps=3, compile=TRACED, **quiet).fit(modules[1], loader())
    assert apart(*modules) < 2e-6 and apart(modules[0], Net()) > 1e-4


class LoadsItsOwnState(Callback):
    """Replaces the optimizer's groups and states in the middle of a fit, as a rollback does."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            [optimizer] = trainer.optimizers
            optimizer.load_state_dict(optimizer.state_dict())


def test_groups_that_are_replaced_keep_their_schedule(quiet: Any) -> None:
    """Learning rates of the groups before would stay what they were."""
    modules = [Net(schedule=lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 2, 0.5)) for _ in range(2)]
    for module, compiles in zip(modules, (None, TRACED), strict=True):
        Trainer(max_steps=8, compile=compiles, callbacks=LoadsItsOwnState(), **quiet).fit(module, loader())
    assert apart(*modules) < 2e-6 and apart(modules[0], Net()) > 1e-4


class Growing(optim.Optimizer):
    """Adds to its state in its first step, and again once a group is "slow"."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1, "slow": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if len(state) == 0:
                    state["mean"] = parameter.grad.clone()
                change = state["mean"].mul_(0.9).add_(parameter.grad)
                if group["slow"]:
                    if len(state) == 1:
                        state["slow"] = parameter.clone()
                    change = change + parameter - state["slow"].lerp_(parameter.to(state["slow"].dtype), 0.5)
                parameter.sub_((group["lr"] * change).to(parameter.dtype))


class Reshapes(Callback):
    """Changes which entries the states have, and their dtype, in the middle of a fit."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        [optimizer] = trainer.optimizers
        if trainer.global_step == 3:
            for group in optimizer.param_groups:
                group["slow"] = True
        if trainer.global_step in (6, 9):
            dtype = torch.float64 if trainer.global_step == 6 else torch.float32
            for parameter, state in optimizer.state.items():
                optimizer.state[parameter] = {name: entry.to(dtype) for name, entry in state.items()}
        if trainer.global_step == 12:
            optimizer.state.clear()


def test_states_that_change_their_form_are_followed(quiet: Any) -> None:
    modules = Net(Growing), Net(Growing)
    for module, compiles in zip(modules, (None, TRACED), strict=True):
        Trainer(max_steps=16, compile=compiles, callbacks=Reshapes(), **quiet).fit(module, loader())
    assert apart(*modules) < 2e-6 and apart(modules[0], Net()) > 1e-4


class Unfreezes(Callback):
    """Trains the first layer from the fourth step on."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.first.requires_grad_(False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.first.requires_grad_(trainer.global_step >= 3)


@pytest.mark.parametrize("make", [sgd, optim.AdamW])
def test_a_layer_that_is_unfrozen_begins_to_train(make: Any, quiet: Any) -> None:
    modules = Net(make), Net(make)
    for module, compiles in zip(modules, (None, TRACED), strict=True):
        Trainer(max_steps=8, compile=compiles, callbacks=Unfreezes(), **quiet).fit(module, loader())
    assert apart(*modules) < 2e-6 and apart(modules[0].first, Net().first) > 1e-4


class Recorded(Callback):
    """Keeps a copy of the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = weights_of(pl_module)


def test_asynchronous_saves_hold_the_weights_of_their_step(quiet: Any, tmp_path: Path) -> None:
    recorded, saves = Recorded(), ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, asynchronous=True)
    arguments = {**quiet, "enable_checkpointing": True, "callbacks": [recorded, saves]}
    Trainer(max_steps=8, compile=TRACED, **arguments).fit(Net(), loader())
    files = sorted(tmp_path.rglob("model.safetensors"))
    assert len(files) == 8
    for file in files:
        step = int(file.parent.name.partition("step=")[2])
        assert not differences(dict(sorted(load_file(file).items())), dict(sorted(recorded.weights[step].items())))


class Muon(Net):
    """Muon for matrices, AdamW for the rest: two optimizers, and a loss that is a sum with its number of items."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        logits = self.last(torch.tanh(self.first(batch[0])))
        loss = F.cross_entropy(logits, batch[1], reduction="sum")
        return {"loss": loss, "num_items": torch.tensor(len(logits)), "logits": logits}

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        return [optim.Muon(matrices, 0.01), optim.AdamW(p for p in self.parameters() if p.dim() < 2)]


class Outputs(Callback):
    """Collects the outputs of the steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(outputs)


def test_several_optimizers_and_a_loss_with_items(quiet: Any) -> None:
    modules, outputs = (Muon(), Muon()), (Outputs(), Outputs())
    for module, output, compiles in zip(modules, outputs, (None, TRACED), strict=True):
        arguments = {**quiet, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "compile": compiles}
        Trainer(max_steps=3, callbacks=output, **arguments).fit(module, loader())
    # Muon orthogonalizes in bfloat16.
    assert apart(*modules) < 1e-3
    for plain, compiled in zip(*(output.seen for output in outputs), strict=True):
        assert torch.allclose(plain["loss"], compiled["loss"], atol=1e-2)
        assert not compiled["logits"].requires_grad and compiled["logits"].shape == (4, 3)
    assert all(p.grad is None for p in modules[1].parameters())


@pytest.mark.parametrize(
    "schedule", [lambda o: CosineAnnealingLR(o, 20), lambda o: OneCycleLR(o, 0.2, 20, cycle_momentum=False)]
)
def test_schedules_and_a_short_last_batch_are_not_compiled_for_each_step(
    schedule: Any, tmp_path: Path, quiet: Any
) -> None:
    modules, rates = (Net(sgd, schedule), Net(sgd, schedule)), []
    counters.clear()
    for module, compiles in zip(modules, (None, TRACED), strict=True):
        arguments = {**quiet, "logger": CSVLogger(tmp_path), "compile": compiles}
        trainer = Trainer(max_epochs=1, callbacks=[WeightAveraging(), LearningRateMonitor()], **arguments)
        trainer.fit(module, loader(78))
        rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
    assert apart(*modules) < 1e-6 and rates[0] == rates[1] and type(rates[1][0]) is float
    assert counters["stats"]["unique_graphs"] <= 4


def test_a_resumed_run_ends_with_the_same_bits_and_changes_its_mind_about_compile(tmp_path: Path, quiet: Any) -> None:
    def run(folder: str, compiles: Any, ckpt_path: Path | None = None) -> Net:
        module = Net(schedule=lambda optimizer: CosineAnnealingLR(optimizer, 40))
        checkpoint = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=7, save_top_k=-1)
        arguments = {**quiet, "enable_checkpointing": True, "compile": compiles}
        Trainer(max_epochs=2, callbacks=checkpoint, **arguments).fit(module, loader(), ckpt_path=ckpt_path)
        return module

    whole, eager = run("whole", "step"), run("eager", None)
    saved = "step=27", "step=28"
    folder = next(path for path in sorted((tmp_path / "whole").iterdir()) if path.name.startswith(saved))
    other = tmp_path / "eager" / folder.name
    assert same_weights(whole, run("resumed", "step", folder))
    assert apart(whole, run("on", "step", other)) < 1e-5
    assert apart(eager, run("off", None, folder)) < 1e-5


SCALE = 1.0


class Scaled(Net):
    """Reads a global of the user's, and calls a function that is one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return SCALE * loss_of(self.last(torch.tanh(self.first(batch[0]))), batch[1])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


class ChangesGlobals(Callback):
    """Changes the user's globals between two steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.monkeypatch.setitem(globals(), "SCALE", 0.5)
        if trainer.global_step == 4:
            self.monkeypatch.setitem(globals(), "loss_of", lambda logits, targets: logits.square().mean())


def test_a_step_sees_the_users_globals_change_and_does_not_check_torchs(
    quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[str] = []
    kept_guards = compiled_step.kept_guards

    def recorded(guards: Any) -> list[bool]:
        kept = kept_guards(guards)
        dropped.extend(guard.name for guard, keeps in zip(guards, kept, strict=True) if not keeps)
        return kept

    monkeypatch.setattr(compiled_step, "kept_guards", recorded)
    modules = Scaled(), Scaled()
    for module, compiles in zip(modules, (None, "step"), strict=True):
        with monkeypatch.context() as changed:
            callbacks = ChangesGlobals(changed)
            Trainer(max_steps=6, compile=compiles, callbacks=callbacks, **quiet).fit(module, loader())
    assert apart(*modules) < 2e-6 and apart(modules[0], Net()) > 1e-4
    assert any("torch_dot_optim" in name for name in dropped) and not any(
        "test_compiled_step" in name for name in dropped
    )


def test_a_profiler_times_the_graph_as_the_training_step(quiet: Any) -> None:
    profiler = SimpleProfiler()
    Trainer(max_steps=3, compile=TRACED, profiler=profiler, **quiet).fit(Net(), loader())
    assert len(profiler.durations["training_step"]) == 3


class Dropping(Net):
    """Draws random numbers in the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.last(F.dropout(torch.tanh(self.first(batch[0])), 0.3)), batch[1])


def test_random_numbers_of_the_graph_are_resumed(tmp_path: Path, quiet: Any) -> None:
    def run(seed: int, steps: int, ckpt_path: Path | None = None) -> Net:
        module = Dropping()
        torch.manual_seed(seed)
        arguments = {**quiet, "enable_checkpointing": True, "compile": "step", "max_steps": steps}
        checkpoint = ModelCheckpoint(tmp_path / str(steps), "{step}", every_n_train_steps=5)
        Trainer(callbacks=checkpoint, **arguments).fit(module, loader(), ckpt_path=ckpt_path)
        return module

    whole = run(1, 10)
    run(1, 5)
    [folder] = (tmp_path / "5").glob("step=5*")
    assert same_weights(whole, run(2, 10, folder)) and not same_weights(whole, run(2, 10))


class Printing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        print(loss.item())
        return loss


class WithoutLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"los": batch[0].sum()}


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class AfterBackward(Net):
    def on_after_backward(self) -> None:
        raise AssertionError("never called")


class OwnStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("never called")


def hooked(groups: Any) -> optim.Optimizer:
    optimizer = optim.SGD(groups, 0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Printing, {}, r"cannot trace .*test_compiled_step.py, line \d+, 'print\(loss.item\(\)\)'.*Move that line"),
        (WithoutLoss, {}, "without 'loss'"),
        (lambda: Net(optim.RAdam), {}, "radam.py.*another optimizer"),
        (Manual, {}, "manual optimization"),
        (AfterBackward, {}, "AfterBackward.on_after_backward"),
        (OwnStep, {}, "OwnStep.optimizer_step"),
        (Net, {"callbacks": [GradNormMonitor()]}, "GradNormMonitor.on_before_optimizer_step"),
        (lambda: Net(lambda groups: optim.Adam(groups, fused=True)), {}, "fused=True"),
        (lambda: Net(hooked), {}, "hooks that are registered with SGD"),
        (lambda: Net(lambda groups: optim.LBFGS(groups[0]["params"])), {}, "LBFGS"),
        (lambda: Net(schedule=lambda o: OneCycleLR(o, 0.1, 9)), {}, "cycle_momentum=False"),
    ],
)
def test_what_has_no_place_in_one_graph_is_refused(make: Any, arguments: Any, message: str, quiet: Any) -> None:
    trainer = Trainer(max_steps=2, compile=TRACED, **{**quiet, **arguments})
    module = make()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(module, loader())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compile": True}, "use 'step'.*torch.compile\\(module\\)"),
        ({"compile": {"fullgraph": False}}, "Known: backend, dynamic, mode, options"),
        ({"compile": "step", "accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"compile": "step", "accumulate_grad_batches": "auto"}, "accumulate_grad_batches='auto'"),
        ({"compile": "step", "detect_anomaly": True}, "detect_anomaly=True"),
        ({"compile": "step", "precision": "16-mixed"}, "'bf16-mixed' or '32-true'"),
        ({"compile": "step", "devices": 2}, "strategy='ddp': set devices=1"),
    ],
)
def test_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(accelerator="cpu", **arguments)


def test_more_fits_than_torch_compiles_one_function(quiet: Any) -> None:
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        trainer = Trainer(max_steps=1, compile={"backend": "eager"}, **quiet)
        trainer.fit(Net(sgd), loader(8))
    assert isinstance(trainer.callback_metrics["loss"], Tensor)
