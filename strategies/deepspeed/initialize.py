"""DeepSpeed itself: its import, its engine for a module, and the end of one."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.errors import ConfigurationError, MissingExtraError, nearest, needs
from leyden.strategies.launch.environment import with_variables
from leyden.strategies.window import read_loss

ACCELERATOR = "DS_ACCELERATOR"


def import_deepspeed(device: torch.device, level: int = logging.WARNING) -> Any:
    """DeepSpeed, for this kind of device.

    Raises:
        MissingExtraError: if it is not installed.
        ConfigurationError: if this process uses it with another kind of device already.
    """
    if "deepspeed" not in sys.modules:
        # It would take a GPU wherever there is one, and asks once.
        with with_variables({ACCELERATOR: device.type}), needs("deepspeed", "deepspeed", "DeepSpeedStrategy"):
            importlib.import_module("deepspeed")
    deepspeed: Any = sys.modules["deepspeed"]
    if not hasattr(deepspeed, "initialize"):
        # A folder of that name beside the script is an empty namespace package.
        raise MissingExtraError("deepspeed", "deepspeed", "DeepSpeedStrategy")
    # torch says this in every step, of calls that are DeepSpeed's own.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(level)
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise ConfigurationError(
            f"DeepSpeed runs on {found!r} in this process, and the run on {device.type!r}: use one kind of device in "
            "one process."
        )
    if device.type == "cpu":
        # A faster all-reduce within one machine, which is compiled for 25 to 45 s when first used.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def device_number(device: torch.device, local_rank: int) -> int:
    """The number of this rank's device, which DeepSpeed takes from the variable LOCAL_RANK.

    Raises:
        ConfigurationError: if the starter of the ranks has set it to another one.
    """
    number = local_rank if device.index is None else device.index
    given = os.environ.get("LOCAL_RANK") if "RANK" in os.environ else None
    if given not in (None, str(number)):
        raise ConfigurationError(
            f"DeepSpeed runs a rank on the GPU of its number on the machine (LOCAL_RANK={given}), and this one is to "
            f"run on {device}: leave devices out and choose GPUs by CUDA_VISIBLE_DEVICES, the same for all ranks of "
            "the machine."
        )
    return number


def join_group(deepspeed: Any, number: int) -> None:
    """Makes DeepSpeed use the existing process group, on the device of that number."""
    # It reads this one in steps of stage 3 too. It alone does not make a process look like one of several ranks.
    os.environ["LOCAL_RANK"] = str(number)
    # Without these words it would look for mpi4py.
    deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False, verbose=False)


class StepModule(nn.Module):
    """The engine's model: a call of it runs one step of the module, whichever that is.

    DeepSpeed's hooks are on its forward. They see the loss alone, so that the batch, and whatever else the step
    returns, stay as they are.

    Attributes:
        step: what the next call runs.
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
        """Returns, once, what the last step returned."""
        outputs, self.outputs = self.outputs, None
        return outputs


class Called(StepModule):
    """The engine's model if a loop calls the model itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def make_engine(deepspeed: Any, wrapped: StepModule, config: dict[str, Any], optimizer: Optimizer | None) -> Any:
    """DeepSpeed's engine of a module. All ranks call it.

    Raises:
        ConfigurationError: where DeepSpeed refuses the config.
    """
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    if config.get("activation_checkpointing"):
        # For modules that call deepspeed.checkpointing.checkpoint.
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
    try:
        engine = deepspeed.initialize(model=wrapped, optimizer=optimizer, model_parameters=trained, config=config)[0]
    except _refusals() as error:
        raise ConfigurationError(f"DeepSpeed refuses this config: {error}") from error

    if engine.basic_optimizer is not None and engine.basic_optimizer is not engine.optimizer:
        # Its own would take away the buffers of offloaded gradients, and leave those of the parameters.
        engine.basic_optimizer.zero_grad = engine.optimizer.zero_grad
    return engine


def _refusals() -> tuple[type[Exception], ...]:
    """The exceptions that DeepSpeed raises for an invalid config."""
    own = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfigError
    offload = importlib.import_module("deepspeed.runtime.zero.utils").ZeRORuntimeException
    return own, offload, AssertionError, ValueError, NotImplementedError


def make_scheduler(optimizer: Optimizer, section: Mapping[str, Any]) -> Any:
    """The scheduler of a config's section: one of DeepSpeed's, or of torch's.

    Raises:
        ConfigurationError: for an unknown one, or arguments that it does not take.
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
                f"the DeepSpeed config leaves scheduler.params.{key} at 'auto', which nothing in the run can fill: "
                "give a value."
            )
    known = [*schedules.VALID_LR_SCHEDULES, *torch.optim.lr_scheduler.__all__]
    if name not in known:
        raise ConfigurationError(f"the DeepSpeed config's scheduler {name!r} is not known. {nearest(name, known)}")
    kind = getattr(schedules if name in schedules.VALID_LR_SCHEDULES else torch.optim.lr_scheduler, name)
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise ConfigurationError(f"the DeepSpeed config's scheduler {name} cannot be made: {error}.") from error


def close_engine(engine: Any) -> None:
    """Closes an engine: removes its hooks, and all that refers to the module in DeepSpeed."""
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
        # Stage 3 puts its own in the place of torch's, for every model of the process.
        nn.functional.linear = linear
    engine.optimizer = engine.basic_optimizer = engine.client_optimizer = engine.lr_scheduler = None
