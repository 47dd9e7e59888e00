"""Activation checkpointing and per-block compilation, applied before a model is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from leyden.core.errors import ConfigurationError, with_article
from leyden.strategies.fsdp.policy import Groups, modules_of_classes
from leyden.strategies.recomputing import recompute


def checkpoint_activations(root: nn.Module, policy: Any) -> list[str]:
    """Makes modules recompute their activations in backward instead of keeping them. Module names do not change.

    Args:
        root: the whole model.
        policy: classes of modules, or their names; a predicate on modules; the groups of a wrap policy; or None.

    Returns:
        The names of the checkpointed modules.
    """
    if not policy:
        return []
    if isinstance(policy, Groups):
        names = _names_of(policy, "activation_checkpointing_policy=True")
    elif callable(policy) and not isinstance(policy, type):
        names = [name for name, module in root.named_modules() if name and policy(module)]
    else:
        names = modules_of_classes(root, policy, "activation_checkpointing_policy")
    recompute(map(root.get_submodule, names))
    return names


def compile_blocks(root: nn.Module, groups: Groups, arguments: dict[str, Any]) -> None:
    """Compiles each group in place.

    Args:
        root: the whole model.
        groups: the groups to compile.
        arguments: arguments of `torch.compile`.

    Raises:
        ConfigurationError: if a group is a torch.nn class, which torch silently does not compile; or if there is no
            group.
    """
    for name in _names_of(groups, "compile=True"):
        module: Any = root.get_submodule(name)
        kind = type(module)
        if kind.__module__.startswith("torch.nn."):
            raise ConfigurationError(
                f"compile=True: {name!r} is {with_article(kind.__name__)} from torch.nn, on which torch's "
                "Module.compile does nothing. Define the block as your own class, or set auto_wrap_policy to a class "
                "of your own."
            )
        compile_in_place: Callable[..., None] = module.compile
        compile_in_place(**arguments)


def _names_of(groups: Groups, argument: str) -> list[str]:
    """Returns the names of the groups; raises if there are none."""
    if not groups.names:
        raise ConfigurationError(
            f"{argument} applies to the groups of auto_wrap_policy, which found none in this model: set "
            "auto_wrap_policy to the class of the blocks."
        )
    return groups.names
