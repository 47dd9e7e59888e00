"""The names of `accelerate.accelerator`, for scripts that import from there."""

from leyden.trainer.accelerator.accelerator import Accelerator
from leyden.trainer.accelerator.standalone.absent import lacking

__all__ = ["Accelerator"]
__getattr__ = lacking(__name__)
