"""Mistakes in logging and with checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from bad_input.fitting import sgd
from bad_input.ground import DURING, Ground, Module, loader, logs, mistake
from torch import nn

from leyden import Callback, CheckpointError, LeydenError, TrainModule
from leyden.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint


# logging --------------------------------------------------------------------------------------------------------------
def log_with_different_arguments(module: Module) -> None:
    module.log("x", 1.0)
    module.log("x", 1.0, prog_bar=True)


logs(
    "a tensor of several numbers",
    r"of shape \(3,\)\. Log one number, such as value\.mean\(\)",
    lambda s: s.log("x", torch.ones(3)),
)
logs("a string for a value", r"called with a str\. Log a number", lambda s: s.log("x", "high"))
logs("a dict for a value", r"For a dict, call self\.log_dict", lambda s: s.log("x", {"a": 1.0}))
NUMBER: Any = 3
logs(
    "a number for a name",
    r"must be a name, not an int\. Call self\.log\('loss', loss\)",
    lambda s: s.log(NUMBER, 1.0),
)
logs("different arguments for one name", r"was called with different arguments before", log_with_different_arguments)
logs("nothing to log", r"would log nothing\. Set one of them", lambda s: s.log("x", 1.0, on_step=False, on_epoch=False))
logs(
    "an unknown reduction",
    r"reduce_fx='men'\): unknown reduction\. Did you mean 'mean'\?",
    lambda s: s.log("x", 1.0, reduce_fx="men"),
)


@mistake(r"self\.log cannot be called outside of a hook")
def a_log_in_configure_optimizers(ground: Ground) -> None:
    def configure_optimizers(self: Module) -> Any:
        self.log("lr", 0.1)

    ground.fit(ground.module(configure_optimizers=configure_optimizers))


@mistake(r"self\.log cannot be called in on_fit_start")
def a_log_in_on_fit_start(ground: Ground) -> None:
    ground.fit(ground.module(on_fit_start=lambda self: self.log("x", 1.0)))


@mistake(r"self\.log cannot be called in predict_step")
def a_log_in_predict_step(ground: Ground) -> None:
    def predict_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0)

    ground.trainer().predict(ground.module(predict_step=predict_step), loader())


@mistake(r"on_step=True\) in on_train_epoch_end: this hook runs outside of steps", when=DURING)
def on_step_in_an_epoch_hook(ground: Ground) -> None:
    ground.fit(ground.module(on_train_epoch_end=lambda self: self.log("x", 1.0, on_step=True)))


@mistake(r"weights values by batch size.*Pass batch_size=", when=DURING)
def a_batch_of_unknown_size(ground: Ground) -> None:
    def training_step(self: Module, batch: Any, batch_idx: int) -> Any:
        self.log("x", 1.0, on_epoch=True)
        return self.net.weight.sum()

    ground.fit(ground.module(training_step=training_step), ["a", "b"])


@mistake(r"EarlyStopping monitors 'val_lss', which was not logged\. Did you mean 'val_loss'\?", when=DURING)
def an_early_stopping_that_monitors_an_unlogged_metric(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), callbacks=EarlyStopping("val_lss"))


@mistake(r"'val_lss'.*Did you mean 'val_loss'\?", when=DURING)
def a_model_checkpoint_that_monitors_an_unlogged_metric(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), callbacks=ModelCheckpoint(monitor="val_lss"), enable_checkpointing=True)


@mistake(r"[Ll]ogger")
def a_learning_rate_monitor_without_loggers(ground: Ground) -> None:
    ground.fit(callbacks=LearningRateMonitor())


@mistake(r"is not attached to a Trainer: pass it to Trainer\.fit first", LeydenError)
def a_module_without_a_trainer(ground: Ground) -> None:
    ground.module().print("hello")


# checkpoints ----------------------------------------------------------------------------------------------------------
def from_path(ground: Ground, path: Any, module: Module | None = None, **options: Any) -> None:
    ground.trainer().fit(module or ground.module(), loader(), ckpt_path=path, **options)


@mistake(r"besst: does not exist, and is not a special value of ckpt_path\. Did you mean 'best'\?", CheckpointError)
def a_misspelled_ckpt_path(ground: Ground) -> None:
    from_path(ground, "besst")


@mistake(r"holds no complete checkpoint, but ckpt_path='last' needs one. Use 'auto'", CheckpointError)
def last_without_a_checkpoint(ground: Ground) -> None:
    from_path(ground, "last")


@mistake(r"no ModelCheckpoint of this Trainer has saved a best checkpoint yet: pass a path, or 'last'")
def best_without_a_checkpoint(ground: Ground) -> None:
    from_path(ground, "best")


@mistake(r"fit the module first")
def current_before_the_first_fit(ground: Ground) -> None:
    from_path(ground, "current")


@mistake(r"nowhere.*(not there|no checkpoint|does not exist)", CheckpointError)
def a_missing_checkpoint(ground: Ground) -> None:
    from_path(ground, ground.folder / "nowhere")


@mistake(r"there is no part 'optimizer'\. Did you mean 'optimizers'\?")
def an_unknown_part_in_restore(ground: Ground) -> None:
    from_path(ground, None, restore=["weights", "optimizer"])


@mistake(r"restore=3.*'all', 'weights'")
def restore_as_a_number(ground: Ground) -> None:
    from_path(ground, None, restore=3)


@mistake(r"is a pickle, which can run any code.*pass trust=True", CheckpointError)
def a_pickle_without_trust(ground: Ground) -> None:
    path = ground.folder / "other.ckpt"
    torch.save({"state_dict": Module().state_dict()}, path)
    from_path(ground, path)


@mistake(r"weights do not fit.*net\.weight.*Build the module as it was saved")
def weights_that_do_not_fit(ground: Ground) -> None:
    path, module = ground.saved(), ground.module()
    module.net = nn.Linear(4, 3)
    from_path(ground, path, module)


@mistake(r"has 1 optimizers, and configure_optimizers made 2.*leave 'optimizers' out of restore")
def a_different_number_of_optimizers(ground: Ground) -> None:
    path = ground.saved()
    from_path(ground, path, ground.module(configure_optimizers=lambda self: [sgd(self), sgd(self)]))


@mistake(r"saved with weights_only=True and cannot be resumed\. .*restore='weights'", CheckpointError)
def a_resume_from_a_weights_only_checkpoint(ground: Ground) -> None:
    trainer = ground.fit()
    path = trainer.save_checkpoint(ground.folder / "weights", weights_only=True)
    ground.modules.clear()
    from_path(ground, path)


@mistake(r"save_checkpoint has no module to save: call fit first", LeydenError)
def save_checkpoint_before_a_fit(ground: Ground) -> None:
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


@mistake(r"'widht' is not an argument\. Did you mean 'width'\?")
def an_unknown_hyperparameter(ground: Ground) -> None:
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


@mistake(r"two callbacks have the same state_key.*override state_key in one of them")
def two_callbacks_with_one_state_key(ground: Ground) -> None:
    ground.fit(None, loader(), loader(), callbacks=[EarlyStopping("val_loss"), EarlyStopping("val_loss", patience=9)])


@mistake(r"Wide needs width, which the checkpoint does not have.*save_hyperparameters\(\)")
def an_argument_that_was_not_saved(ground: Ground) -> None:
    class Wide(TrainModule):
        def __init__(self, width: int) -> None:
            super().__init__()

    Wide.load_from_checkpoint(ground.saved())


@mistake(r"to_onnx needs an input: pass input_sample")
def an_export_without_an_input(ground: Ground) -> None:
    ground.module().to_onnx(ground.folder / "m.onnx")
