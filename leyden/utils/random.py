"""Stand-in for `accelerate.utils.random`, with all names of `leyden.utils`."""

from leyden.accelerator.standalone.absent import lacking
from leyden.utils import *  # noqa: F403

__getattr__ = lacking(__name__)
