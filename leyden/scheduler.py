"""The names of `accelerate.scheduler`, for scripts that import from there."""

from leyden.trainer.accelerator.prepared.scheduler import PreparedScheduler as AcceleratedScheduler
from leyden.trainer.accelerator.standalone.absent import lacking

__all__ = ["AcceleratedScheduler"]
__getattr__ = lacking(__name__)
