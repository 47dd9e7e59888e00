"""Maps the copies that DeepSpeed's engine steps to the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.strategies.deepspeed.engine import ZeroEngine
from leyden.strategies.deepspeed.engine_state import NamedOptimizer, refresh
from leyden.strategies.master_weights import MasterWeights
from leyden.strategies.weights import WeightReader


class ZeroMasterWeights(MasterWeights):
    """The engine's flat float32 copies of the weights. Each rank holds its part."""

    def __init__(self, zero: ZeroEngine) -> None:
        self._zero = zero

    def groups(self, optimizer: Optimizer) -> list[list[Tensor]]:
        return self._zero.groups

    def saved_form(self, optimizer: Optimizer) -> Any:
        pieces = self._zero.pieces
        return NamedOptimizer(optimizer, self._zero.groups, pieces) if pieces else optimizer

    def parts(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        if self._zero.engine is None:
            return None
        pieces = self._zero.pieces
        return {name: pieces[id(p)].fragment() if id(p) in pieces else p for name, p in module.named_parameters()}

    def load(self, reader: WeightReader, module: nn.Module) -> None:
        pieces = {key: piece for key, piece in self._zero.pieces.items() if piece.is_copy}
        stored = set(reader.names()) if pieces else ()
        fragments = {name: pieces[id(p)].fragment() for name, p in module.named_parameters() if id(p) in pieces}
        if fragments:
            reader.fill({name: fragment for name, fragment in fragments.items() if name in stored})
            refresh(self._zero.engine)
