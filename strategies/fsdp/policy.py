"""Wrap policies: which modules of a model become a group whose parameters are gathered and freed together."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import nn

from leyden.strategies.errors import ConfigurationError, kind_of, nearest

Classes: TypeAlias = "Iterable[type[nn.Module] | str]"
WrapPolicy: TypeAlias = "Literal['auto'] | int | type[nn.Module] | Classes | Callable[..., bool] | None"

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SMALL = 10
"""A container with less than a tenth of the largest one's parameters is left to the group around it."""


@dataclass(slots=True)
class Groups:
    """The modules that a policy chose, children before their parents.

    Attributes:
        names: their full names.
        left: name of a chosen module → why it stays in the group around it.
        how: the policy, in a word.
    """

    names: list[str]
    left: dict[str, str] = field(default_factory=dict)
    how: str = ""


def choose(root: nn.Module, policy: WrapPolicy, ignored: set[nn.Parameter] | None = None) -> Groups:
    """Applies a wrap policy to a model; the root is a group of its own in any case and not among them.

    Args:
        root: the whole model.
        policy: "auto" for the repeated block of the model; classes of modules, or their names; a number, for modules of
            at least so many parameters; a function of a module, or of (module, recurse, nonwrapped_numel) as
            FSDP1's policies are; None for no group beside the root.
        ignored: parameters that are not sharded.

    Raises:
        ConfigurationError: if a class is not in the model, or the policy is invalid.
    """
    skipped = ignored or set()
    if policy is None or policy is False:
        return Groups([], how="the root alone")
    if isinstance(policy, bool):
        raise ConfigurationError(
            f"auto_wrap_policy={policy!r}: give 'auto', classes of modules, a number of parameters, a function or None."
        )
    if isinstance(policy, str) and policy == "auto":
        names, how = _repeated_blocks(root), "auto"
    elif isinstance(policy, int):
        if policy < 1:
            raise ConfigurationError(f"auto_wrap_policy={policy}: give at least 1 parameter.")
        names, how = _by_size(root, policy), f"from {policy} parameters"
    elif isinstance(policy, (str, type)) or not callable(policy):
        names, how = modules_of_classes(root, policy, "auto_wrap_policy"), "by class"
    else:
        names, how = _by_function(root, policy), "by function"
    modules = dict(root.named_modules())
    names = [name for name in names if name and any(p not in skipped for p in modules[name].parameters())]
    for name in names:
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise ConfigurationError(
                f"auto_wrap_policy chose {name!r}, {kind_of(modules[name])}, which has no forward pass around which "
                "its parameters could be gathered: choose the modules in it."
            )
    groups = Groups(sorted(names, key=lambda name: -name.count(".")), how=how)
    _leave_tied(root, groups)
    return groups


def modules_of_classes(root: nn.Module, wanted: Any, argument: str) -> list[str]:
    """The names of modules that are of one of the classes.

    Args:
        root: the whole model.
        wanted: a class, a class's name, or several of them.
        argument: what the user called it, for errors.

    Raises:
        ConfigurationError: if one of them is not in the model.
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
            raise ConfigurationError(f"{argument} holds {entry!r}: give classes of modules, or their names.")
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
    """The blocks of the outermost containers that repeat one class, as the layers of a transformer do."""
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
    """The children of a container that are of its repeated class, if they hold at least half of its parameters."""
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
    """Modules of at least so many parameters that are in no smaller group, as FSDP1's size policy counts them."""

    def groups(module: nn.Module, own: int) -> bool:
        return own >= least and not isinstance(module, (nn.ModuleList, nn.ModuleDict))

    return _children_first(root, lambda module, total: total >= least, groups, nn.MultiheadAttention)


def _by_function(root: nn.Module, policy: Callable[..., Any]) -> list[str]:
    if not _takes_recurse(policy):
        return [name for name, module in root.named_modules() if name and policy(module)]
    return _children_first(
        root,
        lambda module, total: policy(module=module, recurse=True, nonwrapped_numel=total),
        lambda module, own: policy(module=module, recurse=False, nonwrapped_numel=own),
    )


def _children_first(
    root: nn.Module,
    enters: Callable[[nn.Module, int], bool],
    groups: Callable[[nn.Module, int], bool],
    closed: type[nn.Module] | tuple[()] = (),
) -> list[str]:
    """Chooses modules from the innermost to the outermost.

    Args:
        root: the whole model.
        enters: looks into a module with so many parameters.
        groups: makes a group of a module, of whose parameters so many are in no group within it.
        closed: the class of modules that are not looked into.
    """
    chosen: list[str] = []

    def visit(module: nn.Module, name: str) -> int:
        """Groups the modules within one, and returns the number of parameters that were grouped."""
        total = sum(p.numel() for p in module.parameters())
        if not enters(module, total):
            return 0
        children = [] if isinstance(module, closed) else module.named_children()
        grouped = sum(visit(child, f"{name}.{own}" if name else own) for own, child in children)
        if name and groups(module, total - grouped):
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


def _leave_tied(root: nn.Module, groups: Groups) -> None:
    """Leaves a module in the group around it if one of its parameters is also used outside: two shards would drift."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, module in root.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module_name, own))
    shared = [places for places in owners.values() if len(places) > 1]
    modules = dict(root.named_modules(remove_duplicate=False))
    while True:
        again = [
            (name, outside)
            for name in groups.names
            if (outside := _used_outside(name, shared, modules, groups.names)) is not None
        ]
        if not again:
            return
        for name, outside in again:
            groups.names.remove(name)
            groups.left[name] = f"tied to {outside}"


def _used_outside(
    name: str, shared: list[list[tuple[str, str]]], modules: dict[str, nn.Module], chosen: list[str]
) -> str | None:
    """Where else a parameter of the group is used; None if nowhere. A module that stands twice in the model is one."""
    group = {id(module) for module in modules[name].modules()}
    for other in chosen:
        # Parameters of a group inside this one are checked with that group.
        if other != name and other.startswith(f"{name}."):
            group -= {id(module) for module in modules[other].modules()}
    for places in shared:
        inside = [id(modules[owner]) in group for owner, _ in places]
        if any(inside) and not all(inside):
            owner, own = places[inside.index(False)]
            return f"{owner}.{own}" if owner else own
    return None
