"""For modules of tests that train in automatic and in manual optimisation alike."""

from __future__ import annotations

from torch import Tensor

from leyden import TrainModule


def result_of(module: TrainModule, loss: Tensor) -> Tensor | None:
    """What `training_step` returns: the loss, or None in manual optimisation, where the step has been made of it."""
    if module.automatic_optimization:
        return loss
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return None
