"""Stand-in for `accelerate.test_utils.testing`, which defines no names of its own."""

from leyden.compat.accelerate.absent import lacking

__all__ = []
__getattr__ = lacking(__name__)
