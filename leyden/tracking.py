"""Stand-in for `accelerate.tracking`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.records.tracking import (
    CometMLTracker,
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
    on_main_process,
)
from leyden.compat.accelerate.absent import lacking
from leyden.compat.accelerate.trackers import (
    AimTracker,
    ClearMLTracker,
    DVCLiveTracker,
    SwanLabTracker,
    TrackioTracker,
)

__all__ = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "on_main_process",
]
__getattr__ = lacking(__name__)
