"""The names of `accelerate.tracking`, for scripts that import from there."""

from leyden.trainer.accelerator.absent import lacking
from leyden.trainer.accelerator.tracking import (
    CometMLTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)

__all__ = ["CometMLTracker", "GeneralTracker", "MLflowTracker", "TensorBoardTracker", "WandBTracker"]
__getattr__ = lacking(__name__)
