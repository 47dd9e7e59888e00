"""Groups of parameters: which decay, which learn slower, and which are for Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from leyden.core.errors import ConfigurationError

Decays = Callable[[str, nn.Parameter], bool]


def parameter_groups(
    module: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    layer_decay: float = 1.0,
    decays: Decays | None = None,
) -> list[dict[str, Any]]:
    """Returns the trainable parameters as groups for an optimizer, with weight decay and a learning rate per layer.

    Args:
        module: the model.
        lr: the learning rate of the last layer. None leaves it to the optimizer.
        weight_decay: weight decay of the parameters that decay; that of others is 0. None leaves it to the optimizer.
        layer_decay: the factor from each layer's learning rate to that of the layer before, such as 0.9 (Clark et al.,
            https://arxiv.org/abs/2003.10555). The layers are the model's blocks, in one or several `nn.ModuleList`;
            what is before them, such as embeddings, counts as one layer, and so does what follows.
        decays: a function of name and parameter that returns whether it decays. Default: those with two dimensions or
            more, which leaves out biases and norms.

    Raises:
        ConfigurationError: if `layer_decay` is not in (0, 1], comes without `lr`, or the model has no blocks.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4))
        >>> [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(model, weight_decay=0.1)]
        [(1, 0.1), (3, 0.0)]
    """
    if not 0 < layer_decay <= 1:
        raise ConfigurationError(f"layer_decay={layer_decay}: use a factor above 0 and up to 1.")
    depths = {}
    if layer_decay < 1:
        if lr is None:
            raise ConfigurationError(f"layer_decay={layer_decay} needs lr, the learning rate of the last layer.")
        depths = _depths(module)
    last = max(depths.values(), default=0)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        does_decay = parameter.ndim > 1 if decays is None else decays(name, parameter)
        depth = depths.get(name, last)
        group = groups.setdefault((-depth, not does_decay), {"params": []})
        group["params"].append(parameter)
        if weight_decay is not None or not does_decay:
            group["weight_decay"] = weight_decay if does_decay else 0.0
        if lr is not None:
            group["lr"] = lr * layer_decay ** (last - depth)
    return [groups[key] for key in sorted(groups)]


def split_parameters(
    module: nn.Module, *, adamw: Mapping[str, Any] | None = None, exclude: Iterable[str] = (), **options: Any
) -> list[dict[str, Any]]:
    """Returns groups for `Muon`: matrices, and those that AdamW updates.

    Muon gets the matrices of the model's blocks, also batches of them, and linear layers outside the blocks. AdamW gets
    embeddings, convolutions, vectors, and the output layer: that of a model of transformers, or the last linear layer
    behind the blocks.

    Args:
        module: the model.
        adamw: settings of the groups for AdamW, such as `{"lr": 3e-4}`.
        exclude: parts of names of parameters that AdamW gets too, such as "router".
        **options: arguments of `parameter_groups`.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> [(group["algorithm"], len(group["params"])) for group in split_parameters(model)]
        [('muon', 1), ('adamw', 2), ('adamw', 2)]
    """
    if isinstance(exclude, str):
        raise ConfigurationError(f"exclude={exclude!r}: use a list of names, such as [{exclude!r}].")
    matrices = _matrices(module, tuple(exclude))
    groups = []
    for algorithm, settings in (("muon", {}), ("adamw", dict(adamw or {}))):
        for group in parameter_groups(module, **options):
            own = [p for p in group["params"] if (id(p) in matrices) == (algorithm == "muon")]
            if own:
                groups.append({**group, "params": own, "algorithm": algorithm, **settings})
    return groups


def _matrices(module: nn.Module, exclude: tuple[str, ...]) -> set[int]:
    """Returns the ids of the parameters for Muon."""
    blocks = tuple(f"{block}." for block in _blocks(module))
    inside, before, others, heads = (set[int]() for _ in range(4))
    after: list[int] = []
    has_begun = not blocks
    for path, part in module.named_modules():
        # As models of transformers name it. Others have None, or no such method.
        head = getattr(part, "get_output_embeddings", lambda: None)()
        heads |= set() if head is None else {id(head.weight)}
        for name, parameter in part.named_parameters(path, recurse=False):
            is_inside = bool(blocks) and name.startswith(blocks)
            has_begun = has_begun or is_inside
            is_table = isinstance(part, (nn.Embedding, nn.EmbeddingBag, _ConvNd))
            # Biases of experts are stacked into matrices.
            is_bias = "bias" in name.rpartition(".")[2]
            is_matrix = parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
            if is_table or is_bias or not is_matrix or any(word in name for word in exclude):
                others.add(id(parameter))
            elif is_inside:
                inside.add(id(parameter))
            elif isinstance(part, nn.Linear) and has_begun:
                after.append(id(parameter))
            elif isinstance(part, nn.Linear):
                before.add(id(parameter))
    # A head that is tied to the embeddings is known already, and no other layer counts as one.
    heads = heads or set(after[-1:])
    return (inside | before | set(after)) - others - heads


def _blocks(module: nn.Module) -> list[str]:
    """Returns the names of the model's blocks, in order: the entries of lists of modules of one class each.

    Lists inside blocks do not count, nor do layers such as nn.Linear, nor lists of much smaller modules.
    """
    lists: list[tuple[float, list[str]]] = []
    outer: str | None = None
    for name, part in module.named_modules():
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or (outer is not None and name.startswith(outer)):
            continue
        blocks = dict(part.named_children())
        is_list = len(blocks) > (0 if isinstance(part, nn.ModuleList) else 1)
        if is_list and len({*map(type, blocks.values())}) == 1 and any([*b.children()] for b in blocks.values()):
            outer = f"{name}." if name else ""
            size = sum(p.numel() for p in part.parameters()) / len(blocks)
            lists.append((size, [f"{outer}{child}" for child in blocks]))
    largest = max((size for size, _ in lists), default=0)
    return [block for size, own in lists if size >= largest / 4 for block in own]


def _depths(module: nn.Module) -> dict[str, int]:
    """Returns each parameter's layer: 0 before the first block, 1 for that block, and so on."""
    blocks = _blocks(module)
    if not blocks:
        raise ConfigurationError(
            "layer_decay: the model has no blocks in an nn.ModuleList or nn.Sequential, whose learning rates could "
            "differ. Make the groups yourself."
        )
    depths, depth = {}, 0
    for name, _ in module.named_parameters():
        own = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
        # What is between the blocks of an encoder and a decoder belongs to the block before it.
        depth = own if own is not None else depth + 1 if depth == len(blocks) else depth
        depths[name] = depth
    return depths
