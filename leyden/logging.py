"""Stand-in for `accelerate.logging`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.standalone.rank_logging import RankLogger as MultiProcessAdapter
from leyden.accelerator.standalone.rank_logging import get_logger
from leyden.compat.accelerate.absent import lacking

__all__ = ["MultiProcessAdapter", "get_logger"]
__getattr__ = lacking(__name__)
