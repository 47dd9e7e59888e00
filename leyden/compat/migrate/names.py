"""What `leyden migrate` knows of the names of Lightning and Accelerate: ours for each, or why there is none."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate")
"""The packages whose names are rewritten."""

# Our module -> the names that it has of Lightning's, wherever Lightning keeps them.
SAME = {
    "leyden": (
        "Callback CombinedLoader Trainer Tuner rank_zero_debug rank_zero_deprecation rank_zero_info rank_zero_only "
        "rank_zero_warn seed_everything"
    ),
    "leyden.callbacks": (
        "BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder CSVLogger CometLogger "
        "DeviceStatsMonitor EMAWeightAveraging EarlyStopping GradientAccumulationScheduler LambdaCallback "
        "LearningRateFinder LearningRateMonitor Logger MLFlowLogger ModelCheckpoint ModelPruning ModelSummary "
        "OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar RichProgressBarTheme SpikeDetection "
        "StochasticWeightAveraging TQDMProgressBar TensorBoardLogger ThroughputMonitor Timer TrainingSpikeException "
        "WandbLogger WeightAveraging grad_norm measure_flops"
    ),
    "leyden.strategies": (
        "ClusterEnvironment KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment SLURMEnvironment "
        "TorchElasticEnvironment DDPStrategy DeepSpeedStrategy DoublePrecision FSDPStrategy ModelParallelStrategy "
        "Precision SingleDeviceStrategy Strategy TransformerEnginePrecision XLAStrategy"
    ),
    "leyden.trainer": "AsyncCheckpointIO CheckpointIO",
    "leyden.cli": (
        "ArgsType LRSchedulerCallable LRSchedulerTypeTuple LRSchedulerTypeUnion OptimizerCallable ReduceLROnPlateau "
        "SaveConfigCallback instantiate_class"
    ),
    "leyden.trainer.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler",
}
TARGETS = {name: f"{module}.{name}" for module, names in SAME.items() for name in names.split()} | {
    "LightningArgumentParser": "leyden.cli.LeydenArgumentParser",
    "LightningCLI": "leyden.LeydenCLI",
    "LightningDataModule": "leyden.DataModule",
    "LightningModule": "leyden.TrainModule",
    "MisconfigurationException": "leyden.ConfigurationError",
}
"""Names of Lightning, and the paths of ours that take their place."""

PARTS = {
    "": "leyden",
    "callbacks": "leyden.callbacks",
    "cli": "leyden.cli",
    "core": "leyden.trainer",
    "loggers": "leyden.callbacks",
    "profilers": "leyden.trainer.profilers",
    "strategies": "leyden.strategies",
    "trainer": "leyden.trainer",
    "tuner": "leyden.trainer",
}
"""Modules below `lightning.pytorch`, and ours."""
BELOW = (
    "advanced base batch_size_finder batch_size_scaling callback checkpoint comet csv_logs datamodule ddp deepspeed "
    "device_stats_monitor early_stopping finetuning fsdp gradient_accumulation_scheduler hooks lambda_function logger "
    "lr_finder lr_monitor mlflow model_checkpoint model_parallel model_summary module on_exception_checkpoint "
    "prediction_writer profiler progress progress_bar pytorch rich_model_summary rich_progress simple single_device "
    "spike stochastic_weight_avg strategy tensorboard throughput_monitor timer tqdm_progress trainer tuning wandb "
    "weight_averaging xla"
)
"""Submodules such as `callbacks.early_stopping`, which Leyden has too."""

OF_FABRIC = ("measure_flops", "seed_everything")
"""Names of `lightning.fabric` that scripts with a Trainer use too. Its other classes belong to Fabric."""

_PLUGIN = "Trainer(precision='16-mixed'), 'bf16-mixed', '16-true', … chooses it"
_TYPE = "it annotates a type, write"
# What to use instead -> names of Lightning that have no counterpart.
INSTEAD = {
    "leyden.Accelerator runs a loop of your own (docs/from-accelerate.md)": "Fabric",
    "write a subclass of leyden.callbacks.ModelCheckpoint or leyden.Callback": "Checkpoint",
    "write a subclass of leyden.callbacks.Logger, or use one of its loggers": "NeptuneLogger LitLogger DummyLogger",
    "Trainer(strategy='xla') finds the ranks of XLA": "XLAEnvironment",
    "Trainer(accelerator='cpu', 'cuda', 'mps' or 'xla') chooses the device": (
        "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator XLAAccelerator find_usable_cuda_devices"
    ),
    _PLUGIN: "HalfPrecision MixedPrecision FSDPPrecision DeepSpeedPrecision XLAPrecision BitsandbytesPrecision",
    "Trainer(sync_batchnorm=True) does it": "LayerSync TorchSyncBatchNorm",
    "a checkpoint is a folder without pickles, which Leyden writes itself (docs/checkpoints.md)": (
        "TorchCheckpointIO XLACheckpointIO"
    ),
    "write a subclass of leyden.strategies.Strategy (docs/strategies.md)": "ParallelStrategy",
    "Trainer(strategy='xla') chooses it": "SingleDeviceXLAStrategy",
    "use torch_xla's own profiler": "XLAProfiler",
    "a Logger's methods are called on the first rank alone": "rank_zero_experiment",
    "leyden.get_logger(__name__) logs on the first process alone": (
        "rank_zero_module rank_prefixed_message WarningCache LightningDeprecationWarning"
    ),
    "use leyden.utils.send_to_device(batch, device)": "move_data_to_device",
    f"{_TYPE} torch.Tensor | Mapping[str, Any] | None": "STEP_OUTPUT",
    f"{_TYPE} typing.Any": "EVAL_DATALOADERS TRAIN_DATALOADERS OptimizerLRScheduler OptimizerLRSchedulerConfig",
    f"{_TYPE} torch.optim.lr_scheduler.LRScheduler": "LRSchedulerPLType LRSchedulerType LRSchedulerConfig",
    "a SIGTERM ends the run in order: ask for trainer.received_sigterm": "SIGTERMException",
    "read trainer.training, trainer.validating, trainer.testing or trainer.predicting": (
        "RunningStage TrainerFn TrainerState TrainerStatus"
    ),
    "optimizers are torch's own": "LightningOptimizer",
    "`leyden merge CHECKPOINT` writes one file of weights": "convert_zero_checkpoint_to_fp32_state_dict",
    "Leyden counts its own versions: remove the comparison": "__version__",
    "write `with torch.random.fork_rng():`": "isolate_rng",
    "use types.SimpleNamespace; the values of `self.hparams` are attributes too": "AttributeDict",
    "leyden.callbacks.ModelSummary(max_depth) prints it, and gives the rows to its `show`": "summarize",
}
WHY = {name: f"no counterpart: {instead}" for instead, names in INSTEAD.items() for name in names.split()}
OTHER = {"utilities": ("ModelSummary", "ReduceLROnPlateau")}
"""Names in certain modules that differ from the same name in `TARGETS`."""
WHOLE = {
    "data": "it is a package of its own, litdata",
    "demos": "models and data of demonstrations are not part of Leyden: write your own",
    "loops": "loops have no public parts: trainer.fit_loop holds the limits, and trainer.progress the counters",
    "metrics": "metrics are a package of their own: `from torchmetrics import …`",
}
"""Modules without any counterpart."""
NO_COUNTERPART = "Leyden has no counterpart; docs/from-lightning.md lists what is different"

MEMBERS = {
    "add_argparse_args": "use leyden.LeydenCLI, or add the arguments yourself",
    "from_argparse_args": "use leyden.LeydenCLI, or Trainer(**vars(args))",
    "parse_argparser": "use leyden.LeydenCLI",
}
"""Methods of Lightning's classes that Leyden's lack."""


@dataclass(frozen=True, slots=True)
class Found:
    """The counterpart of an import path of Lightning or Accelerate.

    Attributes:
        target: the path of ours that takes its place; None if there is none.
        used: how many words of the path name it; those behind are its attributes.
        is_module: the path names a module.
        why: what to use instead, without a target.
    """

    target: str | None
    used: int
    is_module: bool = False
    why: str = ""

    @property
    def module(self) -> str:
        """Leyden's module that has to be imported for the target."""
        target = self.target or ""
        return target if self.is_module else target.rpartition(".")[0]


def lookup(path: str) -> Found:
    """Finds the counterpart of a path, with attributes behind it or without.

    Example:
        >>> lookup("lightning.pytorch.LightningModule.load_from_checkpoint")
        Found(target='leyden.TrainModule', used=3, is_module=False, why='')
    """
    words = path.split(".")
    if words[0] == "accelerate":
        return _of_accelerate(words)
    whole = words[0] == "lightning" and words[1:2] in (["pytorch"], ["fabric"])
    root = 2 if whole else 1
    return _of_lightning(words, root, fabric="fabric" in words[0] or (whole and words[1] == "fabric"))


def _of_lightning(words: list[str], root: int, fabric: bool) -> Found:
    rest = words[root:]
    part = rest[0] if rest else ""
    if part in WHOLE:
        return Found(None, root + 1, why=f"no counterpart: {WHOLE[part]}")
    for place, word in enumerate(rest):
        used = root + place + 1
        if word in TARGETS and word not in OTHER.get(part, ()) and (not fabric or word in OF_FABRIC):
            return Found(TARGETS[word], used)
        if word in WHY:
            return Found(None, used, why=WHY[word])
        if not word.islower():
            return Found(None, used, why=WHY["Fabric"] if fabric else NO_COUNTERPART)
    if fabric:
        return Found(None, len(words), is_module=True, why=WHY["Fabric"])
    strange = [place for place, word in enumerate(rest[1:]) if word not in BELOW.split()]
    if part in PARTS and strange:
        return Found(None, root + strange[0] + 2, why=NO_COUNTERPART)
    return Found(PARTS.get(part), len(words), is_module=True, why=NO_COUNTERPART)


def _of_accelerate(words: list[str]) -> Found:
    from leyden.compat.accelerate.absent import attribute, instead_of

    root = sys.modules["leyden"]
    inside, module = words[1:], ""
    while inside and ".".join(filter(None, (module, inside[0]))) in root._MODULES:
        module = ".".join(filter(None, (module, inside.pop(0))))
    home = f"leyden.{module}" if module else "leyden"
    if module == "utils" and len(inside) > 1 and inside[0].islower() and inside[0] not in _names(home):
        inside.pop(0)  # names of its other modules are in leyden.utils itself
    used = len(words) - len(inside) + 1
    if not inside:
        return Found(home, len(words), is_module=True)
    if inside[0] in ("commands", "__version__"):
        why = WHY["__version__"] if inside[0] == "__version__" else "it is of Accelerate alone"
        return Found(None, used, why=why)
    if inside[0] in _names(home):
        return Found(f"{home}.{inside[0]}", used)
    try:
        attribute(home, inside[0])
    except AttributeError:
        return Found(None, used, why=f"no counterpart: {instead_of(inside[0])}")
    return Found(f"{home}.{inside[0]}", used)


def _names(module: str) -> list[str]:
    found = importlib.import_module(module)
    return list(getattr(found, "__all__", None) or vars(found))
