"""Arguments that a class accepts as `**kwargs` and forwards to torch, W&B or Rich."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from leyden.cli.configuration.class_paths import imported


def passed_on(made: object) -> dict[str, Any]:
    """Returns the arguments that one of Leyden's classes accepts as `**kwargs`, with their types.

    The class itself checks the values. The library that receives the arguments is imported, since it is needed anyway.

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
                # The class's own error names the missing extra.
                continue
    return found


def _of_ddp() -> dict[str, Any]:
    from leyden.strategies.ddp import OWN

    return _named_by("torch.nn.parallel.DistributedDataParallel", *OWN)


def _of_deepspeed() -> dict[str, Any]:
    from leyden.strategies.deepspeed.config import ARGUMENTS

    return dict.fromkeys(ARGUMENTS, Any)


def _of_fsdp() -> dict[str, Any]:
    from leyden.strategies.fsdp.fsdp1_names import HANDLERS, TAKEN

    return dict.fromkeys((*HANDLERS, *TAKEN), Any)


def _of_lambda() -> dict[str, Any]:
    from leyden.callbacks.lambda_callback import HOOKS

    return dict.fromkeys(HOOKS, Callable)


def _named_by(path: str, *but: str) -> dict[str, Any]:
    """Returns the named arguments of a library's class or function."""
    parameters = inspect.signature(imported(path)).parameters.values()
    named = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return dict.fromkeys((name for name in named if name not in but), Any)


TAKEN_BY: dict[str, Callable[[], dict[str, Any]]] = {
    "DDPStrategy": _of_ddp,
    "DeepSpeedStrategy": _of_deepspeed,
    "FSDPStrategy": _of_fsdp,
    "LambdaCallback": _of_lambda,
    "PyTorchProfiler": partial(_named_by, "torch.profiler.profile"),
    "RichModelSummary": partial(_named_by, "rich.table.Table"),
    "TensorBoardLogger": partial(_named_by, "torch.utils.tensorboard.SummaryWriter", "log_dir"),
    "WandbLogger": partial(_named_by, "wandb.init"),
}
