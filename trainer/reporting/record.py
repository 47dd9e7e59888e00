"""The record of a run's start, for loggers: arguments, command, versions, devices, and the state of its code."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from leyden.callbacks.loggers.logger import Logger
from leyden.checkpoint.format.secrets import masked_text, masked_value
from leyden.core.devices import name_of
from leyden.core.environment import STARTED_IN
from leyden.core.errors import kind_of
from leyden.core.rank_zero import warn
from leyden.trainer.events.hooks import overrides
from leyden.trainer.reporting.command import Command, words_here
from leyden.trainer.reporting.repository import Repository

if TYPE_CHECKING:
    from leyden.trainer.run import Run

PACKAGES = (
    *("numpy", "torchmetrics", "torchvision", "torchaudio", "torchdata", "torchao", "torch_xla", "triton", "deepspeed"),
    *("transformers", "datasets", "tokenizers", "accelerate", "peft", "timm", "flash_attn", "transformer_engine"),
    *("safetensors", "xxhash", "lightning", "sklearn", "scipy", "pandas", "jsonargparse", "hydra", "omegaconf"),
    *("tensorboard", "wandb", "mlflow"),
)
"""The packages that may affect a run's numbers or its logging, by module name."""


def record_start(run: Run) -> None:
    """Records on rank 0 how a fit was started, in each logger that implements `log_run`.

    Errors are only warned of: they never end the run.
    """
    loggers = [logger for logger in run.loggers if overrides(logger, "log_run", Logger)]
    wanted = run.arguments.record_run
    if not loggers or not wanted or not run.strategy.ranks.is_global_zero:
        return
    found: tuple[dict[str, Any], str] | None = None
    for logger in loggers:
        try:
            found = found or start_of(run, with_diff=wanted != "no_diff", beside_secrets=wanted == "diff")
            logger.log_run(*found)
        except Exception as error:
            warn(f"{type(logger).__name__} could not record the start of the run: {type(error).__name__}: {error}")


def start_of(run: Run, with_diff: bool = True, beside_secrets: bool = False) -> tuple[dict[str, Any], str]:
    """Returns the record of a fit's start, as plain values for JSON, and the diff of its code; see `Repository.of`."""
    repository = Repository.of(_folder_of_code(), with_diff, beside_secrets)
    code = None if repository is None else dataclasses.asdict(repository)
    diff = (code.pop("diff") if code is not None else None) or ""
    command = Command.here()
    ranks = run.strategy.ranks
    record = {
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "step": run.progress.global_step,
        "ckpt_path": run.ckpt_path,
        "command": str(Command(words_here(), STARTED_IN) if command is None else command),
        "folder": STARTED_IN,
        "host": platform.node(),
        "system": platform.platform(),
        "world_size": ranks.world_size,
        "device": str(run.strategy.root_device),
        "device_name": _name_of(run.strategy.root_device),
        "arguments": arguments_of(run),
        "changed": changed_arguments(run),
        "versions": _versions(),
        "git": code,
    }
    return record, diff


def arguments_of(run: Run) -> dict[str, Any]:
    """Returns the Trainer's resolved arguments as plain values. Objects are described in words."""
    arguments, ranks, strategy = run.arguments, run.strategy.ranks, run.strategy
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    values |= {
        "accelerator": strategy.root_device.type,
        "strategy": strategy.name,
        "devices": ranks.world_size // arguments.num_nodes,
        "precision": strategy.precision.name,
        "logger": [logger.state_key for logger in run.loggers],
        "callbacks": [callback.state_key for callback in run.callbacks if not isinstance(callback, Logger)],
    }
    values |= {name: getattr(run.limits, name) for name in ("max_epochs", "max_steps", "min_epochs", "min_steps")}
    return {name: _plain(name, value) for name, value in values.items()}


def changed_arguments(run: Run) -> list[str]:
    """Returns the names of the Trainer's arguments that differ from their defaults."""
    fields = dataclasses.fields(run.arguments)
    return [field.name for field in fields if getattr(run.arguments, field.name) != field.default]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return masked_value(name, value)
    if isinstance(value, Mapping):
        return {str(key): _plain(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    text = str(value)
    return kind_of(value) if " object at 0x" in text else masked_text(text)


def _versions() -> dict[str, str]:
    """Returns the versions of Python, torch and its libraries, and the packages imported so far."""
    found = {"python": platform.python_version(), "leyden": str(getattr(sys.modules["leyden"], "__version__", "?"))}
    found["torch"] = str(torch.__version__)
    libraries = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        libraries["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    found |= {name: version for name, version in libraries.items() if version is not None}
    for name in PACKAGES:
        module = sys.modules.get(name)
        if module is not None and (version := _version(name, module)) is not None:
            found[name] = version
    return found


def _version(name: str, module: Any) -> str | None:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _name_of(device: torch.device) -> str:
    if name := name_of(device):
        return name
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _folder_of_code() -> Path:
    """Returns the folder of the running script, or the working directory for an installed program like `leyden fit`."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return Path(STARTED_IN)
    path = Path(STARTED_IN, script).resolve()
    packages = (place for place in sys.path if os.path.basename(place) in ("site-packages", "dist-packages"))
    installed = {Path(place).resolve() for place in (sysconfig.get_path("scripts"), *packages)}
    own = Path(os.path.dirname(str(sys.modules["leyden"].__file__))).resolve()
    return Path(STARTED_IN) if any(place in path.parents for place in (*installed, own)) else path.parent
