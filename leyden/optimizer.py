"""The names of `accelerate.optimizer`, for scripts that import from there."""

from leyden.trainer.accelerator.standalone.absent import lacking
from leyden.trainer.engine.prepared import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
__getattr__ = lacking(__name__)
