"""The five lines printed at the start of fit, and errors that say where in the run they happened and what to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.strategies.errors import ConfigurationError, LeydenError, is_out_of_memory
from leyden.strategies.settings import RunSettings
from leyden.trainer.given import in_known_names
from leyden.trainer.hooks import overrides
from leyden.trainer.module import TrainModule

if TYPE_CHECKING:
    from leyden.trainer.trainer import Trainer


def five_lines(trainer: Trainer, start: str) -> str:
    """What runs where, in the five lines that fit prints.

    Args:
        trainer: a Trainer whose training data is loaded.
        start: what the run starts from.
    """
    ranks, strategy = trainer.world_size, trainer.strategy
    readers = strategy.data_size
    sizes = _batch_sizes(trainer.sources.train_loader)
    accumulated = trainer.accumulation.length(trainer.progress.epoch) if trainer.accumulation is not None else 1
    per_rank = "+".join(str(size) for size in sizes) if sizes else "?"
    total = str(sum(sizes) * readers * accumulated) if sizes else "?"
    told = [text for text in (strategy.details, strategy.precision.describe(strategy.modules)) if text]
    details = f": {', '.join(told)}" if told else ""
    folder = trainer.log_dir or trainer.default_root_dir
    return "\n".join(
        (
            f"devices     {ranks} × {strategy.root_device}, {ranks} rank{'s' if ranks > 1 else ''}",
            f"strategy    {strategy.name}, precision {strategy.precision.name}{details}",
            f"batch       {per_rank} per rank × {readers} × {accumulated} accumulated = {total}",
            f"run folder  {folder}",
            f"start       {start}",
        )
    )


def settings_of(trainer: Trainer, optimizers: int | None = None, loader: Any = None) -> RunSettings:
    """What a run asks for, for a strategy that has settings of its own.

    Args:
        trainer: before a fit its module is a blank one.
        optimizers: how many there are, once they are made.
        loader: of the training data, once it is loaded.
    """
    accumulation, module = trainer.accumulation, trainer.module
    lengths = [1] if accumulation is None else list(set(accumulation.scheduling.values()))
    sizes = _batch_sizes(loader)
    return RunSettings(
        accumulation=lengths[0] if len(lengths) == 1 else None,
        clip_value=trainer.arguments.gradient_clip_val,
        clip_algorithm=trainer.arguments.gradient_clip_algorithm,
        batch_size=sizes[0] if len(sizes) == 1 else None,
        manual=not module.automatic_optimization,
        own_backward=overrides(module, "backward", TrainModule),
        optimizers=optimizers,
        schedulers=None if optimizers is None else len(trainer.lr_scheduler_configs),
    )


def _batch_sizes(loader: Any) -> list[int]:
    """Batch sizes of a loader, or of each of several; empty where they are not known."""
    parts = getattr(loader, "flattened", None)
    if parts is not None:
        found = [_batch_sizes(part) for part in parts]
        return [size for sizes in found for size in sizes] if all(found) else []
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return [size] if isinstance(size, int) else []


def shapes_of(batch: Any) -> str:
    """Shapes and dtypes of a batch, in one line."""
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {shapes_of(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (list, tuple)):
        return "[" + ", ".join(shapes_of(value) for value in batch) + "]"
    return type(batch).__name__


def where(trainer: Trainer) -> str:
    """Where a run stands, in a few words."""
    stage = trainer.state.pass_of or trainer.state.stage
    progress = trainer.progress
    return f"step {progress.global_step} (epoch {progress.epoch}, batch {progress.batch}) in {stage}"


def out_of_memory(trainer: Trainer, error: BaseException) -> BaseException:
    """The same kind of error, saying where it happened and what to try."""
    device = trainer.strategy.root_device
    use = ""
    if device.type == "cuda":
        taken, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        use = f" {taken / 2**30:.2f} GiB are in use, {peak / 2**30:.2f} at the peak, of {total / 2**30:.2f}."
    progress = trainer.progress
    batch = shapes_of(trainer.logs.batch) if trainer.logs.batch is not None else "none"
    message = (
        f"out of memory on {device} in step {progress.global_step}, epoch {progress.epoch}, batch {progress.batch} "
        f"(batch: {batch}).{use} Try (1) a smaller batch_size with accumulate_grad_batches to keep the global batch, "
        "(2) precision='bf16-mixed', (3) activation checkpointing (torch.utils.checkpoint) or a sharding strategy. "
        f"The error was: {error}"
    )
    try:
        return type(error)(message)
    except TypeError:
        # A class of somebody's own, with arguments of its own.
        return RuntimeError(message)


def in_better_words(trainer: Trainer, error: BaseException) -> BaseException:
    """The error, or a better one that says what to do, where more is known than its message says."""
    if is_out_of_memory(error):
        return out_of_memory(trainer, error)
    unknown = in_known_names(error, (trainer.module, trainer, *trainer.callbacks))
    if unknown is not None:
        return unknown
    hint = _hint(error)
    return error if hint is None else ConfigurationError(f"{hint} The error was: {error}")


def _hint(error: BaseException) -> str | None:
    """What to do about an error of torch's whose words do not say it; None for any other."""
    text = str(error)
    if isinstance(error, RuntimeError) and "Expected to have finished reduction in the prior iteration" in text:
        return (
            "Some parameters took no part in the loss, and DDP waits for their gradients: use "
            "strategy='ddp_find_unused_parameters_true', or freeze them (requires_grad = False)."
        )
    if "got mixed torch.Tensor and DTensor" in text:
        return (
            "A part of the sharded module was run outside of its steps, where its parameters are not gathered. Run it from "
            "training_step, validation_step, … or forward of the module itself."
        )
    if isinstance(error, RuntimeError) and (
        "Expected all tensors to be on the same device" in text or "is on meta device" in text or "device meta" in text
    ):
        return (
            "Some tensors are on another device than the module. Batches are moved for you unless transfer_batch_to_device is "
            "overridden; create new tensors with device=self.device, and register constants by self.register_buffer."
        )
    return None


def checked_for_nan(training_step: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
    """The training step, with a look at each loss; reads every one back, which is why only detect_anomaly asks for it."""

    def checked(*args: Any) -> Any:
        outputs = training_step(*args)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and not bool(torch.isfinite(loss).all()):
            progress = trainer.progress
            raise LeydenError(
                f"the loss is {loss.detach().tolist()} in epoch {progress.epoch}, batch {progress.batch}, step "
                f"{progress.global_step}: look at that batch, lower the learning rate, or clip (gradient_clip_val)."
            )
        return outputs

    return checked
