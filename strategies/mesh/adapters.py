"""LoRA adapters around split layers: the plan names the layer, and its adapters get matching styles.

LoRA adds `B A x` to a layer's output (Hu et al., 2021, arXiv:2106.09685). If the layer splits its outputs, B splits its
outputs too. If the layer splits its inputs, A splits its inputs too, and A's outputs are summed over the ranks before B
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from leyden.core.errors import ConfigurationError, kind_of

BASE, FIRST, SECOND = "base_layer", "lora_A", "lora_B"
"""Names in peft: the wrapped layer, and the containers of the two matrices of each adapter."""
OF_STYLE = {
    "colwise": ("replicate", "colwise"),
    "gather": ("replicate", "gather"),
    "rowwise": ("rowwise", "replicate"),
}
"""Style of the layer → styles of A and B."""


def with_adapters(found: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Replaces the style of each layer with adapters by styles for the wrapped layer and its adapters.

    Args:
        found: module name → style.
        modules: module name → module.

    Raises:
        ConfigurationError: for an adapter that does not support the layer's style; names the layer.
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
            f"{f' with {others[0]!r}' if others else ''}: adapters are placed automatically only for LoRA with the "
            f"styles {', '.join(OF_STYLE)}. Name the inner layers in the plan: '{name}.{BASE}' and its adapters."
        )
    return OF_STYLE[style]
