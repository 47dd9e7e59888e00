"""Stand-in for `accelerate.checkpointing`: importing one of its names raises an error that names the alternative."""

from leyden.accelerator.standalone.absent import lacking

__all__ = []
__getattr__ = lacking(__name__)
