"""The names of `accelerate.scheduler`, for scripts that import from there."""

from leyden.trainer.accelerator.absent import lacking
from leyden.trainer.accelerator.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
__getattr__ = lacking(__name__)
