"""Stand-in for `accelerate.scheduler`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.prepared.scheduler import PreparedScheduler as AcceleratedScheduler
from leyden.compat.accelerate.absent import lacking

__all__ = ["AcceleratedScheduler"]
__getattr__ = lacking(__name__)
