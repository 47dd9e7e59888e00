"""Loads the models that commands accept: an import path, a script, or a Hugging Face configuration, without memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from torch import nn

from leyden.core.errors import ConfigurationError, MissingExtraError, kind_of, nearest


def _parsed(ctx: click.Context, param: click.Parameter, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"--args {text[:99]}: not valid JSON ({error}): give '{{\"name\": value}}'."
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"--args {text}: give '{{\"name\": value}}'.")
    return found


ARGS = click.option(
    "--args",
    "arguments",
    default="{}",
    metavar="JSON",
    callback=_parsed,
    help="Arguments of the class, such as '{\"width\": 64}'.",
)
DOWNLOAD = click.option(
    "--download", is_flag=True, help="The model may be a name on Hugging Face's hub; its config.json is downloaded."
)
SCRIPT = "leyden_script"
"""Module name for an imported script, so the code under `if __name__ == "__main__"` does not run."""


def load_model(name: str, arguments: dict[str, Any], download: bool = False) -> tuple[nn.Module, str]:
    """Builds a model on the meta device.

    Args:
        name: an import path such as `package.module:Class`; a script (`train.py`, whose only TrainModule is meant, or
            `train.py:NAME`, a class or a function that builds one); a config.json of Hugging Face, or a folder with
            one.
        arguments: the arguments of the class or the function.
        download: `name` may be a model on Hugging Face's hub, whose config.json is downloaded (no weights).

    Returns:
        The model, and a note if it had to be built in memory.

    Raises:
        ConfigurationError: if there is no such model; lists the accepted forms.
    """
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _hugging_face(path if path.suffix == ".json" else path / "config.json"), ""
    if download and not _is_script(name) and not _is_import_path(name):
        return _hugging_face(name), ""
    return _built(name, load_object(name), arguments)


def load_object(name: str) -> Any:
    """Loads an object by its name in a module or script.

    Args:
        name: `package.module:NAME`, `train.py:NAME`, or `train.py` for its only TrainModule.

    Raises:
        ConfigurationError: if it is not there; names the nearest.
    """
    if _is_script(name):
        script, _, attribute = name.partition(":")
        found: ModuleType = _run(Path(script))
        attribute = attribute or _only_module(found, script)
        source = script
    else:
        if not _is_import_path(name):
            raise ConfigurationError(
                f"{name!r} is neither a script (train.py:Class) nor an import path (package.module:Class) nor a local "
                "folder with a config.json. For a model on Hugging Face's hub add --download, which downloads its "
                "config.json."
            )
        source, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
        if not source or not attribute:
            raise ConfigurationError(f"{source}:{attribute} is not an import path: give package.module:Class.")
        found = _imported(source)
    if not hasattr(found, attribute):
        raise ConfigurationError(f"{source} has no {attribute!r}. {nearest(attribute, vars(found))}")
    return getattr(found, attribute)


def _is_script(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def _is_import_path(name: str) -> bool:
    return "/" not in name and (":" in name or "." in name)


def _imported(module: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"there is no module {error.name!r}: run this where `python -c 'import {module}'` works."
        ) from error
    except Exception as error:
        raise ConfigurationError(f"{module} cannot be imported ({type(error).__name__}: {error}).") from error


def _run(script: Path) -> ModuleType:
    if not script.is_file():
        raise ConfigurationError(f"there is no script {str(script)!r}: give its path, such as train.py:Class.")
    # As Python does for a script that it runs.
    sys.path.insert(0, str(script.parent.resolve()))
    spec = importlib.util.spec_from_file_location(SCRIPT, script)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = found
    try:
        spec.loader.exec_module(found)
    except Exception as error:
        raise ConfigurationError(f"{script} cannot be imported ({type(error).__name__}: {error}).") from error
    return found


def _only_module(script: ModuleType, name: str) -> str:
    from leyden.trainer.module import TrainModule

    own = [
        key
        for key, kind in vars(script).items()
        if isinstance(kind, type) and issubclass(kind, TrainModule) and kind.__module__ == SCRIPT
    ]
    if len(own) != 1:
        raise ConfigurationError(
            f"{name} has {len(own)} TrainModules{': ' * bool(own)}{', '.join(own)}. Name the class, or a function that "
            f"builds the model: {name}:NAME."
        )
    return own[0]


def _built(name: str, kind: Any, arguments: dict[str, Any]) -> tuple[nn.Module, str]:
    if isinstance(kind, nn.Module):
        return kind, ""

    def build() -> Any:
        model = kind(**arguments)
        # A TrainModule may make its layers there.
        if callable(getattr(model, "configure_model", None)):
            model.configure_model()
        return model

    note = ""
    try:
        try:
            with torch.device("meta"):
                model = build()
        except (NotImplementedError, RuntimeError) as error:
            note = f"built in memory, since it failed on the meta device: {str(error).splitlines()[0]}"
            model = build()
    except Exception as error:
        raise ConfigurationError(f"{name} cannot be built ({error}): give its arguments as --args '{{…}}'.") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{name} makes {kind_of(model)}, which is not an nn.Module.")
    return model, note


def _hugging_face(source: Path | str) -> nn.Module:
    """Builds the model that a local config.json describes, or that of a name on the hub."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "transformers", None, "a Hugging Face model") from error
    if isinstance(source, Path) and not source.is_file():
        raise ConfigurationError(f"{source} does not exist: give a folder with a config.json, or an import path.")
    # Code next to the file is not trusted, so it is not run.
    try:
        found = transformers.AutoConfig.from_pretrained(str(source), local_files_only=isinstance(source, Path))
    except (OSError, ValueError, KeyError, RecursionError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{source} is not the configuration of a Hugging Face model: {said}") from error
    [architecture, *_] = getattr(found, "architectures", None) or [""]
    is_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    kind: Any = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    with torch.device("meta"):
        model = kind.from_config(found)  # type: ignore[no-untyped-call]
    assert isinstance(model, nn.Module)
    return model
