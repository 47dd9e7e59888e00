"""TrainModule, the base class for users: an nn.Module with a training step, optimizers and hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError, LeydenError
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.hparams import Hyperparameters, arguments_for, class_only

if TYPE_CHECKING:
    from typing_extensions import Self

    from leyden.callbacks.base import Callback
    from leyden.strategies.base import Strategy
    from leyden.trainer.logging.logs import Logs, TracedLogs
    from leyden.trainer.logging.values import Reduction
    from leyden.trainer.trainer import Trainer

T = TypeVar("T")


class TrainModule(Hyperparameters, nn.Module):
    """The model, its steps and its optimizer.

    Implement `training_step` and `configure_optimizers`; add `validation_step`, `test_step`, `predict_step` and hooks
    as needed. `leyden.trainer.events.hooks` lists the order of hooks. A hook that you do not override is never called.

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
    """True: the first rank of each machine calls `prepare_data`. False: only global rank 0 calls it."""
    automatic_optimization: bool = True
    """False: `training_step` calls `manual_backward` and steps the optimizers itself."""
    strict_loading: bool = True
    """False: missing and unexpected weights in a checkpoint are ignored."""
    example_input_array = cast(Any, None)  # torch.jit.script does not support attributes annotated as Any.
    """An input of `forward` (a tensor, tuple or dict), for sizes in the summary, the logged graph and ONNX."""
    _is_traced = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._logs: Logs | TracedLogs | None = None

    # implemented by subclasses ----------------------------------------------------------------------------------------
    # The signatures of steps let a subclass take fewer arguments without a type error.
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step(batch, batch_idx)`: computes the loss of one batch.

        A step whose first parameter is named `dataloader_iter` draws its own batches, as (batch, batch_idx,
        dataloader_idx).

        Returns:
            A scalar loss, or a dict with `loss`. A dict may also have `num_items`, the number of tokens or samples that
            `loss` sums over. The gradient is then divided by the items of the whole accumulation window on all ranks,
            so accumulation and sharding give the gradient of one large batch.
        """
        raise _unwritten(self)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`validation_step(batch, batch_idx, dataloader_idx=0)`: runs one validation batch, in eval mode."""
        raise _unwritten(self)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`test_step(batch, batch_idx, dataloader_idx=0)`: runs one batch of `Trainer.test`."""
        raise _unwritten(self)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`predict_step(batch, batch_idx, dataloader_idx=0)`: runs one batch of `Trainer.predict`; by default calls the
        module on the batch."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Returns the optimizers and their schedulers.

        Returns:
            An optimizer; a list of optimizers; `([optimizers], [schedulers])` or `([optimizers], scheduler)`; a dict
            `{"optimizer": …, "lr_scheduler": …}`; a list of such dicts; or None to train without one. A scheduler may
            be a dict `{"scheduler": …, "interval": "epoch" | "step", "frequency": 1, "monitor": "val_loss",
            "strict": True, "name": None}`.
        """
        raise _unwritten(self)

    def configure_model(self) -> None:
        """Builds submodules in the strategy's context (on the meta device if it shards). Called in every stage."""

    def configure_weights(self, load: Callable[[str | Path], None]) -> None:
        """Loads pretrained weights into the model that `configure_model` built. Called in every stage.

        By now the strategy holds the model as it trains it. Each rank reads only its own part of every tensor, so a
        model larger than a rank's memory can start from pretrained weights.

        Args:
            load: reads a folder that `save_pretrained` of transformers wrote. It does nothing if the run restores the
                weights of a checkpoint.

        Example:
            >>> class Pretrained(TrainModule):
            ...     def configure_weights(self, load):
            ...         load("path/to/llama")
        """

    def run_identity(self) -> Any:
        """Returns the identity of this run, so that `ckpt_path="auto"` never resumes another run's checkpoint.

        Returns:
            Any plain value, such as the name of a trial: a checkpoint belongs to this run if it recorded the same
            value. None, the default, compares the module's class, the saved hyperparameters and the optimizers' options
            instead.
        """
        return None

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Returns callbacks of this module. They replace the Trainer's callbacks of the same type."""
        return []

    def prepare_data(self) -> None:
        """Downloads data. Called on one rank per machine while the others wait; see `prepare_data_per_node`."""

    def train_dataloader(self) -> Any:
        """Returns the training loader if none is passed to `fit`."""
        raise _unwritten(self)

    def val_dataloader(self) -> Any:
        """Returns the validation loaders if none are passed to `fit` or `validate`."""
        raise _unwritten(self)

    def test_dataloader(self) -> Any:
        """Returns the test loaders if none are passed to `test`."""
        raise _unwritten(self)

    def predict_dataloader(self) -> Any:
        """Returns the prediction loaders if none are passed to `predict`."""
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
        """Called before a batch. Return -1 to end the epoch, after an open window; the epoch is validated as usual."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_validation_model_zero_grad(self) -> None: ...

    def on_validation_model_eval(self) -> None:
        """Sets eval mode for a validation. An override keeps the current mode unless it calls this method."""
        self.eval()

    def on_validation_model_train(self) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_model_eval(self) -> None:
        """Sets eval mode for a test. An override keeps the current mode unless it calls this method."""
        self.eval()

    def on_test_model_train(self) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_model_eval(self) -> None:
        """Sets eval mode for a prediction. An override keeps the current mode unless it calls this method."""
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
        """Transforms a batch before it moves to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch to the device; override it for data structures whose tensors Leyden cannot find."""
        return self._strategy.to_device(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Transforms a batch on the device, such as for augmentation."""
        return batch

    # optimization hooks -----------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Runs backward on the loss, which is already divided for accumulation and scaled for the precision.

        In manual optimization `manual_backward` calls it and passes further arguments on.
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

        The gradients are already computed, so the closure only returns the loss. For an optimizer such as LBFGS, which
        evaluates the loss several times, the closure runs the training step, as it always does in Lightning.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clears the gradients at the start of an accumulation window."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Steps a scheduler; `metric` is the monitored value for a plateau scheduler, otherwise None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the gradients before a step, according to the Trainer's arguments; override it for a custom rule."""
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
        """Runs `backward` and its hooks in manual optimization, with the loss scaled for the precision.

        Args:
            loss: the loss, which is not divided for accumulation.
            *args: passed to `backward`.
            **kwargs: passed to `backward`.

        Raises:
            ConfigurationError: in automatic optimization, where the Trainer calls backward.
        """
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward requires manual optimization: set self.automatic_optimization = False in __init__."
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
        """Returns the optimizer, or the list of optimizers, to step in manual optimization.

        Args:
            use_prepared_optimizer: False for the raw optimizers, whose steps bypass precision and strategy.
            use_pl_optimizer: Lightning's name for the same argument.
        """
        if use_pl_optimizer is not None:
            use_prepared_optimizer = use_pl_optimizer
        accelerator = self.trainer.accelerator
        optimizers = accelerator.prepared_optimizers if use_prepared_optimizer else accelerator.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Returns the scheduler, a list of several schedulers, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return schedulers[0] if len(schedulers) == 1 else (schedulers or None)

    def toggled_optimizer(self, optimizer: Any) -> AbstractContextManager[None]:
        """Restricts gradients to the parameters of this optimizer inside the block; blocks may be nested."""
        return self.trainer.accelerator.toggles.turned_to(_unwrapped(optimizer))

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Disables gradients for the parameters of all other optimizers, until `untoggle_optimizer`.

        Several toggles may follow each other: `untoggle_optimizer` restores the state before the first one.
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
        """Records a value without reading it back from the device.

        Args:
            name: the value's name; logged both per step and per epoch, it becomes `name_step` and `name_epoch`.
            value: a number, a tensor with one element, or a torchmetrics metric.
            prog_bar: show the value in the progress bar.
            logger: pass the value to the loggers, every `log_every_n_steps`. Default True.
            on_step: log the value of this step. Default: True in training steps.
            on_epoch: reduce over the epoch, weighted by batch size. Default: True in evaluation and epoch hooks.
            reduce_fx: "mean" or "avg", "sum", "max", "min" (in any case), or a function of the stacked values.
            enable_graph: keep the autograd graph of this step's value.
            sync_dist: reduce epoch values over the ranks, unless False. Step values are never reduced, unlike in
                Lightning, because a step would then wait for a logger.
            sync_dist_group: process group to reduce in; None for all ranks with different data.
            add_dataloader_idx: append `/dataloader_idx_i` to the name if there are several loaders.
            batch_size: weight of the value in a mean; by default inferred from the batch.
            metric_attribute: accepted for compatibility with Lightning; metrics are found automatically.
            rank_zero_only: log only on rank 0; no other rank knows the value.

        Raises:
            ConfigurationError: if the value is not a single number, the hook belongs to no epoch, or the arguments
                differ from those of an earlier call.
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
        """Records a dict of values, or a torchmetrics.MetricCollection, with the same arguments as `log`."""
        items: Any = dictionary.items
        for name, value in items(keep_base=False) if hasattr(dictionary, "compute_groups") else items():
            self.log(name, value, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the main process; accepts the arguments of Python's `print`."""
        self.trainer.print(*args, **kwargs)

    def _join(self, trainer: Trainer | None, logs: Logs | TracedLogs | None = None) -> None:
        """Attaches this module and all TrainModules inside it to a run: each can log and has the Trainer."""
        for part in self.modules():
            if isinstance(part, TrainModule):
                part._trainer, part._logs = trainer, logs

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Makes `trainer` None outside of a run, not an error, inside the block: torch.jit reads every attribute."""
        parts = [part for part in self.modules() if isinstance(part, TrainModule)]
        for part in parts:
            part._is_traced = True
        try:
            yield
        finally:
            for part in parts:
                part._is_traced = False

    def _leave(self) -> None:
        """Detaches the module from an ended run: `log` becomes a no-op."""
        for part in self.modules():
            if isinstance(part, TrainModule):
                part._logs = None

    # the run and its devices ------------------------------------------------------------------------------------------
    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module or ran it last. Another Trainer, or None, may be assigned between runs.

        Raises:
            LeydenError: if the module is not attached to a Trainer.
        """
        if self._trainer is None and not self._is_traced:
            raise LeydenError(f"{type(self).__name__} is not attached to a Trainer: pass it to Trainer.fit first.")
        return self._trainer  # type: ignore[return-value]

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._join(trainer, self._logs)

    @property
    def _strategy(self) -> Strategy:
        return self.trainer.strategy

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters; the CPU if it has none."""
        parameter = next(self.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """The number of completed accumulation windows."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def device_mesh(self) -> Any:
        """The strategy's device mesh, or None if it has none."""
        return getattr(self._strategy, "device_mesh", None)

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        return [] if self._trainer is None else self._trainer.loggers

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stacks the tensors of a nested structure over the ranks: `(world_size, *shape)`.

        With tensor parallelism it takes one rank per tp group, whose ranks have the same samples:
        `(data_size, *shape)`.
        """
        return self.trainer.accelerator.all_gather(data, group, sync_grads)

    # weights ----------------------------------------------------------------------------------------------------------
    def freeze(self) -> Self:
        """Disables gradients for all parameters and sets eval mode; returns the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Enables gradients for all parameters and sets train mode; returns the module."""
        return self.requires_grad_(True).train()

    @torch.no_grad()
    def to_onnx(self, file_path: str | Path | Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Exports the forward pass with torch.onnx.

        Args:
            file_path: the output file.
            input_sample: an input of `forward`; by default `example_input_array`.
            **kwargs: passed to `torch.onnx.export`.

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
        """Exports the forward pass with torch.jit, which torch has deprecated in favor of `torch.export`.

        Args:
            file_path: an optional output: a path, or a file open for writing.
            method: "script" compiles the code of `forward`, "trace" records a pass.
            example_inputs: inputs for "trace": a tensor, a tuple, or a dict by name; by default `example_input_array`.
            **kwargs: passed to `torch.jit.script` or `torch.jit.trace`.

        Returns:
            A `torch.jit.ScriptModule` in eval mode. This module is unchanged.

        Raises:
            ConfigurationError: for an unknown method, for sharded weights, or for a trace without an input.
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
        """Builds the module from the hyperparameters in a checkpoint and loads its weights; returns it in train mode.

        It calls `configure_model` before loading. Call `eval()` on the result to predict in your own loop.

        Args:
            checkpoint_path: a checkpoint folder, or another trainer's file, which needs `trust=True`.
            map_location: the device of the loaded module, or any other value that torch.load accepts. Default: the CPU.
                Tensors are read to the CPU, so only the entry "cpu" of a dict counts.
            hparams_file: a YAML or JSON file of hyperparameters, such as a logger's hparams.yaml, that replaces those
                of the checkpoint.
            strict: raise if names do not match; by default the module's `strict_loading`. False warns, and raises only
                if no name matches.
            weights_only: only for pickle files of other trainers, as in `Trainer.fit`; True never runs code.
            trust: load a foreign pickle file, which may run code if torch's safe loader cannot read it.
            **kwargs: arguments of `__init__`, which override saved ones. Unknown arguments cause a warning.

        Raises:
            CheckpointError: if the checkpoint is damaged or not a checkpoint.
            ConfigurationError: if the weights do not match, an argument of `__init__` was not saved, or the method is
                called on an instance, which it cannot change.
        """
        from leyden.checkpoint.module import load_module

        return load_module(
            cls, checkpoint_path, map_location, hparams_file, strict, trust, weights_only, kwargs, arguments_for
        )

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles are detached from the run.
        return {**self.__dict__, "_trainer": None, "_logs": None, "_toggled": {}, "_toggled_for": None}

    # torch.jit would otherwise compile all properties along with the forward pass.
    __jit_unused_properties__: ClassVar[list[str]] = [
        name
        for room in (vars(Hyperparameters), locals())
        for name, value in list(room.items())
        if isinstance(value, property)
    ]


def _unwrapped(optimizer: Optimizer | PreparedOptimizer) -> Optimizer:
    """Returns the raw optimizer, as precision and strategy know it; `self.optimizers()` returns wrappers."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _unwritten(module: TrainModule) -> ConfigurationError:
    name = inspect.stack()[1].function
    return ConfigurationError(
        f"{type(module).__name__} has no {name}: implement it, or pass its replacement to the Trainer."
    )
