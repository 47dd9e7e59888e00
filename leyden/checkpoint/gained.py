"""Parameter groups that an optimizer gained during a run.

A resume adds them again before it loads their state. A run that rolls back to a checkpoint without them drops them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


def has_more_groups(saved: Any, optimizer: Optimizer) -> bool:
    """Returns True if a saved state has more groups than the optimizer. Loading refuses a damaged one, not this."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    return isinstance(groups, list) and len(groups) > len(optimizer.param_groups)


def add_gained_groups(optimizer: Optimizer, saved: Any, made: int, module: nn.Module) -> None:
    """Adds the groups that the saved optimizer gained after it was created with `made` groups.

    Until the state is loaded, they have the first group's options. If the state does not fit, no group is added: the
    optimizer was created with a different number of groups, or a parameter has left the module or is in a group
    already. `check_named` then names the difference.

    Example:
        >>> from torch.optim import SGD
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> optimizer = SGD(net[1].parameters(), lr=0.1)
        >>> saved = {"param_groups": [{"params": ["1.weight", "1.bias"]}, {"params": ["0.weight"]}]}
        >>> add_gained_groups(optimizer, saved, made=1, module=net)
        >>> len(optimizer.param_groups)
        2
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or len(optimizer.param_groups) != made or len(groups) <= made:
        return
    parameters = dict(module.named_parameters())
    gained = [_names(group) for group in groups[made:]]
    if not all(gained) or not _are_free([name for own in gained for name in own], parameters, optimizer):
        return
    first = optimizer.param_groups[0] if optimizer.param_groups else {}
    options = {key: value for key, value in first.items() if key in optimizer.defaults}
    for own in gained:
        added: list[Any] = [parameters[name] for name in own]
        if "param_names" in first:
            added = list(zip(own, added, strict=True))
        optimizer.add_param_group({**options, "params": added})


def _are_free(names: Sequence[str], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> bool:
    """Returns True if the names are distinct, and no named parameter is in a group of the optimizer."""
    taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return len(set(names)) == len(names) and all(
        name in parameters and id(parameters[name]) not in taken for name in names
    )


def names_gained(optimizer: Optimizer, saved: Any, module: nn.Module) -> list[str]:
    """Returns the parameters' names in the groups that an optimizer has but its saved state lacks."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    gained = optimizer.param_groups[len(saved["param_groups"]) :]
    return [
        names.get(id(parameter), "a parameter outside the module") for group in gained for parameter in group["params"]
    ]


def drop_gained_groups(optimizer: Optimizer, saved: Any) -> None:
    """Drops the groups that an optimizer has but its saved state lacks, along with their parameters' state."""
    count = len(saved["param_groups"])
    for group in optimizer.param_groups[count:]:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
    del optimizer.param_groups[count:]


def _names(group: Any) -> Sequence[str]:
    names = group.get("params") if isinstance(group, Mapping) else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []
