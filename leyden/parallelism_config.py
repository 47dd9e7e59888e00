"""The names of `accelerate.parallelism_config`, for scripts that import from there."""

from leyden.trainer.accelerator.absent import lacking
from leyden.trainer.accelerator.parallel import ParallelismConfig

__all__ = ["ParallelismConfig"]
__getattr__ = lacking(__name__)
