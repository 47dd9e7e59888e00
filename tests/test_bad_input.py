"""Mistakes that users make: each gives one clear error that names the fix, before training where that can be known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from leyden import (
    Callback,
    CheckpointError,
    CombinedLoader,
    ConfigurationError,
    DataModule,
    LeydenError,
    Trainer,
    TrainModule,
)
from leyden.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


class Module(TrainModule):
    """A module without a mistake, in which each case makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4), torch.randint(0, 2, (count,)))


def loader(count: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=2, **options)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.randn(4), torch.tensor(1)


class NoBatch:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Numbers(DataModule):
    def train_dataloader(self) -> Any:
        return loader()


@dataclass
class Ground:
    """What a case works with: modules whose training steps are counted, and Trainers that write to one folder."""

    folder: Path
    modules: list[Module] = field(default_factory=list)

    def module(self, base: type[Module] = Module, **methods: Callable[..., Any]) -> Module:
        module = type("Broken", (base,), methods)()
        self.modules.append(module)
        return module

    def trainer(self, **arguments: Any) -> Trainer:
        return Trainer(**{**QUIET, "default_root_dir": self.folder, **arguments})

    def fit(self, module: Any = None, *data: Any, **arguments: Any) -> Trainer:
        trainer = self.trainer(**arguments)
        trainer.fit(self.module() if module is None else module, *(data or (loader(),)))
        return trainer

    def saved(self) -> Path:
        """A checkpoint of a whole run."""
        trainer = self.fit()
        path = trainer.save_checkpoint(self.folder / "saved")
        self.modules.clear()
        return path

    @property
    def steps(self) -> int:
        return sum(module.steps for module in self.modules)


Case = tuple[str, type[Exception], str, Callable[[Ground], Any]]
BEFORE: list[Case] = []
DURING: list[Case] = []


def mistake(
    match: str, error: type[Exception] = ConfigurationError, when: list[Case] = BEFORE
) -> Callable[[Callable[[Ground], Any]], Callable[[Ground], Any]]:
    """Adds the function to the table: what it raises, and whether training may have begun by then."""

    def add(function: Callable[[Ground], Any]) -> Callable[[Ground], Any]:
        when.append((function.__name__, error, match, function))
        return function

    return add


def returns(name: str, match: str, wrong: Callable[[Module, Any], Any], **arguments: Any) -> None:
    """A mistake in what training_step returns, which no one can know before."""

    def run(ground: Ground) -> None:
        def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
            self.steps += 1
            return wrong(self, batch)

        ground.fit(ground.module(training_step=training_step), **arguments)

    DURING.append((name, ConfigurationError, match, run))


def optimizers(name: str, match: str, configured: Callable[[Module], Any], **arguments: Any) -> None:
    """A mistake in what configure_optimizers returns."""
    BEFORE.append(
        (
            name,
            ConfigurationError,
            match,
            lambda ground: ground.fit(ground.module(configure_optimizers=configured), **arguments),
        )
    )


def logs(name: str, match: str, call: Callable[[Module], Any]) -> None:
    """A mistake in a call of self.log."""

    def run(ground: Ground) -> None:
        def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
            call(self)
            return self.loss(batch)

        ground.fit(ground.module(training_step=training_step))

    DURING.append((name, ConfigurationError, match, run))


# what fit is given ------------------------------------------------------------------------------------------------------
@mistake(r"fit needs a TrainModule and training data: trainer\.fit\(module, train_loader\)")
def fit_without_arguments(ground: Ground) -> None:
    ground.trainer().fit()


@mistake(r"was given the class Module: give an instance, Module\(\)")
def a_class_for_a_module(ground: Ground) -> None:
    ground.trainer().fit(Module, loader())  # type: ignore[arg-type]


@mistake(r"was given a Linear: subclass leyden\.TrainModule")
def a_module_that_is_no_train_module(ground: Ground) -> None:
    ground.trainer().fit(nn.Linear(4, 2), loader())


@mistake(r"Plain has no training_step: write it")
def no_training_step(ground: Ground) -> None:
    class Plain(TrainModule):
        def configure_optimizers(self) -> Any:
            return None

    ground.trainer().fit(Plain(), loader())


@mistake(r"Plain has no configure_optimizers: write it")
def no_configure_optimizers(ground: Ground) -> None:
    class Plain(TrainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    ground.trainer().fit(Plain(), loader())


@mistake(r"there is no train loader: give one to Trainer\.fit, or write train_dataloader in Broken")
def no_loader(ground: Ground) -> None:
    ground.trainer().fit(ground.module())


@mistake(r"train_dataloader returned None: return a loader")
def a_loader_that_is_none(ground: Ground) -> None:
    ground.trainer().fit(ground.module(train_dataloader=lambda self: None))


@mistake(r"the train loader is a int, over which nothing can iterate: give a DataLoader")
def a_loader_that_is_a_number(ground: Ground) -> None:
    ground.fit(None, 3)


@mistake(r"fewer than batch_size=2, and drop_last=True")
def a_loader_of_length_zero(ground: Ground) -> None:
    ground.fit(None, loader(1, drop_last=True))


@mistake(r"the validation loader has a length of 0.*Give it a data set with samples")
def a_validation_loader_of_length_zero(ground: Ground) -> None:
    ground.fit(None, loader(), DataLoader(samples(0)))


@mistake(r"gave no batch: an epoch needs at least one")
def a_loader_without_a_batch(ground: Ground) -> None:
    ground.fit(None, NoBatch())


@mistake(r"limit_train_batches=0 leaves nothing to train on: use Trainer\.validate")
def nothing_to_train_on(ground: Ground) -> None:
    ground.fit(limit_train_batches=0)


@mistake(r"limit_train_batches=0\.1 of 4 batches is less than one batch: give at least 0\.25")
def a_fraction_of_a_batch(ground: Ground) -> None:
    ground.fit(limit_train_batches=0.1)


@mistake(r"a fraction of a loader that has no length: give a number of batches")
def a_fraction_of_an_unsized_loader(ground: Ground) -> None:
    ground.fit(None, DataLoader(Endless(), batch_size=2), limit_train_batches=0.5)


@mistake(r"loaders and a datamodule: give one of them")
def loaders_and_a_datamodule(ground: Ground) -> None:
    ground.trainer().fit(ground.module(), loader(), datamodule=Numbers())


@mistake(r"val_check_interval=9 is more than the 4 batches of an epoch.*check_val_every_n_epoch=None")
def a_validation_interval_that_is_too_large(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), val_check_interval=9)


@mistake(r"val_check_interval=0\.5 is a fraction of an epoch, and the training loader has no length")
def a_validation_interval_of_an_unsized_loader(ground: Ground) -> None:
    ground.fit(None, DataLoader(Endless(), batch_size=2), loader(), val_check_interval=0.5)


@mistake(r"there are 2 validation loaders: validation_step must take a dataloader_idx")
def several_loaders_without_their_index(ground: Ground) -> None:
    ground.fit(None, loader(), [loader(), loader()])


@mistake(r"CombinedLoader\(mode='max'\) is not known\. Did you mean 'max_size'\?")
def a_mode_of_combined_loaders(ground: Ground) -> None:
    CombinedLoader([loader()], mode="max")  # type: ignore[arg-type]


@mistake(r"fit\(max_epochs='3'\): use a whole number")
def max_epochs_of_fit(ground: Ground) -> None:
    ground.trainer().fit(ground.module(), loader(), max_epochs="3")  # type: ignore[arg-type]


@mistake(r"fit\(max_steps=True\): use a whole number")
def max_steps_of_fit(ground: Ground) -> None:
    ground.trainer().fit(ground.module(), loader(), max_steps=True)


@mistake(r"the parameter 'net\.weight' is on the meta device.*Build the module on a real device")
def a_module_on_the_meta_device(ground: Ground) -> None:
    module = ground.module()
    module.net = nn.Linear(4, 2, device="meta")
    ground.fit(module)


@mistake(r"configure_callbacks returned a str: return callbacks")
def no_callbacks_configured(ground: Ground) -> None:
    ground.fit(ground.module(configure_callbacks=lambda self: "none"))


@mistake(r"test needs a TrainModule: trainer\.test\(module, loader\)")
def a_test_of_nothing(ground: Ground) -> None:
    ground.trainer().test()


@mistake(r"Broken has no test_step: write one")
def a_test_without_its_step(ground: Ground) -> None:
    ground.trainer().test(ground.module(), loader())


@mistake(r"there is no val loader: give one to Trainer\.validate")
def a_validation_without_a_loader(ground: Ground) -> None:
    ground.trainer().validate(ground.module())


@mistake(r"Plain has no predict_step and no forward: write one of them")
def a_prediction_without_forward(ground: Ground) -> None:
    class Plain(TrainModule):
        pass

    ground.trainer().predict(Plain(), loader())


# optimizers and schedulers ----------------------------------------------------------------------------------------------
def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def scheduled(module: nn.Module, make: Callable[[Any], Any] = lambda o: StepLR(o, 1), **options: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}


optimizers("configure_optimizers of no form", r"returned a int: return an optimizer", lambda self: 3)
optimizers("a list of no optimizers", r"returned a str where an optimizer belongs", lambda self: ["adam"])
optimizers("a dict without optimizer", r"a dict without 'optimizer'", lambda self: {"optim": sgd(self)})
optimizers(
    "a dict with a wrong key",
    r"the key 'lr_schedular'\. Did you mean 'lr_scheduler'\?",
    lambda self: {"optimizer": sgd(self), "lr_schedular": None},
)
optimizers("a scheduler's key", r"the unknown key 'intervall'\. Did you mean", lambda s: scheduled(s, intervall="step"))
optimizers(
    "a scheduler's interval", r"interval='batch': use 'epoch' or 'step'", lambda s: scheduled(s, interval="batch")
)
optimizers("a scheduler's frequency", r"frequency=0: use a whole number from 1", lambda s: scheduled(s, frequency=0))
optimizers(
    "no scheduler", r"is a str, which is no scheduler: give one of torch", lambda s: scheduled(s, lambda o: "step")
)
optimizers(
    "plateau without monitor",
    r"needs a value to watch.*'monitor': 'val_loss'",
    lambda s: scheduled(s, ReduceLROnPlateau),
)
optimizers(
    "a scheduler of another optimizer",
    r"StepLR was made for an optimizer that configure_optimizers does not return",
    lambda self: ([sgd(self)], [StepLR(sgd(self), 1)]),
)
optimizers(
    "a plateau scheduler of another optimizer",
    r"ReduceLROnPlateau was made for an optimizer that configure_optimizers does not return",
    lambda self: ([sgd(self)], [{"scheduler": ReduceLROnPlateau(sgd(self)), "monitor": "val_loss"}]),
)
optimizers(
    "an optimizer of another module",
    r"holds no parameter of this module\. Make it in configure_optimizers, from self\.parameters\(\)",
    lambda self: sgd(nn.Linear(4, 2)),
)
optimizers(
    "LBFGS and accumulation",
    r"LBFGS evaluates the loss several times.*use accumulate_grad_batches=1",
    lambda self: torch.optim.LBFGS(self.parameters()),
    accumulate_grad_batches=2,
)
optimizers(
    "LBFGS and a scaler",
    r"LBFGS evaluates the loss several times.*use precision='bf16-mixed' or '32-true'",
    lambda self: torch.optim.LBFGS(self.parameters()),
    precision="16-mixed",
)
optimizers(
    "LBFGS and another",
    r"LBFGS evaluates the loss several times.*use manual optimisation",
    lambda self: [torch.optim.LBFGS(self.parameters()), sgd(self)],
)


@mistake(r"monitors 'val_lost', which has not been logged\. Did you mean 'val_loss'\?", when=DURING)
def a_plateau_scheduler_that_watches_nothing(ground: Ground) -> None:
    module = ground.module(configure_optimizers=lambda self: scheduled(self, ReduceLROnPlateau, monitor="val_lost"))
    ground.fit(module, loader(), loader())


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@mistake(r"gradient_clip_val cannot be used with manual optimisation: call self\.clip_gradients")
def clipping_in_manual_optimisation(ground: Ground) -> None:
    ground.fit(ground.module(Manual), gradient_clip_val=1.0)


@mistake(r"accumulate_grad_batches cannot be used with manual optimisation: step every n batches")
def accumulation_in_manual_optimisation(ground: Ground) -> None:
    ground.fit(ground.module(Manual), accumulate_grad_batches=2)


@mistake(r"set self\.automatic_optimization = False", when=DURING)
def manual_backward_in_automatic_optimisation(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))

    ground.fit(ground.module(training_step=training_step))


# what training_step returns ---------------------------------------------------------------------------------------------
returns("a loss that is a number", r"returned a float, not a loss\. Return a scalar tensor", lambda s, b: 0.5)
returns("a loss that is None", r"returned None, not a loss\. Return a scalar tensor", lambda s, b: None)
returns("a dict without loss", r"none is 'loss'\. Return \{'loss': loss", lambda s, b: {"los": s.loss(b)})
returns("a dict whose loss is a number", r"is a float, not a tensor: return it before any", lambda s, b: {"loss": 0.5})
returns("a loss that is detached", r"has no gradient\. Compute it from the module's", lambda s, b: s.loss(b).detach())
returns(
    "a loss of many numbers", r"has the shape \(2,\): return one number, as loss\.mean", lambda s, b: s(b[0]).sum(1)
)
returns(
    "num_items that is a word",
    r"num_items is a str: return a number",
    lambda s, b: {"loss": s.loss(b), "num_items": "two"},
)
returns(
    "num_items of several numbers",
    r"num_items has the shape \(3,\): return one number",
    lambda s, b: {"loss": s.loss(b), "num_items": torch.ones(3)},
)


@mistake(r"num_items for some batches .* and not for others: return it always or never", when=DURING)
def num_items_now_and_then(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), **({"num_items": 2} if batch_idx else {})}

    ground.fit(ground.module(training_step=training_step), accumulate_grad_batches=2)


@mistake(r"the loss is nan in epoch 0, batch 0.*lower the learning rate, or clip", LeydenError, DURING)
def a_loss_of_nan(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float("nan")

    ground.fit(ground.module(training_step=training_step), detect_anomaly=True)


@mistake(r"on another device than the module.*transfer_batch_to_device", when=DURING)
def a_batch_on_another_device(ground: Ground) -> None:
    def transfer(self: Module, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [tensor.to("meta") for tensor in batch]

    ground.fit(ground.module(transfer_batch_to_device=transfer))


@mistake(r"MemoryError|out of memory on cpu in step 0.*smaller batch_size", torch.OutOfMemoryError, DURING)
def a_batch_that_does_not_fit(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    ground.fit(ground.module(training_step=training_step))


# logging ----------------------------------------------------------------------------------------------------------------
def log_with_other_arguments(module: Module) -> None:
    module.log("x", 1.0)
    module.log("x", 1.0, prog_bar=True)


logs(
    "a tensor of several numbers",
    r"of shape \(3,\): log one number, as value\.mean\(\)",
    lambda s: s.log("x", torch.ones(3)),
)
logs("a word for a value", r"given a str: log a number", lambda s: s.log("x", "high"))
logs("a dict for a value", r"a dict goes to self\.log_dict", lambda s: s.log("x", {"a": 1.0}))
logs("a name that is no word", r"needs a name, and got a int: self\.log\('loss', loss\)", lambda s: s.log(3, 1.0))  # type: ignore[arg-type]
logs("other arguments", r"was called with other arguments before", log_with_other_arguments)
logs("nothing to log", r"would log nothing: set one of them", lambda s: s.log("x", 1.0, on_step=False, on_epoch=False))
logs(
    "a reduction", r"reduce_fx='men'\) is not known\. Did you mean 'mean'\?", lambda s: s.log("x", 1.0, reduce_fx="men")
)


@mistake(r"self\.log cannot be called outside of a hook")
def a_log_in_configure_optimizers(ground: Ground) -> None:
    def configure_optimizers(self: Module) -> Any:
        self.log("lr", 0.1)

    ground.fit(ground.module(configure_optimizers=configure_optimizers))


@mistake(r"self\.log cannot be called in on_fit_start")
def a_log_before_training(ground: Ground) -> None:
    ground.fit(ground.module(on_fit_start=lambda self: self.log("x", 1.0)))


@mistake(r"self\.log cannot be called in predict_step")
def a_log_in_prediction(ground: Ground) -> None:
    def predict_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0)

    ground.trainer().predict(ground.module(predict_step=predict_step), loader())


@mistake(r"on_step=True\) in on_train_epoch_end: there is no step there", when=DURING)
def a_step_value_of_an_epoch(ground: Ground) -> None:
    ground.fit(ground.module(on_train_epoch_end=lambda self: self.log("x", 1.0, on_step=True)))


@mistake(r"weighs by batch size.*pass batch_size=", when=DURING)
def a_batch_whose_size_is_unknown(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, on_epoch=True)
        return self.net.weight.sum()

    ground.fit(ground.module(training_step=training_step), ["a", "b"])


@mistake(r"EarlyStopping monitors 'val_lss', which was not logged\. Did you mean 'val_loss'\?", when=DURING)
def an_early_stopping_that_watches_nothing(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), callbacks=EarlyStopping("val_lss"))


@mistake(r"'val_lss'.*Did you mean 'val_loss'\?", when=DURING)
def a_checkpoint_that_watches_nothing(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), callbacks=ModelCheckpoint(monitor="val_lss"), enable_checkpointing=True)


@mistake(r"[Ll]ogger")
def a_learning_rate_monitor_without_loggers(ground: Ground) -> None:
    ground.fit(callbacks=LearningRateMonitor())


@mistake(r"is not attached to a Trainer: hand it to Trainer\.fit first", LeydenError)
def a_module_that_no_trainer_runs(ground: Ground) -> None:
    ground.module().print("hello")


# checkpoints ------------------------------------------------------------------------------------------------------------
def from_path(ground: Ground, path: Any, module: Module | None = None, **options: Any) -> None:
    ground.trainer().fit(module or ground.module(), loader(), ckpt_path=path, **options)


@mistake(r"holds no whole checkpoint, and ckpt_path='last' needs one: use 'auto'", CheckpointError)
def the_last_checkpoint_of_none(ground: Ground) -> None:
    from_path(ground, "last")


@mistake(r"no ModelCheckpoint of this Trainer has saved one yet: give a path, or 'last'")
def the_best_checkpoint_of_none(ground: Ground) -> None:
    from_path(ground, "best")


@mistake(r"fit it first")
def a_current_run_before_the_first(ground: Ground) -> None:
    from_path(ground, "current")


@mistake(r"nowhere.*(not there|no checkpoint|does not exist)", CheckpointError)
def a_checkpoint_that_is_not_there(ground: Ground) -> None:
    from_path(ground, ground.folder / "nowhere")


@mistake(r"there is no part 'optimizer'\. Did you mean 'optimizers'\?")
def a_part_that_is_not_there(ground: Ground) -> None:
    from_path(ground, None, restore=["weights", "optimizer"])


@mistake(r"restore=3.*'all', 'weights'")
def parts_that_are_a_number(ground: Ground) -> None:
    from_path(ground, None, restore=3)


@mistake(r"is a pickle, which can run any code.*pass trust=True", CheckpointError)
def a_pickle_without_trust(ground: Ground) -> None:
    path = ground.folder / "other.ckpt"
    torch.save({"state_dict": Module().state_dict()}, path)
    from_path(ground, path)


@mistake(r"weights do not fit Broken.*net\.weight.*Build the module as it was saved")
def weights_that_do_not_fit(ground: Ground) -> None:
    path, module = ground.saved(), ground.module()
    module.net = nn.Linear(4, 3)
    from_path(ground, path, module)


@mistake(r"has 1 optimizers, and configure_optimizers made 2.*leave 'optimizers' out of restore")
def another_number_of_optimizers(ground: Ground) -> None:
    path = ground.saved()
    from_path(ground, path, ground.module(configure_optimizers=lambda self: [sgd(self), sgd(self)]))


@mistake(r"saved with weights_only and cannot be resumed: fit\(\.\.\., restore='weights'\)", CheckpointError)
def a_resume_from_weights_alone(ground: Ground) -> None:
    trainer = ground.fit()
    path = trainer.save_checkpoint(ground.folder / "weights", weights_only=True)
    ground.modules.clear()
    from_path(ground, path)


@mistake(r"save_checkpoint has no module to save: fit one first", LeydenError)
def a_checkpoint_of_nothing(ground: Ground) -> None:
    ground.trainer().save_checkpoint(ground.folder / "nothing")


@mistake(r"inside an accumulation window.*trainer\.window\.closes", LeydenError, DURING)
def a_checkpoint_inside_a_window(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.trainer.save_checkpoint(ground.folder / "inside")

    ground.fit(ground.module(training_step=training_step), accumulate_grad_batches=2)


@mistake(r"save_hyperparameters cannot keep the argument 'function'.*ignore=\['function'\]")
def a_hyperparameter_that_cannot_be_saved(ground: Ground) -> None:
    class Kept(TrainModule):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    Kept(lambda: 0)


@mistake(r"'widht' is no argument\. Did you mean 'width'\?")
def a_hyperparameter_that_is_not_there(ground: Ground) -> None:
    class Kept(TrainModule):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    Kept()


@mistake(r"callbacks.*Stateful.*'handle'")
def a_callback_whose_state_cannot_be_saved(ground: Ground) -> None:
    class Stateful(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"handle": object()}

    ground.fit(callbacks=Stateful())


@mistake(r"user.*'lock'")
def a_module_whose_state_cannot_be_saved(ground: Ground) -> None:
    def on_save_checkpoint(self: Module, checkpoint: dict[str, Any]) -> None:
        checkpoint["lock"] = object()

    ground.fit(ground.module(on_save_checkpoint=on_save_checkpoint))


@mistake(r"two callbacks have the state_key.*override state_key so that they differ")
def two_callbacks_with_one_key(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), callbacks=[EarlyStopping("val_loss"), EarlyStopping("val_loss", patience=9)])


@mistake(r"Wide needs width, which the checkpoint does not have.*save_hyperparameters\(\)")
def an_argument_that_was_not_saved(ground: Ground) -> None:
    class Wide(TrainModule):
        def __init__(self, width: int) -> None:
            super().__init__()

    Wide.load_from_checkpoint(ground.saved())


@mistake(r"to_onnx needs an input: give input_sample")
def an_export_without_an_input(ground: Ground) -> None:
    ground.module().to_onnx(ground.folder / "m.onnx")


def check(ground: Ground, error: type[Exception], match: str, run: Callable[[Ground], Any], recwarn: Any) -> str:
    with pytest.raises(error) as caught:
        run(ground)
    message = str(caught.value)
    assert re.search(match, message, re.DOTALL), message
    assert not [warning for warning in recwarn if "while the run failed" in str(warning.message)], "a second error"
    return message


@pytest.mark.parametrize(("error", "match", "run"), [case[1:] for case in BEFORE], ids=[case[0] for case in BEFORE])
def test_before_training(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, error: type[Exception], match: str, run: Callable[[Ground], Any]
) -> None:
    ground = Ground(tmp_path)
    check(ground, error, match, run, recwarn)
    assert ground.steps == 0


@pytest.mark.parametrize(("error", "match", "run"), [case[1:] for case in DURING], ids=[case[0] for case in DURING])
def test_in_training(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, error: type[Exception], match: str, run: Callable[[Ground], Any]
) -> None:
    check(Ground(tmp_path), error, match, run, recwarn)


def test_the_table_is_long_enough() -> None:
    names = [case[0] for case in BEFORE + DURING]
    assert len(names) >= 50
    assert len(set(names)) == len(names)


def test_a_module_can_be_fitted_after_a_mistake(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    module, trainer = ground.module(), ground.trainer()
    with pytest.raises(ConfigurationError):
        trainer.fit(module, loader(1, drop_last=True))
    trainer.fit(module, loader())
    assert (module.steps, trainer.global_step) == (4, 4)
