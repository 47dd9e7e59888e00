"""Stand-in for `accelerate.utils`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.ranks import DistributedType
from leyden.accelerator.settings.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from leyden.accelerator.settings.fp8_recipes import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from leyden.accelerator.settings.megatron import (
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    avg_losses_across_data_parallel_group,
)
from leyden.accelerator.settings.parallel import (
    ParallelismConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from leyden.accelerator.settings.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TorchDynamoPlugin,
)
from leyden.accelerator.standalone.memory import find_executable_batch_size, release_memory
from leyden.accelerator.standalone.world import (
    broadcast,
    broadcast_object_list,
    convert_to_fp32,
    extract_model_from_parallel,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    save,
    send_to_device,
    set_seed,
    synchronize_rng_states,
    tqdm,
    wait_for_everyone,
)
from leyden.compat.accelerate.absent import lacking
from leyden.core.tree import batch_size_of as find_batch_size

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "avg_losses_across_data_parallel_group",
    "broadcast",
    "broadcast_object_list",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]
__getattr__ = lacking(__name__)
