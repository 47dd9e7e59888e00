"""Callbacks: checkpoints, loggers, progress bars and everything else that happens around the training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.core.lazy import lazy_name

_HOMES = {
    "ActivationCheckpointing": "leyden.callbacks.activation_checkpointing",
    "AutoAccumulation": "leyden.callbacks.gradient_accumulation",
    "BackboneFinetuning": "leyden.callbacks.finetuning",
    "BaseFinetuning": "leyden.callbacks.finetuning",
    "BasePredictionWriter": "leyden.callbacks.prediction_writer",
    "BatchSizeFinder": "leyden.callbacks.batch_size_finder",
    "BatchSizeScheduler": "leyden.callbacks.batch_size_scheduler",
    "Callback": "leyden.callbacks.base",
    "CSVLogger": "leyden.callbacks.loggers.csv_logger",
    "CometLogger": "leyden.callbacks.loggers.comet_logger",
    "DeviceStatsMonitor": "leyden.callbacks.device_stats_monitor",
    "DriftError": "leyden.callbacks.drift_guard",
    "DriftGuard": "leyden.callbacks.drift_guard",
    "DummyLogger": "leyden.callbacks.loggers.silent",
    "EarlyStopping": "leyden.callbacks.early_stopping",
    "EMAWeightAveraging": "leyden.callbacks.weight_averaging",
    "ExpertBalancing": "leyden.callbacks.expert_balancing",
    "GarbageCollection": "leyden.callbacks.garbage_collection",
    "GradNormMonitor": "leyden.callbacks.grad_norm_monitor",
    "GradientAccumulation": "leyden.callbacks.gradient_accumulation",
    "GradientAccumulationScheduler": "leyden.callbacks.gradient_accumulation",
    "LambdaCallback": "leyden.callbacks.lambda_callback",
    "LearningRateFinder": "leyden.callbacks.lr_finder",
    "LearningRateMonitor": "leyden.callbacks.lr_monitor",
    "Logger": "leyden.callbacks.loggers.logger",
    "MLFlowLogger": "leyden.callbacks.loggers.mlflow_logger",
    "ModelCheckpoint": "leyden.callbacks.checkpointing.model_checkpoint",
    "ModelPruning": "leyden.callbacks.model_pruning",
    "ModelSummary": "leyden.callbacks.model_summary",
    "NonFiniteError": "leyden.callbacks.non_finite_guard",
    "NonFiniteGuard": "leyden.callbacks.non_finite_guard",
    "OnExceptionCheckpoint": "leyden.callbacks.checkpointing.on_exception_checkpoint",
    "PreemptionCheckpoint": "leyden.callbacks.checkpointing.preemption_checkpoint",
    "SequenceLengthWarmup": "leyden.callbacks.sequence_length_warmup",
    "SpikeDetection": "leyden.callbacks.spike_detection",
    "ProgressBar": "leyden.callbacks.bars.progress_bar",
    "ReportLogger": "leyden.callbacks.loggers.report_logger",
    "RichModelSummary": "leyden.callbacks.rich_summary",
    "RichProgressBar": "leyden.callbacks.bars.rich_bar",
    "RichProgressBarTheme": "leyden.callbacks.bars.rich_bar",
    "StochasticWeightAveraging": "leyden.callbacks.stochastic_weight_averaging",
    "StragglerMonitor": "leyden.callbacks.straggler_monitor",
    "TQDMProgressBar": "leyden.callbacks.bars.tqdm_bar",
    "TensorBoardLogger": "leyden.callbacks.loggers.tensorboard",
    "ThroughputMonitor": "leyden.callbacks.throughput_monitor",
    "Timer": "leyden.callbacks.timer",
    "TrainingSpikeException": "leyden.callbacks.spike_detection",
    "WandbLogger": "leyden.callbacks.loggers.wandb_logger",
    "WeightDigests": "leyden.callbacks.weight_digests",
    "grad_norm": "leyden.callbacks.grad_norm_monitor",
    "measure_flops": "leyden.callbacks.peak_flops",
    "WeightAveraging": "leyden.callbacks.weight_averaging",
}

if TYPE_CHECKING:
    from leyden.callbacks.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from leyden.callbacks.bars.progress_bar import ProgressBar as ProgressBar
    from leyden.callbacks.bars.rich_bar import RichProgressBar as RichProgressBar
    from leyden.callbacks.bars.rich_bar import RichProgressBarTheme as RichProgressBarTheme
    from leyden.callbacks.bars.tqdm_bar import TQDMProgressBar as TQDMProgressBar
    from leyden.callbacks.base import Callback as Callback
    from leyden.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from leyden.callbacks.batch_size_scheduler import BatchSizeScheduler as BatchSizeScheduler
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from leyden.callbacks.checkpointing.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from leyden.callbacks.checkpointing.preemption_checkpoint import PreemptionCheckpoint as PreemptionCheckpoint
    from leyden.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from leyden.callbacks.drift_guard import DriftError as DriftError
    from leyden.callbacks.drift_guard import DriftGuard as DriftGuard
    from leyden.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from leyden.callbacks.expert_balancing import ExpertBalancing as ExpertBalancing
    from leyden.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from leyden.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from leyden.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from leyden.callbacks.grad_norm_monitor import GradNormMonitor as GradNormMonitor
    from leyden.callbacks.grad_norm_monitor import grad_norm as grad_norm
    from leyden.callbacks.gradient_accumulation import AutoAccumulation as AutoAccumulation
    from leyden.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
    from leyden.callbacks.gradient_accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from leyden.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from leyden.callbacks.loggers.comet_logger import CometLogger as CometLogger
    from leyden.callbacks.loggers.csv_logger import CSVLogger as CSVLogger
    from leyden.callbacks.loggers.logger import Logger as Logger
    from leyden.callbacks.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
    from leyden.callbacks.loggers.silent import DummyLogger as DummyLogger
    from leyden.callbacks.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from leyden.callbacks.loggers.wandb_logger import WandbLogger as WandbLogger
    from leyden.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from leyden.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from leyden.callbacks.model_pruning import ModelPruning as ModelPruning
    from leyden.callbacks.model_summary import ModelSummary as ModelSummary
    from leyden.callbacks.non_finite_guard import NonFiniteError as NonFiniteError
    from leyden.callbacks.non_finite_guard import NonFiniteGuard as NonFiniteGuard
    from leyden.callbacks.peak_flops import measure_flops as measure_flops
    from leyden.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from leyden.callbacks.rich_summary import RichModelSummary as RichModelSummary
    from leyden.callbacks.sequence_length_warmup import SequenceLengthWarmup as SequenceLengthWarmup
    from leyden.callbacks.spike_detection import SpikeDetection as SpikeDetection
    from leyden.callbacks.spike_detection import TrainingSpikeException as TrainingSpikeException
    from leyden.callbacks.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from leyden.callbacks.straggler_monitor import StragglerMonitor as StragglerMonitor
    from leyden.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from leyden.callbacks.timer import Timer as Timer
    from leyden.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from leyden.callbacks.weight_averaging import WeightAveraging as WeightAveraging
    from leyden.callbacks.weight_digests import WeightDigests as WeightDigests

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a callback on first use, so a run imports only the callbacks that it uses."""
    return lazy_name(__name__, _HOMES, name)
