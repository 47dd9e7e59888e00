"""The names of `accelerate.utils.constants`, for scripts that import there: importing one names the alternative."""

from leyden.trainer.accelerator.standalone.absent import lacking

__all__ = []
__getattr__ = lacking(__name__)
