"""Stand-in for `accelerate.state`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.loop.gradient_state import GradientState
from leyden.accelerator.ranks import AcceleratorState, DistributedType, PartialState
from leyden.compat.accelerate.absent import lacking

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]
__getattr__ = lacking(__name__)
