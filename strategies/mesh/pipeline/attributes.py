"""AssignedAttributes: refuses reads of attributes that blocks of other stages assign in their forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from leyden.core.errors import ConfigurationError

BUILT_IN = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
"""Attributes of every module."""


class AssignedAttributes:
    """Refuses to read attributes of other stages' blocks, if this stage's blocks assign them in their forward.

    A sum of `block.aux_loss` over all blocks would otherwise silently lack the losses of other stages. Assignments are
    observed in a rehearsal, on blocks of this stage; other blocks of the same class are assumed to assign the same.

    Args:
        blocks: full name → block, for the blocks of this stage.
        others: pairs of full name and stand-in, for the blocks of other stages.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], others: Sequence[tuple[str, nn.Module]]) -> None:
        self._blocks = blocks
        # The stand-ins' classes as they are now, because `_refuse_reads` replaces them.
        self._others = [(full_name, stand_in, type(stand_in)) for full_name, stand_in in others]
        self._known: set[tuple[type, str, str]] = set()
        """(class of block, path within the block, attribute) of the assignments seen so far."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the attributes that blocks assign within this context."""
        before: dict[nn.Module, dict[str, Any]] = {}

        def enter(block: nn.Module, args: Any) -> None:
            before.update({part: _attributes(part) for part in block.modules()})

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            for path, part in block.named_modules():
                now = _attributes(part)
                then = before.pop(part, now)
                for name in now:
                    if name not in then or not _is_same(then[name], now[name]):
                        self._record(block, path, name)

        handles = [
            handle
            for block in self._blocks.values()
            for handle in (block.register_forward_pre_hook(enter), block.register_forward_hook(leave))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, block: nn.Module, path: str, name: str) -> None:
        if (type(block), path, name) in self._known:
            return
        self._known.add((type(block), path, name))
        for full_name, stand_in, kind in self._others:
            # isinstance, because FSDP replaces a block's class by a subclass.
            if isinstance(block, kind):
                _refuse_reads(_copied_part(stand_in, path), name, f"{full_name}.{path}" if path else full_name)


def _attributes(part: nn.Module) -> dict[str, tuple[Any, int]]:
    """Returns the attributes and buffers of a module: name → (value, version). In-place writes bump the version."""
    own = {name: (value, 0) for name, value in vars(part).items() if name not in BUILT_IN}
    return own | {name: (value, value._version) for name, value in part._buffers.items() if value is not None}


def _is_same(then: tuple[Any, int], now: tuple[Any, int]) -> bool:
    return then[0] is now[0] and then[1] == now[1]


def _copied_part(stand_in: nn.Module, path: str) -> nn.Module | None:
    """Returns the submodule of a stand-in at a path, after copying it: stand-ins share submodules with their blocks."""
    part: nn.Module = stand_in
    for name in filter(None, path.split(".")):
        child = part._modules.get(name)
        if child is None:
            return None
        if not hasattr(type(child), "_leyden_stand_in"):
            copied: Any = object.__new__(_stand_in_class(type(child)))
            copied.__dict__.update(child.__dict__)
            part.__dict__["_modules"] = {**part._modules, name: copied}
            child = copied
        part = child
    return part


def _stand_in_class(kind: type) -> type:
    return type(kind.__name__, (kind,), {"_leyden_stand_in": True})


def _refuse_reads(part: nn.Module | None, name: str, full_name: str) -> None:
    """Makes reads of an attribute raise an error."""
    if part is None:
        return

    def read(_: nn.Module) -> Any:
        raise ConfigurationError(
            f"the step reads {name!r} of {full_name!r}, which that module assigns in its forward on another stage of "
            "the pipeline. Let the blocks return such a value along with the activations, so each stage adds its own "
            "part and passes it on, or use a strategy without pp."
        )

    def write(_: nn.Module, value: Any = None) -> None:
        """Ignores assignments."""

    if not hasattr(type(part), "_leyden_stand_in"):
        part.__class__ = _stand_in_class(type(part))
    setattr(type(part), name, property(read, write, write))
