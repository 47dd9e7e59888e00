"""Stand-in for `accelerate.launchers`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.standalone.notebook import debug_launcher, notebook_launcher
from leyden.compat.accelerate.absent import lacking

__all__ = ["debug_launcher", "notebook_launcher"]
__getattr__ = lacking(__name__)
