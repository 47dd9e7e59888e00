"""Megatron-LM settings of Accelerate, mapped to Leyden's own mesh; the user's model trains unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from leyden.accelerator.ranks import is_true, joined_strategy
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn
from leyden.strategies.readers import Readers

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

DEGREES = {
    "tp_degree": "MEGATRON_LM_TP_DEGREE",
    "pp_degree": "MEGATRON_LM_PP_DEGREE",
    "num_micro_batches": "MEGATRON_LM_NUM_MICRO_BATCHES",
    "expert_model_parallel_size": "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE",
}
SWITCHES = {
    "sequence_parallelism": "MEGATRON_LM_SEQUENCE_PARALLELISM",
    "recompute_activations": "MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
    "use_distributed_optimizer": "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
}
INSTEAD = {
    "MeshStrategy(pp=…, schedule='Interleaved1F1B', stages_per_rank=…) assigns several stages to a rank": (
        "num_layers_per_virtual_pipeline_stage"
    ),
    "MeshStrategy(pp=…, split=…) sets the first block of each stage": "pipeline_model_parallel_split_rank",
    "the loop and its loader decide how long to train and when to evaluate": (
        "train_iters train_samples eval_iters eval_interval consumed_samples"
    ),
    "the optimizer that you prepare sets weight decay and learning rates per parameter group": (
        "weight_decay_incr_style start_weight_decay end_weight_decay no_wd_decay_cond scale_lr_cond lr_mult"
    ),
    "the scheduler that you prepare sets the learning rate": (
        "lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr"
    ),
    "the script builds its own datasets and loaders": (
        "megatron_dataset_flag seq_length encoder_seq_length decoder_seq_length custom_get_batch_function "
        "custom_megatron_datasets_provider_function"
    ),
    "Accelerator(log_with=…) sets the trackers": "tensorboard_dir set_all_logging_options",
    "accelerator.pipeline_step(model, batch, step=…) runs your own step": (
        "custom_train_step_class custom_train_step_kwargs custom_loss_function"
    ),
    "the model that you prepare is trained unchanged": (
        "custom_model_provider_function custom_prepare_model_function other_megatron_args"
    ),
}
"""The alternative to each group of settings for Megatron-LM's own models, data and loop."""


@dataclass
class MegatronLMPlugin:
    """Tensor and pipeline parallelism for `Accelerator(megatron_lm_plugin=…)`, under the names of Accelerate's plugin.

    Megatron-LM itself is not needed, and none of its models, datasets and kernels are used: a `MeshStrategy` splits
    layers by the model's plan and assigns blocks to pipeline stages. A loader's `batch_size` is the batch of one model
    replica per step, which is split into `num_micro_batches`; under Accelerate it is the size of one micro-batch.

    Attributes:
        tp_degree: ranks that split each layer. For this and the following degrees, None takes the launcher's variable,
            or 1.
        pp_degree: ranks of the pipeline, each with its stages.
        num_micro_batches: micro-batches per batch in a pipeline; 4 per stage by default.
        gradient_clipping: gradient norm to which each step clips, 0 to disable; None takes the launcher's, or 1.0.
        sequence_parallelism: no effect: the model's plan marks modules split along the sequence by "sequence".
        recompute_activations: recompute the blocks' activations in backward.
        use_distributed_optimizer: shard the model over the data-parallel ranks, instead of replicating it.
        return_logits: no effect: evaluation returns the model's whole output.
        is_train_batch_min: no effect.
        expert_model_parallel_size: ranks that divide the experts of a mixture. They shard the model, too.

    The other attributes are for Megatron-LM's own models and loop. They are refused, each with an alternative.

    Raises:
        ConfigurationError: for a degree below 1, and for settings of Megatron-LM's own models, data and loop.

    Example:
        >>> MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4).build().layout.pp
        2
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool | str = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    expert_model_parallel_size: int | None = None

    def __post_init__(self) -> None:
        defaults = {entry.name: entry.default for entry in fields(self)}
        for instead, names in INSTEAD.items():
            for name in names.split():
                if getattr(self, name) not in (defaults[name], None, {}, []):
                    raise ConfigurationError(
                        f"MegatronLMPlugin({name}=…) is for Megatron-LM's own models, data and loop, which Leyden does "
                        f"not use. Leave it out: {instead}."
                    )
        for name, variable in DEGREES.items():
            given, default = getattr(self, name), 1 if name != "num_micro_batches" else 4 * (self.pp_degree or 1)
            text = str(os.environ.get(variable) or default if given is None else given)
            if not text.isdigit() or int(text) < 1:
                raise ConfigurationError(f"MegatronLMPlugin({name}={text}): use an integer of at least 1.")
            setattr(self, name, int(text))
        for name, variable in SWITCHES.items():
            if getattr(self, name) is None:
                setattr(self, name, is_true(variable))
        if self.gradient_clipping is None:
            self.gradient_clipping = float(os.environ.get("MEGATRON_LM_GRADIENT_CLIPPING") or 1.0)
        if self.gradient_clipping < 0:
            raise ConfigurationError(
                f"MegatronLMPlugin(gradient_clipping={self.gradient_clipping}): use a positive norm, or 0 to disable "
                "clipping."
            )

    def build(self) -> str | Strategy:
        """Builds the strategy. The remaining ranks replicate the model, or shard it."""
        from leyden.strategies.mesh.mesh_strategy import MeshStrategy

        tp, stages, micro_batches = self.tp_degree or 1, self.pp_degree or 1, self.num_micro_batches or 1
        experts = self.expert_model_parallel_size or 1
        if tp * stages * experts == 1 and not (self.use_distributed_optimizer or self.recompute_activations):
            return "auto"
        if stages > 1 and micro_batches > 1:
            warn(
                f"num_micro_batches={micro_batches} splits each batch of a loader into {micro_batches} micro-batches. "
                f"Accelerate draws {micro_batches} batches per step: multiply batch_size by {micro_batches} for the "
                "same step.",
            )
        options: dict[str, Any] = {"dp_replicate": -1, "dp_shard": experts}
        if self.use_distributed_optimizer:
            options = {"dp_replicate": 1, "dp_shard": -1}
        if self.recompute_activations:
            options["activation_checkpointing_policy"] = True
        if stages > 1:
            # 1F1B needs at least as many micro-batches as stages.
            options["microbatches"] = micro_batches
            options["schedule"] = "1F1B" if micro_batches >= stages else "GPipe"
        return MeshStrategy(tp=tp, pp=stages, ep=experts, **options)


class MegatronLMDummyScheduler(LambdaLR):
    """Megatron-LM's default schedule: linear warm-up from 0 to the optimizer's learning rate, then linear decay to 0.

    Args:
        optimizer: the optimizer.
        total_num_steps: optimizer steps after which the rate is 0; None keeps it constant after the warm-up.
        warmup_num_steps: optimizer steps of the warm-up.
        **kwargs: `num_training_steps` and `num_warmup_steps`, other names of the same arguments.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
        >>> MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2).get_last_lr()
        [0.0]
    """

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        total = kwargs.pop("num_training_steps", total_num_steps)
        warmup = kwargs.pop("num_warmup_steps", warmup_num_steps) or 0
        if kwargs:
            raise TypeError(f"MegatronLMDummyScheduler has no argument {next(iter(kwargs))!r}.")

        def factor(step: int) -> float:
            if step < warmup:
                return step / warmup
            return 1.0 if total is None else max(0.0, (total - step) / max(1, total - warmup))

        super().__init__(getattr(optimizer, "optimizer", optimizer), factor)


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """Averages losses over the data-parallel ranks.

    Args:
        losses: 0-d tensors, the same number on every rank.

    Returns:
        The means, shape (number of losses,), in the order of the losses.
    """
    stacked = torch.stack([loss.detach().reshape(()) for loss in losses])
    return Readers(joined_strategy()).reduce(stacked)
