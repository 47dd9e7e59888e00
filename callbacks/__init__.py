"""Callbacks: checkpoints, loggers, bars and everything else that happens beside the training step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ActivationCheckpointing": "activation_checkpointing",
    "AutoAccumulation": "gradient_accumulation",
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "BatchSizeScheduler": "batch_size_scheduler",
    "Callback": "base",
    "CSVLogger": "csv_logger",
    "CometLogger": "comet_logger",
    "DeviceStatsMonitor": "device_stats_monitor",
    "DriftError": "drift_guard",
    "DriftGuard": "drift_guard",
    "DummyLogger": "silent",
    "EarlyStopping": "early_stopping",
    "EMAWeightAveraging": "weight_averaging",
    "GarbageCollection": "garbage_collection",
    "GradNormMonitor": "grad_norm_monitor",
    "GradientAccumulation": "gradient_accumulation",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "lr_monitor",
    "Logger": "logger",
    "MLFlowLogger": "mlflow_logger",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "NonFiniteError": "non_finite_guard",
    "NonFiniteGuard": "non_finite_guard",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "PreemptionCheckpoint": "preemption_checkpoint",
    "SequenceLengthWarmup": "sequence_length_warmup",
    "SpikeDetection": "spike_detection",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "rich_summary",
    "RichProgressBar": "rich_bar",
    "RichProgressBarTheme": "rich_bar",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "TQDMProgressBar": "tqdm_bar",
    "TensorBoardLogger": "tensorboard",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "TrainingSpikeException": "spike_detection",
    "WandbLogger": "wandb_logger",
    "WeightDigests": "weight_digests",
    "measure_flops": "peak_flops",
    "WeightAveraging": "weight_averaging",
}

if TYPE_CHECKING:
    from leyden.callbacks.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from leyden.callbacks.base import Callback as Callback
    from leyden.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from leyden.callbacks.batch_size_scheduler import BatchSizeScheduler as BatchSizeScheduler
    from leyden.callbacks.comet_logger import CometLogger as CometLogger
    from leyden.callbacks.csv_logger import CSVLogger as CSVLogger
    from leyden.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from leyden.callbacks.drift_guard import DriftError as DriftError
    from leyden.callbacks.drift_guard import DriftGuard as DriftGuard
    from leyden.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from leyden.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from leyden.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from leyden.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from leyden.callbacks.grad_norm_monitor import GradNormMonitor as GradNormMonitor
    from leyden.callbacks.gradient_accumulation import AutoAccumulation as AutoAccumulation
    from leyden.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
    from leyden.callbacks.gradient_accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from leyden.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from leyden.callbacks.logger import Logger as Logger
    from leyden.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from leyden.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from leyden.callbacks.mlflow_logger import MLFlowLogger as MLFlowLogger
    from leyden.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from leyden.callbacks.model_summary import ModelSummary as ModelSummary
    from leyden.callbacks.non_finite_guard import NonFiniteError as NonFiniteError
    from leyden.callbacks.non_finite_guard import NonFiniteGuard as NonFiniteGuard
    from leyden.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from leyden.callbacks.peak_flops import measure_flops as measure_flops
    from leyden.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from leyden.callbacks.preemption_checkpoint import PreemptionCheckpoint as PreemptionCheckpoint
    from leyden.callbacks.progress_bar import ProgressBar as ProgressBar
    from leyden.callbacks.rich_bar import RichProgressBar as RichProgressBar
    from leyden.callbacks.rich_bar import RichProgressBarTheme as RichProgressBarTheme
    from leyden.callbacks.rich_summary import RichModelSummary as RichModelSummary
    from leyden.callbacks.sequence_length_warmup import SequenceLengthWarmup as SequenceLengthWarmup
    from leyden.callbacks.silent import DummyLogger as DummyLogger
    from leyden.callbacks.spike_detection import SpikeDetection as SpikeDetection
    from leyden.callbacks.spike_detection import TrainingSpikeException as TrainingSpikeException
    from leyden.callbacks.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from leyden.callbacks.tensorboard import TensorBoardLogger as TensorBoardLogger
    from leyden.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from leyden.callbacks.timer import Timer as Timer
    from leyden.callbacks.tqdm_bar import TQDMProgressBar as TQDMProgressBar
    from leyden.callbacks.wandb_logger import WandbLogger as WandbLogger
    from leyden.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from leyden.callbacks.weight_averaging import WeightAveraging as WeightAveraging
    from leyden.callbacks.weight_digests import WeightDigests as WeightDigests

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a callback when it is first used, so that a run pays only for those that it uses."""
    if name not in _HOMES:
        raise AttributeError(f"module 'leyden.callbacks' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"leyden.callbacks.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
