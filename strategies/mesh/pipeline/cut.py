"""Cut: which stage of a pipeline holds which part of a model, and what stands in for the parts that it lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leyden.strategies.errors import ConfigurationError, nearest
from leyden.strategies.mesh.pipeline.guard import Guard

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Cut:
    """Where a model is cut.

    Attributes:
        container: full name of the list of blocks.
        starts: the first block of each stage.
        blocks: the names of the blocks in it.
        before: full names of the modules and parameters that the first stage holds beside its blocks.
        after: the same of the last stage.
    """

    container: str
    starts: tuple[int, ...]
    blocks: tuple[str, ...]
    before: tuple[str, ...] = field(default=())
    after: tuple[str, ...] = field(default=())

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts)

    def blocks_of(self, stage: int) -> range:
        """The places of a stage's blocks in their list."""
        return range(self.starts[stage], (*self.starts, len(self.blocks))[stage + 1])

    def stage_of(self, name: str) -> int:
        """The stage that holds a parameter, by its full name."""
        own = name.removeprefix(f"{self.container}.").partition(".")[0]
        if name.startswith(f"{self.container}.") and own in self.blocks:
            block = self.blocks.index(own)
            return max(stage for stage, start in enumerate(self.starts) if start <= block)
        return self.stages - 1 if _is_within(name, self.after) else 0

    def stage_of_buffer(self, name: str) -> int:
        """The stage whose buffer of a name counts: the last one runs the code around the blocks to its end."""
        if name.startswith(f"{self.container}.") or _is_within(name, self.before):
            return self.stage_of(name)
        return self.stages - 1


def find_cut(
    root: nn.Module,
    stages: int,
    pipeline_module: str | None = None,
    split: Sequence[str] | None = None,
    first_stage: Sequence[str] = (),
    last_stage: Sequence[str] = (),
) -> Cut:
    """Decides where a model is cut.

    The blocks are those of the largest list of modules (`nn.ModuleList` or `nn.Sequential`) in it. What is defined
    before that list belongs to the first stage, what is defined after it to the last.

    Args:
        root: the whole model.
        stages: the number of stages.
        pipeline_module: name of the list, or of a module with the list in it; the whole model if left out.
        split: names of the blocks with which the second and each later stage begins; as even as can be if left out.
        first_stage: names of modules or parameters that belong to the first stage, wherever they are defined.
        last_stage: the same of the last stage.

    Raises:
        ConfigurationError: if there is nothing to cut, too little of it, or a name that is not there.
    """
    container = _container(root, pipeline_module)
    own = tuple(root.get_submodule(container)._modules)
    blocks = [f"{container}.{name}" for name in own]
    if split is not None:
        starts = _starts(blocks, split, stages)
    elif len(blocks) < stages:
        raise ConfigurationError(
            f"the pipeline has {stages} stages, and {container!r} has {len(blocks)} blocks: use as many stages at most."
        )
    else:
        starts = tuple(math.ceil(stage * len(blocks) / stages) for stage in range(stages))
    names = [name for name, _ in root.named_modules(remove_duplicate=False) if name]
    names += [name for name, _ in root.named_parameters(remove_duplicate=False)]
    for name in (*first_stage, *last_stage):
        if name not in names:
            raise ConfigurationError(
                f"first_stage or last_stage names {name!r}, which the model does not have. {nearest(name, names)}"
            )
    before, after = _sides(root, container)
    moved = {*first_stage, *last_stage}
    return Cut(
        container,
        starts,
        own,
        (*(name for name in before if name not in moved), *first_stage),
        (*(name for name in after if name not in moved), *last_stage),
    )


def _container(root: nn.Module, wanted: str | None) -> str:
    modules = dict(root.named_modules())
    if wanted is not None and wanted not in modules:
        raise ConfigurationError(
            f"pipeline_module={wanted!r} is no module of the model. {nearest(wanted, [n for n in modules if n])}"
        )
    start = wanted or ""
    if isinstance(modules[start], LISTS) and start:
        return start
    lists = {
        f"{start}.{name}" if start else name: sum(p.numel() for p in module.parameters())
        for name, module in modules[start].named_modules()
        if name and isinstance(module, LISTS) and len(module) > 1
    }
    if not any(lists.values()):
        raise ConfigurationError(
            f"{'the model' if wanted is None else repr(wanted)} has no nn.ModuleList or nn.Sequential of several "
            "blocks that a pipeline could cut: put its blocks into one, and name it as pipeline_module."
        )
    # The outermost of equal ones: a list of lists is cut at its own entries.
    return max(lists, key=lambda name: (lists[name], -name.count(".")))


def _starts(blocks: list[str], split: Sequence[str], stages: int) -> tuple[int, ...]:
    unknown = [name for name in split if name not in blocks]
    if unknown:
        raise ConfigurationError(f"split names {unknown[0]!r}, which is no block. {nearest(unknown[0], blocks)}")
    starts = (0, *(blocks.index(name) for name in split))
    if len(starts) != stages:
        raise ConfigurationError(
            f"split names {len(split)} blocks, and {stages} stages need {stages - 1}: the first block of each stage "
            "but the first."
        )
    if list(starts) != sorted(set(starts)):
        raise ConfigurationError(
            f"split={list(split)}: name the blocks in their order, each once, and not the first one."
        )
    return starts


def _sides(root: nn.Module, container: str) -> tuple[list[str], list[str]]:
    """The names of what is defined before the list of blocks and after it, and holds parameters."""
    before: list[str] = []
    after: list[str] = []
    module, prefix = root, ""
    for own in container.split("."):
        before += [f"{prefix}{name}" for name, p in module._parameters.items() if p is not None]
        side = before
        for name, child in module.named_children():
            if name == own:
                side = after
            elif any(True for _ in child.parameters()):
                side.append(f"{prefix}{name}")
        module, prefix = module.get_submodule(own), f"{prefix}{own}."
    before += [f"{prefix}{name}" for name, p in module._parameters.items() if p is not None]
    return before, after


def _is_within(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


class Holdings:
    """What the stages of this rank hold of a model.

    Args:
        root: the whole model, before anything of it is dropped.
        cut: where it is cut.
        stages: those of this rank.
        absent: takes what stands in the place of parameters that other ranks hold.

    Attributes:
        guard: has the model run in steps of the pipeline alone.
    """

    def __init__(self, root: nn.Module, cut: Cut, stages: Sequence[int], absent: set[nn.Parameter]) -> None:
        self.cut, self.stages = cut, tuple(stages)
        self.absent = absent
        """What stands in the place of parameters that other ranks hold: nan of their shape, in the memory of one."""
        self._stages_of: dict[int, set[int]] = {}
        self._names: dict[int, str] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self._stages_of.setdefault(id(parameter), set()).add(cut.stage_of(name))
            self._names.setdefault(id(parameter), name)
        self._slots = {
            (module, name): id(parameter)
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self._made: dict[int, nn.Parameter] = {}
        self.guard = Guard()
        self._check_ties()

    def _check_ties(self) -> None:
        ends = {0, self.cut.stages - 1}
        for key, stages in self._stages_of.items():
            if len(stages) > 1 and stages != ends:
                raise ConfigurationError(
                    f"{self._names[key]!r} is tied between the stages {sorted(stages)} of the pipeline: only the "
                    "first and the last can share a parameter. Untie it, or move the split."
                )

    def is_held(self, module: nn.Module, name: str) -> bool:
        """True for a parameter that a stage of this rank holds."""
        return bool(self._stages_of[self._slots[module, name]] & set(self.stages))

    @property
    def placeholders(self) -> dict[str, nn.Parameter]:
        """What stands in the place of parameters that other ranks hold, by their full names."""
        return {self._names[key]: parameter for key, parameter in self._made.items()}

    def shared_slots(self) -> list[tuple[nn.Module, str]]:
        """Where the parameters stand that the first and the last stage share, each once."""
        found: dict[int, tuple[nn.Module, str]] = {}
        for slot, key in self._slots.items():
            if len(self._stages_of[key]) > 1:
                found.setdefault(key, slot)
        return list(found.values())

    def drop(self, slots: Iterable[tuple[nn.Module, str]], device: torch.device) -> list[tuple[nn.Module, str]]:
        """Frees the parameters at some slots that other ranks hold; returns the slots that are left.

        Args:
            slots: of parameters and buffers.
            device: of this rank.
        """
        left = []
        for module, name in slots:
            parameter = module._parameters.get(name)
            if parameter is None or self.is_held(module, name):
                left.append((module, name))
                continue
            key = self._slots[module, name]
            if key not in self._made:
                self._made[key] = _placeholder(parameter, device)
                self.absent.add(self._made[key])
            module._parameters[name] = self._made[key]
        return left

    def watch(self, root: nn.Module) -> None:
        """Lets every part of the model that lacks parameters, or contains the blocks, run only in steps."""
        cut = self.cut
        above = cut.container.split(".")
        partial = {".".join(above[:count]) for count in range(len(above) + 1)}
        here = {place for stage in self.stages for place in cut.blocks_of(stage)}
        partial |= {f"{cut.container}.{name}" for place, name in enumerate(cut.blocks) if place not in here}
        self.guard.watch(
            (name, module)
            for name, module in root.named_modules()
            if name in partial or any(p in self.absent for p in module._parameters.values() if p is not None)
        )


def _placeholder(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Nan of the shape of a parameter, which takes the memory of one number: whoever computes with it finds out."""
    value = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
    one: Tensor = torch.full((), value, dtype=parameter.dtype, device=device)
    made = nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
