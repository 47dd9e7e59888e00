"""Plan: the layers of a model that are split over the `tp` dimension, and how. TensorParallel applies it."""

from __future__ import annotations

from collections import Counter
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

from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import warn
from leyden.strategies.mesh.adapters import with_adapters
from leyden.strategies.mesh.expert_parallel import WORD
from leyden.strategies.mesh.experts import SPLITS, Experts, check_experts, check_split, split_of
from leyden.strategies.mesh.local_views import LocalViews
from leyden.strategies.mesh.plan_checks import check_counted, check_layer, check_tied, check_whole, pattern_of
from leyden.strategies.mesh.rng import TensorParallelRNG
from leyden.strategies.mesh.styles import (
    Colwise,
    Heads,
    Replicated,
    Rowwise,
    Sequence,
    SharedInput,
    Style,
    grad_placement,
    placed,
)

if TYPE_CHECKING:
    from leyden.strategies.fsdp.values import Slot

ENOUGH = 0.5
"""A plan that splits a smaller share of the parameters is worth a warning."""
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
    "expert_parallel": (Experts, {}),
}
"""Style words of a plan → the class and arguments of the style."""
OF_TRANSFORMERS = {
    "colwise_rep": "gather",
    "colwise_gather_output": "gather",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise",
    "rowwise_rep": "rowwise",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "replicate_sum",
    "moe_tp_experts": "experts",
    "ep_dispatch_experts": "expert_parallel",
}
"""Style words of `transformers` plans → Leyden's."""
UNSUPPORTED = {
    "mla_kv_a_proj": "for the compressed keys of multi-head latent attention",
    "packed_rowwise": "for weights stacked along their inputs",
    "local_params": "for parameters that belong to no submodule",
    "all_reduce": "for modules that reduce their own outputs",
    "moe_identity_expert": "for experts without weights",
    "grouped_gemm": "for the single weights of experts, which 'expert_parallel' for their module divides",
}
"""Styles of `transformers` that this version does not support → their purpose."""


class Plan:
    """The parallel style of each module that is split.

    Args:
        entries: pattern → style. A pattern is a module's name in `named_modules`, in which * stands for any single
            component: "layers.*.attention.query". A style is a word from `STYLES`, or a ParallelStyle of torch. A
            parameter of an 'experts' module is named in the same way, with a word from `SPLITS`.

    Raises:
        ConfigurationError: for an unknown style.

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
                f"the plan has the style {style!r} of transformers, {UNSUPPORTED[word]}. This version does not support "
                f"it: pass MeshStrategy(plan={{…}}) with styles {', '.join(STYLES)}, or use FSDP with tp=1."
            )
        if word not in STYLES and word not in SPLITS:
            raise ConfigurationError(f"the plan has the style {style!r}. {nearest(style, STYLES)}")
        return word

    def matched(self, root: nn.Module) -> dict[str, str | ParallelStyle]:
        """Returns the style of each module and parameter that the plan names. Later patterns win.

        If a layer has adapters, its style applies to the wrapped layer, and the adapters get matching styles.

        Raises:
            ConfigurationError: if a pattern matches neither a module nor a parameter.
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

    def experts(self, root: nn.Module) -> dict[str, dict[str, Placement]]:
        """Returns the modules that are 'expert_parallel': name → the placements of its parameters over `tp`."""
        matched, modules = self.matched(root), dict(root.named_modules())
        splits: dict[str, dict[str, Placement]] = {name: {} for name, style in matched.items() if style == WORD}
        for name, word in matched.items():
            owner, _, parameter = name.rpartition(".")
            if name not in modules and owner in splits:
                splits[owner][parameter] = split_of(str(word), modules[owner]._parameters[parameter])
        return splits


def _names(root: nn.Module) -> tuple[list[str], list[str]]:
    """Returns the names of a model's modules, and those of its parameters."""
    modules = [name for name, _ in root.named_modules() if name]
    return modules, [name for name, _ in root.named_parameters(remove_duplicate=False)]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    wanted = pattern.split(".")
    return [
        name for name in names if len(parts := name.split(".")) == len(wanted) and all(map(fnmatchcase, parts, wanted))
    ]


def is_split(root: nn.Module) -> bool:
    """Returns True if parameters are already split: by hand, or by `from_pretrained(tp_plan="auto")`."""
    return any(isinstance(parameter, DTensor) for parameter in root.parameters())


def plan_of(root: nn.Module, divides_experts: bool = False) -> Plan | None:
    """Returns the plan that a module defines: its `parallel_plan()`, or those of its submodules; None if none does.

    A `transformers` model defines its plan as `tp_plan`, for all models of its class. Patterns without a match in this
    model are dropped.

    Args:
        root: the module.
        divides_experts: makes the experts of a `transformers` model 'expert_parallel'.
    """
    entries: dict[str, Any] = {}
    planned: list[str] = []
    for name, module in root.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in planned):
            continue
        parallel_plan: Any = getattr(module, "parallel_plan", None)
        found = parallel_plan() if callable(parallel_plan) else _transformers_plan(module, divides_experts)
        if isinstance(found, Mapping) and found:
            planned.append(name)
            entries |= {f"{name}.{pattern}" if name else pattern: style for pattern, style in found.items()}
    return Plan(entries) if entries else None


def _transformers_plan(model: nn.Module, divides_experts: bool) -> dict[str, str]:
    found: Any = getattr(model, "tp_plan", None)
    if not isinstance(found, Mapping):
        return {}
    if divides_experts:
        own = {**found, **(getattr(model, "ep_plan", None) or {})}
        experts = [p for p, style in own.items() if style in ("moe_tp_experts", "ep_dispatch_experts")]
        found = {**found, **dict.fromkeys(experts, "expert_parallel")}
    modules, parameters = _names(model)
    return {pattern: style for pattern, style in found.items() if _matching(pattern, (*modules, *parameters))}


class TensorParallel:
    """Applies a plan to a model, one FSDP group at a time, and sets up its steps.

    Args:
        plan: the layers to split, and how.
        mesh: the `tp` dimension.
        device: the device of this rank.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
        self.plan, self.mesh = plan, mesh
        self._views = LocalViews(mesh)
        self._shared_input = SharedInput()
        self._rng = TensorParallelRNG(mesh, device, plan.is_sequence)
        self._styles: dict[nn.Module, ParallelStyle] = {}
        self.share = 1.0
        """The share of the model's parameters that is split."""

    def synchronize(self) -> None:
        """Gives the ranks of the group the random state of the first one."""
        self._rng.synchronize()

    @property
    def is_running(self) -> bool:
        """True within `running`."""
        return self._views.are_active

    @contextmanager
    def running(self, trains: bool) -> Iterator[None]:
        """The context in which the model runs forward and backward.

        Args:
            trains: True gives ranks different random numbers while their activations differ; False leaves the
                generators alone.
        """
        with ExitStack() as stack:
            stack.callback(self._shared_input.clear)
            stack.enter_context(self._views.active())
            if trains:
                stack.enter_context(self._rng.active())
            if self.plan.splits_loss:
                stack.enter_context(loss_parallel())
            yield

    def begin(self, root: nn.Module) -> None:
        """Checks the plan against a model whose parameters are still whole, and chooses the style of each module.

        Raises:
            ConfigurationError: if the plan does not fit the model; names the layer.
        """
        modules, matched = dict(root.named_modules()), self.plan.matched(root)
        splits: dict[str, dict[str, str]] = {}
        for name in [name for name in matched if name not in modules]:
            owner, _, parameter = name.rpartition(".")
            word = check_split(name, modules[owner], matched.pop(name), matched.get(owner))
            splits.setdefault(owner, {})[parameter] = word
        # Without words for their parameters, experts are whole on every rank of a tp group.
        matched = {name: style for name, style in matched.items() if style != WORD or name in splits}
        styles = {name: self._style(name, style, splits.get(name, {})) for name, style in matched.items()}
        self._styles |= {modules[name]: style for name, style in styles.items()}
        for name, style in styles.items():
            check_layer(name, modules[name], style, self.mesh.size())
            if isinstance(style, Experts):
                check_experts(name, modules[name], style, self.mesh.size())
        check_whole(root)
        check_counted(root, self._styles, self.mesh.size())
        check_tied(root, self.placement)
        self._measure(root)
        # `split` applies the styles of modules with parameters; the others only need their hooks.
        for name, style in styles.items():
            if not any(p is not None for p in modules[name]._parameters.values()):
                style._apply(modules[name], self.mesh)

    def _measure(self, root: nn.Module) -> None:
        """Measures the share of the parameters that is split, and warns if it is less than half."""
        whole: Counter[str] = Counter()
        total = 0
        seen: set[nn.Parameter] = set()
        for name, module in root.named_modules():
            for parameter_name, parameter in module._parameters.items():
                if parameter is None or parameter in seen:
                    continue
                seen.add(parameter)
                total += parameter.numel()
                # None: a style of torch's own, which splits its module.
                found = self.placement(module, parameter_name)
                if isinstance(parameter, DTensor):
                    found = parameter.placements[-1]
                if found is not None and found.is_replicate():
                    whole[pattern_of(name) or type(root).__name__] += parameter.numel()
        self.share = 1 - whole.total() / total if total else 1.0
        if self.share < ENOUGH:
            largest = ", ".join(f"{pattern} ({count / total:.0%})" for pattern, count in whole.most_common(3))
            warn(
                f"the plan splits {self.share:.0%} of the parameters of {type(root).__name__} over tp="
                f"{self.mesh.size()}, and every rank of a tp group computes the rest in full. The largest layers that "
                f"it leaves whole: {largest}. Add them to MeshStrategy(plan={{…}}), or use FSDP with tp=1."
            )

    def _style(self, name: str, style: str | ParallelStyle, splits: dict[str, str]) -> ParallelStyle:
        if not isinstance(style, str):
            return style
        if style not in STYLES:
            raise ConfigurationError(
                f"the plan makes the module {name!r} {style!r}, which is for single parameters of an 'experts' module. "
                f"{nearest(style, STYLES)}"
            )
        kind, arguments = STYLES[style]
        if kind is Experts:
            arguments = {"splits": splits}
        return kind(
            shared_input=self._shared_input,
            sequence=self.plan.is_sequence,
            switch_rng=self._rng.switch,
            **arguments,
        )

    def placement(self, module: nn.Module, name: str) -> Placement | None:
        """Returns the placement of a parameter after the split; None if a style of torch's decides it."""
        style = self._styles.get(module)
        if isinstance(style, Style):
            return style.placements(module)[name]
        return Replicate() if style is None else None

    def split(self, slots: Iterable[Slot]) -> None:
        """Splits the parameters at some slots, which every rank holds whole. Those without a style are replicated."""
        slots = [(module, name) for module, name in slots if module._parameters.get(name) is not None]
        ties = _ties(slots)
        for module in {id(module): module for module, _ in slots}.values():
            style = self._styles.get(module)
            if style is not None:
                style._apply(module, self.mesh)
            self._replicate(module, style)
        for tied in ties:
            (first, name), *others = tied
            for module, other_name in others:
                module._parameters[other_name] = first._parameters[name]

    def _replicate(self, module: nn.Module, style: ParallelStyle | None) -> None:
        """Replicates the parameters that the style left whole, and makes them readable as plain tensors in a step."""
        unsplit = {name: p for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
        gradient = grad_placement(style if isinstance(style, Style) else None)
        for name, parameter in unsplit.items():
            module._parameters[name] = placed(parameter, self.mesh, Replicate())
        split: list[Any] = [p for p in module._parameters.values() if isinstance(p, DTensor)]
        # Experts that are divided over `ep` too are on a larger mesh, and have views of their own.
        if isinstance(style, Experts) and all(part.device_mesh == self.mesh for part in split):
            self._views.add(module, style.placements(module))
        # Without a style, hand-written code may have split some of the parameters; its own hooks read those.
        names = list(unsplit) if style is None else [name for name, p in module._parameters.items() if p is not None]
        if names and (style is None or isinstance(style, (Replicated, Sequence, Heads))):
            self._views.add(module, dict.fromkeys(names, gradient))


def _ties(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Returns groups of slots that hold the same parameter."""
    found: dict[int, list[Slot]] = {}
    for module, name in slots:
        found.setdefault(id(module._parameters[name]), []).append((module, name))
    return [tied for tied in found.values() if len(tied) > 1]
