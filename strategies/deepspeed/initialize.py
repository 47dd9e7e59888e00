"""Importing DeepSpeed, and creating and closing its engine."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.core.environment import with_variables
from leyden.core.errors import ConfigurationError, MissingExtraError, nearest, needs
from leyden.strategies.window import read_loss

ACCELERATOR = "DS_ACCELERATOR"


def import_deepspeed(device: torch.device, level: int = logging.WARNING) -> Any:
    """Imports DeepSpeed for this type of device.

    Raises:
        MissingExtraError: if DeepSpeed is not installed.
        ConfigurationError: if this process already uses DeepSpeed with another type of device.
    """
    if "deepspeed" not in sys.modules:
        # Without the variable, DeepSpeed picks a GPU whenever there is one. It decides only once.
        with with_variables({ACCELERATOR: device.type}), needs("deepspeed", "deepspeed", "DeepSpeedStrategy"):
            importlib.import_module("deepspeed")
    deepspeed: Any = sys.modules["deepspeed"]
    if not hasattr(deepspeed, "initialize"):
        # A folder named "deepspeed" next to the script is imported as an empty namespace package.
        raise MissingExtraError("deepspeed", "deepspeed", "DeepSpeedStrategy")
    # torch warns in every step, of DeepSpeed's own calls.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(level)
    device_in_use = deepspeed.accelerator.get_accelerator().device_name()
    if device_in_use != device.type:
        raise ConfigurationError(
            f"DeepSpeed runs on {device_in_use!r} in this process, but the run on {device.type!r}. Use only one type "
            "of device in a process."
        )
    if device.type == "cpu":
        # Disables a faster all-reduce within one machine, which would compile for 25 to 45 s on first use.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def device_number(device: torch.device, local_rank: int) -> int:
    """Returns the index of this rank's device, which DeepSpeed reads from the variable LOCAL_RANK.

    Raises:
        ConfigurationError: if the launcher set the variable to another index.
    """
    number = local_rank if device.index is None else device.index
    given = os.environ.get("LOCAL_RANK") if "RANK" in os.environ else None
    if given not in (None, str(number)):
        raise ConfigurationError(
            f"DeepSpeed runs each rank on the GPU of its local rank (LOCAL_RANK={given}), but this rank should run on "
            f"{device}. Leave devices out, and choose GPUs with the same CUDA_VISIBLE_DEVICES for all ranks of the "
            "machine."
        )
    return number


def join_group(deepspeed: Any, number: int) -> None:
    """Makes DeepSpeed use the existing process group, on the device with that index."""
    # Steps of stage 3 read the variable too. On its own it does not make this process look like one of several ranks.
    os.environ["LOCAL_RANK"] = str(number)
    # Without these arguments DeepSpeed would look for mpi4py.
    deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)


class StepModule(nn.Module):
    """The engine's model. Calling it runs one step of the user's module, of any kind.

    DeepSpeed's hooks run around its forward. They see only the loss, so they do not change the batch or the step's
    other outputs.

    Attributes:
        step: function that the next call runs.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.step: Callable[[], Any] | None = None
        self.outputs: Any = None

    def forward(self) -> Tensor | None:
        assert self.step is not None
        step, self.step = self.step, None
        self.outputs = outputs = step()
        return read_loss(outputs)[0] if torch.is_grad_enabled() else None

    def take(self) -> Any:
        """Returns the last step's output, and drops it."""
        outputs, self.outputs = self.outputs, None
        return outputs


class CallableModel(StepModule):
    """The engine's model for a custom loop, which calls the model itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@contextmanager
def gathering_for_transformers(deepspeed: Any) -> Iterator[None]:
    """Gathers each module's parameters while a model of transformers initializes it, inside of `zero.Init`.

    zero.Init gathers them in `Module.apply`. transformers goes through a model's modules itself, and would initialize
    the empty tensors that zero.Init has left.
    """
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    models = importlib.import_module("transformers").PreTrainedModel
    initialize = models._initialize_weights

    def gathered(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Some modules initialize their children, as T5's attention does. The whole model may not fit into memory.
        near = [module, *(below for child in module.children() for below in (child, *child.children()))]
        own = {p: None for part in near for p in part.parameters(recurse=False) if hasattr(p, "ds_id")}
        with deepspeed.zero.GatheredParameters(list(own), modifier_rank=0):
            initialize(self, module, *args, **kwargs)

    models._initialize_weights = gathered
    try:
        yield
    finally:
        models._initialize_weights = initialize


def make_engine(deepspeed: Any, wrapped: StepModule, config: dict[str, Any], optimizer: Optimizer | None) -> Any:
    """Creates DeepSpeed's engine for a module. All ranks call it.

    Raises:
        ConfigurationError: if DeepSpeed rejects the config.
    """
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if config.get("activation_checkpointing"):
        # For modules that call deepspeed.checkpointing.checkpoint.
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
    try:
        engine = deepspeed.initialize(model=wrapped, optimizer=optimizer, model_parameters=trained, config=config)[0]
    except _config_errors() as error:
        raise ConfigurationError(f"DeepSpeed rejects this config: {error}") from error

    if engine.basic_optimizer is not None and engine.basic_optimizer is not engine.optimizer:
        # The wrapped optimizer's own zero_grad would drop the buffers of offloaded gradients and keep the parameters'
        # gradients.
        engine.basic_optimizer.zero_grad = engine.optimizer.zero_grad
    return engine


def _config_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that DeepSpeed raises for an invalid config."""
    own = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfigError
    offload = importlib.import_module("deepspeed.runtime.zero.utils").ZeRORuntimeException
    return own, offload, AssertionError, ValueError, NotImplementedError


def make_scheduler(optimizer: Optimizer, section: Mapping[str, Any]) -> Any:
    """Creates the scheduler of a config's section, one of DeepSpeed's or of torch's.

    Raises:
        ConfigurationError: for an unknown scheduler, or for arguments that it does not accept.
    """
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    name, params = str(section.get("type")), dict(section.get("params", {}))
    rates = [group["lr"] for group in optimizer.param_groups]
    for key, value in {"warmup_min_lr": 0.0, "warmup_max_lr": max(rates)}.items():
        if params.get(key) == "auto":
            params[key] = value
    for key, value in params.items():
        if value == "auto":
            raise ConfigurationError(
                f"The DeepSpeed config has scheduler.params.{key}='auto', but the run has no value to fill in. Set a "
                "value."
            )
    known = [*schedules.VALID_LR_SCHEDULES, *torch.optim.lr_scheduler.__all__]
    if name not in known:
        raise ConfigurationError(f"The DeepSpeed config's scheduler {name!r} is not known. {nearest(name, known)}")
    kind = getattr(schedules if name in schedules.VALID_LR_SCHEDULES else torch.optim.lr_scheduler, name)
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise ConfigurationError(f"The DeepSpeed config's scheduler {name} cannot be created: {error}.") from error


def close_engine(engine: Any) -> None:
    """Closes an engine. Removes its hooks, and DeepSpeed's references to the module."""
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    engine.module.__dict__.pop("ds_inflight_param_registry", None)
    vars(engine.basic_optimizer or engine).pop("zero_grad", None)
    parts = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    linear = getattr(parts.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if linear is not None:
        # Undoes stage 3's replacement of torch's function, which affects every model of the process.
        nn.functional.linear = linear
    engine.optimizer = engine.basic_optimizer = engine.client_optimizer = engine.lr_scheduler = None
