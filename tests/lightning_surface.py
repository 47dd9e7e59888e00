"""Compares Lightning's public API with Leyden's, and reads what docs/lightning-reference.md says about it.

`python tests/lightning_surface.py` lists every name of Lightning's classes, and what it is here.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

SURFACE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "frozen" / "lightning.json").read_text())
"""For each class of Lightning 2.6: arguments and defaults, methods with their arguments, and properties."""
PAGE = (Path(__file__).parents[1] / "docs" / "lightning-reference.md").read_text(encoding="utf-8")
SECTIONS = {text.split("`")[1]: text for text in PAGE.split("\n## ")[1:]}
"""The section of the page about each class."""
NAMES = {"LightningModule": "TrainModule", "LightningDataModule": "DataModule", "LightningCLI": "LeydenCLI"}
NAMES |= {"LightningArgumentParser": "LeydenArgumentParser"}
KINDS = ("arguments", "methods", "properties")
PLACES = ("leyden", "leyden.callbacks", "leyden.strategies", "leyden.trainer.profilers", "leyden.cli")
# Arguments of hooks, which are called by position.
RENAMED = {"pl_module": "module", "lightning_module": "module", "state_dict": "state", "model": "module"}
RENAMED |= {"lightning_class": "leyden_class"}
# The values of defaults that Lightning writes as names.
VALUES = {
    "Interval.step": "step",
    "RunningStage.TRAINING": "train",
    "torch.device('cpu')": "cpu",
    "multiplicative": "multiplicative",
    "LRSchedulerTypeTuple": "LRScheduler",
    "(Optimizer,)": "Optimizer",
    "SaveConfigCallback": "SaveConfigCallback",
    "Trainer": "Trainer",
    "logging.WARN": 30,
    "default_pg_timeout": "0:30:00",
}


def counterpart(name: str) -> Any:
    """Returns the class of Leyden with the same role; None without one."""
    for place in PLACES:
        found = getattr(importlib.import_module(place), NAMES.get(name, name), None)
        if found is not None:
            return found
    return None


def parameters(call: Any) -> dict[str, Any]:
    """Returns the arguments of a class or function with their defaults, including those passed on to base classes."""
    found: dict[str, Any] = {}
    owners = [vars(owner).get("__init__") for owner in call.__mro__] if isinstance(call, type) else [call]
    for function in owners:
        if not inspect.isfunction(function) and not inspect.ismethod(function):
            continue
        own = inspect.signature(function).parameters
        found = {**{name: _default(parameter) for name, parameter in own.items()}, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return found


def is_same(theirs: dict[str, str], mine: dict[str, Any]) -> bool:
    """Returns True if each of Lightning's arguments exists here with its default; others may exist, too."""
    named = {name if name in mine else RENAMED.get(name, name): default for name, default in theirs.items()}
    return all(
        name.startswith("*") or (name in mine and _is_default(default, mine[name])) for name, default in named.items()
    )


def same(name: str) -> dict[str, list[str]]:
    """Returns the arguments, methods and properties of a class that are the same here."""
    mine = counterpart(name)
    if mine is None:
        return {"arguments": [], "methods": [], "properties": []}
    given, surface = parameters(mine), SURFACE[name]
    by_hand = {"log_dict": parameters(getattr(mine, "log", None))} if hasattr(mine, "log_dict") else {}
    if name == "LambdaCallback":
        given |= dict.fromkeys(importlib.import_module("leyden.callbacks.lambda_callback").HOOKS)
    return {
        "arguments": [
            key
            for key, default in surface["arguments"].items()
            if key.startswith("*") or is_same({key: default}, given)
        ],
        "methods": [
            key
            for key, theirs in surface["methods"].items()
            if callable(getattr(mine, key, None))
            and is_same(theirs, {**by_hand.get(key, {}), **parameters(getattr(mine, key))})
        ],
        "properties": [key for key in surface["properties"] if _has(mine, key)],
    }


def rows(section: str) -> dict[str, str]:
    """Returns what a section says about each name that is not the same."""
    found = re.findall(r"^\| (`.*?) \| (.*?) \|$", section, re.MULTILINE)
    return {name: text for names, text in found for name in re.findall(r"`([^`]+)`", names)}


def _default(parameter: inspect.Parameter) -> Any:
    return "required" if parameter.default is inspect.Parameter.empty else parameter.default


def _is_default(theirs: str, mine: Any) -> bool:
    if theirs == "required":
        # An argument that is optional here can be passed as in Lightning.
        return True
    if theirs in VALUES:
        text = getattr(mine, "__name__", None) or str(mine)
        return bool(mine == VALUES[theirs]) or str(VALUES[theirs]) in text
    try:
        value = eval(theirs, {"timedelta": importlib.import_module("datetime").timedelta})
    except NameError:
        return False
    return isinstance(value, bool) is isinstance(mine, bool) and bool(value == mine)


def _has(mine: type, name: str) -> bool:
    if hasattr(mine, name):
        return True
    # Some attributes are set in __init__.
    return mine.__name__ == "TrainModule" and hasattr(mine(), name)


if __name__ == "__main__":
    for title in SURFACE:
        equal, different = same(title), rows(SECTIONS.get(title, ""))
        print(f"\n{title}")
        for kind in KINDS:
            for member in SURFACE[title][kind]:
                text = different.get(member) or ("the same" if member in equal[kind] else "-")
                print(f"  {kind:<10}  {member:<40}  {text}")
