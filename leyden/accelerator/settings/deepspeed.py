"""DeepSpeed for an Accelerator: the plugin, and placeholders for objects that DeepSpeed's config creates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import RunSettings
from leyden.strategies.deepspeed.config import ZeroConfig

if TYPE_CHECKING:
    from leyden.accelerator.settings.options import Options
    from leyden.strategies.base import Strategy
    from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy


@dataclass
class DeepSpeedPlugin:
    """DeepSpeed's ZeRO for an Accelerator, under Accelerate's names; `DeepSpeedStrategy` has its own names.

    None takes the config's value, or DeepSpeed's default. If a value given here or to the Accelerator differs from the
    one in `hf_ds_config`, an error names both.

    Attributes:
        hf_ds_config: DeepSpeed's config: a mapping, the path of a JSON file, or an object with a `config` attribute.
            Leyden fills in its "auto" values.
        gradient_accumulation_steps: batches per step, for an Accelerator that does not set its own.
        gradient_clipping: gradient norm to which the engine clips in each step.
        zero_stage: 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too; 2 by default.
        is_train_batch_min: report the smallest batch size of several loaders to DeepSpeed; False reports the largest.
        offload_optimizer_device: device that stores optimizer state: "none", "cpu" or "nvme".
        offload_param_device: device that stores parameters (stage 3).
        offload_optimizer_nvme_path: folder for optimizer state on NVMe.
        offload_param_nvme_path: folder for parameters on NVMe.
        zero3_init_flag: build models sharded in `zero3_init_context_manager()`, at stage 3.
        zero3_save_16bit_model: accepted for Accelerate's scripts; `save_model` gathers weights in their own dtype.
        transformer_moe_cls_names: comma-separated classes of mixture-of-experts layers, gathered whole at stage 3.
        enable_msamp: refused: MS-AMP is no longer maintained.
        msamp_opt_level: refused, like `enable_msamp`.

    Raises:
        ConfigurationError: for unsupported settings, when the Accelerator is created.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | Path | None = None
    offload_param_nvme_path: str | Path | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    strategy: DeepSpeedStrategy | None = field(default=None, init=False, repr=False)

    def build(self) -> DeepSpeedStrategy:
        """Builds the strategy."""
        if self.enable_msamp or self.msamp_opt_level is not None:
            raise ConfigurationError("DeepSpeedPlugin(enable_msamp=…): MS-AMP is no longer maintained. Leave it out.")
        from leyden.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy

        config = getattr(self.hf_ds_config, "config", self.hf_ds_config)
        section = {
            "deepspeed_config_file": config,
            "zero_stage": self.zero_stage,
            "gradient_accumulation_steps": _none_if_auto(self.gradient_accumulation_steps),
            "gradient_clipping": _none_if_auto(self.gradient_clipping),
            "offload_optimizer_device": self.offload_optimizer_device,
            "offload_optimizer_nvme_path": self.offload_optimizer_nvme_path,
            "offload_param_device": self.offload_param_device,
            "offload_param_nvme_path": self.offload_param_nvme_path,
            "zero3_init_flag": bool(self.zero3_init_flag),
            "zero3_save_16bit_model": self.zero3_save_16bit_model,
            "deepspeed_moe_layer_cls_names": self.transformer_moe_cls_names,
        }
        self.strategy = DeepSpeedStrategy.from_accelerate(section)
        return self.strategy

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The config so far; `strategy.final_config()` is what DeepSpeed receives."""
        return (self.strategy or self.build()).config.values

    @property
    def precision(self) -> str | None:
        """The precision that the config enables, "bf16" or "fp16"; None if it enables neither."""
        config = (self.strategy or self.build()).config
        return next((name for name in ("bf16", "fp16") if config.given(f"{name}.enabled") is True), None)

    def get_value(self, path: str, default: Any = None) -> Any:
        """Returns the config's value at a dotted path such as "zero_optimization.stage"."""
        return (self.strategy or self.build()).config.get(path, default)

    def is_zero3_init_enabled(self) -> bool:
        """Returns True if `zero3_init_context_manager()` builds models sharded."""
        return bool(self.zero3_init_flag) and (self.strategy or self.build()).stage == 3

    def zero3_init_context_manager(self, enable: bool = True) -> AbstractContextManager[Any]:
        """Builds models sharded at stage 3 within the block; `enable=False` builds them whole.

        Create the Accelerator first.
        """
        strategy = self.strategy or self.build()
        return strategy.model_context() if enable and self.is_zero3_init_enabled() else nullcontext()

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Does nothing: there is only one plugin to select."""

    @property
    def selected(self) -> bool:
        return True


class DummyOptim:
    """Placeholder for the optimizer that DeepSpeed creates from its config.

    Attributes:
        params: the model's parameters.
        lr: value for an "auto" in the config.
        weight_decay: value for an "auto" in the config.
        kwargs: values for other optimizer parameters that are "auto" in the config, by name.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0.0, **kwargs: Any) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """Placeholder for the scheduler that DeepSpeed creates from its config, or a function from DeepSpeed's optimizer.

    Attributes:
        optimizer: a DummyOptim, or the optimizer.
        total_num_steps: optimizer steps of the run, for an "auto" in the config.
        warmup_num_steps: value for an "auto" in the config.
        lr_scheduler_callable: function that creates a scheduler from the optimizer; the config must then have none.
        kwargs: accepted for Accelerate's scripts.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs


def _none_if_auto(value: Any) -> Any:
    return None if value in (None, "auto", "none") else value


def given_plugin(plugin: Any, plugins: Any) -> DeepSpeedPlugin | None:
    """Returns the plugin among an Accelerator's arguments. Refuses several, since one engine drives one model."""
    given = plugins if plugin is None else plugin
    found = list(given.values()) if isinstance(given, Mapping) else [] if given is None else [given]
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} DeepSpeed plugins were given ({', '.join(given)}), but one engine drives the trained model. "
            "Pass one plugin. Models that are only evaluated need none: accelerator.prepare_model(model, "
            "evaluation_mode=True)."
        )
    if found and not isinstance(found[0], DeepSpeedPlugin):
        raise ConfigurationError(
            f"deepspeed_plugin={found[0]!r}: pass a DeepSpeedPlugin, such as DeepSpeedPlugin(zero_stage=2)."
        )
    return found[0] if found else None


def plugin_describing(strategy: Strategy) -> DeepSpeedPlugin | None:
    """Returns a plugin that describes a DeepSpeed strategy, whatever chose it; None for other strategies."""
    config = getattr(strategy, "config", None)
    if not isinstance(config, ZeroConfig):
        return None
    found: Any = strategy
    plugin = DeepSpeedPlugin(
        hf_ds_config=config.values,
        gradient_accumulation_steps=config.given("gradient_accumulation_steps"),
        gradient_clipping=config.given("gradient_clipping"),
        zero_stage=config.stage,
        offload_optimizer_device=config.offloads("optimizer"),
        offload_param_device=config.offloads("param"),
        zero3_init_flag=found.zero3_init_flag,
    )
    plugin.strategy = found
    return plugin


def accumulation_of(strategy: Any, steps: int) -> int:
    """Returns the Accelerator's batches per step, or DeepSpeed's if these are 1. The strategy refuses conflicts."""
    config = getattr(strategy, "config", None)
    own = config.given("gradient_accumulation_steps") if isinstance(config, ZeroConfig) else None
    return int(own) if own is not None and steps == 1 else steps


# preparing ------------------------------------------------------------------------------------------------------------
def complete_config(
    strategy: Any, accumulation: int, options: Options, objects: Sequence[Any], loaders: Sequence[Any]
) -> None:
    """Merges the script's settings into DeepSpeed's config, before the engine is created.

    `objects` has the optimizers and schedulers of one call of `prepare`, including placeholders, and `loaders` those
    prepared in this call or before.

    Raises:
        ConfigurationError: for a contradiction, or a placeholder whose section the config lacks.
    """
    optimizers = [entry for entry in objects if isinstance(entry, DummyOptim)]
    schedulers = [entry for entry in objects if isinstance(entry, DummyScheduler)]
    for dummy in optimizers:
        _fill(strategy.config, "optimizer", {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs})
    for scheduler in schedulers:
        if scheduler.lr_scheduler_callable is not None:
            continue
        owner = scheduler.optimizer
        rate = owner.lr if isinstance(owner, DummyOptim) else owner.defaults["lr"]
        known = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": rate,
            "warmup_num_steps": scheduler.warmup_num_steps,
            "total_num_steps": scheduler.total_num_steps,
        }
        _fill(strategy.config, "scheduler", {name: value for name, value in known.items() if value is not None})
    real = [entry for entry in objects if not isinstance(entry, (DummyOptim, DummyScheduler))]
    real_optimizers = [entry for entry in real if hasattr(entry, "param_groups")]
    callables = [entry for entry in schedulers if entry.lr_scheduler_callable is not None]
    strategy.check_settings(
        RunSettings(
            accumulation=accumulation,
            batch_size=_batch_size(loaders, strategy.ranks.world_size, options),
            optimizers=len(real_optimizers),
            schedulers=len(real) - len(real_optimizers) + len(callables),
        )
    )


def _batch_size(loaders: Sequence[Any], ranks: int, options: Options) -> int | None:
    """Returns the batch size per rank, the smallest or largest of several as the options choose; None if unknown."""
    given = [getattr(loader, "batch_size", None) for loader in loaders]
    sizes = [size // ranks if options.data.split_batches else size for size in given if isinstance(size, int)]
    return None if not sizes else (min if options.train_batch_is_min else max)(sizes)


def _fill(config: Any, section: str, values: Mapping[str, Any]) -> None:
    """Fills in the "auto" values of a section."""
    if config.get(section) is None:
        name = {"optimizer": "DummyOptim", "scheduler": "DummyScheduler"}[section]
        raise ConfigurationError(
            f"a {name} was prepared, but the DeepSpeed config has no {section} section. Add the section, or prepare a "
            f"real {section}."
        )
    auto = {
        f"{section}.params.{name}": value
        for name, value in values.items()
        if config.get(f"{section}.params.{name}") == "auto"
    }
    config.fill(auto)
