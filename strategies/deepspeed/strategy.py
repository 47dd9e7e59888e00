"""DeepSpeed: optimizer state, gradients and parameters are sharded over the ranks by its ZeRO engine."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.base import ClipAlgorithm, Refused, shadow_items
from leyden.strategies.deepspeed.config import ARGUMENTS, OFFLOADS, ZeroConfig
from leyden.strategies.deepspeed.engine import ZeroEngine, is_partitioned
from leyden.strategies.deepspeed.engine_state import counters, refresh, release, restore_counters, weights
from leyden.strategies.deepspeed.initialize import device_number, join_group, make_scheduler
from leyden.strategies.deepspeed.master_weights import ZeroMasterWeights
from leyden.strategies.deepspeed.own_loop import ZeroLoop
from leyden.strategies.errors import ConfigurationError, LeydenError, nearest
from leyden.strategies.precision import HalfPrecision
from leyden.strategies.process_group import GROUP_SETTINGS, ProcessGroupStrategy
from leyden.strategies.settings import RunSettings
from leyden.strategies.weights import StateWriter, WeightReader, fill_weights
from leyden.strategies.window import BackwardHooks, Window, zeroed

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class DeepSpeedStrategy(ProcessGroupStrategy):
    """DeepSpeed's ZeRO engine.

    Needs the extra `leyden[deepspeed]`. `docs/deepspeed.md` says which side decides where a DeepSpeed config and the
    run both have a setting; contradictions are errors that name both.

    Args:
        stage: what is sharded over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. Default:
            the config's, else 2.
        config: DeepSpeed's own config, as a mapping or the path of a JSON file; "auto" is filled from the run.
        offload_optimizer: optimizer state, and the step, wait on the "cpu" (True) or on "nvme"; or a mapping as in the
            config.
        offload_parameters: the same for parameters (stage 3).
        nvme_path: a folder on the disk, where something is offloaded to "nvme".
        pin_memory: offload to page-locked memory. Default True with a GPU.
        zero3_init_flag: at stage 3, what `configure_model` builds is sharded as it is built.
        activation_checkpointing_policy: classes of modules, or their names, whose activations are computed again in
            backward; or a function of a module. For `deepspeed.checkpointing` in your own code, see
            `partition_activations`.
        logging_level: of DeepSpeed's logger.
        **kwargs: further settings of DeepSpeed by the names of `leyden.strategies.deepspeed.config.ARGUMENTS`
            (overlap_comm, reduce_bucket_size, loss_scale, partition_activations, …), and those of
            `ProcessGroupStrategy`.

    Raises:
        ConfigurationError: for a setting that is unknown, contradicts another or cannot work.

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
        self.zero = ZeroEngine(self.config)
        self.master_weights = ZeroMasterWeights(self.zero)
        self.own_loop: ZeroLoop = ZeroLoop(self.zero)
        self._warned_of_skip = False
        self._failed = False

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], **kwargs: Any) -> Self:
        """The strategy that the `deepspeed_config` of an Accelerate YAML file describes.

        Args:
            config: the mapping under `deepspeed_config`, as the file has it.
            **kwargs: further arguments of this class.

        Raises:
            ConfigurationError: if a key contradicts `deepspeed_config_file`.
        """
        left = dict(config)
        clip, steps = left.pop("gradient_clipping", None), left.pop("gradient_accumulation_steps", None)
        given: dict[str, Any] = {
            "config": left.pop("deepspeed_config_file", None),
            "stage": left.pop("zero_stage", None),
            "zero3_init_flag": left.pop("zero3_init_flag", False),
            "stage3_gather_16bit_weights_on_model_save": left.pop("zero3_save_16bit_model", None),
        }
        for argument, part in OFFLOADS.items():
            device, path = left.pop(f"offload_{part}_device", None), left.pop(f"offload_{part}_nvme_path", None)
            if device not in (None, "none"):
                given[argument] = {"device": device, **({"nvme_path": path} if device == "nvme" and path else {})}
        names = left.pop("deepspeed_moe_layer_cls_names", None)
        if left:
            raise ConfigurationError(f"deepspeed_config: {sorted(left)[0]!r} has no meaning here: leave it out.")
        strategy = cls(**{**given, **kwargs})
        asked = {"gradient_clipping": clip, "gradient_accumulation_steps": steps}
        strategy.config.fill({name: value for name, value in asked.items() if value is not None})
        if names:
            strategy.own_loop = ZeroLoop(strategy.zero, [name.strip() for name in names.split(",")])
        return strategy

    @property
    def replicas(self) -> list[list[int]]:
        # From stage 1 on each rank steps a part, which the others are sent.
        return super().replicas if self.stage == 0 else [[rank] for rank in range(self.ranks.world_size)]

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; None until optimizers are set up. It stays for a run that goes on or evaluates."""
        return self.zero.engine

    @property
    def refusals(self) -> dict[Refused, str]:
        return {
            **super().refusals,
            "asynchronous": "the engine may move weights and state in any pass, so each checkpoint is written before "
            "training goes on",
        }

    # environment ------------------------------------------------------------------------------------------------------
    def check_settings(self, settings: RunSettings) -> None:
        self.zero.check(settings, self.ranks.world_size)

    def setup_environment(self) -> None:
        lower = self.config.lower_weights(self.precision.name)
        if lower is not None and self.precision.name == {"bf16": "bf16-mixed", "fp16": "16-mixed"}[lower]:
            # The config asks for weights in half precision, so inputs have it too.
            self.precision = HalfPrecision("bf16" if lower == "bf16" else "16")
        # An Accelerator's prepare may still fill what is "auto".
        self.final_config(complete=False)
        number = device_number(self.root_device, self.ranks.local_rank)
        self.ranks.use_device()
        library = self.zero.load_library(self.root_device, self.logging_level)
        super().setup_environment()
        join_group(library, number)

    def final_config(self, complete: bool = True) -> dict[str, Any]:
        """The config that DeepSpeed gets.

        Args:
            complete: nothing may be "auto" any more.

        Raises:
            ConfigurationError: for what contradicts precision or device.
        """
        self.zero.run_on(self.precision, self.root_device)
        return self.zero.final_config(complete)

    def report_failure(self, error: BaseException, where: str = "") -> bool:
        self._failed = True
        return super().report_failure(error, where)

    def teardown(self) -> None:
        if self._failed:
            # It stopped in the middle of a step, and is of no use to a later run.
            self.close_engine()
            self._failed = False
        super().teardown()

    def close_engine(self) -> None:
        """Closes the engine, which frees master weights and optimizer state."""
        self.zero.close()

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
        with self.zero.library.zero.Init(config_dict_or_path=self.final_config(complete=False)):
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
                "a rank without a single sample of its own cannot take part in a DeepSpeed run, whose engine reduces "
                "gradients in the order of a real backward: use a larger data set, a smaller batch_size or fewer ranks."
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
            "the accumulation window was closed without a batch that closes it, and DeepSpeed had reduced its "
            "gradients as if more were to come: give the loader its right length, or none at all."
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.own_loop.backward(loss, *args, **kwargs)

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[None]:
        return self.zero.closing(enabled)

    def scale_gradients(self, factor: Tensor | float) -> None:
        self.zero.scale_gradients(factor)

    def before_step(self, optimizer: Optimizer) -> None:
        """Does nothing: the engine's step brings gradients to their true scale."""

    def clip(self, optimizer: Optimizer, value: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clips in the step that follows, after which `engine.get_global_grad_norm` knows the norm."""
        if algorithm == "value":
            raise ConfigurationError("DeepSpeed clips gradients by their norm alone: use the algorithm 'norm'.")
        return self.zero.clip(value)

    def clip_parameters(
        self, parameters: Sequence[Tensor], value: float, algorithm: ClipAlgorithm = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        return self.own_loop.clip(parameters, value, algorithm, norm_type)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        if kwargs:
            raise ConfigurationError(
                f"optimizer.step({', '.join(f'{name}=…' for name in kwargs)}): DeepSpeed's engine makes the step and "
                "hands no arguments on to the optimizer. Call optimizer.step() alone, or use another strategy."
            )
        stepped = self.zero.step()
        if not stepped and not self._warned_of_skip and not self.config.scales_loss(self.precision.name):
            self._warned_of_skip = True
            warnings.warn(
                "DeepSpeed skipped a step whose gradients are not finite, where other strategies would go on with nan: "
                "look at the loss, or use detect_anomaly=True.",
                stacklevel=2,
            )
        return stepped

    def end_step(self) -> None:
        """Does nothing: the engine has its own loss scaler."""

    # state ------------------------------------------------------------------------------------------------------------
    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        if self.stage < 3:
            return module.state_dict()
        state: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            partitioned = is_partitioned(value)
            with self.zero.library.zero.GatheredParameters([value], enabled=partitioned):
                taken = value.detach() if isinstance(value, Tensor) else value
                if not rank0_only:
                    state[name] = taken.clone() if partitioned else taken
                elif self.ranks.is_global_zero:
                    state[name] = taken.cpu().clone()
        return state

    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        """Writes what DDP would, with the float32 master weights in place of the parameters: each rank its part."""
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
