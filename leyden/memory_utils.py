"""Stand-in for `accelerate.memory_utils`, so that scripts written for Accelerate only change the package name."""

from leyden.compat.accelerate.absent import lacking
from leyden.utils import find_executable_batch_size, release_memory

__all__ = ["find_executable_batch_size", "release_memory"]
__getattr__ = lacking(__name__)
