"""StageRunner: runs the user's step on one stage of a pipeline."""

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

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.attributes import AssignedAttributes
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.refusals import refuse_per_layer_outputs
from leyden.strategies.mesh.pipeline.rng import PipelineRNG, may_draw

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NextStageReached(BaseException):
    """Raised when the step reaches a block of the next stage. A BaseException, so `except Exception` lets it pass."""


class StageRunner:
    """Runs the user's step on single stages of a model.

    Every stage runs the step from its beginning, with stand-ins for the blocks of other stages. Stand-ins for earlier
    blocks return nan, except the last one, which returns the payload received from the previous stage. The stand-in for
    the next stage's first block ends the step; the output of the block before it is the payload for the next stage.

    Every stage computes values that need no blocks, such as masks and positions, for itself. A value that only another
    stage can compute is nan, and so is every loss that depends on it.

    Args:
        root: the whole model.
        holdings: the parts of the model that this rank's stages hold.
        rng: random numbers of this rank's stages.
    """

    def __init__(self, root: nn.Module, holdings: Holdings, rng: PipelineRNG) -> None:
        cut, stages = holdings.cut, holdings.stages
        self._root, self._cut, self._guard, self._rng = root, cut, holdings.guard, rng
        self.stage = 0
        """The stage that runs, or ran last."""
        self._received: Any = None
        """The payload from the previous stage."""
        self._output: Any = None
        """The output of the running stage's last block."""
        self._times_entered = 0
        """How often the step has called the block that returns the received payload."""
        self._reached_next_stage = False
        self._original_children: dict[nn.Module, dict[str, nn.Module | None]] = {}
        """Module → its children, for every module whose children are swapped while a stage runs."""
        self._stage_children: dict[int, dict[nn.Module, dict[str, nn.Module | None]]] = {}
        """Stage → module → its children while the stage runs, with stand-ins for those of other stages."""
        self._attributes: list[AssignedAttributes] = []
        self._handles: list[Any] = []
        self._fills_zeros = False
        """True if stand-ins return 0 instead of nan."""
        self._nan_module: str | None = None
        """A module whose stand-in returns nan even then."""
        container = root.get_submodule(cut.container)
        self._blocks = list(container.children())
        for stage in stages:
            blocks = self._blocks_with_stand_ins(container, stage)
            self._stage_children[stage] = {container: dict(blocks)}
            self._attributes.append(self._attributes_of(stage, blocks))
            for full_name in (*cut.before, *cut.after):
                owner, _, name = full_name.rpartition(".")
                parent = root.get_submodule(owner)
                if name in parent._modules and cut.stage_of(full_name) != stage:
                    children = self._stage_children[stage].setdefault(parent, dict(parent._modules))
                    children[name] = _stand_in(parent.get_submodule(name), self._stand_in_forward(full_name))
        for parents in self._stage_children.values():
            self._original_children |= {parent: parent._modules for parent in parents}
        self._register_hooks(stages)
        self._handles += refuse_per_layer_outputs(root, cut)

    def _blocks_with_stand_ins(self, container: nn.Module, stage: int) -> dict[str, nn.Module]:
        """Returns the blocks by name, with stand-ins for those of other stages."""
        own = self._cut.blocks_of(stage)
        return {
            name: block if index in own else _stand_in(block, self._stand_in_block_forward(name, index, own))
            for index, (name, block) in enumerate(container.named_children())
        }

    def _attributes_of(self, stage: int, blocks: dict[str, nn.Module]) -> AssignedAttributes:
        named = [(f"{self._cut.container}.{name}", block) for name, block in blocks.items()]
        own = self._cut.blocks_of(stage)
        own_blocks = dict(named[own.start : own.stop])
        return AssignedAttributes(own_blocks, [(name, block) for name, block in named if name not in own_blocks])

    @contextmanager
    def watching_attributes(self) -> Iterator[None]:
        """Records the attributes that blocks assign within this context, so that reads from stand-ins are refused."""
        with ExitStack() as stack:
            for attributes in self._attributes:
                stack.enter_context(attributes.watching())
            yield

    def _stand_in_block_forward(self, name: str, index: int, own: range) -> Callable[..., Any]:
        """Returns the forward of the stand-in for a block of another stage.

        Args:
            name: the block's name in the list of blocks.
            index: its index in the list.
            own: the indices of the running stage's blocks.
        """
        full_name = f"{self._cut.container}.{name}"

        def forward(*_: Any, **__: Any) -> Any:
            if index >= own.stop:
                self._reached_next_stage = True
                raise NextStageReached
            self._rng.enter_blocks()
            if index < own.start - 1:
                return _filled_tree(self._received, self._filler(full_name))
            self._times_entered += 1
            if self._times_entered > 1:
                raise ConfigurationError(
                    f"the step runs the blocks of {self._cut.container!r} more than once, and a pipeline can run each "
                    "batch through them only once: call the model once per step, or leave out pp."
                )
            return self._received

        return forward

    def _stand_in_forward(self, name: str) -> Callable[..., Any]:
        """Returns the forward of the stand-in for a module of another stage that is not a block."""

        def forward(*_: Any, **__: Any) -> Any:
            if self.stage == 0:
                raise ConfigurationError(
                    f"{name!r} is used before the blocks of {self._cut.container!r}, and the last stage of the "
                    f"pipeline holds it: add it to the first by MeshStrategy(first_stage=({name!r},))."
                )
            received = self._received
            like = received if isinstance(received, Tensor) else next(filter(_is_float, tree_leaves(received)))
            return _filled_like(like, self._filler(name))

        return forward

    def _filler(self, name: str) -> float:
        """Returns the value that a stand-in fills its output with."""
        return 0.0 if self._fills_zeros and name != self._nan_module else math.nan

    @contextmanager
    def zeros_except(self, name: str | None) -> Iterator[None]:
        """Makes stand-ins return 0 instead of nan within this context, except the stand-in for one module."""
        self._fills_zeros, self._nan_module = True, name
        try:
            yield
        finally:
            self._fills_zeros, self._nan_module = False, None

    def _register_hooks(self, stages: tuple[int, ...]) -> None:
        """Registers hooks that record the output of each stage's last block, and that switch random generators."""
        for stage in stages:
            own = self._cut.blocks_of(stage)
            first, last = self._blocks[own.start], self._blocks[own.stop - 1]
            if own.start == 0:
                # On later stages, a stand-in block runs first and switches.
                enter = _hook_of(first, lambda *_: self._rng.enter_blocks())
                self._handles.append(first.register_forward_pre_hook(enter, prepend=True))
            if stage < self._cut.stages - 1:
                self._handles.append(last.register_forward_hook(_hook_of(last, self._record_output)))
            for full_name in self._cut.before if stage == 0 else ():
                owner, _, name = full_name.rpartition(".")
                module = self._root.get_submodule(owner)._modules.get(name)
                if module is not None and may_draw(module):
                    enter = _hook_of(module, lambda *_: self._rng.enter_module())
                    leave = _hook_of(module, lambda *_: self._rng.exit_module())
                    self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
                    self._handles.append(module.register_forward_hook(leave))

    def _record_output(self, args: Any, output: Any) -> None:
        self._output = output

    def run(self, stage: int, step: Callable[[], Any], received: Any = None, micro_batch: int | None = None) -> Any:
        """Runs a step on one stage.

        Args:
            stage: the stage.
            step: the user's step with its micro-batch.
            received: the payload from the previous stage.
            micro_batch: the micro-batch's number in the batch; None leaves the random generators alone.

        Returns:
            What the step returned, on the last stage; the payload for the next stage, on the others.

        Raises:
            ConfigurationError: unless the step runs through the blocks exactly once.
        """
        self.stage, self._received, self._times_entered, self._reached_next_stage = stage, received, 0, False
        was_open = self._guard.open(True)
        for parent, children in self._stage_children[stage].items():
            parent.__dict__["_modules"] = children
        # No context managers: per micro-batch, they would cost as much as a layer of a small model.
        try:
            if micro_batch is not None:
                self._rng.begin_stage(stage, micro_batch)
            outputs = step()
        finally:
            if micro_batch is not None:
                self._rng.end_stage(stage)
            for parent, children in self._original_children.items():
                parent.__dict__["_modules"] = children
            self._guard.open(was_open)
        is_last = stage == self._cut.stages - 1
        if self._reached_next_stage is is_last or (stage > 0 and not self._times_entered):
            raise ConfigurationError(
                f"the step did not run through the blocks of {self._cut.container!r}, which the pipeline cuts: set "
                "MeshStrategy(pipeline_module=…) to the list of blocks that the step runs."
            )
        output, self._output, self._received = self._output, None, None
        return outputs if is_last else output

    def around(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a step function so that it returns where the stage ends. FSDP's hooks of the root run around it."""

        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return step_fn(*args, **kwargs)
            except NextStageReached:
                return self._output

        return step

    def remove(self) -> None:
        """Removes all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hook_of(module: nn.Module, act: Callable[..., Any]) -> Callable[..., None]:
    """Returns a hook that acts for one module only. Deep copies share the hook, but do not belong to the pipeline."""

    def hook(called: nn.Module, *call: Any) -> None:
        if called is module:
            act(*call)

    return hook


def _stand_in(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Returns a module with all attributes of another one, a different forward, and no hooks."""
    kind = type(module)
    # FSDP replaces a module's class by a subclass. The stand-in has the original class.
    stand_in: Any = object.__new__(kind.__mro__[2] if isinstance(module, FSDPModule) else kind)
    stand_in.__dict__.update(module.__dict__)
    for name in HOOKS:
        stand_in.__dict__[name] = OrderedDict()
    # A block compiled in place would run its compiled code instead of this forward.
    stand_in.__dict__["_compiled_call_impl"] = None
    stand_in.__dict__["forward"] = forward
    return stand_in  # type: ignore[no-any-return]


def _is_float(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def _filled_tree(tree: Any, value: float) -> Any:
    if isinstance(tree, Tensor):
        return _filled_like(tree, value)
    return tree_map(lambda leaf: _filled_like(leaf, value), tree)


def _filled_like(item: Any, value: float) -> Any:
    """Returns a constant tensor of an item's shape, expanded from one element. Anything but a float tensor stays."""
    return torch.full((), value, dtype=item.dtype, device=item.device).expand(item.shape) if _is_float(item) else item
