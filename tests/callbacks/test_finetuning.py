"""BaseFinetuning and BackboneFinetuning: learning rates, batch norm, resumes in each phase, and several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge_json
from models import QUIET, Squares
from ranks.world import run_world
from same import differences
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer, TrainModule
from leyden.callbacks import BackboneFinetuning, BaseFinetuning, Callback, EMAWeightAveraging, ModelCheckpoint
from leyden.callbacks.finetuning import multiplicative
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import OPTIMIZERS
from leyden.core.errors import StateError
from leyden.strategies.fsdp.sharding import whole

Scheduled = Callable[[Optimizer], Any]
EPOCHS, AT, SAMPLES = 4, 2, 16


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class Net(Squares):
    """A backbone with batch norm and a head; records the learning rates of each batch."""

    def __init__(self, schedule: Scheduled | None = None, kind: Any = AdamW) -> None:
        super().__init__(nn.Identity())
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.head = nn.Linear(4, 2)
        self.schedule, self.kind = schedule, kind
        self.rates: list[list[float]] = []

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        loss = self(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(trained(self), lr=0.1)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class Stages(BaseFinetuning):
    """Trains the head; from the second epoch on also the backbone's last layer, and from the third all of it."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer, lr=0.02)
        elif epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.backbone[:2]], optimizer)


class AddsGroupInHook(Net):
    """Adds a parameter group in a hook of the module, without a callback."""

    def __init__(self, schedule: Scheduled | None = None, kind: Any = AdamW) -> None:
        super().__init__(schedule, kind)
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == AT:
            self.backbone.requires_grad_(True)
            optimizer = self.trainer.optimizers[0]
            optimizer.add_param_group({"params": list(self.backbone.parameters()), "lr": 0.01, "weight_decay": 0.3})


def backbone(**arguments: Any) -> BackboneFinetuning:
    return BackboneFinetuning(**{"unfreeze_backbone_at_epoch": AT, **arguments})


def data(samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(torch.randn(samples, 4, generator=torch.Generator().manual_seed(1)), 4)  # type: ignore[arg-type]


def fit(module: TrainModule, *callbacks: Callback, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    trainer = Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": EPOCHS, **arguments})
    trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: whole(tensor).detach().clone() for name, tensor in tensors}


def state_of(trainer: Trainer) -> list[Any]:
    """Returns the optimizer's state of each parameter, and the options of its groups."""
    [optimizer] = trainer.optimizers
    names = {id(parameter): name for name, parameter in trainer.module.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(p)]: {k: whole(v).tolist() for k, v in own.items()} for p, own in optimizer.state.items()}
    return [groups, state, [scheduler.state_dict() for scheduler in trainer.lr_schedulers]]


# learning rates and trained parameters --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]),
        ({"should_align": False}, [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]),
        ({"backbone_initial_lr": 0.03, "lambda_func": lambda epoch: 1.5}, [0.03, 0.045, 0.0675, 0.1, 0.1, 0.1]),
        ({"backbone_initial_ratio_lr": 0.5, "lambda_func": lambda epoch: 1 / epoch}, [0.05, 0.0125, 0.0025]),
        ({"unfreeze_backbone_at_epoch": 0, "initial_denom_lr": 3.0}, [0.01, 0.02, 0.04, 0.08, 0.1, 0.1]),
    ],
)
def test_the_backbones_learning_rate_follows_its_schedule(arguments: dict[str, Any], expected: list[float]) -> None:
    module, callback = Net(), backbone(**arguments)
    at = callback.unfreeze_backbone_at_epoch
    fit(module, callback, max_epochs=at + len(expected), limit_val_batches=0)
    by_epoch = module.rates[::4]
    assert module.rates == [rates for rates in by_epoch for _ in range(4)]
    assert by_epoch[:at] == [[0.1]] * at
    assert [rates[1] for rates in by_epoch[at:]] == pytest.approx(expected, rel=1e-12)
    assert all(rates[0] == 0.1 for rates in by_epoch)
    assert multiplicative(3) == 2.0


def test_backbone_finetuning_equals_a_plain_loop_bit_for_bit() -> None:
    module, model = Net(kind=SGD), Net(kind=SGD)
    fit(module, backbone(train_bn=False), limit_val_batches=0)
    model.backbone.requires_grad_(False)
    model.backbone[1].track_running_stats = False
    optimizer = SGD(model.head.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        if epoch == AT:
            layers = [model.backbone[0], model.backbone[2]]
            for layer in layers:
                layer.requires_grad_(True)
            optimizer.add_param_group({"params": [p for layer in layers for p in layer.parameters()], "lr": 0.1 * 0.1})
        elif epoch > AT:
            optimizer.param_groups[1]["lr"] *= 2.0
        for batch in data():
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    assert not differences(weights(module), weights(model))


def test_batch_norm_is_trained_in_a_frozen_backbone_unless_train_bn_is_false() -> None:
    for train_bn in (True, False):
        module, before = Net(), weights(Net())
        trainer = fit(module, backbone(train_bn=train_bn), max_epochs=1)
        after = weights(module)
        moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        norm = {
            f"backbone.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        }
        assert moved == {"head.weight", "head.bias"} | (norm if train_bn else set())
        assert len(trainer.optimizers[0].param_groups[0]["params"]) == (4 if train_bn else 2)
        # After unfreezing, batch norm is trainable only with train_bn.
        module = Net()
        trainer = fit(module, backbone(train_bn=train_bn))
        assert len(trainer.optimizers[0].param_groups[1]["params"]) == 4
        assert module.backbone[1].weight.requires_grad is train_bn
        assert module.backbone[1].track_running_stats is train_bn


def test_a_second_fit_refreezes_the_backbone_and_a_continued_fit_does_not() -> None:
    module = Net()
    trainer = fit(module, backbone())
    assert len(trained(module)) == 8
    trainer.fit(module, data(), max_epochs=1)
    assert len(trained(module)) == 4
    module, straight = Net(), Net()
    trainer = fit(module, backbone(), max_epochs=AT + 1)
    trainer.fit(module, data(), data(), ckpt_path="current", max_epochs=EPOCHS)
    fit(straight, backbone())
    assert module.rates == straight.rates and not differences(weights(module), weights(straight))


def test_verbose_prints_both_learning_rates(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Net(), backbone(verbose=True, rounding=3))
    assert "learning rate: 0.1, backbone: 0.02" in capsys.readouterr().out


def test_finetune_function_runs_for_each_optimizer_under_manual_optimization() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.scale = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward((self.scale * self(batch)).pow(2).mean())
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, 1.0)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [SGD(self.head.parameters(), lr=0.1), SGD([self.scale], lr=0.2)]

    class UnfreezesInSecondOptimizer(Stages):
        def __init__(self) -> None:
            self.calls: list[tuple[int, float]] = []

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
            self.calls.append((epoch, optimizer.param_groups[0]["lr"]))
            if epoch == 1 and optimizer is pl_module.trainer.optimizers[1]:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)

    module, callback = Manual(), UnfreezesInSecondOptimizer()
    before = weights(module)
    trainer = fit(module, callback, max_epochs=2)
    assert callback.calls == [(0, 0.1), (0, 0.2), (1, 0.1), (1, 0.2)]
    assert [group["lr"] for group in trainer.optimizers[1].param_groups] == [0.2, 0.02]
    assert not torch.equal(module.backbone[0].weight, before["backbone.0.weight"])


# helpers for subclasses -----------------------------------------------------------------------------------------------
class ScaledLayer(nn.Module):
    """Has a direct parameter and a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.child = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)


def test_flatten_modules_lists_leaves_and_modules_with_direct_parameters() -> None:
    scaled, layer = ScaledLayer(), nn.Linear(1, 1)
    tree = nn.ModuleDict({"a": nn.Sequential(layer, nn.ReLU()), "b": scaled})
    flat = BaseFinetuning.flatten_modules(tree)
    assert flat == [layer, tree["a"][1], scaled, scaled.child]  # type: ignore[index]
    assert BaseFinetuning.flatten_modules([[tree["a"]], (scaled, layer)]) == flat
    assert BaseFinetuning.flatten_modules([]) == []
    with pytest.raises(ConfigurationError, match="is not a module"):
        BaseFinetuning.flatten_modules([layer.weight])  # type: ignore[list-item]


def test_filter_params_selects_by_train_bn_and_requires_grad() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), ScaledLayer())
    net[0].bias.requires_grad_(False)
    names = {id(parameter): name for name, parameter in net.named_parameters()}

    def found(**arguments: bool) -> list[str]:
        return [names[id(parameter)] for parameter in BaseFinetuning.filter_params([net, net], **arguments)]

    scaled = ["2.scale", "2.child.weight", "2.child.bias"]
    assert found() == ["0.weight", "1.weight", "1.bias", *scaled]
    assert found(train_bn=False) == ["0.weight", *scaled]
    assert found(requires_grad=False) == ["0.bias"]


def test_freeze_module_spares_children_and_freeze_includes_them() -> None:
    scaled, norm = ScaledLayer(), nn.BatchNorm1d(2)
    BaseFinetuning.freeze_module(scaled)
    assert [parameter.requires_grad for parameter in scaled.parameters()] == [False, True, True]
    BaseFinetuning.freeze([scaled, norm])
    assert trained(scaled) == [] and len(trained(norm)) == 2 and norm.track_running_stats
    BaseFinetuning.freeze(norm, train_bn=False)
    assert trained(norm) == [] and not norm.track_running_stats
    BaseFinetuning.make_trainable([scaled, [norm]])
    assert len(trained(scaled)) == 3 and norm.track_running_stats


def test_parameters_already_in_the_optimizer_stay_in_their_group_with_a_warning() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 1))
    optimizer = SGD(net[:2].parameters(), lr=0.5)
    net.requires_grad_(False)
    # Parameters that are already trained are not candidates.
    net[1].requires_grad_(True)
    with pytest.warns(UserWarning, match="^1 of the parameters to unfreeze are already in the optimizer"):
        BaseFinetuning.unfreeze_and_add_param_group(net, optimizer, initial_denom_lr=5.0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 2]
    assert optimizer.param_groups[1]["lr"] == 0.1 and len(trained(net)) == 5
    assert BaseFinetuning.filter_on_optimizer(optimizer, []) == []
    BaseFinetuning.unfreeze_and_add_param_group(net, optimizer, lr=1.0)
    assert len(optimizer.param_groups) == 2


# resumes --------------------------------------------------------------------------------------------------------------
def lambda_by_step(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}


def cycle(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": OneCycleLR(optimizer, 0.2, total_steps=64), "interval": "step"}


def chained(optimizer: Optimizer) -> LRScheduler | ChainedScheduler:
    return ChainedScheduler([ExponentialLR(optimizer, 0.9), CosineAnnealingLR(optimizer, 2)])


def decay(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, 0.5)


def plateau(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=0.5), "monitor": "loss"}


CASES: dict[str, Any] = {
    "backbone": lambda: (Net(), [backbone()]),
    "frozen norm, one cycle": lambda: (Net(cycle, SGD), [backbone(train_bn=False)]),
    "stages, lambda": lambda: (Net(lambda_by_step), [Stages()]),
    "hook, chained": lambda: (AddsGroupInHook(chained), []),
    "hook, decay, EMA": lambda: (AddsGroupInHook(decay), [EMAWeightAveraging(decay=0.5)]),
    "backbone, plateau": lambda: (Net(plateau), [backbone()]),
}


def resumed_runs(folder: Path, case: str, steps: list[int], strategy: str = "auto") -> list[str]:
    """Returns the differences between an uninterrupted run and runs that were saved at some steps and resumed."""
    arguments = {"gradient_clip_val": 0.5, "strategy": strategy, "default_root_dir": folder}
    module, callbacks = CASES[case]()
    every = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight = fit(module, *callbacks, every, **{**arguments, "enable_checkpointing": True})
    expected, state, found = weights(module), state_of(straight), []
    for step in steps:
        again, callbacks = CASES[case]()
        trainer = fit(again, *callbacks, ckpt_path=folder / f"step={step}", **arguments)
        found += [f"{case} at {step}: {line}" for line in differences(weights(again), expected)]
        if state_of(trainer) != state or again.rates != module.rates[step:]:
            found.append(f"{case} at {step}: optimizer, schedulers or learning rates")
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_resume_in_each_phase_equals_an_uninterrupted_run(case: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # While frozen, at the end of the last frozen epoch, in the epoch that unfreezes, and after it.
        assert resumed_runs(tmp_path, case, [5, 8, 9, 14]) == []


def on_ranks(folder: Path, strategy: str, cases: list[str]) -> list[str]:
    return [
        line
        for number, case in enumerate(cases)
        for line in resumed_runs(folder / f"{strategy}-{number}", case, [4, 5, 7], strategy)
    ]


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ("ddp", ["frozen norm, one cycle"]),
        pytest.param("ddp", ["hook, chained", "stages, lambda"], marks=pytest.mark.full),
        pytest.param("fsdp", ["frozen norm, one cycle", "hook, chained"], marks=pytest.mark.full),
    ],
)
def test_a_resume_on_two_ranks_equals_an_uninterrupted_run(strategy: str, cases: list[str], tmp_path: Path) -> None:
    assert run_world(2, on_ranks, tmp_path, strategy, cases) == [[], []]


def test_a_saved_parameter_group_missing_from_configure_optimizers_raises(tmp_path: Path) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            return SGD([{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 0.01}], lr=0.1)

    class One(Net):
        def configure_optimizers(self) -> Any:
            return SGD(self.head.parameters(), lr=0.1)

    fit(Two(), max_epochs=1).save_checkpoint(tmp_path / "two")
    with pytest.raises(ConfigurationError, match=r"saved, but not in this optimizer: backbone\.0\.bias"):
        fit(One(), ckpt_path=tmp_path / "two")


def test_restoring_without_optimizers_adds_the_backbone_group_again(tmp_path: Path) -> None:
    fit(Net(), backbone(), max_epochs=3).save_checkpoint(tmp_path / "saved")
    module = Net()
    trainer = Trainer(callbacks=[backbone()], **QUIET, max_epochs=5)
    parts = ["weights", "progress", "callbacks"]
    trainer.fit(module, data(), ckpt_path=tmp_path / "saved", restore=parts)
    assert [rates[1] for rates in module.rates[::4]] == pytest.approx([0.01, 0.02], rel=1e-12)


@pytest.mark.parametrize("params", [["head.weight"], ["nowhere"], [], [3], "backbone.0.bias"])
def test_forged_parameter_groups_raise(params: Any, tmp_path: Path) -> None:
    fit(Net(), backbone(), max_epochs=3).save_checkpoint(tmp_path / "saved")
    forge_json(tmp_path / "saved", OPTIMIZERS, lambda tree: replace(tree, params))
    with pytest.raises((CheckpointError, ConfigurationError)):
        fit(Net(), backbone(), ckpt_path=tmp_path / "saved")


def replace(tree: Any, params: Any) -> None:
    groups = groups_in(tree)
    assert len(groups) == 2
    groups[1]["params"] = params


def groups_in(tree: Any) -> list[Any]:
    """Returns the groups of the only optimizer, wherever the file stores them."""
    if isinstance(tree, dict) and "param_groups" in tree:
        found: list[Any] = tree["param_groups"]
        return found
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [group for part in parts for group in groups_in(part)]


def test_an_invalid_callback_state_raises() -> None:
    callback = backbone()
    callback.check_state_dict(callback.state_dict())
    with pytest.raises(StateError, match="group"):
        callback.check_state_dict({"previous_backbone_lr": 0.1, "group": None})


# errors ---------------------------------------------------------------------------------------------------------------
class OptimizesFrozenParameters(Net):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [SGD(trained(self), lr=0.1), SGD(trained(self.head), lr=0.1)]


class NoOptimizer(Net):
    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Squares, r"BackboneFinetuning needs Squares\.backbone"),
        (OptimizesFrozenParameters, r"filter\(lambda p: p\.requires_grad"),
        (NoOptimizer, "there are 0"),
    ],
)
def test_unsuitable_modules_raise_before_training(module: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(module(), backbone())


def test_several_optimizers_raise() -> None:
    module = TwoOptimizers()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="there are 2: subclass BaseFinetuning"):
        fit(module, backbone())


def test_an_unimplemented_method_raises_by_name() -> None:
    with pytest.raises(NotImplementedError, match="freeze_before_training"):
        fit(Net(), BaseFinetuning())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"unfreeze_backbone_at_epoch": -1}, "counted from 0"),
        ({"unfreeze_backbone_at_epoch": 1.5}, "counted from 0"),
        ({"lambda_func": 2.0}, "lambda_func=2.0"),
        ({"backbone_initial_ratio_lr": 0}, "backbone_initial_ratio_lr=0"),
        ({"backbone_initial_lr": -1.0}, "backbone_initial_lr=-1.0"),
        ({"initial_denom_lr": True}, "initial_denom_lr=True"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        BackboneFinetuning(**arguments)
