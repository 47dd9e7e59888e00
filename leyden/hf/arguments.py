"""Converts the TrainingArguments of transformers into arguments of a Trainer, an HFModule and a DataLoader."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from leyden.checkpoint.format.bucket import BucketPath, place_of
from leyden.core.errors import ConfigurationError
from leyden.core.rank_zero import warn

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
"""The values of `optim` that are converted."""
IGNORED = frozenset(
    {
        # Without effect on training, or always so with Leyden.
        *("output_dir", "do_train", "do_eval", "do_predict", "local_rank", "debug", "skip_memory_metrics", "use_cache"),
        *("log_on_each_node", "log_level", "log_level_replica", "logging_strategy", "logging_first_step"),
        *("average_tokens_across_devices", "eval_use_gather_object", "eval_accumulation_steps", "ddp_timeout"),
        *("restore_callback_states_from_checkpoint", "dataloader_in_order", "enable_jit_checkpoint"),
        *("prediction_loss_only", "eval_do_concat_batches", "fsdp_config", "eval_steps"),
    }
)


@dataclass
class Converted:
    """What `from_training_arguments` returns.

    Attributes:
        trainer: arguments of `Trainer`.
        module: arguments of `HFModule`.
        loader: arguments of the training `DataLoader`.
        fit: arguments of `Trainer.fit`.
        seed: the seed for `seed_everything`, before the model is built.
        unconverted: names of arguments that differ from their defaults and have no counterpart.
    """

    trainer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    seed: int = 42
    unconverted: list[str] = field(default_factory=list)


def from_training_arguments(args: Any) -> Converted:
    """Returns the arguments of Leyden that train as a `TrainingArguments` of transformers says.

    Warns of each argument that differs from its default and has no counterpart; docs/from-hf-trainer.md lists all.

    Args:
        args: the TrainingArguments, or Seq2SeqTrainingArguments.

    Raises:
        ConfigurationError: if the optimizer has no counterpart.

    Example:
        >>> from transformers import TrainingArguments
        >>> converted = from_training_arguments(TrainingArguments(learning_rate=1e-3, max_steps=100))
        >>> converted.module["lr"], converted.trainer["max_steps"], converted.trainer["gradient_clip_val"]
        (0.001, 100, 1.0)
    """
    converted = Converted(seed=args.seed)
    converted.trainer = _limits(args) | _validation(args) | _devices(args) | _reports(args)
    converted.trainer["callbacks"] = _checkpoints(args)
    converted.module = {
        "lr": args.learning_rate,
        "optimizer": _optimizer(args),
        "weight_decay": args.weight_decay,
        "scheduler": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "scheduler_kwargs": args.lr_scheduler_kwargs or None,
        "warmup_steps": args.warmup_steps,
        "label_smoothing": args.label_smoothing_factor,
        "generation": _generation(args),
    }
    converted.loader = {
        "batch_size": args.per_device_train_batch_size,
        "shuffle": True,
        "drop_last": args.dataloader_drop_last,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
    }
    if args.resume_from_checkpoint:
        converted.fit["ckpt_path"] = args.resume_from_checkpoint
    converted.unconverted = _unconverted(args)
    if converted.unconverted:
        warn(
            f"from_training_arguments: {', '.join(converted.unconverted)} has no counterpart here and is left out. "
            "docs/from-hf-trainer.md says what to do instead."
        )
    return converted


CONVERTED = frozenset(
    {
        *("num_train_epochs", "max_steps", "gradient_accumulation_steps", "max_grad_norm", "eval_strategy"),
        *("eval_on_start", "per_device_eval_batch_size", "use_cpu", "bf16", "fp16", "fsdp", "deepspeed"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "full_determinism", "output_dir", "logging_steps", "disable_tqdm", "report_to", "run_name"),
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
        *("metric_for_best_model", "greater_is_better", "learning_rate", "weight_decay"),
        *("optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "label_smoothing_factor", "seed"),
        *("per_device_train_batch_size", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        "resume_from_checkpoint",
        *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
    }
)
"""The arguments that are converted."""


def _limits(args: Any) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "accumulate_grad_batches": args.gradient_accumulation_steps,
        "gradient_clip_val": args.max_grad_norm or None,
    }
    if args.max_steps > 0:
        return limits | {"max_steps": args.max_steps}
    if args.num_train_epochs % 1:
        raise ConfigurationError(
            f"num_train_epochs={args.num_train_epochs} is not a whole number. Set max_steps to the number of steps."
        )
    return limits | {"max_epochs": int(args.num_train_epochs)}


def _validation(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"num_sanity_val_steps": 0, "validate_at_start": args.eval_on_start}
    if args.eval_strategy == "no":
        return found | {"limit_val_batches": 0, "validate_at_start": False}
    if args.eval_strategy == "steps":
        # Trainer counts batches here, and transformers optimizer steps.
        steps = _steps(args, args.eval_steps or args.logging_steps)
        found |= {"val_check_interval": steps * args.gradient_accumulation_steps, "check_val_every_n_epoch": None}
    return found


def _steps(args: Any, steps: float) -> int:
    """Returns a number of optimizer steps, which transformers takes as a fraction of all steps if it is below 1."""
    if steps >= 1:
        return int(steps)
    if args.max_steps <= 0:
        raise ConfigurationError(f"{steps} of all steps needs max_steps. Set it, or give a number of steps.")
    return math.ceil(int(args.max_steps) * steps)


def _devices(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"deterministic": True if args.full_determinism else None}
    if args.use_cpu:
        found["accelerator"] = "cpu"
    if args.bf16 or args.fp16:
        found["precision"] = "bf16-mixed" if args.bf16 else "16-mixed"
    ddp = {
        "find_unused_parameters": args.ddp_find_unused_parameters,
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
        "process_group_backend": args.ddp_backend,
    }
    ddp = {name: value for name, value in ddp.items() if value is not None}
    if args.deepspeed:
        from leyden.strategies import DeepSpeedStrategy

        found["strategy"] = DeepSpeedStrategy(config=args.deepspeed)
    elif args.fsdp:
        found["strategy"] = "fsdp"
    elif ddp:
        from leyden.strategies import DDPStrategy

        found["strategy"] = DDPStrategy(**ddp)
    return found


def _reports(args: Any) -> dict[str, Any]:
    from leyden.callbacks import TensorBoardLogger, WandbLogger

    names = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    folder = args.output_dir or "."
    loggers: list[Any] = []
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(None if isinstance(place_of(folder, "output_dir"), BucketPath) else folder))
    if "wandb" in names:
        loggers.append(WandbLogger(name=args.run_name))
    return {
        "default_root_dir": folder,
        "logger": loggers or False,
        "log_every_n_steps": _steps(args, args.logging_steps),
        "enable_progress_bar": not args.disable_tqdm,
    }


def _checkpoints(args: Any) -> list[Any]:
    from leyden.callbacks import ModelCheckpoint

    if args.save_strategy == "no":
        return []
    arguments: dict[str, Any] = {
        "save_weights_only": args.save_only_model,
        "save_on_each_node": args.save_on_each_node,
    }
    if args.save_strategy == "steps":
        arguments["every_n_train_steps"] = _steps(args, args.save_steps)
    if args.save_strategy == "best" or args.load_best_model_at_end:
        metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
        higher = args.greater_is_better if args.greater_is_better is not None else not metric.endswith("loss")
        arguments |= {"monitor": f"val_{metric}", "mode": "max" if higher else "min"}
        arguments["save_top_k"] = args.save_total_limit or 1
    else:
        arguments["save_top_k"] = args.save_total_limit or -1
        if arguments["save_top_k"] > 1:
            arguments |= {"monitor": "step", "mode": "max"}
    return [ModelCheckpoint(**arguments)]


def _optimizer(args: Any) -> Any:
    name = str(getattr(args.optim, "value", args.optim))
    if name.startswith("adamw_torch") and name in OPTIMIZERS:
        return functools.partial(
            torch.optim.AdamW,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True if name.endswith("fused") else None,
        )
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return functools.partial(Adafactor, scale_parameter=False, relative_step=False)
    if name not in OPTIMIZERS:
        raise ConfigurationError(
            f"optim={name!r} is not converted, only {', '.join(OPTIMIZERS)} are. Set optim='adamw_torch' here, and "
            "pass HFModule(optimizer=…) a callable that gets the parameter groups and lr=."
        )
    return name


def _generation(args: Any) -> dict[str, Any] | None:
    """Returns `generation=` for a Seq2SeqTrainingArguments with `predict_with_generate`."""
    if not getattr(args, "predict_with_generate", False):
        return None
    config = args.generation_config
    if config is not None and not hasattr(config, "to_dict"):
        from transformers import GenerationConfig

        config = GenerationConfig.from_pretrained(config)
    given = {
        "generation_config": config,
        "max_length": args.generation_max_length,
        "num_beams": args.generation_num_beams,
    }
    return {name: value for name, value in given.items() if value is not None}


def _unconverted(args: Any) -> list[str]:
    # Some defaults are set after the fields, so that only an object has them.
    default = type(args)()
    names = (entry.name for entry in dataclasses.fields(args) if entry.name not in CONVERTED | IGNORED)
    found = [name for name in names if getattr(args, name) != getattr(default, name)]
    reporters = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    found += [f"report_to={name}" for name in reporters if name not in ("none", "tensorboard", "wandb")]
    if args.fsdp and (args.fsdp_config != default.fsdp_config or args.fsdp not in (True, "full_shard", ["full_shard"])):
        found.append("fsdp_config")
    return found
