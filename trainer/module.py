"""TrainModule: an nn.Module with a training step, an optimizer and hooks. What users subclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.hparams import Hyperparameters, arguments_for, class_only

if TYPE_CHECKING:
    from typing_extensions import Self

    from leyden.callbacks.base import Callback
    from leyden.strategies.base import Strategy
    from leyden.trainer.logging.logs import Logs
    from leyden.trainer.logging.traced import TracedLogs
    from leyden.trainer.logging.values import Reduction
    from leyden.trainer.trainer import Trainer

T = TypeVar("T")


class TrainModule(Hyperparameters, nn.Module):
    """The model, its steps and its optimizer.

    Write `training_step` and `configure_optimizers`; add `validation_step`, `test_step`, `predict_step` and any hook.
    `leyden.trainer.events.hooks` gives the order of hooks. A hook that you do not override is never called.

    Example:
        >>> import torch
        >>> class Classifier(TrainModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(64, 10)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         loss = torch.nn.functional.cross_entropy(self.net(x), y)
        ...         self.log("loss", loss, prog_bar=True)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
    """

    prepare_data_per_node: bool = True
    """True: the first rank of each machine calls `prepare_data`. False: the first of all machines."""
    automatic_optimization: bool = True
    """False: `training_step` calls `manual_backward` and steps the optimizers itself."""
    strict_loading: bool = True
    """False: weights in a checkpoint that have no place here, or are missing in it, are passed over."""
    example_input_array = cast(Any, None)  # torch.jit.script knows no attribute that is annotated as Any.
    """An input of `forward` (a tensor, tuple or dict), for the summary's sizes, the logged graph and ONNX."""
    _is_traced = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._logs: Logs | TracedLogs | None = None

    # what a subclass writes -------------------------------------------------------------------------------------------
    # Steps are typed so that a subclass may take fewer arguments without a word from its type checker.
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step(batch, batch_idx)`: computes the loss of one batch.

        A step whose first argument is called `dataloader_iter` draws its own batches, as (batch, batch_idx,
        dataloader_idx).

        Returns:
            A scalar loss; a dict with `loss`; or a dict with `loss`, a sum, and `num_items`, the number of tokens or
            samples it is a sum over: then the gradient is divided by the items of the whole accumulation window and of
            all ranks, so that accumulating and sharding equal the big batch.
        """
        raise _unwritten(self)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`validation_step(batch, batch_idx, dataloader_idx=0)`: one batch of validation, in eval mode."""
        raise _unwritten(self)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`test_step(batch, batch_idx, dataloader_idx=0)`: one batch of `Trainer.test`."""
        raise _unwritten(self)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`predict_step(batch, batch_idx, dataloader_idx=0)`: one batch of `Trainer.predict`; unless overridden, the
        module is called on the batch."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """The optimizers, with their schedulers.

        Returns:
            An optimizer; a list of them; `([optimizers], [schedulers])` or `([optimizers], scheduler)`; a dict
            `{"optimizer": …, "lr_scheduler": …}`; a list of such dicts; or None to train without one. A scheduler may
            be a dict `{"scheduler": …, "interval": "epoch" | "step", "frequency": 1, "monitor": "val_loss",
            "strict": True, "name": None}`.
        """
        raise _unwritten(self)

    def configure_model(self) -> None:
        """Builds parts of the model in the strategy's context, on the meta device where it shards. Called per stage."""

    def run_identity(self) -> Any:
        """What distinguishes this run from others, for `ckpt_path="auto"`, which continues no other run's checkpoint.

        Returns:
            Any plain value, such as the name of a trial: a checkpoint that recorded the same one is this run's, and
            nothing else is compared. None, the default, compares the module's class, the saved hyperparameters and the
            optimizers' options.
        """
        return None

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Callbacks that belong to this module; one of the same type as a Trainer's replaces it."""
        return []

    def prepare_data(self) -> None:
        """Downloads and the like: called on one rank of each machine, while the others wait; see
        `prepare_data_per_node`.
        """

    def train_dataloader(self) -> Any:
        """The training loader, where none is given to `fit`."""
        raise _unwritten(self)

    def val_dataloader(self) -> Any:
        """The validation loaders, where none are given to `fit` or `validate`."""
        raise _unwritten(self)

    def test_dataloader(self) -> Any:
        """The test loaders, where none are given to `test`."""
        raise _unwritten(self)

    def predict_dataloader(self) -> Any:
        """The prediction loaders, where none are given to `predict`."""
        raise _unwritten(self)

    # hooks, in the order of leyden.trainer.events.hooks ---------------------------------------------------------------
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a batch. Returning -1 ends the epoch, at the end of an open window; it is validated as any other."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_validation_model_zero_grad(self) -> None: ...

    def on_validation_model_eval(self) -> None:
        """Goes to eval mode for a validation. An override that does not call this one leaves the mode as it is."""
        self.eval()

    def on_validation_model_train(self) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_model_eval(self) -> None:
        """Goes to eval mode for a test. An override that does not call this one leaves the mode as it is."""
        self.eval()

    def on_test_model_train(self) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_model_eval(self) -> None:
        """Goes to eval mode for a prediction. An override that does not call this one leaves the mode as it is."""
        self.eval()

    def on_predict_model_train(self) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes a batch before it is moved to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch; override it for a structure whose tensors Leyden cannot find."""
        return self._strategy.to_device(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes a batch on the device (augmentation there)."""
        return batch

    # optimisation hooks -----------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward on the loss, already divided for accumulation and scaled for precision.

        In manual optimisation `manual_backward` calls it, with its own further arguments.
        """
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: PreparedOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Steps one optimizer.

        The gradients are there already: the closure returns the loss and evaluates it again only for an optimizer
        that calls it several times, such as LBFGS. (Lightning runs the training step inside the closure.)
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clears the gradients at the start of a window."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Steps a scheduler; `metric` is the monitored value of a plateau scheduler, else None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the gradients before a step, as the Trainer's arguments say; override it for a rule of your own."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer | PreparedOptimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clips the gradients of one optimizer; returns their total norm ("norm") or None ("value")."""
        if gradient_clip_val is None:
            return None
        algorithm = gradient_clip_algorithm or "norm"
        if algorithm not in ("norm", "value"):
            raise ConfigurationError(f"gradient_clip_algorithm={algorithm!r} is not known: use 'norm' or 'value'.")
        return self._strategy.clip(_unwrapped(optimizer), float(gradient_clip_val), algorithm)  # type: ignore[arg-type]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in manual optimisation, scaled for the precision, by `backward` and with the hooks around it.

        Args:
            loss: as it is; nothing divides it.
            *args: handed on to `backward`.
            **kwargs: handed on to `backward`.

        Raises:
            ConfigurationError: in automatic optimisation, where the Trainer calls backward.
        """
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward belongs to manual optimisation: set self.automatic_optimization = False in __init__."
            )
        self.trainer.accelerator.manual_backward(loss, *args, **kwargs)

    @overload
    def optimizers(
        self, use_prepared_optimizer: Literal[True] = True, *, use_pl_optimizer: Literal[True] | None = None
    ) -> PreparedOptimizer | list[PreparedOptimizer]: ...
    @overload
    def optimizers(
        self, use_prepared_optimizer: bool = True, *, use_pl_optimizer: bool | None = None
    ) -> Optimizer | list[Optimizer]: ...
    def optimizers(self, use_prepared_optimizer: bool = True, *, use_pl_optimizer: bool | None = None) -> Any:
        """The optimizer, or the list of them, to be stepped in manual optimisation.

        Args:
            use_prepared_optimizer: False for the optimizers themselves, whose steps know nothing of precision and
                strategy.
            use_pl_optimizer: Lightning's name of the same.
        """
        if use_pl_optimizer is not None:
            use_prepared_optimizer = use_pl_optimizer
        accelerator = self.trainer.accelerator
        found = accelerator.prepared_optimizers if use_prepared_optimizer else accelerator.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return found[0] if len(found) == 1 else (found or None)

    def toggled_optimizer(self, optimizer: Any) -> AbstractContextManager[None]:
        """Only the parameters of this optimizer take gradients within the block; such blocks may be nested."""
        return self.trainer.accelerator.toggles.turned_to(_unwrapped(optimizer))

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Makes every parameter of other optimizers stop taking gradients, until `untoggle_optimizer`.

        Toggling to another optimizer in between is allowed: `untoggle_optimizer` restores what was before the first.
        """
        self.trainer.accelerator.toggles.turn_to(_unwrapped(optimizer))

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undoes `toggle_optimizer`."""
        self.trainer.accelerator.toggles.undo()

    # logging ----------------------------------------------------------------------------------------------------------
    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Records a value, without reading it back from the device.

        Args:
            name: the name it goes by; a value logged on both levels goes by `name_step` and `name_epoch`.
            value: a number, a tensor of one number, or a torchmetrics metric.
            prog_bar: show it in the progress bar.
            logger: give it to the loggers (every `log_every_n_steps`); True if left out.
            on_step: the value of this step. Default: True in training steps.
            on_epoch: reduced over the epoch, weighted by batch size. Default: True in evaluation and epoch hooks.
            reduce_fx: "mean", "sum", "max", "min", or a function of the stacked values.
            enable_graph: keep the autograd graph of the value of this step.
            sync_dist: epoch values are reduced over the ranks unless this is False. Step values are this rank's own in
                any case, unlike Lightning's for True: no step waits for a logger.
            sync_dist_group: process group to reduce in; None for all ranks that see different data.
            add_dataloader_idx: append `/dataloader_idx_i` where there are several loaders.
            batch_size: weight of the value in a mean; found from the batch if left out.
            metric_attribute: accepted for scripts written for Lightning; metrics are known by themselves.
            rank_zero_only: log on rank 0 only; no other rank knows the value.

        Raises:
            ConfigurationError: if the value is no single number, the hook belongs to no epoch, or the arguments
                changed.
        """
        logs = self._logs
        if logs is None:
            return
        if rank_zero_only:
            if self._trainer is not None and not self._trainer.is_global_zero:
                return
            sync_dist = False
        options = (prog_bar, logger, on_step, on_epoch, sync_dist, reduce_fx)
        logs.record(name, value, options, enable_graph, add_dataloader_idx, batch_size, sync_dist_group)

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """Records several values with the same arguments as `log`; takes a torchmetrics.MetricCollection too."""
        items: Any = dictionary.items
        for name, value in items(keep_base=False) if hasattr(dictionary, "compute_groups") else items():
            self.log(name, value, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the main process; takes what Python's `print` takes."""
        self.trainer.print(*args, **kwargs)

    def _join(self, trainer: Trainer | None, logs: Logs | TracedLogs | None = None) -> None:
        """Takes part in a run, with every TrainModule inside it: each can log, and knows the Trainer."""
        for part in self.modules():
            if isinstance(part, TrainModule):
                part._trainer, part._logs = trainer, logs

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Lets torch.jit, which reads every attribute, read `trainer` outside of a run within the block: it is None."""
        parts = [part for part in self.modules() if isinstance(part, TrainModule)]
        for part in parts:
            part._is_traced = True
        try:
            yield
        finally:
            for part in parts:
                part._is_traced = False

    def _leave(self) -> None:
        """The run is over: `log` does nothing any more."""
        for part in self.modules():
            if isinstance(part, TrainModule):
                part._logs = None

    # where the module runs --------------------------------------------------------------------------------------------
    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module, or ran it last. Another one, or None, may be assigned between runs.

        Raises:
            LeydenError: if no Trainer does.
        """
        if self._trainer is None and not self._is_traced:
            raise LeydenError(f"{type(self).__name__} is not attached to a Trainer: hand it to Trainer.fit first.")
        return self._trainer  # type: ignore[return-value]

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._join(trainer, self._logs)

    @property
    def _strategy(self) -> Strategy:
        return self.trainer.strategy

    @property
    def device(self) -> torch.device:
        """Device of the module's parameters (the CPU if it has none)."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the module's first floating parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Number of accumulation windows done."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def device_mesh(self) -> Any:
        """The strategy's device mesh, or None where it has none."""
        return getattr(self._strategy, "device_mesh", None)

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        return [] if self._trainer is None else self._trainer.loggers

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stacks tensors of any nested structure over the ranks: (world_size, *shape).

        Of the ranks of a tp group, which have the same samples, there is one: (data_size, *shape).
        """
        return self.trainer.accelerator.all_gather(data, group, sync_grads)

    # weights ----------------------------------------------------------------------------------------------------------
    def freeze(self) -> None:
        """Stops gradients of all parameters and goes to eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Undoes `freeze`."""
        self.requires_grad_(True)
        self.train()

    @torch.no_grad()
    def to_onnx(self, file_path: str | Path | Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Exports the forward pass by torch.onnx.

        Args:
            file_path: where to write it.
            input_sample: an input of `forward`; `example_input_array` if left out.
            **kwargs: handed to `torch.onnx.export`.

        Raises:
            ConfigurationError: if there is no input.
        """
        from leyden.trainer.exporting import to_onnx

        with self._readable():
            return to_onnx(self, file_path, input_sample, kwargs)

    def to_torchscript(
        self,
        file_path: str | Path | Any = None,
        method: str = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Exports the forward pass by torch.jit, which torch has deprecated: `torch.export` takes its place.

        Args:
            file_path: where to write it too: a path, or a file that is open for writing.
            method: "script" compiles the code of `forward`, "trace" records a pass.
            example_inputs: inputs for "trace": a tensor, a tuple, or a dict by name; `example_input_array` if left out.
            **kwargs: handed to `torch.jit.script` or `torch.jit.trace`.

        Returns:
            A `torch.jit.ScriptModule` in eval mode. The module itself is as it was.

        Raises:
            ConfigurationError: for an unknown method, sharded weights, and a trace without an input.
        """
        from leyden.trainer.exporting import to_torchscript

        with self._readable():
            return to_torchscript(self, file_path, method, example_inputs, kwargs)

    @class_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        *,
        trust: bool = False,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Builds the module from the hyperparameters in a checkpoint, and loads its weights. It comes in train mode.

        `configure_model` is called before. For predictions of one's own, call `eval()` on what is returned.

        Args:
            checkpoint_path: a checkpoint folder; or a file of another trainer, which needs `trust=True`.
            map_location: device of the loaded module, or what else torch.load takes; the CPU if left out. A
                checkpoint's tensors are read to the CPU, so of a dict its entry "cpu" counts.
            hparams_file: a YAML or JSON file of hyperparameters in place of the checkpoint's: a logger's hparams.yaml.
            strict: raise on names that do not fit; the module's `strict_loading` if left out. False warns of them, and
                raises where nothing fits.
            weights_only: for pickle files of other trainers alone, as in `Trainer.fit`; True runs no code, trusted or
                not.
            trust: load a foreign pickle file, which may run code if torch's safe loader cannot read it.
            **kwargs: arguments of `__init__`, before those that were saved. One that it does not take is warned of.

        Raises:
            CheckpointError: if the checkpoint is damaged or not a checkpoint.
            ConfigurationError: if the weights do not fit, an argument of `__init__` was not saved, or it is called on
                an instance, which it would leave as it is.
        """
        from leyden.trainer.checkpoint.module import load_module

        return load_module(
            cls, checkpoint_path, map_location, hparams_file, strict, trust, weights_only, kwargs, arguments_for
        )

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles leave behind the run that a module was in.
        return {**self.__dict__, "_trainer": None, "_logs": None, "_toggled": {}, "_toggled_for": None}

    # torch.jit compiles properties with the forward pass, unless it is told not to.
    __jit_unused_properties__: ClassVar[list[str]] = [
        name
        for room in (vars(Hyperparameters), locals())
        for name, value in list(room.items())
        if isinstance(value, property)
    ]


def _unwrapped(optimizer: Optimizer | PreparedOptimizer) -> Optimizer:
    """Of `self.optimizers()` they come wrapped; precision and strategy know them by the optimizer itself."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _unwritten(module: TrainModule) -> ConfigurationError:
    name = inspect.stack()[1].function
    return ConfigurationError(
        f"{type(module).__name__} has no {name}: write it, or give the Trainer what stands in for it."
    )
