"""Stand-in for `accelerate.local_sgd`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.standalone.local_sgd import LocalSGD
from leyden.compat.accelerate.absent import lacking

__all__ = ["LocalSGD"]
__getattr__ = lacking(__name__)
