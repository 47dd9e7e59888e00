"""Mistakes in the arguments of fit, in optimizers, and in the return values of training_step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bad_input.ground import (
    DURING,
    Endless,
    Ground,
    Module,
    NoBatch,
    Numbers,
    loader,
    mistake,
    optimizers,
    returns,
    samples,
)
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from leyden import CombinedLoader, LeydenError, TrainModule


# arguments of fit -----------------------------------------------------------------------------------------------------
@mistake(r"fit needs a TrainModule and training data: trainer\.fit\(module, train_loader\)")
def fit_without_arguments(ground: Ground) -> None:
    ground.trainer().fit()


@mistake(r"needs a TrainModule, not the class Module: pass an instance, Module\(\)")
def a_class_for_a_module(ground: Ground) -> None:
    ground.trainer().fit(Module, loader())  # type: ignore[arg-type]


@mistake(r"not a Linear: subclass leyden\.TrainModule")
def a_module_that_is_not_a_train_module(ground: Ground) -> None:
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


@mistake(r"there is no train loader: pass one to Trainer\.fit, or define train_dataloader in Broken")
def no_loader(ground: Ground) -> None:
    ground.trainer().fit(ground.module())


@mistake(r"train_dataloader returned None: return a loader")
def a_loader_that_is_none(ground: Ground) -> None:
    ground.trainer().fit(ground.module(train_dataloader=lambda self: None))


@mistake(r"the train loader is an int, which is not iterable: pass a DataLoader")
def a_loader_that_is_a_number(ground: Ground) -> None:
    ground.fit(None, 3)


@mistake(r"fewer than batch_size=2, and drop_last=True")
def a_loader_of_length_zero(ground: Ground) -> None:
    ground.fit(None, loader(1, drop_last=True))


@mistake(r"the validation loader has a length of 0.*Give it a dataset with samples")
def a_validation_loader_of_length_zero(ground: Ground) -> None:
    ground.fit(None, loader(), DataLoader(samples(0)))


@mistake(r"yielded no batch: an epoch needs at least one")
def a_loader_without_a_batch(ground: Ground) -> None:
    ground.fit(None, NoBatch())


@mistake(r"limit_train_batches=0\.1 of 4 batches is less than one batch: pass at least 0\.25")
def a_fraction_of_a_batch(ground: Ground) -> None:
    ground.fit(limit_train_batches=0.1)


@mistake(r"a fraction of a loader that has no length: pass a number of batches")
def a_fraction_of_an_unsized_loader(ground: Ground) -> None:
    ground.fit(None, DataLoader(Endless(), batch_size=2), limit_train_batches=0.5)


@mistake(r"loaders and a datamodule: pass one of them")
def loaders_and_a_datamodule(ground: Ground) -> None:
    ground.trainer().fit(ground.module(), loader(), datamodule=Numbers())


@mistake(r"val_check_interval=9 exceeds the 4 batches of an epoch.*check_val_every_n_epoch=None")
def a_validation_interval_that_is_too_large(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), val_check_interval=9)


@mistake(r"val_check_interval=0\.5 is a fraction of an epoch, but the training loader has no length")
def a_validation_interval_of_an_unsized_loader(ground: Ground) -> None:
    ground.fit(None, DataLoader(Endless(), batch_size=2), loader(), val_check_interval=0.5)


@mistake(r"there are 2 validation loaders: validation_step must take a dataloader_idx")
def several_validation_loaders_without_dataloader_idx(ground: Ground) -> None:
    ground.fit(None, loader(), [loader(), loader()])


@mistake(r"CombinedLoader has no mode 'max'\. Did you mean 'max_size'\?")
def an_unknown_mode_of_combined_loader(ground: Ground) -> None:
    CombinedLoader([loader()], mode="max")  # type: ignore[arg-type]


@mistake(r"fit\(max_epochs='3'\): use a whole number")
def max_epochs_as_a_string(ground: Ground) -> None:
    ground.trainer().fit(ground.module(), loader(), max_epochs="3")  # type: ignore[arg-type]


@mistake(r"fit\(max_steps=True\): use a whole number")
def max_steps_as_a_bool(ground: Ground) -> None:
    ground.trainer().fit(ground.module(), loader(), max_steps=True)


@mistake(r"The parameter 'net\.weight' is on the meta device.*Build the module on a real device")
def a_module_on_the_meta_device(ground: Ground) -> None:
    module = ground.module()
    module.net = nn.Linear(4, 2, device="meta")
    ground.fit(module)


@mistake(r"configure_callbacks returned a str: return callbacks")
def configure_callbacks_that_returns_a_string(ground: Ground) -> None:
    ground.fit(ground.module(configure_callbacks=lambda self: "none"))


@mistake(r"test needs a TrainModule: trainer\.test\(module, loader\)")
def testing_without_a_module(ground: Ground) -> None:
    ground.trainer().test()


@mistake(r"Broken has no test_step: define one")
def testing_without_a_test_step(ground: Ground) -> None:
    ground.trainer().test(ground.module(), loader())


@mistake(r"there is no val loader: pass one to Trainer\.validate")
def validating_without_a_loader(ground: Ground) -> None:
    ground.trainer().validate(ground.module())


@mistake(r"Plain has no predict_step and no forward: write one of them")
def predicting_without_predict_step_and_forward(ground: Ground) -> None:
    class Plain(TrainModule):
        pass

    ground.trainer().predict(Plain(), loader())


# optimizers and schedulers --------------------------------------------------------------------------------------------
def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def scheduled(module: nn.Module, make: Callable[[Any], Any] = lambda o: StepLR(o, 1), **options: Any) -> Any:
    optimizer = sgd(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}


optimizers(
    "configure_optimizers that returns a number", r"returned an int\. It may return an optimizer", lambda self: 3
)
optimizers("a list of strings for optimizers", r"returned a str in place of an optimizer", lambda self: ["adam"])
optimizers("a dict without optimizer", r"a dict without the key 'optimizer'", lambda self: {"optim": sgd(self)})
optimizers(
    "a dict with a wrong key",
    r"the key 'lr_schedular'\. Did you mean 'lr_scheduler'\?",
    lambda self: {"optimizer": sgd(self), "lr_schedular": None},
)
optimizers(
    "an unknown scheduler key", r"the unknown key 'intervall'\. Did you mean", lambda s: scheduled(s, intervall="step")
)
optimizers(
    "an invalid scheduler interval",
    r"interval='batch': use 'epoch' or 'step'",
    lambda s: scheduled(s, interval="batch"),
)
optimizers(
    "an invalid scheduler frequency", r"frequency=0: use a whole number from 1", lambda s: scheduled(s, frequency=0)
)
optimizers(
    "a string for a scheduler",
    r"is a str, not a scheduler\. Use one of torch",
    lambda s: scheduled(s, lambda o: "step"),
)
optimizers(
    "plateau without monitor",
    r"needs a value to monitor.*'monitor': 'val_loss'",
    lambda s: scheduled(s, ReduceLROnPlateau),
)
optimizers(
    "a scheduler of another optimizer",
    r"StepLR belongs to an optimizer that configure_optimizers does not return",
    lambda self: ([sgd(self)], [StepLR(sgd(self), 1)]),
)
optimizers(
    "a plateau scheduler of another optimizer",
    r"ReduceLROnPlateau belongs to an optimizer that configure_optimizers does not return",
    lambda self: ([sgd(self)], [{"scheduler": ReduceLROnPlateau(sgd(self)), "monitor": "val_loss"}]),
)
optimizers(
    "an optimizer of another module",
    r"has no parameter of this module\. Create it in configure_optimizers, from self\.parameters\(\)",
    lambda self: sgd(nn.Linear(4, 2)),
)
optimizers(
    "LBFGS and accumulation",
    r"LBFGS evaluates the loss several times.*use accumulate_grad_batches=1",
    lambda self: torch.optim.LBFGS(self.parameters()),
    accumulate_grad_batches=2,
)
optimizers(
    "LBFGS and a gradient scaler",
    r"LBFGS evaluates the loss several times.*use precision='bf16-mixed' or '32-true'",
    lambda self: torch.optim.LBFGS(self.parameters()),
    precision="16-mixed",
)
optimizers(
    "LBFGS and another optimizer",
    r"LBFGS evaluates the loss several times.*use manual optimization",
    lambda self: [torch.optim.LBFGS(self.parameters()), sgd(self)],
)


@mistake(r"monitors 'val_lost', which was not logged\. Did you mean 'val_loss'\?", when=DURING)
def a_plateau_scheduler_that_monitors_an_unlogged_metric(ground: Ground) -> None:
    module = ground.module(configure_optimizers=lambda self: scheduled(self, ReduceLROnPlateau, monitor="val_lost"))
    ground.fit(module, loader(), loader())


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@mistake(r"gradient_clip_val cannot be used with manual optimization: call self\.clip_gradients")
def clipping_in_manual_optimization(ground: Ground) -> None:
    ground.fit(ground.module(Manual), gradient_clip_val=1.0)


@mistake(r"accumulate_grad_batches cannot be used with manual optimization: step every n batches")
def accumulation_in_manual_optimization(ground: Ground) -> None:
    ground.fit(ground.module(Manual), accumulate_grad_batches=2)


@mistake(r"set self\.automatic_optimization = False", when=DURING)
def manual_backward_in_automatic_optimization(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch))

    ground.fit(ground.module(training_step=training_step))


# return values of training_step ---------------------------------------------------------------------------------------
returns("a loss that is a number", r"returned a float, not a loss\. Return a scalar tensor", lambda s, b: 0.5)
returns("a loss that is None", r"returned None, not a loss\. Return a scalar tensor", lambda s, b: None)
returns("a dict without loss", r"without 'loss'\. Return \{'loss': loss", lambda s, b: {"los": s.loss(b)})
returns(
    "a dict whose loss is a number", r"is a float, not a tensor\. Return it without float", lambda s, b: {"loss": 0.5}
)
returns(
    "a loss that is detached",
    r"a loss without a gradient\. Compute it from the module's",
    lambda s, b: s.loss(b).detach(),
)
returns(
    "a loss of many numbers",
    r"of shape \(2,\)\. Return a single number, such as loss\.mean",
    lambda s, b: s(b[0]).sum(1),
)
returns(
    "num_items that is a string",
    r"num_items is a str\. Return a number",
    lambda s, b: {"loss": s.loss(b), "num_items": "two"},
)
returns(
    "num_items of several numbers",
    r"num_items has the shape \(3,\)\. Return a single number",
    lambda s, b: {"loss": s.loss(b), "num_items": torch.ones(3)},
)


@mistake(r"num_items for some batches .* and not for others\. Return it always or never", when=DURING)
def num_items_for_some_batches_only(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), **({"num_items": 2} if batch_idx else {})}

    ground.fit(ground.module(training_step=training_step), accumulate_grad_batches=2)


@mistake(r"the loss is nan in epoch 0, batch 0.*lower the learning rate, or clip", LeydenError, DURING)
def a_loss_of_nan(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float("nan")

    ground.fit(ground.module(training_step=training_step), detect_anomaly=True)


@mistake(r"not on the module's device.*transfer_batch_to_device", when=DURING)
def a_batch_on_another_device(ground: Ground) -> None:
    def transfer(self: Module, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [tensor.to("meta") for tensor in batch]

    ground.fit(ground.module(transfer_batch_to_device=transfer))


@mistake(r"MemoryError|out of memory on cpu in step 0.*smaller batch_size", torch.OutOfMemoryError, DURING)
def a_batch_that_exceeds_memory(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    ground.fit(ground.module(training_step=training_step))
