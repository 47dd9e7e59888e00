"""Stand-in for `accelerate.parallelism_config`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.settings.parallel import ParallelismConfig
from leyden.compat.accelerate.absent import lacking

__all__ = ["ParallelismConfig"]
__getattr__ = lacking(__name__)
