"""Activation checkpointing and compilation of single blocks of a model, before they are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from leyden.strategies.errors import ConfigurationError, with_article
from leyden.strategies.fsdp.policy import Groups, modules_of_classes
from leyden.strategies.recomputing import recompute


def checkpoint_activations(root: nn.Module, policy: Any) -> list[str]:
    """Has modules recompute their activations in backward instead of keeping them. Their names stay.

    Args:
        root: the whole model.
        policy: classes of modules, or their names; a function of a module; the groups of a wrap policy; or None.

    Returns:
        The names of those modules.
    """
    if not policy:
        return []
    if isinstance(policy, Groups):
        names = _some(policy, "activation_checkpointing_policy=True")
    elif callable(policy) and not isinstance(policy, type):
        names = [name for name, module in root.named_modules() if name and policy(module)]
    else:
        names = modules_of_classes(root, policy, "activation_checkpointing_policy")
    recompute(map(root.get_submodule, names))
    return names


def compile_blocks(root: nn.Module, groups: Groups, arguments: dict[str, Any]) -> None:
    """Compiles modules in place.

    Raises:
        ConfigurationError: for a class of torch.nn itself, which torch passes over in silence (tried: no graph is
            made); and where there is no group to compile.
    """
    for name in _some(groups, "compile=True"):
        module: Any = root.get_submodule(name)
        kind = type(module)
        if kind.__module__.startswith("torch.nn."):
            raise ConfigurationError(
                f"compile=True: {name!r} is {with_article(kind.__name__)} of torch.nn itself, on which torch's "
                "Module.compile does nothing. Write the block as a class of your own, or give auto_wrap_policy the "
                "class of such a block."
            )
        compile_in_place: Callable[..., None] = module.compile
        compile_in_place(**arguments)


def _some(groups: Groups, argument: str) -> list[str]:
    if not groups.names:
        raise ConfigurationError(
            f"{argument} means the groups of auto_wrap_policy, and it found none in this model: give it the class of "
            "the blocks."
        )
    return groups.names
