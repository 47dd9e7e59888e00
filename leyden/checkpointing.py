"""The names of `accelerate.checkpointing`, for scripts that import from there; importing one names the alternative."""

from leyden.trainer.accelerator.standalone.absent import lacking

__all__ = []
__getattr__ = lacking(__name__)
