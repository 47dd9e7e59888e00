"""Stand-in for `accelerate.launchers`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.standalone.absent import lacking
from leyden.accelerator.standalone.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
__getattr__ = lacking(__name__)
