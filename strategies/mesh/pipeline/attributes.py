"""Attributes: what blocks assign in their forward, which the other stages of a pipeline do not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from leyden.strategies.errors import ConfigurationError

OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))


class Attributes:
    """Refuses to read from blocks of other stages what blocks of this rank's own assign in their forward.

    A sum of `block.aux_loss` over all blocks would lack those of other stages without a word. What blocks assign is
    seen in a rehearsal; blocks of the same class assign the same.

    Args:
        blocks: this rank's own, by their full names.
        others: by the full names of the other blocks, what stands in for them.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], others: Sequence[tuple[str, nn.Module]]) -> None:
        self._blocks = blocks
        self._others = [(full, other, type(other)) for full, other in others]
        self._known: set[tuple[type, str, str]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this context the blocks run, and what they assign is noted."""
        before: dict[nn.Module, dict[str, Any]] = {}

        def enter(block: nn.Module, args: Any) -> None:
            before.update({part: _content(part) for part in block.modules()})

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            for path, part in block.named_modules():
                now = _content(part)
                then = before.pop(part, now)
                for name in now:
                    if name not in then or not _is_same(then[name], now[name]):
                        self._note(block, path, name)

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

    def _note(self, block: nn.Module, path: str, name: str) -> None:
        if (type(block), path, name) in self._known:
            return
        self._known.add((type(block), path, name))
        for full, other, kind in self._others:
            # FSDP's class extends that of a block.
            if isinstance(block, kind):
                _refuse(_part(other, path), name, f"{full}.{path}" if path else full)


def _content(part: nn.Module) -> dict[str, tuple[Any, int]]:
    """The attributes of a module, and its buffers with how often they have changed in place."""
    own = {name: (value, 0) for name, value in vars(part).items() if name not in OF_EVERY_MODULE}
    return own | {name: (value, value._version) for name, value in part._buffers.items() if value is not None}


def _is_same(then: tuple[Any, int], now: tuple[Any, int]) -> bool:
    return then[0] is now[0] and then[1] == now[1]


def _part(stand_in: nn.Module, path: str) -> nn.Module | None:
    """Copies a part of a block's stand-in, so that the block itself stays as it is."""
    part: nn.Module = stand_in
    for own in filter(None, path.split(".")):
        child = part._modules.get(own)
        if child is None:
            return None
        if not hasattr(type(child), "_leyden_stand_in"):
            twin: Any = object.__new__(_stand_in_of(type(child)))
            twin.__dict__.update(child.__dict__)
            part.__dict__["_modules"] = {**part._modules, own: twin}
            child = twin
        part = child
    return part


def _stand_in_of(kind: type) -> type:
    return type(kind.__name__, (kind,), {"_leyden_stand_in": True})


def _refuse(part: nn.Module | None, name: str, full: str) -> None:
    """Has an attribute of a part raise an error when it is read."""
    if part is None:
        return

    def read(_: nn.Module) -> Any:
        raise ConfigurationError(
            f"the step reads {name!r} of {full!r}, which that module assigns in its forward, and another stage of the "
            "pipeline runs it: what is made of all blocks would lack some. Have the blocks return such a value beside "
            "the activations, so that each stage adds its own and sends it on, or use a strategy without pp."
        )

    def write(_: nn.Module, value: Any = None) -> None:
        """Takes a value that nothing reads."""

    if not hasattr(type(part), "_leyden_stand_in"):
        part.__class__ = _stand_in_of(type(part))
    setattr(type(part), name, property(read, write, write))
