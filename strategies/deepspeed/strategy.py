"""DeepSpeed: optimizer state, gradients and parameters are sharded over the ranks by its ZeRO engine."""

from __future__ import annotations

import inspect
import logging
import multiprocessing.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.base import ClipAlgorithm
from leyden.strategies.deepspeed.config import ARGUMENTS, ZeroConfig
from leyden.strategies.deepspeed.engine_state import (
    NamedOptimizer,
    counters,
    pieces_of,
    refresh,
    release,
    restore_counters,
    weights,
)
from leyden.strategies.deepspeed.initialize import (
    close_engine,
    device_number,
    import_deepspeed,
    join_group,
    make_engine,
    make_scheduler,
)
from leyden.strategies.deepspeed.own_loop import OwnLoop
from leyden.strategies.errors import ConfigurationError, LeydenError, nearest
from leyden.strategies.precision import HalfPrecision
from leyden.strategies.process_group import ProcessGroupStrategy
from leyden.strategies.settings import RunSettings
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights
from leyden.strategies.window import BackwardHooks, Window

T = TypeVar("T")
GROUP_SETTINGS = frozenset(inspect.signature(ProcessGroupStrategy).parameters)


class DeepSpeedStrategy(OwnLoop):
    """DeepSpeed's ZeRO engine.

    Needs the extra `leyden[deepspeed]`. What belongs to whom where a DeepSpeed config and the run both have a setting stands in
    `docs/deepspeed.md`; contradictions are errors that name both sides.

    Args:
        stage: what is sharded over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Default: the
            config's, else 2.
        config: DeepSpeed's own config, as a mapping or the path of a JSON file; "auto" is filled from the run.
        offload_optimizer: optimizer state, and the step, wait on the "cpu" (True) or on "nvme"; or a mapping as in the config.
        offload_parameters: the same for parameters (stage 3).
        nvme_path: a folder on the disk, where something is offloaded to "nvme".
        pin_memory: page-locked memory for what is offloaded. Default True with a GPU.
        zero3_init_flag: at stage 3, what `configure_model` builds is sharded as it is built.
        activation_checkpointing_policy: classes of modules, or their names, whose activations are computed again in backward;
            or a function of a module. For `deepspeed.checkpointing` in your own code, see `partition_activations`.
        logging_level: of DeepSpeed's logger.
        **kwargs: further settings of DeepSpeed by the names of `leyden.strategies.deepspeed.config.ARGUMENTS` (overlap_comm,
            reduce_bucket_size, loss_scale, partition_activations, …), and those of `ProcessGroupStrategy`.

    Raises:
        ConfigurationError: for what is unknown, contradicts something else or cannot work.

    Example:
        >>> DeepSpeedStrategy(stage=3, offload_optimizer="cpu").config.offloads("optimizer")
        'cpu'
    """

    name = "deepspeed"
    supports_closure = False

    def __init__(
        self,
        *,
        stage: Literal[0, 1, 2, 3] | None = None,
        config: Mapping[str, Any] | str | Path | ZeroConfig | None = None,
        offload_optimizer: bool | str | Mapping[str, Any] = False,
        offload_parameters: bool | str | Mapping[str, Any] = False,
        nvme_path: str | Path | None = None,
        pin_memory: bool | None = None,
        zero3_init_flag: bool = True,
        activation_checkpointing_policy: Any = None,
        logging_level: int = logging.WARNING,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{name: value for name, value in kwargs.items() if name in GROUP_SETTINGS})
        own = {name: value for name, value in kwargs.items() if name not in GROUP_SETTINGS}
        for name in own:
            if name not in ARGUMENTS:
                known = sorted(
                    {*inspect.signature(DeepSpeedStrategy).parameters, *ARGUMENTS, *GROUP_SETTINGS} - {"kwargs"}
                )
                raise ConfigurationError(f"DeepSpeedStrategy has no argument {name!r}. {nearest(name, known)}")
        given = {
            "stage": stage,
            "offload_optimizer": offload_optimizer or None,
            "offload_parameters": offload_parameters or None,
            "nvme_path": nvme_path,
            "pin_memory": pin_memory,
            **own,
        }
        beside = {name: value for name, value in given.items() if value is not None}
        if isinstance(config, ZeroConfig) and beside:
            raise ConfigurationError(
                f"DeepSpeedStrategy(config=ZeroConfig(…)) has {' and '.join(beside)} in it: set them there."
            )
        self.config = config if isinstance(config, ZeroConfig) else ZeroConfig(config, **beside)
        self.stage = self.config.stage
        self.name = f"deepspeed_stage_{self.stage}"
        # At stage 3 a forward gathers parameters, so ranks stay in step in evaluation too.
        self.replicates = self.supports_inference_mode = self.stage < 3
        self.zero3_init_flag = zero3_init_flag
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.logging_level = logging_level
        self.settings = RunSettings()
        self._deepspeed: Any = None
        self._engines: list[Any] = []
        self._groups: list[list[Tensor]] = []
        self._frozen: set[int] = set()
        self._told_of_skip = False
        self._failed = False

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; None until optimizers are set up. It stays for a run that goes on or evaluates."""
        return self._engines[0] if self._engines else None

    # environment ------------------------------------------------------------------------------------------------------
    def check_settings(self, settings: RunSettings) -> None:
        self.config.check(settings, self.ranks.world_size)
        self.settings = settings

    def setup_environment(self) -> None:
        lower = self.config.lower_weights(self.precision.name)
        if lower is not None and self.precision.name == {"bf16": "bf16-mixed", "fp16": "16-mixed"}[lower]:
            # The config's word: weights in half precision, and so the inputs.
            self.precision = HalfPrecision("bf16" if lower == "bf16" else "16")
        # What is "auto" yet, an Accelerator's prepare may fill.
        self.final_config(complete=False)
        number = device_number(self.root_device, self.ranks.local_rank)
        self.ranks.use_device()
        self._deepspeed = import_deepspeed(self.root_device, self.logging_level)
        super().setup_environment()
        join_group(self._deepspeed, number)

    def final_config(self, complete: bool = True) -> dict[str, Any]:
        """What DeepSpeed is given.

        Args:
            complete: nothing may be "auto" any more.

        Raises:
            ConfigurationError: for what contradicts precision or device.
        """
        return self.config.build(
            precision=self.precision.name,
            device=self.root_device.type,
            micro_batch=self.settings.batch_size,
            complete=complete,
        )

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        self._failed = True
        return super().report_failure(error, where)

    def teardown(self) -> None:
        if self._failed:
            # Broken off in the middle of a step, it is of no use to a later run.
            self.close_engine()
            self._failed = False
        super().teardown()

    def close_engine(self) -> None:
        """Lets go of the engine, and with it of masters and optimizer state."""
        _close(self._engines)

    @property
    def details(self) -> str:
        offloaded = [
            f"{what} offloaded to {self.config.offloads(part)}"
            for part, what in (("optimizer", "optimizer"), ("param", "parameters"))
            if self.config.offloads(part)
        ]
        what = (
            "nothing",
            "optimizer state",
            "optimizer state and gradients",
            "optimizer state, gradients and parameters",
        )
        return ", ".join([f"{what[self.stage]} sharded", *offloaded])

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def model_context(self) -> Iterator[None]:
        if self.stage < 3 or not self.zero3_init_flag:
            yield
            return
        # Not by its argument dtype: on a device without float16 it takes bfloat16 for every other.
        with self._deepspeed.zero.Init(config_dict_or_path=self.final_config(complete=False)):
            yield

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        if len(modules) != 1:
            raise ConfigurationError(
                f"DeepSpeed's engine drives one module, and {len(modules)} were given: make them parts of one."
            )
        [module] = modules
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigurationError(
                    f"DeepSpeed cannot hold {name}, which has no dimension: give it the shape (1,)."
                )
        if self.engine is not None and self.engine.module.module is not module:
            self.close_engine()
        if self.engine is None and not any(is_partitioned(parameter) for parameter in module.parameters()):
            super().setup_modules(modules)
        if self.activation_checkpointing_policy is not None:
            from leyden.strategies.fsdp.blocks import checkpoint_activations

            checkpoint_activations(module, self.activation_checkpointing_policy)
        self.modules = [module]
        return self.modules

    def synchronize(self, module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if not is_partitioned(tensor):
                    dist.broadcast(tensor.detach(), 0)

    def synchronize_buffers(self) -> None:
        for module in self.modules:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        if self.engine is not None and optimizers and self.engine.basic_optimizer is optimizers[0]:
            # A fit that goes on.
            self.optimizers = list(optimizers)
            return self.optimizers
        self.close_engine()
        [module] = modules
        trained: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._groups = [list(group["params"]) for optimizer in optimizers for group in optimizer.param_groups] or [
            trained
        ]
        if optimizers:
            self.config.check_optimizer(optimizers[0])
        self._frozen = {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
        self._make_engine(module, optimizers[0] if optimizers else None)
        self.optimizers = [self.engine.basic_optimizer]
        return self.optimizers

    def _make_engine(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        self._engines.append(make_engine(self._deepspeed, self._root(module), self.final_config(), optimizer))
        # Before the process group is left (see ProcessGroupStrategy), or with this strategy.
        multiprocessing.util.Finalize(self, _close, args=(self._engines,), exitpriority=200)

    def check_trained(self) -> None:
        if self.engine is None:
            return
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) in self._frozen:
                    raise ConfigurationError(
                        f"{name} was frozen when DeepSpeed's engine was made and is trained now, which the engine would not do: leave "
                        "it trainable with a learning rate of 0 until then, or unfreeze it and fit again."
                    )
        if len(self.engine.basic_optimizer.param_groups) != len([group for group in self._groups if group]):
            raise ConfigurationError(
                "a parameter group was added after DeepSpeed's engine was made, which would not step it: give the optimizer all groups "
                "in configure_optimizers."
            )

    def make_schedulers(self) -> list[Any]:
        section = self.config.scheduler
        return [] if section is None else [make_scheduler(self.engine.basic_optimizer, section)]

    def parameter_groups(self, optimizer: Optimizer) -> list[list[Tensor]]:
        return self._groups

    # the step ---------------------------------------------------------------------------------------------------------
    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        engine = self.engine
        engine.set_gradient_accumulation_boundary(window.closes)
        engine.module.step = self._in_precision(partial(step_fn, batch, *extra))
        loss = engine()
        outputs = engine.module.take()
        for hook in hooks.on_before_backward:
            hook(loss)
        num_items = outputs.get("num_items") if isinstance(outputs, Mapping) else None
        engine.backward(self.loss_to_backward(loss, num_items, window))
        for after in hooks.on_after_backward:
            after()
        return outputs

    def _in_precision(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The step under autocast, unless that is DeepSpeed's own business."""
        context = self.precision.forward_context
        if context is None or self.engine.torch_autocast_enabled():
            return step

        def run() -> Any:
            with context():
                return step()

        return run

    def skip_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        if filler is None:
            raise ConfigurationError(
                "a rank without a single sample of its own cannot take part in a DeepSpeed run, whose engine reduces gradients in "
                "the order of a real backward: use a larger data set, a smaller batch_size or fewer ranks."
            )
        engine = self.engine
        engine.set_gradient_accumulation_boundary(window.closes)
        engine.module.step = self._in_precision(partial(step_fn, filler, *extra))
        loss = engine()
        engine.module.take()
        # Not loss * 0, which is nan where the loss is.
        zero = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
        self.skip_items(window)
        engine.backward(zero)

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if self.stage < 3:
            return super().evaluate(step_fn, batch, extra)
        if self.engine is None:
            self._make_engine(self.modules[0], None)
        root = self.engine.module
        root.step = partial(step_fn, batch, *extra)
        context = self.precision.forward_context
        with nullcontext() if context is None else context():
            root()
        outputs: T = root.take()
        return outputs

    def sync_gradients(self) -> None:
        raise LeydenError(
            "the accumulation window was closed without a batch that closes it, and DeepSpeed had reduced its gradients as if more "
            "were to come: give the loader its right length, or none at all."
        )

    def scale_gradients(self, factor: Tensor | float) -> None:
        sharded = self.engine.optimizer
        if sharded is self.engine.basic_optimizer:
            grads = [p.grad for group in self._groups for p in group if p.grad is not None]
            torch._foreach_mul_(grads, factor)
        elif hasattr(sharded, "custom_loss_scaler"):
            # Its step divides by the loss scale what lies in flat buffers, in several forms, and knows the norm by it.
            # As a number, since what is offloaded is on another device; the step reads back what it has found anyway.
            sharded.external_loss_scale = sharded.loss_scale / float(factor)
            sharded.custom_loss_scaler = True
        else:
            raise ConfigurationError(
                f"num_items in an accumulation window cannot go with DeepSpeed's {type(sharded).__name__}: leave "
                "data_types.grad_accum_dtype out of the config."
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Nothing: the engine's step brings gradients to their true scale."""

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clips in the step that follows, as the engine does; the norm is known after it (`engine.get_global_grad_norm`)."""
        if algorithm == "value":
            raise ConfigurationError("DeepSpeed clips gradients by their norm alone: use the algorithm 'norm'.")
        sharded = self.engine.optimizer
        if sharded is self.engine.basic_optimizer:
            return nn.utils.clip_grad_norm_([p for group in self._groups for p in group], value)
        sharded.clip_grad = value
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if kwargs:
            raise ConfigurationError(
                f"optimizer.step({', '.join(f'{name}=…' for name in kwargs)}): DeepSpeed's engine makes the step and hands no "
                "arguments on to the optimizer. Call optimizer.step() alone, or use another strategy."
            )
        engine, self._reduced = self.engine, False
        engine.step()
        sharded = engine.optimizer
        if sharded is not engine.basic_optimizer:
            sharded.clip_grad = engine.gradient_clipping()
            if getattr(sharded, "custom_loss_scaler", False):
                sharded.custom_loss_scaler, sharded.external_loss_scale = False, None
        stepped = bool(engine.was_step_applied())
        if not stepped and not self._told_of_skip and not self.config.scales_loss(self.precision.name):
            self._told_of_skip = True
            warnings.warn(
                "DeepSpeed skipped a step whose gradients are not finite, where other strategies would go on with nan: look at the loss, "
                "or use detect_anomaly=True.",
                stacklevel=2,
            )
        return stepped

    def end_step(self) -> None:
        """Nothing: the engine has its own loss scaler."""

    # state ------------------------------------------------------------------------------------------------------------
    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        if self.stage < 3:
            return module.state_dict()
        state: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            partitioned = is_partitioned(value)
            with self._deepspeed.zero.GatheredParameters([value], enabled=partitioned):
                taken = value.detach() if isinstance(value, Tensor) else value
                if not rank0_only:
                    state[name] = taken.clone() if partitioned else taken
                elif self.ranks.is_global_zero:
                    state[name] = taken.cpu().clone()
        return state

    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        """Writes what DDP would: float32 masters by the names of the parameters; each rank its stretches, what all have once."""
        pieces = {} if self.engine is None else pieces_of(self.engine)
        writer.model(weights(module, pieces), replicated=[name for name, _ in module.named_parameters()])
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        pieces = {} if self.engine is None else pieces_of(self.engine)
        if not pieces and not any(is_partitioned(parameter) for parameter in module.parameters()):
            super().load_module(reader, module, strict)
            return
        fill_weights(module, reader, strict, weights(module, pieces))
        if pieces:
            refresh(self.engine)
        else:
            release(module)

    def load_masters(self, reader: WeightReader, module: nn.Module) -> None:
        pieces = {key: piece for key, piece in pieces_of(self.engine).items() if piece.is_copy}
        stored = set(reader.names()) if pieces else ()
        named = {name: pieces[id(p)].fragment() for name, p in module.named_parameters() if id(p) in pieces}
        if named:
            reader.fill({name: fragment for name, fragment in named.items() if name in stored})
            refresh(self.engine)

    def state_parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        if self.engine is None:
            return None
        pieces = pieces_of(self.engine)
        return {name: pieces[id(p)].fragment() if id(p) in pieces else p for name, p in module.named_parameters()}

    def saved_form(self, optimizer: Optimizer) -> Any:
        pieces = pieces_of(self.engine)
        return NamedOptimizer(optimizer, self._groups, pieces) if pieces else optimizer

    def state_dict(self) -> dict[str, Any]:
        return {} if self.engine is None else counters(self.engine)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.engine is not None:
            restore_counters(self.engine, state_dict)


def is_partitioned(tensor: Tensor) -> bool:
    """True for a parameter that DeepSpeed's stage 3 holds: its own data is empty outside of a forward."""
    return hasattr(tensor, "ds_id")


def _close(engines: list[Any]) -> None:
    while engines:
        close_engine(engines.pop())


__all__ = ["DeepSpeedStrategy"]
