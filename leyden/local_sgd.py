"""Stand-in for `accelerate.local_sgd`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.standalone.absent import lacking
from leyden.accelerator.standalone.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
__getattr__ = lacking(__name__)
