"""Names of Accelerate that Leyden lacks: an import of one raises an error with another to use."""

from __future__ import annotations

import difflib
import dis
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

BIG_MODELS = (
    "Leyden has no inference of models that exceed a device's memory. Use transformers' from_pretrained(..., "
    "device_map='auto') for that. To train one, use strategy='fsdp' with configure_model or from_pretrained "
    "(docs/fsdp.md), or DeepSpeed's stage 3"
)
ON_META = (
    "use `with torch.device('meta'):`, or the Trainer's configure_model, which builds on it if the strategy shards"
)

# Answer -> the names of Accelerate that it replaces: those that scripts ask for most.
INSTEAD = {
    BIG_MODELS: (
        *("load_checkpoint_and_dispatch", "load_checkpoint_in_model", "infer_auto_device_map", "dispatch_model"),
        *("cpu_offload", "disk_offload"),
    ),
    ON_META: ("init_empty_weights", "init_on_device"),
    "quantize with transformers' from_pretrained(..., quantization_config=BitsAndBytesConfig(…)), or torchao": (
        *("BnbQuantizationConfig", "load_and_quantize_model"),
    ),
    "Accelerator(strategy=MeshStrategy(pp=…)).prepare(model) splits a model into stages, also for evaluation": (
        "prepare_pippy",
    ),
    "use `leyden merge <checkpoint> <folder>`": ("merge_fsdp_weights",),
    "use `leyden config default`": ("write_basic_config",),
    "pass the class itself to Accelerator(log_with=…)": ("register_tracker_class",),
    "use PartialState().default_device.type": ("torch_device",),
    "use torch.cuda.is_bf16_supported()": ("is_bf16_available",),
    "compare with packaging.version": ("compare_versions", "is_torch_version"),
}
ANSWERS = {name: instead for instead, names in INSTEAD.items() for name in names}
PACKAGES = (
    "aim bnb boto3 clearml comet_ml datasets deepspeed dvclive matplotlib megatron_lm mlflow msamp pandas peft pynvml "
    "pytest rich schedulefree swanlab tensorboard timm torch_xla torchao torchdata torchvision trackio "
    "transformer_engine transformers triton wandb"
)
"""Accelerate's words in `is_<word>_available`: package names, except bnb."""
HOMES = tuple(
    f"leyden{name}"
    for name in ("", ".utils", ".state", ".data_loader", ".logging", ".optimizer", ".scheduler", ".tracking")
)
DEVICES = ("cuda", "mps", "xpu", "npu", "mlu", "musa", "hpu", "sdaa", "neuron")


def lacking(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module with Accelerate's names; see `attribute`."""
    return functools.partial(attribute, module)


def attribute(module: str, name: str) -> Any:
    """Resolves a name that a module with Accelerate's names, such as `leyden.utils`, does not define.

    Returns:
        The object of that name in another of these modules, since Accelerate's modules import from each other; a
        working function for `is_<package>_available` and `is_<device>_available`.

    Raises:
        ImportError: if an import statement asks for a name that Leyden lacks. (It drops the message of an
            AttributeError.)
        AttributeError: if others do: libraries probe modules with `getattr`.
    """
    if name.startswith("_"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    for home in HOMES if module != "leyden" else ():
        if name in importlib.import_module(home).__all__:
            return getattr(importlib.import_module(home), name)
    if name.startswith("is_") and name.endswith("_available"):
        subject = name.removeprefix("is_").removesuffix("_available")
        if subject in PACKAGES.split():
            return functools.partial(_is_installed, "bitsandbytes" if subject == "bnb" else subject)
        if subject in DEVICES:
            return functools.partial(_has_device, subject)
    text = f"{module} has no {name}: {instead_of(name)}"
    if _is_import_statement(sys._getframe(1), f"{module}.{name}"):
        raise ImportError(text, name=name)
    raise AttributeError(text)


def instead_of(name: str) -> str:
    """Returns what to use instead of a name that Leyden lacks: an answer, or the nearest name and the page.

    Example:
        >>> instead_of("EarlyStopping")
        'use `from leyden.callbacks import EarlyStopping`'
        >>> instead_of("synchronize_rng_state")
        'did you mean `from leyden import synchronize_rng_states`? docs/from-accelerate.md lists the names'
    """
    if name in ANSWERS:
        return ANSWERS[name]
    modules = (*HOMES, "leyden.callbacks")
    homes = {known: module for module in reversed(modules) for known in importlib.import_module(module).__all__}
    if name in homes:
        return f"use `from {homes[name]} import {name}`"
    close = difflib.get_close_matches(name, homes, n=1)
    near = f"did you mean `from {homes[close[0]]} import {close[0]}`? " if close else ""
    return f"{near}docs/from-accelerate.md lists the names"


def _is_import_statement(frame: FrameType, path: str) -> bool:
    """Returns True if an import statement asks a `__getattr__` for a name that is no submodule.

    Importlib asks a package first, and then looks for a submodule. A module is asked by an opcode of the statement.
    """
    while frame.f_code.co_name == "__getattr__" and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_name == "_handle_fromlist":
        return importlib.util.find_spec(path) is None
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_device(kind: str) -> bool:
    import torch

    backend = getattr(torch, kind, None) if kind != "mps" else torch.backends.mps
    return bool(backend is not None and backend.is_available())
