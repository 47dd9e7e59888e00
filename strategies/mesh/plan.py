"""Plan: which layers of a model are split over the ranks of the `tp` dimension, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel
from torch.distributed.tensor.placement_types import Placement

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.strategies.mesh.adapters import with_adapters
from leyden.strategies.mesh.alike import check_batch
from leyden.strategies.mesh.checks import check_counted, check_layer, check_tied, check_whole, pattern_of
from leyden.strategies.mesh.draws import Draws
from leyden.strategies.mesh.experts import SPLITS, Experts, check_experts, check_split
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
from leyden.strategies.process_group import GroupRanks

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
    "rowwise_split_input": (Rowwise, {"takes_whole": True}),
    "experts": (Experts, {}),
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
    "moe_tp_experts": "experts",
}
"""What the plans of `transformers` models call them."""
UNSUPPORTED = {
    "mla_kv_a_proj": "for the compressed keys of multi-head latent attention",
    "packed_rowwise": "for weights that stack their inputs",
    "local_params": "for parameters that a layer reads without a module of their own",
    "all_reduce": "for modules that sum by themselves",
    "moe_identity_expert": "for experts without weights",
    "grouped_gemm": "for expert parallelism",
    "ep_dispatch_experts": "for expert parallelism",
}
"""Styles of `transformers` that are not part of this version, each with what it is for."""


class Plan:
    """Which modules of a model have which style.

    Args:
        entries: pattern → style. A pattern is a module's name as `named_modules` gives it, in which * stands for
            any one part: "layers.*.attention.query". A style is a word of `STYLES`, or a ParallelStyle of torch.
            A parameter of a module of 'experts' is named in the same way, with a word of `SPLITS`.

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
        if word in UNSUPPORTED:
            raise ConfigurationError(
                f"the plan has the style {style!r} of transformers, {UNSUPPORTED[word]}, which is not part of this "
                f"version: give MeshStrategy(plan={{…}}) a plan of {', '.join(STYLES)}; or use FSDP, with tp=1."
            )
        if word not in STYLES and word not in SPLITS:
            raise ConfigurationError(f"the plan has the style {style!r}. {nearest(style, STYLES)}")
        return word

    def matched(self, root: nn.Module) -> dict[str, str | ParallelStyle]:
        """The modules and parameters that the plan names, each with its style; a later pattern wins.

        A layer with adapters gives its style to the layer within, and theirs to the adapters.

        Raises:
            ConfigurationError: if a pattern matches neither.
        """
        names, parameters = _names(root)
        found: dict[str, Any] = {}
        for pattern, style in self.entries.items():
            own = _matching(pattern, names) or _matching(pattern, parameters)
            if not own:
                raise ConfigurationError(
                    f"the plan's {pattern!r} matches no module of {type(root).__name__}. "
                    f"{nearest(pattern, [pattern_of(name) for name in names])}"
                )
            found |= dict.fromkeys(own, self._word(style))
        return with_adapters(found, dict(root.named_modules()))


def _names(root: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the modules and of the parameters in a module."""
    modules = [name for name, _ in root.named_modules() if name]
    return modules, [name for name, _ in root.named_parameters(remove_duplicate=False)]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    wanted = pattern.split(".")
    return [
        name for name in names if len(parts := name.split(".")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
    ]


def is_split(root: nn.Module) -> bool:
    """True for a model with parameters that are split already: by hand, or by `from_pretrained(tp_plan="auto")`."""
    return any(isinstance(parameter, DTensor) for parameter in root.parameters())


def plan_of(root: nn.Module) -> Plan | None:
    """The plan that a module brings: its `parallel_plan()`, or those of the modules in it; None where there is none.

    A `transformers` model brings one as `tp_plan`, written for all models of its class: what matches nothing in this
    one is left out.
    """
    entries: dict[str, Any] = {}
    taken: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in taken):
            continue
        own: Any = getattr(module, "parallel_plan", None)
        found = own() if callable(own) else _of_transformers(module)
        if isinstance(found, Mapping) and found:
            taken.append(name)
            entries |= {f"{name}.{pattern}" if name else pattern: style for pattern, style in found.items()}
    return Plan(entries) if entries else None


def _of_transformers(model: nn.Module) -> dict[str, str]:
    found: Any = getattr(model, "tp_plan", None)
    if not isinstance(found, Mapping):
        return {}
    modules, parameters = _names(model)
    return {pattern: style for pattern, style in found.items() if _matching(pattern, (*modules, *parameters))}


class TensorParallel:
    """A plan that is applied to a model, part by part.

    Args:
        plan: what is split, and how.
        mesh: the `tp` dimension.
        device: of this rank.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
        self.plan, self.mesh = plan, mesh
        self._views = LocalViews(mesh)
        self._entrance = Entrance()
        self._draws = Draws(mesh, device, plan.is_sequence)
        self._styles: dict[nn.Module, ParallelStyle] = {}

    def start(self, ranks: GroupRanks, batch: Any) -> None:
        """Begins a run with its first batch: the ranks of the group have the same, and the same random numbers.

        Raises:
            ConfigurationError: if they were given different batches.
        """
        check_batch(ranks, self.mesh, batch)
        self._draws.agree()

    @property
    def is_running(self) -> bool:
        """True within `running`."""
        return self._views.are_active

    @contextmanager
    def running(self, trains: bool) -> Iterator[None]:
        """The context in which the model runs forward and backward.

        Args:
            trains: random numbers differ between ranks where activations do.
        """
        with ExitStack() as stack:
            stack.callback(self._entrance.clear)
            stack.enter_context(self._views.active())
            if trains:
                stack.enter_context(self._draws.active())
            if self.plan.splits_loss:
                stack.enter_context(loss_parallel())
            yield

    def begin(self, root: nn.Module) -> None:
        """Takes a model whose parameters are still whole.

        Raises:
            ConfigurationError: if the plan does not fit it; names the layer.
        """
        modules, matched = dict(root.named_modules()), self.plan.matched(root)
        splits: dict[str, dict[str, str]] = {}
        for name in [name for name in matched if name not in modules]:
            owner, _, own = name.rpartition(".")
            splits.setdefault(owner, {})[own] = check_split(name, modules[owner], matched.pop(name), matched.get(owner))
        found = {name: self._style(name, style, splits.get(name, {})) for name, style in matched.items()}
        self._styles |= {modules[name]: style for name, style in found.items()}
        for name, style in found.items():
            check_layer(name, modules[name], style, self.mesh.size())
            if isinstance(style, Experts):
                check_experts(name, modules[name], style, self.mesh.size())
        check_whole(root)
        check_counted(root, self._styles, self.mesh.size())
        check_tied(root, self.placement)
        for name, style in found.items():
            if not any(p is not None for p in modules[name]._parameters.values()):
                style._apply(modules[name], self.mesh)

    def _style(self, name: str, style: str | ParallelStyle, splits: dict[str, str]) -> ParallelStyle:
        if not isinstance(style, str):
            return style
        if style not in STYLES:
            raise ConfigurationError(
                f"the plan makes the module {name!r} {style!r}, which is for single parameters of a module of "
                f"'experts'. {nearest(style, STYLES)}"
            )
        kind, arguments = STYLES[style]
        if kind is Experts:
            arguments = {"splits": splits}
        return kind(entrance=self._entrance, sequence=self.plan.is_sequence, draws=self._draws.switch, **arguments)

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
        if isinstance(style, Experts):
            self._views.give(module, style.placements(module))
        # Where no style stands, hand-written code may have split some, which its own hooks read.
        names = list(left) if style is None else [name for name, p in module._parameters.items() if p is not None]
        if names and (style is None or isinstance(style, (Replicated, Sequence, Heads))):
            self._views.give(module, dict.fromkeys(names, gradient))


def _ties(slots: Iterable[Slot]) -> list[list[Slot]]:
    """The slots that hold one and the same parameter."""
    found: dict[int, list[Slot]] = {}
    for module, name in slots:
        found.setdefault(id(module._parameters[name]), []).append((module, name))
    return [tied for tied in found.values() if len(tied) > 1]
