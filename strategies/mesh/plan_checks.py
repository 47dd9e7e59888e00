"""Checks that a plan fits a model, before any weight changes."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, Shard

from leyden.core.errors import ConfigurationError, kind_of
from leyden.strategies.mesh.styles import HEADS, Colwise, Heads, Rowwise, heads_of


def check_layer(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    """Refuses a layer that its style cannot split, or cannot split over that many ranks.

    Raises:
        ConfigurationError: names the layer.
    """
    if isinstance(style, Heads):
        _check_heads(name, module, size)
    if not isinstance(style, (Colwise, Rowwise)):
        return
    word = "colwise" if isinstance(style, Colwise) else "rowwise"
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ConfigurationError(
            f"the plan makes {name!r} {word}, but it is {kind_of(module)}: only Linear and Embedding layers can be "
            "split. Name the layers inside it instead."
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        raise ConfigurationError(
            f"{name!r} has {'sparse=True' if module.sparse else 'max_norm'}, which works on whole rows of gradients or "
            "weights: remove this option, or leave the embedding out of the plan."
        )
    for parameter, placement in style.placements(module).items():
        dim = placement.dim if isinstance(placement, Shard) else None
        count = None if dim is None else module.get_parameter(parameter).shape[dim]
        if count is not None and count % size:
            raise ConfigurationError(
                f"{name}.{parameter} has {count} {'columns' if dim else 'rows'}, which tp={size} does not divide: pad "
                "the layer, choose another tp, or leave it out of the plan."
            )


def check_whole(root: nn.Module) -> None:
    """Refuses layers that read their weights from a private list, where replaced parameters have no effect.

    Raises:
        ConfigurationError: names the layer.
    """
    for name, module in root.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigurationError(
                f"{name!r} is {kind_of(module)}, which keeps its weights in a list of its own that tensor parallelism "
                "cannot replace: use strategy='fsdp' or 'ddp' for this model."
            )


def check_loaded(root: nn.Module, mesh: DeviceMesh) -> None:
    """Refuses a model that was split before setup, if it was split over other ranks or has no values.

    Args:
        root: the model.
        mesh: the `tp` dimension.

    Raises:
        ConfigurationError: names a parameter.
    """
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        loaded = parameter.device_mesh
        if loaded.ndim == 1 and loaded.mesh_dim_names == mesh.mesh_dim_names and loaded != mesh:
            raise ConfigurationError(
                f"{name!r} is split over {loaded.size()} ranks, and the strategy splits layers over {mesh.size()}: "
                "load the model whole, without tp_plan. The strategy then splits it by the model's own plan."
            )
        if parameter.is_meta:
            raise ConfigurationError(
                f"{name!r} was split on the meta device, so it has no values: build the model on the CPU, or use "
                "MeshStrategy(plan={pattern: style}), which fills one layer at a time."
            )


def _check_heads(name: str, module: nn.Module, size: int) -> None:
    found = heads_of(module)
    if not found:
        raise ConfigurationError(
            f"the plan makes {name!r} 'heads', but it stores no head count: it has none of the attributes "
            f"{', '.join(HEADS)}."
        )
    for attribute, count in found.items():
        if count % size:
            raise ConfigurationError(
                f"{name}.{attribute} is {count}, which tp={size} does not divide: choose a tp that divides it."
            )


def check_counted(root: nn.Module, styles: dict[nn.Module, ParallelStyle], size: int) -> None:
    """Refuses layers that store a head count and are not marked 'heads': they would compute with too many heads.

    Models of `transformers` infer the head count from the activation, so their counts only need to be divisible.

    Raises:
        ConfigurationError: names the layer and the entry to add to the plan.
    """

    def stays_split(module: nn.Module) -> bool:
        style = styles.get(module)
        return isinstance(style, Colwise) and not style.gathers

    for name, module in root.named_modules():
        if isinstance(styles.get(module), Heads) or not any(map(stays_split, module.children())):
            continue
        if type(module).__module__.startswith("transformers."):
            _check_config(name, module, size)
        elif found := heads_of(module):
            counts = ", ".join(f"{attribute}={count}" for attribute, count in found.items())
            raise ConfigurationError(
                f"{name!r} has {counts}, and under tp={size} each rank has a share of its heads: add "
                f"{pattern_of(name)!r}: 'heads' to the plan, which divides the counts."
            )


def _check_config(name: str, module: nn.Module, size: int) -> None:
    config = getattr(module, "config", None)
    for attribute in ("num_attention_heads", "num_key_value_heads") if hasattr(module, "head_dim") else ():
        count = getattr(config, attribute, None)
        if isinstance(count, int) and count % size:
            raise ConfigurationError(
                f"{name!r} has {attribute}={count}, which tp={size} does not divide: choose a tp that divides it."
            )


def check_tied(root: nn.Module, placement: Callable[[nn.Module, str], Placement | None]) -> None:
    """Refuses a plan that splits a tied parameter in two ways.

    Raises:
        ConfigurationError: names both occurrences of the parameter.
    """
    seen: dict[int, tuple[str, Placement | None]] = {}
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name, own = f"{prefix}.{name}" if prefix else name, placement(module, name)
            first_name, first = seen.setdefault(id(parameter), (full_name, own))
            if None not in (own, first) and own != first:
                raise ConfigurationError(
                    f"{first_name!r} and {full_name!r} are one tensor, and the plan splits it in two ways ({first} and "
                    f"{own}). Split both along the vocabulary: the embedding as 'rowwise', the head as 'gather' or "
                    "'loss'."
                )


def pattern_of(name: str) -> str:
    """Returns the plan pattern that matches a module and its repetitions: numbers become *."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
