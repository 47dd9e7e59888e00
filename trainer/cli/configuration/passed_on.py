"""Arguments that a class takes without naming them: those of torch's, W&B's or Rich's that it passes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def passed_on(made: object) -> dict[str, Any]:
    """The arguments that one of Leyden's classes takes as `**kwargs`, and their types.

    The class itself says which values it takes. The library that an argument is for is imported: it is needed anyway.

    Example:
        >>> from leyden.strategies import DDPStrategy
        >>> "find_unused_parameters" in passed_on(DDPStrategy), passed_on(dict)
        (True, {})
    """
    found: dict[str, Any] = {}
    for owner in inspect.getmro(made) if isinstance(made, type) else ():
        if owner.__module__.startswith("leyden.") and owner.__name__ in TAKEN_BY:
            try:
                found |= TAKEN_BY[owner.__name__]()
            except ImportError:
                # The class will name its extra.
                continue
    return found


def _of_ddp() -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    from leyden.strategies.ddp import OWN

    return _arguments(DistributedDataParallel.__init__, *OWN)


def _of_fsdp() -> dict[str, Any]:
    from leyden.strategies.fsdp.fsdp1_names import HANDLERS, TAKEN

    return dict.fromkeys((*HANDLERS, *TAKEN), Any)


def _of_deepspeed() -> dict[str, Any]:
    from leyden.strategies.deepspeed.config import ARGUMENTS

    return dict.fromkeys(ARGUMENTS, Any)


def _of_tensorboard() -> dict[str, Any]:
    from torch.utils.tensorboard import SummaryWriter

    return _arguments(SummaryWriter.__init__, "log_dir")


def _of_wandb() -> dict[str, Any]:
    import wandb

    return _arguments(wandb.init)


def _of_profiler() -> dict[str, Any]:
    from torch.profiler import profile

    return _arguments(profile.__init__)


def _of_rich() -> dict[str, Any]:
    from rich.table import Table

    return _arguments(Table.__init__)


def _of_lambda() -> dict[str, Any]:
    from leyden.callbacks.lambda_callback import HOOKS

    return dict.fromkeys(HOOKS, Callable)


def _arguments(function: Callable[..., Any], *but: str) -> dict[str, Any]:
    named = [name for name, one in inspect.signature(function).parameters.items() if one.kind not in VARIABLE]
    return dict.fromkeys((name for name in named if name not in ("self", *but)), Any)


VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
TAKEN_BY: dict[str, Callable[[], dict[str, Any]]] = {
    "DDPStrategy": _of_ddp,
    "DeepSpeedStrategy": _of_deepspeed,
    "FSDPStrategy": _of_fsdp,
    "LambdaCallback": _of_lambda,
    "PyTorchProfiler": _of_profiler,
    "RichModelSummary": _of_rich,
    "TensorBoardLogger": _of_tensorboard,
    "WandbLogger": _of_wandb,
}
