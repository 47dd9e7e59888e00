"""The prediction loop: `predict_step` over every sample once, the outputs in the data's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from leyden.strategies.batch import move_to_device
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.data.cursor import LoaderCursor
from leyden.trainer.loops.evaluate import EvaluationLoop

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


class PredictionLoop(EvaluationLoop):
    """A pass of prediction.

    Args:
        trainer: holds the parts.
        loaders: each with its number of batches, None for all that it has.
        keeps: who gets the outputs: "all" ranks, the "main" one, or "none", where a callback writes them and they would not fit
            in memory.
    """

    def __init__(self, trainer: Trainer, loaders: list[tuple[LoaderCursor, int | None]], keeps: str = "all") -> None:
        super().__init__(trainer, "predict", loaders)
        self.gather, self.keeps = keeps, keeps != "none"
        self.outputs: list[list[Any]] = []

    def predict(self) -> list[Any] | list[list[Any]] | None:
        """Does the pass.

        Returns:
            The outputs of each batch of all ranks, by global batch and rank, on the CPU; a list of such lists where there
            are several loaders; None if they are not kept here, or a signal broke the pass off.
        """
        self.outputs = [[] for _ in self.loaders]
        if self.run() is None or not self.keeps:
            return None
        strategy = self.trainer.strategy
        if strategy.data_size > 1:
            everywhere = self.gather == "all"
            found = (
                strategy.ranks.all_gather_object(self.outputs)
                if everywhere
                else strategy.ranks.gather_object(self.outputs)
            )
            if found is None:
                return None
            self.outputs = [_in_turn(parts) for parts in zip(*found, strict=True)]
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def _take(self, index: int, outputs: Any) -> None:
        if self.keeps:
            self.outputs[index].append(move_to_device(outputs, torch.device("cpu")))


def keeping(return_predictions: bool | None, gather: str) -> str:
    """Who gets the outputs, by the arguments of `Trainer.predict`.

    Raises:
        ConfigurationError: if `gather` is unknown.
    """
    if gather not in ("all", "main"):
        raise ConfigurationError(f"predict(gather={gather!r}): use 'all' or 'main'.")
    return "none" if return_predictions is False else gather


def _in_turn(parts: Sequence[list[Any]]) -> list[Any]:
    """The outputs of all ranks as the data has them: those of the first global batch by rank, then those of the next."""
    return [part[number] for number in range(max(map(len, parts))) for part in parts if number < len(part)]
