"""Stand-in for `accelerate.utils.operations`, with all names of `leyden.utils`."""

from leyden.compat.accelerate.absent import lacking
from leyden.utils import *  # noqa: F403

__getattr__ = lacking(__name__)
