"""Adapters (LoRA) around split layers: the plan names the layer, and its adapters are placed to match.

LoRA adds `B A x` to a layer's output (Hu et al., 2021, arXiv:2106.09685). Where the layer splits its outputs, so does
B; where it splits its inputs, so does A, whose outputs are summed over the ranks before B reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from leyden.strategies.errors import ConfigurationError, kind_of

BASE, FIRST, SECOND = "base_layer", "lora_A", "lora_B"
"""The names of peft: the layer, and by an adapter's name its two matrices."""
OF_STYLE = {
    "colwise": ("replicate", "colwise"),
    "gather": ("replicate", "gather"),
    "rowwise": ("rowwise", "replicate"),
}
"""The styles of A and B beside a layer's own."""


def with_adapters(found: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The styles of a plan, where those of layers with adapters are given to the layer and to the adapters.

    Args:
        found: styles by the modules' names.
        modules: by name.

    Raises:
        ConfigurationError: for an adapter that does not fit the layer's style; names it.
    """
    styles: dict[str, Any] = {}
    for name, style in found.items():
        module = modules.get(name)
        if module is None or not hasattr(module, BASE):
            styles[name] = style
            continue
        first, second = _pair(name, module, style)
        styles[f"{name}.{BASE}"] = style
        styles |= {f"{name}.{FIRST}.{adapter}": first for adapter, _ in module.get_submodule(FIRST).named_children()}
        styles |= {f"{name}.{SECOND}.{adapter}": second for adapter, _ in module.get_submodule(SECOND).named_children()}
    return styles


def _pair(name: str, module: nn.Module, style: Any) -> tuple[str, str]:
    parts = dict(module.named_children())
    known = {BASE, FIRST, SECOND}
    others = [key for key, part in parts.items() if key not in known and any(True for _ in part.parameters())]
    if not isinstance(style, str) or style not in OF_STYLE or others or not known <= parts.keys():
        raise ConfigurationError(
            f"the plan makes {name!r} {style!r}, which is {kind_of(module)} around a layer"
            f"{f' with {others[0]!r}' if others else ''}: only LoRA beside {', '.join(OF_STYLE)} is placed by itself. "
            f"Name the layers in it, '{name}.{BASE}' and its adapters, in a plan of your own."
        )
    return OF_STYLE[style]
