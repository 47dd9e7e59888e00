"""The names of `accelerate.logging`, for scripts that import from there."""

from leyden.trainer.accelerator.standalone.absent import lacking
from leyden.trainer.accelerator.standalone.rank_logging import RankLogger as MultiProcessAdapter
from leyden.trainer.accelerator.standalone.rank_logging import get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
__getattr__ = lacking(__name__)
