"""Exports of a module for programs without Leyden: ONNX and TorchScript."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path
from leyden.core.rank_zero import warn
from leyden.core.tree import map_tensors
from leyden.trainer.engine.toggling import evaluation_weights, keeping_modes

METHODS = ("script", "trace")


def example_of(module: Any, given: Any, call: str, name: str) -> Any:
    """Returns the input to export with, on the module's device: the given one, or `example_input_array`.

    Args:
        module: the module to export.
        given: the input passed by the user, or None.
        call: the method's name, for the error.
        name: the argument's name, for the error.

    Raises:
        ConfigurationError: if there is no input.
    """
    sample = module.example_input_array if given is None else given
    if sample is None:
        raise ConfigurationError(f"{call} needs an input: pass {name}, or set self.example_input_array.")
    return map_tensors(sample, lambda tensor: tensor.to(module.device))


def _optimizers_of(module: Any) -> list[Any]:
    return [] if module._trainer is None else module._trainer.optimizers


def to_onnx(module: Any, file_path: Any, input_sample: Any, options: dict[str, Any]) -> Any:
    """Exports a module's forward pass; see `TrainModule.to_onnx`."""
    if isinstance(file_path, (str, os.PathLike)):
        file_path = local_path(file_path, "file_path")
    sample = example_of(module, input_sample, "to_onnx", "input_sample")
    with keeping_modes(module), evaluation_weights(_optimizers_of(module)):
        module.eval()
        return torch.onnx.export(module, sample if isinstance(sample, tuple) else (sample,), file_path, **options)


@torch.no_grad()
def to_torchscript(module: Any, file_path: Any, method: str, example_inputs: Any, options: dict[str, Any]) -> Any:
    """Exports a module's forward pass; see `TrainModule.to_torchscript`."""
    check_choice("to_torchscript", METHODS, method=method)
    if isinstance(file_path, (str, os.PathLike)):
        file_path = local_path(file_path, "file_path")
    if any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        raise ConfigurationError(
            "to_torchscript needs whole weights, but this module's weights are sharded. Load a checkpoint with "
            f"{type(module).__name__}.load_from_checkpoint(path), and export the result."
        )
    warn(
        "TorchScript is deprecated in PyTorch and does not work from Python 3.14 on. to_torchscript will be removed "
        "with torch.jit. Use torch.export.export or to_onnx.",
        FutureWarning,
    )
    with keeping_modes(module), evaluation_weights(_optimizers_of(module)), warnings.catch_warnings():
        module.eval()
        # torch repeats the warning for its own functions.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.\w+` is (deprecated|not supported)")
        if method == "script":
            script: Any = torch.jit.script(module, **options)  # type: ignore[no-untyped-call]
        else:
            script = _trace(module, example_inputs, options)
        if file_path is not None:
            torch.jit.save(script, str(file_path) if isinstance(file_path, Path) else file_path)
    return script


def _trace(module: Any, example_inputs: Any, options: dict[str, Any]) -> Any:
    if "example_kwarg_inputs" not in options:
        sample = example_of(module, example_inputs, "to_torchscript(method='trace')", "example_inputs")
        by_name = isinstance(sample, Mapping)
        options = {**options, "example_kwarg_inputs" if by_name else "example_inputs": sample}
    return torch.jit.trace(module, **options)  # type: ignore[no-untyped-call]
