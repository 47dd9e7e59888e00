"""The names of `accelerate.local_sgd`, for scripts that import from there."""

from leyden.trainer.accelerator.standalone.absent import lacking
from leyden.trainer.accelerator.standalone.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
__getattr__ = lacking(__name__)
