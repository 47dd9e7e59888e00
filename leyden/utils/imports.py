"""The names of `accelerate.utils.imports`, for scripts that import from there: an import of one says what to use."""

from leyden.trainer.accelerator.absent import lacking

__all__ = []
__getattr__ = lacking(__name__)
