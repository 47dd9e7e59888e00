"""DeepSpeed: its ZeRO engine shards optimizer state, gradients and parameters over the ranks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.errors import ConfigurationError, LeydenError, nearest
from leyden.core.rank_zero import warn
from leyden.strategies.base import ClipAlgorithm, Refused, RunSettings, shadow_items
from leyden.strategies.deepspeed.config import ARGUMENTS, OFFLOADS, ZeroConfig
from leyden.strategies.deepspeed.engine import ZeroEngine, ZeroMasterWeights, is_partitioned
from leyden.strategies.deepspeed.engine_state import counters, refresh, release, restore_counters, weights
from leyden.strategies.deepspeed.initialize import (
    device_number,
    gathering_for_transformers,
    join_group,
    make_scheduler,
)
from leyden.strategies.deepspeed.own_loop import ZeroLoop
from leyden.strategies.precision import HalfPrecision
from leyden.strategies.process_group import GROUP_SETTINGS, ProcessGroupStrategy, broadcast_all
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights
from leyden.strategies.window import BackwardHooks, Window, zeroed

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class DeepSpeedStrategy(ProcessGroupStrategy):
    """DeepSpeed's ZeRO engine.

    Needs the extra `leyden[deepspeed]`. If a DeepSpeed config and the run both have a setting, `docs/deepspeed.md`
    lists which side decides. Contradictions are errors that name both sides.

    Args:
        stage: ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Default: the
            config's stage, or 2.
        config: DeepSpeed's own config, as a mapping or the path of a JSON file. "auto" is filled from the run.
        offload_optimizer: where optimizer state is kept and the step runs: "cpu" (or True), "nvme", or a mapping as in
            the config.
        offload_parameters: the same for parameters (stage 3).
        nvme_path: folder on the disk for offloading to "nvme".
        pin_memory: whether to offload to page-locked memory. Default: True with a GPU.
        zero3_init_flag: whether, at stage 3, modules are sharded while `configure_model` builds them.
        activation_checkpointing_policy: modules whose activations are recomputed in backward: classes, class names, or
            a function of a module. For `deepspeed.checkpointing` in your own code, see `partition_activations`.
        logging_level: level of DeepSpeed's logger.
        **kwargs: further settings of DeepSpeed by the names in `leyden.strategies.deepspeed.config.ARGUMENTS`
            (overlap_comm, reduce_bucket_size, loss_scale, partition_activations, …), and arguments of
            `ProcessGroupStrategy`.

    Raises:
        ConfigurationError: for a setting that is unknown, invalid, or contradicts another.

    Example:
        >>> DeepSpeedStrategy(stage=3, offload_optimizer="cpu").config.offloads("optimizer")
        'cpu'
    """

    name = "deepspeed"
    supports_closure = False
    drives_one = True

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
        extra = {name: value for name, value in kwargs.items() if name not in GROUP_SETTINGS}
        for name in extra:
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
            **extra,
        }
        arguments = {name: value for name, value in given.items() if value is not None}
        if isinstance(config, ZeroConfig) and arguments:
            raise ConfigurationError(
                f"DeepSpeedStrategy(config=ZeroConfig(…)) got {' and '.join(arguments)} too. Set that in ZeroConfig."
            )
        self.config = config if isinstance(config, ZeroConfig) else ZeroConfig(config, **arguments)
        self.stage = self.config.stage
        self.name = f"deepspeed_stage_{self.stage}"
        # At stage 3 a forward pass gathers parameters, so all ranks must take part in evaluation too.
        self.replicates = self.supports_inference_mode = self.stage < 3
        self.zero3_init_flag = zero3_init_flag
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.logging_level = logging_level
        self.zero = ZeroEngine(self.config)
        self.master_weights = ZeroMasterWeights(self.zero)
        self.own_loop: ZeroLoop = ZeroLoop(self.zero)
        self._warned_of_skip = False
        self._failed = False

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], **kwargs: Any) -> Self:
        """Returns the strategy for the `deepspeed_config` of an Accelerate YAML file.

        Args:
            config: the mapping under `deepspeed_config`.
            **kwargs: further arguments of this class.

        Raises:
            ConfigurationError: if a key contradicts `deepspeed_config_file`.
        """
        remaining = dict(config)
        clip = remaining.pop("gradient_clipping", None)
        steps = remaining.pop("gradient_accumulation_steps", None)
        arguments: dict[str, Any] = {
            "config": remaining.pop("deepspeed_config_file", None),
            "stage": remaining.pop("zero_stage", None),
            "zero3_init_flag": remaining.pop("zero3_init_flag", False),
            "stage3_gather_16bit_weights_on_model_save": remaining.pop("zero3_save_16bit_model", None),
        }
        for argument, part in OFFLOADS.items():
            device = remaining.pop(f"offload_{part}_device", None)
            path = remaining.pop(f"offload_{part}_nvme_path", None)
            if device not in (None, "none"):
                arguments[argument] = {"device": device, **({"nvme_path": path} if device == "nvme" and path else {})}
        moe_names = remaining.pop("deepspeed_moe_layer_cls_names", None)
        if remaining:
            raise ConfigurationError(f"deepspeed_config has the unknown key {sorted(remaining)[0]!r}. Leave it out.")
        strategy = cls(**{**arguments, **kwargs})
        run_settings = {"gradient_clipping": clip, "gradient_accumulation_steps": steps}
        strategy.config.fill({name: value for name, value in run_settings.items() if value is not None})
        if moe_names:
            strategy.own_loop = ZeroLoop(strategy.zero, [name.strip() for name in moe_names.split(",")])
        return strategy

    @property
    def replicas(self) -> list[list[int]]:
        # From stage 1 on, each rank steps only its part and sends it to the other ranks.
        return super().replicas if self.stage == 0 else [[rank] for rank in range(self.ranks.world_size)]

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, or None until optimizers are set up. Kept for a further fit or an evaluation."""
        return self.zero.engine

    @property
    def refusals(self) -> dict[Refused, str]:
        return {
            **super().refusals,
            "asynchronous": "the engine may move weights and state in any pass, so each checkpoint is written before "
            "training continues",
            "trainable_only": "the engine keeps frozen weights in memory of its own, where they are not compared. Use "
            "FSDP",
        }

    # environment ------------------------------------------------------------------------------------------------------
    def check_settings(self, settings: RunSettings) -> None:
        self.zero.check(settings, self.ranks.world_size)

    def setup_environment(self) -> None:
        lower = self.config.lower_weights(self.precision.name)
        if lower is not None and self.precision.name == {"bf16": "bf16-mixed", "fp16": "16-mixed"}[lower]:
            # The config asks for half-precision weights, so inputs are converted too.
            self.precision = HalfPrecision("bf16" if lower == "bf16" else "16")
        # An Accelerator's prepare may still fill values that are "auto".
        self.final_config(complete=False)
        number = device_number(self.root_device, self.ranks.local_rank)
        self.ranks.use_device()
        library = self.zero.load_library(self.root_device, self.logging_level)
        super().setup_environment()
        join_group(library, number)

    def final_config(self, complete: bool = True) -> dict[str, Any]:
        """Returns the final config for DeepSpeed.

        Args:
            complete: whether a remaining "auto" is an error.

        Raises:
            ConfigurationError: if the config contradicts precision or device.
        """
        self.zero.run_on(self.precision, self.root_device)
        return self.zero.final_config(complete)

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        self._failed = True
        return super().report_failure(error, where)

    def teardown(self) -> None:
        if self._failed:
            # An engine that stopped in the middle of a step cannot be reused.
            self.close_engine()
            self._failed = False
        super().teardown()

    def close_engine(self) -> None:
        """Closes the engine, which frees master weights and optimizer state."""
        self.zero.close()

    @property
    def details(self) -> str:
        offloaded = [
            f"{label} offloaded to {self.config.offloads(part)}"
            for part, label in (("optimizer", "optimizer"), ("param", "parameters"))
            if self.config.offloads(part)
        ]
        sharded = (
            "nothing",
            "optimizer state",
            "optimizer state and gradients",
            "optimizer state, gradients and parameters",
        )
        return ", ".join([f"{sharded[self.stage]} sharded", *offloaded])

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def model_context(self) -> Iterator[None]:
        if self.stage < 3 or not self.zero3_init_flag:
            yield
            return
        # Not through the argument `dtype`: on a device without float16, DeepSpeed uses bfloat16 for any other dtype.
        library = self.zero.library
        with library.zero.Init(config_dict_or_path=self.final_config(complete=False)):
            with gathering_for_transformers(library):
                yield

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        if len(modules) != 1:
            raise ConfigurationError(
                f"DeepSpeed's engine drives one module, but {len(modules)} were given. Make them submodules of one."
            )
        [module] = modules
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigurationError(
                    f"DeepSpeed does not support 0-d parameters such as {name}. Give it the shape (1,)."
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
        tensors = [*module.parameters(), *module.buffers()]
        broadcast_all(tensor.detach() for tensor in tensors if not is_partitioned(tensor))

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        [module] = modules
        self.optimizers = self.zero.setup(module, optimizers)
        return self.optimizers

    def check_trained(self) -> None:
        for module in self.modules:
            self.zero.check_trained(module)

    def make_schedulers(self) -> list[Any]:
        section = self.config.scheduler
        return [] if section is None else [make_scheduler(self.engine.basic_optimizer, section)]

    # the step ---------------------------------------------------------------------------------------------------------
    def forward_backward(
        self, step_fn: Callable[..., Any], batch: Any, extra: tuple[Any, ...], window: Window, hooks: BackwardHooks
    ) -> Any:
        loss, outputs = self.zero.forward(self._in_precision(partial(step_fn, batch, *extra)), window.closes)
        for hook in hooks.on_before_backward:
            hook(loss)
        num_items = outputs.get("num_items") if isinstance(outputs, Mapping) else None
        self.engine.backward(self.loss_to_backward(loss, num_items, window))
        for after in hooks.on_after_backward:
            after()
        return outputs

    def _in_precision(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the step under autocast, unless DeepSpeed applies autocast itself."""
        context = self.precision.forward_context
        if context is None or self.engine.torch_autocast_enabled():
            return step

        def run() -> Any:
            with context():
                return step()

        return run

    def shadow_batch(self, step_fn: Callable[..., Any], filler: Any, extra: tuple[Any, ...], window: Window) -> None:
        if filler is None:
            raise ConfigurationError(
                "A rank has no sample of its own, but DeepSpeed's engine reduces gradients in the order of a real "
                "backward on every rank. Use a larger data set, a smaller batch_size or fewer ranks."
            )
        loss, _ = self.zero.forward(self._in_precision(partial(step_fn, filler, *extra)), window.closes)
        shadow_items(self, window)
        self.engine.backward(zeroed(loss))

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        if self.stage < 3:
            return super().evaluate(step_fn, batch, extra)
        if self.engine is None:
            self.zero.make(self.modules[0], None)
        root = self.engine.module
        root.step = partial(step_fn, batch, *extra)
        context = self.precision.forward_context
        with nullcontext() if context is None else context():
            root()
        outputs: T = root.take()
        return outputs

    def sync_gradients(self) -> None:
        raise LeydenError(
            "The accumulation window ended unexpectedly, after DeepSpeed had reduced its gradients as if more batches "
            "followed. Give the loader its correct length, or none at all."
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.own_loop.backward(loss, *args, **kwargs)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        return self.zero.closing(enabled)

    def scale_gradients(self, factor: Tensor | float) -> None:
        self.zero.scale_gradients(factor)

    def before_step(self, optimizer: Optimizer) -> None:
        """No-op, since the engine's step unscales gradients."""

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clips within the next step, after which `engine.get_global_grad_norm` returns the norm."""
        if algorithm == "value":
            raise ConfigurationError("DeepSpeed clips gradients only by norm. Use the algorithm 'norm'.")
        return self.zero.clip(value)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        return self.own_loop.clip(parameters, value, algorithm, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if kwargs:
            raise ConfigurationError(
                f"optimizer.step({', '.join(f'{name}=…' for name in kwargs)}): DeepSpeed's engine runs the step and "
                "passes no arguments to the optimizer. Call optimizer.step() without arguments, or use another "
                "strategy."
            )
        stepped = self.zero.step()
        if not stepped and not self._warned_of_skip and not self.config.scales_loss(self.precision.name):
            self._warned_of_skip = True
            warn(
                "DeepSpeed skipped a step whose gradients are not finite. Other strategies would continue with nan. "
                "Check the loss, or use detect_anomaly=True.",
            )
        return stepped

    def end_step(self) -> None:
        """No-op, since the engine has its own loss scaler."""

    # state ------------------------------------------------------------------------------------------------------------
    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        if self.stage < 3:
            return module.state_dict()
        state: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            partitioned = is_partitioned(value)
            with self.zero.library.zero.GatheredParameters([value], enabled=partitioned):
                whole = value.detach() if isinstance(value, Tensor) else value
                if not rank0_only:
                    state[name] = whole.clone() if partitioned else whole
                elif self.ranks.is_global_zero:
                    state[name] = whole.cpu().clone()
        return state

    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        """Writes the same as DDP, but float32 master weights in place of the parameters. Each rank writes its part."""
        writer.model(weights(module, self.zero.pieces), replicated=[name for name, _ in module.named_parameters()])
        if optimizers is not None:
            writer.optimizers(optimizers)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        pieces = self.zero.pieces
        if not pieces and not any(is_partitioned(parameter) for parameter in module.parameters()):
            super().load_module(reader, module, strict)
            return
        fill_weights(module, reader, strict, weights(module, pieces))
        if pieces:
            refresh(self.engine)
        else:
            release(module)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.engine is None else counters(self.engine)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.engine is not None:
            restore_counters(self.engine, state_dict)
