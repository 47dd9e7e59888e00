"""The names of `accelerate.accelerator`, for scripts that import from there."""

from leyden.trainer.accelerator.absent import lacking
from leyden.trainer.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
__getattr__ = lacking(__name__)
