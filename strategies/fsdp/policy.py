"""Wrap policies: which modules of a model become FSDP groups, whose parameters are gathered and freed together."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import nn

from leyden.core.errors import ConfigurationError, kind_of, nearest

Classes: TypeAlias = "Iterable[type[nn.Module] | str]"
WrapPolicy: TypeAlias = "Literal['auto'] | int | type[nn.Module] | Classes | Callable[..., bool] | None"

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SMALL = 10
"""A container with less than a tenth of the largest container's parameters stays in the enclosing group."""


@dataclass(slots=True)
class Groups:
    """The modules that a policy chose, children before their parents.

    Attributes:
        names: full names of the modules.
        tied: name of a chosen module that stays in the enclosing group, because a parameter is tied → the reason.
    """

    names: list[str]
    tied: dict[str, str] = field(default_factory=dict)


def choose(root: nn.Module, policy: WrapPolicy, ignored: set[nn.Parameter] | None = None) -> Groups:
    """Applies a wrap policy to a model. The root is always a group and is not listed.

    Args:
        root: the whole model.
        policy: "auto" for the model's repeated block; classes of modules, or their names; a minimum number of
            parameters per group; a function of a module, or of (module, recurse, nonwrapped_numel) like FSDP1's
            policies; None to make the root the only group.
        ignored: parameters that are not sharded.

    Raises:
        ConfigurationError: if the model has no module of a class, or the policy is invalid.
    """
    skipped = ignored or set()
    if policy is None or policy is False:
        return Groups([])
    if isinstance(policy, bool):
        raise ConfigurationError(
            f"auto_wrap_policy={policy!r}: use 'auto', classes of modules, a number of parameters, a function or None."
        )
    if isinstance(policy, str) and policy == "auto":
        names = _repeated_blocks(root)
    elif isinstance(policy, int):
        if policy < 1:
            raise ConfigurationError(f"auto_wrap_policy={policy}: use a number of parameters of at least 1.")
        names = _by_size(root, policy)
    elif isinstance(policy, (str, type)) or not callable(policy):
        names = modules_of_classes(root, policy, "auto_wrap_policy")
    else:
        names = _by_function(root, policy)
    modules = dict(root.named_modules())
    names = [name for name in names if name and any(p not in skipped for p in modules[name].parameters())]
    for name in names:
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise ConfigurationError(
                f"auto_wrap_policy chose {name!r}, {kind_of(modules[name])}, which has no forward to gather parameters "
                "around: choose the modules in it."
            )
    groups = Groups(sorted(names, key=lambda name: -name.count(".")))
    _leave_out_tied(root, groups, skipped)
    return groups


def modules_of_classes(root: nn.Module, wanted: Any, argument: str) -> list[str]:
    """Returns the names of the modules that are instances of one of the classes.

    Args:
        root: the whole model.
        wanted: a class, a class name, or several of them.
        argument: name of the user's argument, for errors.

    Raises:
        ConfigurationError: if the model has no module of one of the classes.
    """
    entries = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    found: list[str] = []
    present = {kind.__name__ for module in root.modules() for kind in type(module).__mro__[:-2]}
    for entry in entries:
        if isinstance(entry, str):
            own = [name for name, module in root.named_modules() if _is_called(module, entry)]
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            own = [name for name, module in root.named_modules() if isinstance(module, entry)]
        else:
            raise ConfigurationError(f"{argument} contains {entry!r}: use classes of modules, or their names.")
        if not own:
            label = entry if isinstance(entry, str) else entry.__name__
            raise ConfigurationError(
                f"{argument} names {label}, and the model has no such module. {nearest(label, sorted(present))}"
            )
        found += [name for name in own if name not in found]
    return found


def _is_called(module: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _repeated_blocks(root: nn.Module) -> list[str]:
    """Returns the blocks of the outermost containers that repeat one class, such as the layers of a transformer."""
    found: dict[str, tuple[int, list[str]]] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        blocks = _blocks_of(module)
        if blocks:
            size = sum(p.numel() for name in blocks for p in module.get_submodule(name).parameters())
            found[prefix] = (size, [f"{prefix}.{name}" if prefix else name for name in blocks])
            return
        for name, child in module.named_children():
            visit(child, f"{prefix}.{name}" if prefix else name)

    visit(root, "")
    largest = max((size for size, _ in found.values()), default=0)
    return [name for size, names in found.values() if size * SMALL >= largest for name in names]


def _blocks_of(module: nn.Module) -> list[str]:
    """Returns a container's children of its repeated class, if they hold at least half of its parameters."""
    if not isinstance(module, CONTAINERS):
        return []
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    counts = Counter(type(child) for _, child in children)
    if not counts:
        return []
    kind, count = counts.most_common(1)[0]
    own = [name for name, child in children if type(child) is kind]
    inside = sum(p.numel() for name, child in children if name in own for p in child.parameters())
    whole = sum(p.numel() for p in module.parameters())
    return own if count > 1 and 2 * inside >= whole and not issubclass(kind, CONTAINERS[:2]) else []


def _by_size(root: nn.Module, least: int) -> list[str]:
    """Groups modules with at least `least` parameters outside nested groups, counted as in FSDP1's size policy."""

    def becomes_group(module: nn.Module, ungrouped: int) -> bool:
        return ungrouped >= least and not isinstance(module, (nn.ModuleList, nn.ModuleDict))

    return _children_first(root, lambda module, total: total >= least, becomes_group, nn.MultiheadAttention)


def _by_function(root: nn.Module, policy: Callable[..., Any]) -> list[str]:
    if not _takes_recurse(policy):
        return [name for name, module in root.named_modules() if name and policy(module)]
    return _children_first(
        root,
        lambda module, total: policy(module=module, recurse=True, nonwrapped_numel=total),
        lambda module, ungrouped: policy(module=module, recurse=False, nonwrapped_numel=ungrouped),
    )


def _children_first(
    root: nn.Module,
    descends: Callable[[nn.Module, int], bool],
    becomes_group: Callable[[nn.Module, int], bool],
    opaque: type[nn.Module] | tuple[()] = (),
) -> list[str]:
    """Chooses modules from the innermost to the outermost.

    Args:
        root: the whole model.
        descends: decides whether to look into a module, given its number of parameters.
        becomes_group: decides whether a module becomes a group, given its number of parameters outside nested groups.
        opaque: the class of modules whose children are never visited.
    """
    chosen: list[str] = []

    def visit(module: nn.Module, name: str) -> int:
        """Chooses among a module and its descendants; returns the number of parameters in the chosen groups."""
        total = sum(p.numel() for p in module.parameters())
        if not descends(module, total):
            return 0
        children = [] if isinstance(module, opaque) else module.named_children()
        grouped = sum(visit(child, f"{name}.{own}" if name else own) for own, child in children)
        if name and becomes_group(module, total - grouped):
            chosen.append(name)
            return total
        return grouped

    visit(root, "")
    return chosen


def _takes_recurse(policy: Callable[..., Any]) -> bool:
    inner = policy.func if isinstance(policy, functools.partial) else policy
    try:
        return "recurse" in inspect.signature(inner).parameters
    except (TypeError, ValueError):
        return False


def _leave_out_tied(root: nn.Module, groups: Groups, skipped: set[nn.Parameter]) -> None:
    """Removes groups with a parameter that is also used outside the group: its two shards would drift apart."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in root.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None and parameter not in skipped:
                owners.setdefault(id(parameter), []).append((module_name, own))
    shared = [places for places in owners.values() if len(places) > 1]
    modules = dict(root.named_modules(remove_duplicate=False))
    # Removing a group moves its parameters into the enclosing one, which may then share a parameter with the outside.
    while True:
        tied = [
            (name, outside)
            for name in groups.names
            if (outside := _used_outside(name, shared, modules, groups.names)) is not None
        ]
        if not tied:
            return
        for name, outside in tied:
            groups.names.remove(name)
            groups.tied[name] = f"tied to {outside}"


def _used_outside(
    name: str, shared: list[list[tuple[str, str]]], modules: dict[str, nn.Module], chosen: list[str]
) -> str | None:
    """Returns the full name of a use of the group's parameters outside the group; None if there is none.

    Modules are compared by identity, so a module that appears twice in the model counts once.
    """
    group = {id(module) for module in modules[name].modules()}
    for other in chosen:
        # Parameters of a nested group are checked with that group.
        if other != name and other.startswith(f"{name}."):
            group -= {id(module) for module in modules[other].modules()}
    for places in shared:
        inside = [id(modules[owner]) in group for owner, _ in places]
        if any(inside) and not all(inside):
            owner, own = places[inside.index(False)]
            return f"{owner}.{own}" if owner else own
    return None
