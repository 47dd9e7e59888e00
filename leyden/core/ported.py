"""Detects PyTorch Lightning objects passed to Leyden, for an error that names Leyden's class to use instead."""

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
"""Name of a Lightning class -> Leyden's equivalent."""


def ported(value: object, otherwise: str) -> str:
    """Returns the end of an error about an object of the wrong class: the fix.

    Args:
        value: the object, or a class.
        otherwise: the fix if the object does not come from Lightning.

    Returns:
        For a Lightning object or class, or a subclass of one: the import to use instead. Otherwise, `otherwise`.
    """
    kind = value if isinstance(value, type) else type(value)
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in RIVALS]
    if not bases:
        return otherwise
    known = next((base for base in bases if base.__name__ in OURS), None)
    if known is None:
        return "it belongs to PyTorch Lightning and has no counterpart in Leyden. See docs/from-lightning.md"
    module, _, name = OURS[known.__name__].rpartition(".")
    if known is kind:
        return f"it belongs to PyTorch Lightning. Use Leyden's instead, `from {module} import {name}`"
    return (
        f"it inherits from PyTorch Lightning's {known.__name__}. Inherit from Leyden's instead, "
        f"`from {module} import {name}`"
    )
