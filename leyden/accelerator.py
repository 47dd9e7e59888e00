"""Stand-in for `accelerate.accelerator`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.accelerator import Accelerator
from leyden.accelerator.standalone.absent import lacking

__all__ = ["Accelerator"]
__getattr__ = lacking(__name__)
