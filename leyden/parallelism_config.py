"""The names of `accelerate.parallelism_config`, for scripts that import from there."""

from leyden.trainer.accelerator.settings.parallel import ParallelismConfig
from leyden.trainer.accelerator.standalone.absent import lacking

__all__ = ["ParallelismConfig"]
__getattr__ = lacking(__name__)
