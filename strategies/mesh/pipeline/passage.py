"""Passage: one micro-batch runs through one stage of a pipeline, within the user's own step."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.attributes import Attributes
from leyden.strategies.mesh.pipeline.checks import refuse_records
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.draws import StageDraws, may_draw

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NextStageReached(BaseException):
    """Raised when the step reaches a block of the next stage. No `except Exception` of the user's catches it."""


class Passages:
    """Runs the user's step on the parts of a model that single stages hold.

    Every stage runs the whole step of a micro-batch, in which blocks of other stages do nothing. Those before its own
    return nan, but the last of them, which returns what the stage before has sent. At the first block of the next stage
    the step is left, and what the block before it returned is sent there. So what a step computes beside the blocks,
    such as masks and positions, each stage computes by itself; and a value that another stage should have computed
    is nan, and so is the loss that depends on it.

    Args:
        root: the model, whole.
        holdings: what the stages of this rank hold of it.
        draws: random numbers of the stages.
    """

    def __init__(self, root: nn.Module, holdings: Holdings, draws: StageDraws) -> None:
        cut, stages = holdings.cut, holdings.stages
        self._root, self._cut, self._guard, self._draws = root, cut, holdings.guard, draws
        self.stage = 0
        """The stage that runs, or ran last."""
        self._received: Any = None
        self._output: Any = None
        self._entered = 0
        self._is_left = False
        self._whole: dict[nn.Module, dict[str, nn.Module | None]] = {}
        self._of_stage: dict[int, dict[nn.Module, dict[str, nn.Module | None]]] = {}
        self._attributes: list[Attributes] = []
        self._handles: list[Any] = []
        self._zeros = False
        self._not_zero: str | None = None
        list_of_blocks = root.get_submodule(cut.container)
        self._blocks = list(list_of_blocks.children())
        for stage in stages:
            seen_blocks = self._blocks_seen(list_of_blocks, stage)
            self._of_stage[stage] = {list_of_blocks: dict(seen_blocks)}
            self._attributes.append(self._attributes_of(stage, seen_blocks))
            for full in (*cut.before, *cut.after):
                owner, _, own = full.rpartition(".")
                parent = root.get_submodule(owner)
                if own in parent._modules and cut.stage_of(full) != stage:
                    seen = self._of_stage[stage].setdefault(parent, dict(parent._modules))
                    seen[own] = _stand_in(parent.get_submodule(own), self._elsewhere(full))
        for parents in self._of_stage.values():
            self._whole |= {parent: parent._modules for parent in parents}
        self._listen(stages)
        self._handles += refuse_records(root, cut)

    def _blocks_seen(self, container: nn.Module, stage: int) -> dict[str, nn.Module]:
        """The blocks as a stage sees them: its own, and stand-ins for the others."""
        own = self._cut.blocks_of(stage)
        return {
            name: block if place in own else _stand_in(block, self._other_block(name, place, own))
            for place, (name, block) in enumerate(container.named_children())
        }

    def _attributes_of(self, stage: int, seen: dict[str, nn.Module]) -> Attributes:
        named = [(f"{self._cut.container}.{name}", block) for name, block in seen.items()]
        own = self._cut.blocks_of(stage)
        blocks = dict(named[own.start : own.stop])
        return Attributes(blocks, [(name, block) for name, block in named if name not in blocks])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this context stages run to see what their blocks assign, which no other stage is to read."""
        with ExitStack() as stack:
            for attributes in self._attributes:
                stack.enter_context(attributes.watching())
            yield

    def _other_block(self, name: str, place: int, own: range) -> Callable[..., Any]:
        full = f"{self._cut.container}.{name}"

        def forward(*_: Any, **__: Any) -> Any:
            if place >= own.stop:
                self._is_left = True
                raise NextStageReached
            self._draws.enter_blocks()
            if place < own.start - 1:
                return _filled_tree(self._received, self._filler(full))
            self._entered += 1
            if self._entered > 1:
                raise ConfigurationError(
                    f"the step runs the blocks of {self._cut.container!r} more than once, and a pipeline passes each "
                    "batch through them once: call the model once per step, or leave out pp."
                )
            return self._received

        return forward

    def _elsewhere(self, name: str) -> Callable[..., Any]:
        """What stands for a module beside the blocks that another stage holds."""

        def forward(*_: Any, **__: Any) -> Any:
            if self.stage == 0:
                raise ConfigurationError(
                    f"{name!r} is used before the blocks of {self._cut.container!r}, and the last stage of the "
                    f"pipeline holds it: give MeshStrategy(first_stage=({name!r},))."
                )
            received = self._received
            like = received if isinstance(received, Tensor) else next(filter(_is_float, tree_leaves(received)))
            return _filled_like(like, self._filler(name))

        return forward

    def _filler(self, name: str) -> float:
        """What stands for a value that a module of another stage would have computed."""
        return 0.0 if self._zeros and name != self._not_zero else math.nan

    @contextmanager
    def zeros_but(self, name: str | None) -> Iterator[None]:
        """In this context 0 stands where nan does otherwise, but for one module."""
        self._zeros, self._not_zero = True, name
        try:
            yield
        finally:
            self._zeros, self._not_zero = False, None

    def _listen(self, stages: tuple[int, ...]) -> None:
        """Notes what the last block of each stage returns, and switches random numbers around what a stage holds."""
        for stage in stages:
            own = self._cut.blocks_of(stage)
            first, last = self._blocks[own.start], self._blocks[own.stop - 1]
            if own.start == 0:
                # On later stages what stands in for the blocks before comes first.
                enter = _hook_of(first, lambda *_: self._draws.enter_blocks())
                self._handles.append(first.register_forward_pre_hook(enter, prepend=True))
            if stage < self._cut.stages - 1:
                self._handles.append(last.register_forward_hook(_hook_of(last, self._note)))
            for full in self._cut.before:
                owner, _, name = full.rpartition(".")
                held = self._root.get_submodule(owner)._modules.get(name)
                if held is not None and stage == 0 and may_draw(held):
                    self._handles += [
                        held.register_forward_pre_hook(
                            _hook_of(held, lambda *_: self._draws.begin_held()), prepend=True
                        ),
                        held.register_forward_hook(_hook_of(held, lambda *_: self._draws.end_held())),
                    ]

    def _note(self, args: Any, output: Any) -> None:
        self._output = output

    def run(self, stage: int, step: Callable[[], Any], received: Any = None, micro_batch: int | None = None) -> Any:
        """Runs a step on one stage.

        Args:
            stage: which one.
            step: the user's, of a micro-batch.
            received: what the last block of the stage before returned.
            micro_batch: its number in the batch; None leaves random numbers as they are.

        Returns:
            What the step returned on the last stage; what is to be sent on the others.

        Raises:
            ConfigurationError: if the step does not run through the blocks once.
        """
        self.stage, self._received, self._entered, self._is_left = stage, received, 0, False
        was_open = self._guard.open(True)
        for parent, seen in self._of_stage[stage].items():
            parent.__dict__["_modules"] = seen
        # Not by context managers, which cost each micro-batch as much as a layer of a small model.
        try:
            if micro_batch is not None:
                self._draws.begin_passage(stage, micro_batch)
            outputs = step()
        finally:
            if micro_batch is not None:
                self._draws.end_passage(stage)
            for parent, whole in self._whole.items():
                parent.__dict__["_modules"] = whole
            self._guard.open(was_open)
        is_last = stage == self._cut.stages - 1
        if self._is_left is is_last or (stage > 0 and not self._entered):
            raise ConfigurationError(
                f"the step did not run through the blocks of {self._cut.container!r}, which the pipeline cuts: name "
                "the list of blocks that it does run as MeshStrategy(pipeline_module=…)."
            )
        output, self._output, self._received = self._output, None, None
        return outputs if is_last else output

    def around(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step function that ends where the stage does. It runs within FSDP's hooks of the root."""

        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return step_fn(*args, **kwargs)
            except NextStageReached:
                return self._output

        return step

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hook_of(module: nn.Module, act: Callable[..., Any]) -> Callable[..., None]:
    """A hook that acts for one module. A deep copy of the module shares it, and is no part of the pipeline."""

    def hook(called: nn.Module, *of_call: Any) -> None:
        if called is module:
            act(*of_call)

    return hook


def _stand_in(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A module with all attributes of another one, and another forward."""
    kind = type(module)
    # FSDP's class builds the one that it has extended.
    made: Any = object.__new__(kind.__mro__[2] if isinstance(module, FSDPModule) else kind)
    made.__dict__.update(module.__dict__)
    for name in HOOKS:
        made.__dict__[name] = OrderedDict()
    # A block that is compiled in place would run its compiled code, and not this forward.
    made.__dict__["_compiled_call_impl"] = None
    made.__dict__["forward"] = forward
    return made  # type: ignore[no-any-return]


def _is_float(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def _filled_tree(tree: Any, value: float) -> Any:
    if isinstance(tree, Tensor):
        return _filled_like(tree, value)
    return tree_map(lambda leaf: _filled_like(leaf, value), tree)


def _filled_like(item: Any, value: float) -> Any:
    """A number in the shape of a tensor, in the memory of one; what is no tensor of floats stays."""
    return torch.full((), value, dtype=item.dtype, device=item.device).expand(item.shape) if _is_float(item) else item
