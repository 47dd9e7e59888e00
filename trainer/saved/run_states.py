"""Lists the parts of a run that save state, except the user's code (`user_states.py`) and the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leyden.checkpoint.buffers import Buffers
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.gradients import OpenGradients, UnreducedGradients
from leyden.checkpoint.owners import RankStateOwner
from leyden.checkpoint.step_states import StepStates
from leyden.data.rng import RandomNumbers
from leyden.trainer.logging.metric_states import MetricStates

if TYPE_CHECKING:
    from leyden.trainer.run import Run


def step_states_of(run: Run) -> StepStates:
    """Returns the states that a step changes, except the weights: optimizers, schedulers and scaler."""
    schedulers = [config.scheduler for config in run.schedulers]
    return StepStates(run.engine.strategy, run.module, run.engine.optimizers, schedulers)


def rank_owners(run: Run, ranks: CheckpointRanks) -> dict[str, RankStateOwner]:
    """Returns the owners of rank-specific state, except the data position. RNG state is last: others may draw."""
    return {
        "buffers": Buffers(run.module, ranks),
        "logs": run.logs,
        "metrics": MetricStates(run.module),
        "trained": run.trained,
        "gradients": OpenGradients(run.module, run.engine),
        "unreduced": UnreducedGradients(run.module, run.engine),
        "rng": RandomNumbers(),
    }
