"""Stand-in for `accelerate.test_utils.testing`: importing one of its names raises an error with a hint."""

from leyden.accelerator.standalone.absent import lacking

__all__ = []
__getattr__ = lacking(__name__)
