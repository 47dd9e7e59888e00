"""Cut: how a model is divided into pipeline stages. Holdings: the parts of it that this rank's stages hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from leyden.core.errors import ConfigurationError, nearest
from leyden.strategies.mesh.pipeline.absent import placeholder_of

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Cut:
    """How a model is divided into stages.

    Attributes:
        container: full name of the list of blocks.
        starts: index of each stage's first block.
        blocks: names of the blocks within the list.
        before: full names of the modules and parameters that the first stage holds in addition to its blocks.
        after: the same for the last stage.
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
        """Returns the indices of a stage's blocks."""
        return range(self.starts[stage], (*self.starts, len(self.blocks))[stage + 1])

    def described(self, stage: int) -> str:
        """Returns the names of a stage's blocks, such as `blocks.2 to 3`."""
        names = [self.blocks[index] for index in self.blocks_of(stage)]
        return f"{self.container}.{names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")

    def stage_of(self, name: str) -> int:
        """Returns the stage that holds a parameter, given its full name."""
        block = name.removeprefix(f"{self.container}.").partition(".")[0]
        if name.startswith(f"{self.container}.") and block in self.blocks:
            index = self.blocks.index(block)
            return max(stage for stage, start in enumerate(self.starts) if start <= index)
        return self.stages - 1 if _is_within(name, self.after) else 0

    def stage_of_buffer(self, name: str) -> int:
        """Returns the stage whose copy of a buffer is saved.

        For buffers outside the blocks and the first stage, it is the last stage: only there, the step runs to its end.
        """
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
    """Decides how a model is divided into stages.

    The blocks are the entries of the model's largest list of modules (`nn.ModuleList` or `nn.Sequential`). Modules
    defined before the list belong to the first stage, modules defined after it to the last.

    Args:
        root: the whole model.
        stages: the number of stages.
        pipeline_module: name of the list, or of a module that contains it; the whole model if omitted.
        split: names of the first block of the second and each later stage; an even split if omitted.
        first_stage: names of modules or parameters that belong to the first stage, wherever they are defined.
        last_stage: the same for the last stage.

    Raises:
        ConfigurationError: if the model has no list of blocks, too few blocks, or no module of a given name.
    """
    container = _container(root, pipeline_module)
    block_names = tuple(root.get_submodule(container)._modules)
    blocks = [f"{container}.{name}" for name in block_names]
    if split is not None:
        starts = _starts(blocks, split, stages)
    elif len(blocks) < stages:
        raise ConfigurationError(
            f"the pipeline has {stages} stages, and {container!r} has {len(blocks)} blocks: use at most "
            f"{len(blocks)} stages."
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
        block_names,
        (*(name for name in before if name not in moved), *first_stage),
        (*(name for name in after if name not in moved), *last_stage),
    )


def _container(root: nn.Module, wanted: str | None) -> str:
    """Returns the full name of the list of blocks."""
    modules = dict(root.named_modules())
    if wanted is not None and wanted not in modules:
        raise ConfigurationError(
            f"pipeline_module={wanted!r} is not a module of the model. {nearest(wanted, [n for n in modules if n])}"
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
            "blocks for a pipeline to cut: put its blocks into one, and pass its name as pipeline_module."
        )
    # Among lists of equal size the outermost wins, so a list of lists is cut between its own entries.
    return max(lists, key=lambda name: (lists[name], -name.count(".")))


def _starts(blocks: list[str], split: Sequence[str], stages: int) -> tuple[int, ...]:
    unknown = [name for name in split if name not in blocks]
    if unknown:
        raise ConfigurationError(f"split names {unknown[0]!r}, which is not a block. {nearest(unknown[0], blocks)}")
    starts = (0, *(blocks.index(name) for name in split))
    if len(starts) != stages:
        raise ConfigurationError(
            f"split names {len(split)} blocks, and {stages} stages need {stages - 1}: the first block of each stage "
            "after the first."
        )
    if list(starts) != sorted(set(starts)):
        raise ConfigurationError(
            f"split={list(split)}: name the blocks in their order, each once, and without the model's first block."
        )
    return starts


def _sides(root: nn.Module, container: str) -> tuple[list[str], list[str]]:
    """Returns the full names of the modules and parameters defined before the list of blocks, and of those after it.

    Modules without parameters are left out: every stage can run them.
    """
    before: list[str] = []
    after: list[str] = []
    module, prefix = root, ""
    for component in container.split("."):
        before += [f"{prefix}{name}" for name, p in module._parameters.items() if p is not None]
        side = before
        for name, child in module.named_children():
            if name == component:
                side = after
            elif any(True for _ in child.parameters()):
                side.append(f"{prefix}{name}")
        module, prefix = module.get_submodule(component), f"{prefix}{component}."
    before += [f"{prefix}{name}" for name, p in module._parameters.items() if p is not None]
    return before, after


def _is_within(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


class Holdings:
    """The parts of a model that this rank's stages hold. Other ranks' parameters become placeholders.

    Args:
        root: the whole model, before any parameter is dropped.
        cut: how the model is divided into stages.
        stages: the stages of this rank.
        absent: a set that receives the placeholders.

    Attributes:
        absent: placeholders of the parameters that other ranks hold (see `AbsentParameter`).
        guard: refuses to run the model outside the pipeline's steps.
    """

    def __init__(self, root: nn.Module, cut: Cut, stages: Sequence[int], absent: set[nn.Parameter]) -> None:
        self.cut, self.stages = cut, tuple(stages)
        self.absent = absent
        # Keys are ids of the original parameters.
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
        self._placeholders: dict[int, nn.Parameter] = {}
        self.guard = Guard()
        self._check_ties()

    def _check_ties(self) -> None:
        first_and_last = {0, self.cut.stages - 1}
        for key, stages in self._stages_of.items():
            if len(stages) > 1 and stages != first_and_last:
                raise ConfigurationError(
                    f"{self._names[key]!r} is tied between the stages {sorted(stages)} of the pipeline: only the "
                    "first and the last stage can share a parameter. Untie it, or move the split."
                )

    def is_held(self, module: nn.Module, name: str) -> bool:
        """Returns True if a stage of this rank holds the parameter."""
        return bool(self._stages_of[self._slots[module, name]] & set(self.stages))

    @property
    def placeholders(self) -> dict[str, nn.Parameter]:
        """The placeholders, by the full names of the parameters."""
        return {self._names[key]: parameter for key, parameter in self._placeholders.items()}

    def shared_slots(self) -> list[tuple[nn.Module, str]]:
        """Returns one slot of each parameter that the first and the last stage share."""
        found: dict[int, tuple[nn.Module, str]] = {}
        for slot, key in self._slots.items():
            if len(self._stages_of[key]) > 1:
                found.setdefault(key, slot)
        return list(found.values())

    def drop(self, slots: Iterable[tuple[nn.Module, str]], device: torch.device) -> list[tuple[nn.Module, str]]:
        """Replaces parameters that other ranks hold by placeholders; returns the remaining slots.

        Args:
            slots: slots of parameters and buffers.
            device: the device of this rank.
        """
        remaining = []
        for module, name in slots:
            parameter = module._parameters.get(name)
            if parameter is None or self.is_held(module, name):
                remaining.append((module, name))
                continue
            key = self._slots[module, name]
            if key not in self._placeholders:
                self._placeholders[key] = placeholder_of(parameter, self._names[key], device)
                self.absent.add(self._placeholders[key])
            module._parameters[name] = self._placeholders[key]
        return remaining

    def protect(self, root: nn.Module) -> None:
        """Guards every module that lacks parameters on this rank, or contains blocks of other ranks."""
        cut = self.cut
        path = cut.container.split(".")
        incomplete = {".".join(path[:depth]) for depth in range(len(path) + 1)}
        own_blocks = {index for stage in self.stages for index in cut.blocks_of(stage)}
        incomplete |= {f"{cut.container}.{name}" for index, name in enumerate(cut.blocks) if index not in own_blocks}
        self.guard.protect(
            (name, module)
            for name, module in root.named_modules()
            if name in incomplete or any(p in self.absent for p in module._parameters.values() if p is not None)
        )


class Guard:
    """Refuses to run modules that lack parameters, except within the pipeline's steps, where stand-ins run.

    The guard outlives the run, because the parameters stay on other ranks. A copy of the model has its own copy of the
    guard, which no step opens.
    """

    def __init__(self) -> None:
        self._protected: set[nn.Module] = set()
        self._is_open = False

    def protect(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Adds modules. Must be called after FSDP has registered its hooks, so that the guard's hooks run first.

        Args:
            named: pairs of full name and module.
        """
        for name, module in named:
            if module not in self._protected:
                self._protected.add(module)
                module.register_forward_pre_hook(partial(self._refuse, name), prepend=True)

    def open(self, is_open: bool) -> bool:
        """Opens or closes the guard; returns whether it was open."""
        was_open, self._is_open = self._is_open, is_open
        return was_open

    def _refuse(self, name: str, module: nn.Module, args: Any) -> None:
        if self._is_open:
            return
        raise ConfigurationError(
            f"{repr(name) if name else 'the model'} was run outside of a step, and this rank holds only some stages of "
            "its pipeline: run it in training_step, validation_step, test_step or predict_step (trainer.predict "
            "returns outputs on every rank). Or load a checkpoint into a new model, and run that one without pp."
        )
