"""Objects of PyTorch Lightning passed to Leyden: the error names the class of Leyden to use in their place."""

from __future__ import annotations

RIVALS = ("lightning", "pytorch_lightning", "lightning_fabric")

OURS: dict[str, str] = {
    "LightningModule": "leyden.TrainModule",
    "LightningDataModule": "leyden.DataModule",
    "Callback": "leyden.Callback",
    "Logger": "leyden.callbacks.Logger",
    "Profiler": "leyden.trainer.profilers.Profiler",
    "Strategy": "leyden.strategies.Strategy",
    "CombinedLoader": "leyden.CombinedLoader",
    "ProgressBar": "leyden.callbacks.ProgressBar",
    **{
        name: f"leyden.callbacks.{name}"
        for name in (
            *("CSVLogger", "CometLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
            *(
                "EarlyStopping",
                "GradientAccumulationScheduler",
                "LambdaCallback",
                "LearningRateMonitor",
                "ModelCheckpoint",
            ),
            *("ModelSummary", "OnExceptionCheckpoint", "RichModelSummary", "RichProgressBar", "TQDMProgressBar"),
            "Timer",
        )
    },
    **{
        name: f"leyden.strategies.{name}"
        for name in ("DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "SingleDeviceStrategy", "XLAStrategy")
    },
    **{
        name: f"leyden.strategies.precision.{name}"
        for name in ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
    },
    **{
        name: f"leyden.trainer.profilers.{name}"
        for name in ("SimpleProfiler", "AdvancedProfiler", "PassThroughProfiler", "PyTorchProfiler")
    },
}
"""The name of a class of Lightning's, and the class that does its work here."""


def ported(value: object, otherwise: str) -> str:
    """What to do about an object that is not of the class that belongs there: the end of an error.

    Args:
        value: what was handed in.
        otherwise: what to do if the object is not of Lightning.

    Returns:
        For an object or class of Lightning, or a subclass: the import to use in its place.
    """
    kind = value if isinstance(value, type) else type(value)
    theirs = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in RIVALS]
    if not theirs:
        return otherwise
    known = next((base for base in theirs if base.__name__ in OURS), None)
    if known is None:
        return "it is PyTorch Lightning's, and has no counterpart here: see docs/from-lightning.md"
    room, _, name = OURS[known.__name__].rpartition(".")
    if known is kind:
        return f"it is PyTorch Lightning's; take ours, `from {room} import {name}`"
    return f"it inherits from PyTorch Lightning's {known.__name__}; inherit from ours, `from {room} import {name}`"
