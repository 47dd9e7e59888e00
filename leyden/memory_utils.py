"""The names of `accelerate.memory_utils`, for scripts that import from there."""

from leyden.trainer.accelerator.standalone.absent import lacking
from leyden.utils import find_executable_batch_size, release_memory

__all__ = ["find_executable_batch_size", "release_memory"]
__getattr__ = lacking(__name__)
