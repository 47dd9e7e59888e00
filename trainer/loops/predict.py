"""The prediction loop: `predict_step` over every sample once, the outputs in the data's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from leyden.strategies.batch import move_to_device
from leyden.trainer.data.cursor import LoaderCursor
from leyden.trainer.loops.evaluate import EvaluationLoop

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


class PredictionLoop(EvaluationLoop):
    """A pass of prediction.

    Args:
        trainer: holds the parts.
        loaders: each with its number of batches, None for all that it has.
        keeps: keep the outputs; False where a callback writes them and they would not fit in memory.
    """

    def __init__(self, trainer: Trainer, loaders: list[tuple[LoaderCursor, int | None]], keeps: bool = True) -> None:
        super().__init__(trainer, "predict", loaders)
        self.keeps = keeps
        self.outputs: list[list[Any]] = []

    def predict(self) -> list[Any] | list[list[Any]] | None:
        """Does the pass.

        Returns:
            The outputs of each batch, on the CPU; a list of such lists where there are several loaders; None if they are
            not kept, or a signal broke the pass off.
        """
        self.outputs = [[] for _ in self.loaders]
        if self.run() is None or not self.keeps:
            return None
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def _take(self, index: int, outputs: Any) -> None:
        if self.keeps:
            self.outputs[index].append(move_to_device(outputs, torch.device("cpu")))
