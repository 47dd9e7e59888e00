"""Plan: which layers of a model are split over the ranks of the `tp` dimension, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.strategies.mesh.checks import check_counted, check_layer, check_tied
from leyden.strategies.mesh.local_views import LocalViews
from leyden.strategies.mesh.styles import (
    Colwise,
    Entrance,
    Heads,
    Replicated,
    Rowwise,
    Sequence,
    Style,
    grad_placement,
    placed,
)

if TYPE_CHECKING:
    from leyden.strategies.fsdp.values import Slot

PlanLike: TypeAlias = "Mapping[str, str | ParallelStyle]"
STYLES: dict[str, tuple[type[Style], dict[str, Any]]] = {
    "colwise": (Colwise, {}),
    "rowwise": (Rowwise, {}),
    "sequence": (Sequence, {}),
    "replicate": (Replicated, {}),
    "loss": (Colwise, {"loss": True}),
    "gather": (Colwise, {"gathers": True}),
    "replicate_sum": (Replicated, {"differs": True}),
    "heads": (Heads, {}),
}
"""A plan's words, each with the class and the arguments of its style."""
OF_TRANSFORMERS = {
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise",
    "rowwise_rep": "rowwise",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "replicate_sum",
}
"""What the plans of `transformers` models call them."""


class Plan:
    """Which modules of a model have which style.

    Args:
        entries: pattern → style. A pattern is a module's name as `named_modules` gives it, in which * stands for
            any one part: "layers.*.attention.query". A style is a word of `STYLES`, or a ParallelStyle of torch.

    Raises:
        ConfigurationError: for a word that is no style.

    Example:
        >>> Plan({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}).is_sequence
        False
    """

    def __init__(self, entries: PlanLike) -> None:
        self.entries = dict(entries)
        words = {self._word(style) for style in self.entries.values() if isinstance(style, str)}
        self.is_sequence, self.splits_loss = "sequence" in words, "loss" in words

    def _word(self, style: object) -> object:
        if not isinstance(style, str):
            return style
        word = OF_TRANSFORMERS.get(style, style)
        if word not in STYLES:
            raise ConfigurationError(f"the plan has the style {style!r}. {nearest(style, STYLES)}")
        return word

    def matched(self, root: nn.Module) -> dict[str, str | ParallelStyle]:
        """The modules that the plan names, each with its style; a later pattern overrides an earlier one.

        Raises:
            ConfigurationError: if a pattern matches no module.
        """
        names = [name for name, _ in root.named_modules() if name]
        found: dict[str, Any] = {}
        for pattern, style in self.entries.items():
            own = [name for name in names if _matches(name, pattern)]
            if not own:
                raise ConfigurationError(
                    f"the plan's {pattern!r} matches no module of {type(root).__name__}. "
                    f"{nearest(pattern, [_pattern(name) for name in names])}"
                )
            found |= dict.fromkeys(own, self._word(style))
        return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def plan_of(root: nn.Module) -> Plan | None:
    """The plan that a module brings: its `parallel_plan()`, or those of the modules in it; None where there is none.

    A `transformers` model brings one as `tp_plan`.
    """
    entries: dict[str, Any] = {}
    taken: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in taken):
            continue
        own: Any = getattr(module, "parallel_plan", None)
        found = own() if callable(own) else getattr(module, "tp_plan", None)
        if isinstance(found, Mapping) and found:
            taken.append(name)
            entries |= {f"{name}.{pattern}" if name else pattern: style for pattern, style in found.items()}
    return Plan(entries) if entries else None


class TensorParallel:
    """A plan that is applied to a model, part by part.

    Args:
        plan: what is split, and how.
        mesh: the `tp` dimension.
        draws: see `Style`.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, draws: Callable[[bool], None]) -> None:
        self.plan, self.mesh = plan, mesh
        self.views = LocalViews(mesh)
        self.entrance = Entrance()
        self._draws = draws
        self._styles: dict[nn.Module, ParallelStyle] = {}
        self._names: dict[nn.Module, str] = {}

    def begin(self, root: nn.Module) -> None:
        """Takes a model whose parameters are still whole.

        Raises:
            ConfigurationError: if the plan does not fit it; names the layer.
        """
        modules = dict(root.named_modules())
        self._names |= {module: name for name, module in modules.items()}
        found = {name: self._style(style) for name, style in self.plan.matched(root).items()}
        self._styles |= {modules[name]: style for name, style in found.items()}
        for name, style in found.items():
            check_layer(name, modules[name], style, self.mesh.size())
        check_counted(root, self._styles, self.mesh.size())
        check_tied(root, self.placement)
        for name, style in found.items():
            if not any(p is not None for p in modules[name]._parameters.values()):
                style._apply(modules[name], self.mesh)

    def _style(self, style: str | ParallelStyle) -> ParallelStyle:
        if not isinstance(style, str):
            return style
        kind, arguments = STYLES[style]
        return kind(entrance=self.entrance, sequence=self.plan.is_sequence, draws=self._draws, **arguments)

    def placement(self, module: nn.Module, name: str) -> Placement | None:
        """How a parameter is going to be placed; None where a style of torch's decides."""
        style = self._styles.get(module)
        if isinstance(style, Style):
            return style.placements(module)[name]
        return Replicate() if style is None else None

    def split(self, slots: Iterable[Slot]) -> None:
        """Splits the parameters at some slots, which every rank has whole, and leaves the others replicated."""
        slots = [(module, name) for module, name in slots if module._parameters.get(name) is not None]
        ties = _ties(slots)
        for module in {id(module): module for module, _ in slots}.values():
            style = self._styles.get(module)
            if style is not None:
                style._apply(module, self.mesh)
            self._replicate(module, style)
        for tied in ties:
            (first, name), *others = tied
            for module, other in others:
                module._parameters[other] = first._parameters[name]

    def _replicate(self, module: nn.Module, style: ParallelStyle | None) -> None:
        left = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
        gradient = grad_placement(style if isinstance(style, Style) else None)
        for name, parameter in left.items():
            module._parameters[name] = placed(parameter, self.mesh, Replicate())
        reads_plain = style is None or isinstance(style, (Replicated, Sequence, Heads))
        if reads_plain and module._parameters:
            self.views.give(module, {name: gradient for name, p in module._parameters.items() if p is not None})


def _ties(slots: Iterable[Slot]) -> list[list[Slot]]:
    """The slots that hold one and the same parameter."""
    found: dict[int, list[Slot]] = {}
    for module, name in slots:
        found.setdefault(id(module._parameters[name]), []).append((module, name))
    return [tied for tied in found.values() if len(tied) > 1]


__all__ = ["STYLES", "Plan", "PlanLike", "TensorParallel", "plan_of"]
