"""Stand-in for `accelerate.optimizer`, so that scripts written for Accelerate only change the package name."""

from leyden.compat.accelerate.absent import lacking
from leyden.trainer.engine.prepared import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
__getattr__ = lacking(__name__)
