"""The names of `accelerate.state`, for scripts that import from there."""

from leyden.trainer.accelerator.absent import lacking
from leyden.trainer.accelerator.gradient_state import GradientState
from leyden.trainer.accelerator.ranks import AcceleratorState, DistributedType, PartialState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]
__getattr__ = lacking(__name__)
