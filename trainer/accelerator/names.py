"""The words that Accelerate's arguments are made of, as enums; each is equal to its text."""

from __future__ import annotations

from enum import Enum


class Word(str, Enum):
    """An enum whose members are text."""

    def __str__(self) -> str:
        return str(self.value)


class DDPCommunicationHookType(Word):
    """How DDP sends gradients: `DistributedDataParallelKwargs(comm_hook=…)`."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(Word):
    """What compiles a model: `Accelerator(dynamo_backend=…)`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    CUDAGRAPHS = "CUDAGRAPHS"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


class LoggerType(Word):
    """Trackers by name: `Accelerator(log_with=…)`."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"


class PrecisionType(Word):
    """`Accelerator(mixed_precision=…)`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(Word):
    """`Accelerator(rng_types=…)`."""

    TORCH = "torch"
    CUDA = "cuda"
    GENERATOR = "generator"
