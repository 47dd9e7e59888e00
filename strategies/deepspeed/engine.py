"""DeepSpeed's engine for one module: created from the run's settings, driven, and closed."""

from __future__ import annotations

import multiprocessing.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import RunSettings
from leyden.strategies.deepspeed.config import ZeroConfig
from leyden.strategies.deepspeed.engine_state import NamedOptimizer, Piece, pieces_of, refresh
from leyden.strategies.deepspeed.initialize import (
    CallableModel,
    StepModule,
    close_engine,
    import_deepspeed,
    make_engine,
)
from leyden.strategies.master_weights import MasterWeights
from leyden.strategies.precision import Precision
from leyden.strategies.weights import WeightReader


class ZeroEngine:
    """Holds DeepSpeed's engine, at most one at a time, and the run's settings for it.

    `DeepSpeedStrategy` drives it in a run of the Trainer, and `ZeroLoop` in a custom loop. `ZeroMasterWeights` maps its
    flat buffers to parameters.

    Args:
        config: the DeepSpeed config.

    Attributes:
        library: the module deepspeed, set once the environment is set up.
        groups: the parameters of each of the optimizer's groups.
        is_reduced: True in a custom loop after the backward that completes the gradients, until the step.
    """

    def __init__(self, config: ZeroConfig) -> None:
        self.config = config
        self.library: Any = None
        self.groups: list[list[Tensor]] = []
        self.is_reduced = False
        self._root: type[StepModule] = StepModule
        # True if the next backward of a custom loop closes the window, which completes the gradients.
        self._closes = True
        self._settings = RunSettings()
        self._precision, self._device = "32-true", "cpu"
        self._frozen: set[int] = set()
        self._engines: list[Any] = []

    @property
    def engine(self) -> Any:
        """DeepSpeed's own engine, or None until optimizers are set up. Kept after a fit, for a further fit."""
        return self._engines[0] if self._engines else None

    @property
    def sharded(self) -> Any:
        """DeepSpeed's wrapper around the optimizer, or None at stage 0, which has none."""
        engine = self.engine
        return None if engine.optimizer is engine.basic_optimizer else engine.optimizer

    @property
    def pieces(self) -> dict[int, Piece]:
        """This rank's piece of each trained parameter, by the parameter's id. See `pieces_of`."""
        return {} if self.engine is None else pieces_of(self.engine)

    def load_library(self, device: torch.device, level: int) -> Any:
        """Imports deepspeed for this type of device, with its logger at the given level."""
        self.library = import_deepspeed(device, level)
        return self.library

    # settings ---------------------------------------------------------------------------------------------------------
    def check(self, settings: RunSettings, world_size: int) -> None:
        """Takes the run's settings.

        Raises:
            ConfigurationError: if the config contradicts them.
        """
        self.config.check(settings, world_size)
        self._settings = settings

    def run_on(self, precision: Precision, device: torch.device) -> None:
        """Takes the precision and device type, which complete the config."""
        self._precision, self._device = precision.name, device.type

    def final_config(self, complete: bool = True) -> dict[str, Any]:
        """Returns the final config for DeepSpeed.

        Args:
            complete: whether a remaining "auto" is an error.

        Raises:
            ConfigurationError: if precision or device contradicts the config.
        """
        return self.config.build(
            precision=self._precision,
            device=self._device,
            micro_batch=self._settings.batch_size,
            complete=complete,
        )

    # creating and closing the engine ----------------------------------------------------------------------------------
    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Creates the engine that trains a module, or keeps that of an earlier fit. Returns the stepped optimizer."""
        if self.engine is not None and optimizers and self.engine.basic_optimizer is optimizers[0]:
            return list(optimizers)
        self.close()
        trained: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups = [list(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        self.groups = groups or [trained]
        if optimizers:
            self.config.check_optimizer(optimizers[0])
        self._frozen = {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
        self.make(module, optimizers[0] if optimizers else None)
        return [self.engine.basic_optimizer]

    def make(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        """Creates an engine. Without an optimizer it only gathers parameters for forward passes."""
        self._engines.append(make_engine(self.library, self._root(module), self.final_config(), optimizer))
        # Closes the engine with this object, at the latest before the process group is left (see GroupRanks).
        multiprocessing.util.Finalize(self, _close, args=(self._engines,), exitpriority=200)

    def close(self) -> None:
        """Closes the engine, which frees master weights and optimizer state."""
        _close(self._engines)
        self.is_reduced = False

    def check_trained(self, module: nn.Module) -> None:
        """Raises ConfigurationError for parameters or groups that are trained now but unknown to the engine."""
        if self.engine is None:
            return
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) in self._frozen:
                raise ConfigurationError(
                    f"{name} was frozen when DeepSpeed's engine was created and is trained now, but the engine would "
                    "not train it. Keep it trainable with a learning rate of 0 until then, or unfreeze it and fit "
                    "again."
                )
        if len(self.engine.basic_optimizer.param_groups) != len([group for group in self.groups if group]):
            raise ConfigurationError(
                "A parameter group was added after DeepSpeed's engine was created, which would not step it. Give the "
                "optimizer all groups in configure_optimizers."
            )

    # the step ---------------------------------------------------------------------------------------------------------
    def forward(self, step: Callable[[], Any], closes: bool) -> tuple[Tensor, Any]:
        """Runs a training step as the engine's forward pass. Returns its loss and its full output.

        Args:
            step: the training step, with its batch bound.
            closes: True if the step's backward ends the accumulation window.
        """
        engine = self.engine
        engine.set_gradient_accumulation_boundary(closes)
        engine.module.step = step
        loss = engine()
        return loss, engine.module.take()

    def serve_calls(self) -> None:
        """Makes engines created later accept the model's own arguments in forward, for a custom loop."""
        self._root = CallableModel

    @contextmanager
    def closing(self, closes: bool) -> Iterator[None]:
        """Returns a context that sets whether `backward` ends a window."""
        before, self._closes = self._closes, closes
        try:
            yield
        finally:
            self._closes = before

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs backward on the loss of a custom loop."""
        self.engine.set_gradient_accumulation_boundary(self._closes)
        self.engine.backward(loss, **kwargs)
        self.is_reduced = self._closes

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Multiplies the gradients of the next step."""
        sharded = self.sharded
        if sharded is None:
            grads = [p.grad for group in self.groups for p in group if p.grad is not None]
            torch._foreach_mul_(grads, factor)
        elif hasattr(sharded, "custom_loss_scaler"):
            # The step divides all its flat buffers, and the norm, by the loss scale. A Python number, since offloaded
            # buffers are on another device. The sync costs nothing extra: the step reads back values anyway.
            sharded.external_loss_scale = sharded.loss_scale / float(factor)
            sharded.custom_loss_scaler = True
        else:
            raise ConfigurationError(
                f"DeepSpeed's {type(sharded).__name__} does not support num_items in an accumulation window. Leave "
                "data_types.grad_accum_dtype out of the config."
            )

    def clip(self, value: float) -> Tensor | None:
        """Clips within the next step. Returns the norm at stage 0, where parameters have gradients, else None."""
        if self.sharded is None:
            return nn.utils.clip_grad_norm_([p for group in self.groups for p in group], value)
        self.sharded.clip_grad = value
        return None

    def step(self) -> bool:
        """Runs the engine's step. Returns False if DeepSpeed skipped it because gradients are not finite."""
        engine, sharded = self.engine, self.sharded
        self.is_reduced = False
        engine.step()
        if sharded is not None:
            sharded.clip_grad = engine.gradient_clipping()
            if getattr(sharded, "custom_loss_scaler", False):
                sharded.custom_loss_scaler, sharded.external_loss_scale = False, None
        return bool(engine.was_step_applied())


def is_partitioned(tensor: Any) -> bool:
    """Returns True for a parameter sharded by stage 3, whose own data is empty outside of a forward pass."""
    return hasattr(tensor, "ds_id")


def _close(engines: list[Any]) -> None:
    while engines:
        close_engine(engines.pop())


class ZeroMasterWeights(MasterWeights):
    """The engine's flat float32 copies of the weights. Each rank holds its part."""

    def __init__(self, zero: ZeroEngine) -> None:
        self._zero = zero

    def groups(self, optimizer: Optimizer) -> list[list[Tensor]]:
        return self._zero.groups

    def saved_form(self, optimizer: Optimizer) -> Any:
        pieces = self._zero.pieces
        return NamedOptimizer(optimizer, self._zero.groups, pieces) if pieces else optimizer

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        if self._zero.engine is None:
            return None
        pieces = self._zero.pieces
        return {name: pieces[id(p)].fragment() if id(p) in pieces else p for name, p in module.named_parameters()}

    def load(self, reader: WeightReader, module: nn.Module) -> None:
        pieces = {key: piece for key, piece in self._zero.pieces.items() if piece.is_copy}
        stored = set(reader.names()) if pieces else ()
        fragments = {name: pieces[id(p)].fragment() for name, p in module.named_parameters() if id(p) in pieces}
        if fragments:
            reader.fill({name: fragment for name, fragment in fragments.items() if name in stored})
            refresh(self._zero.engine)
