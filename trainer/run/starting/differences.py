"""Compares what must be the same on all ranks: arguments, module, optimizers, number of batches.

An error names the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leyden.strategies.batch import shape_and_dtype
from leyden.strategies.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from leyden.callbacks.base import Callback
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.engine.schedulers import SchedulerConfig

# Only one rank shows and logs, so these may differ.
FREE = {
    "logger",
    "callbacks",
    "plugins",
    "profiler",
    "enable_progress_bar",
    "enable_model_summary",
    "default_root_dir",
    "strategy",
}


def check_module(
    ranks: Ranks, stage: str, arguments: Arguments, callbacks: Iterable[Callback], module: nn.Module
) -> None:
    """Compares stage, arguments, deciding callbacks, and the names, shapes and dtypes of parameters and buffers.

    Raises:
        ConfigurationError: on every rank, if one differs; names the first difference.
    """
    if ranks.world_size == 1:
        return
    lines = [f"the stage {stage}"]
    for name in sorted(set(arguments.__slots__) - FREE):
        value = getattr(arguments, name)
        plain = isinstance(value, (int, float, str, type(None)))
        lines.append(f"the Trainer's {name}={value if plain else type(value).__name__}")
    lines += [f"the callback {type(callback).__name__}" for callback in callbacks if _decides(callback)]
    lines.append(f"the module {type(module).__name__}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        lines.append(f"{name} {shape_and_dtype(tensor)} {'trained' if tensor.requires_grad else 'fixed'}")
    agree(ranks, lines, "Every rank must build the same Trainer and module.")


def check_optimizers(engine: Engine, module: nn.Module, schedulers: Iterable[SchedulerConfig]) -> None:
    """Compares the optimizers, their options, their parameters and their schedulers.

    Raises:
        ConfigurationError: on every rank, if one differs; names the first difference.
    """
    ranks = engine.strategy.ranks
    if ranks.world_size == 1:
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    lines = []
    for number, optimizer in enumerate(engine.optimizers):
        lines.append(f"optimizer {number} of type {type(optimizer).__name__}")
        owned = engine.strategy.master_weights.groups(optimizer)
        for group, parameters in zip(optimizer.param_groups, owned, strict=True):
            options = ", ".join(f"{key}={_option(value)}" for key, value in sorted(group.items()) if key != "params")
            lines.append(f"a group of optimizer {number} with {options}")
            lines += [f"the parameter {names.get(id(p), 'of no module')} in optimizer {number}" for p in parameters]
    lines += [f"the scheduler {type(config.scheduler).__name__}" for config in schedulers]
    agree(ranks, lines, "Every rank must make the same optimizers in configure_optimizers.")


def check_batches(ranks: Ranks, count: int | None) -> None:
    """Compares the number of batches in an epoch.

    Raises:
        ConfigurationError: on every rank, if it differs.
    """
    if ranks.world_size > 1:
        fix = (
            "Leyden shards one loader over the ranks, so it must be the same on each: give every rank the whole data, "
            "or set use_distributed_sampler=False where each has a share of its own."
        )
        agree(ranks, [f"{'an unknown number of' if count is None else count} training batches"], fix)


def agree(ranks: Ranks, lines: Sequence[str], fix: str) -> None:
    """Raises on every rank if one rank's lines are not those of rank 0.

    Args:
        ranks: every one of them must call it.
        lines: what this rank has, in words, in an order.
        fix: ends the message.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.all_gather_object(digest))) == 1:
        return
    everyone = ranks.all_gather_object(list(lines))
    rank, theirs = next((rank, theirs) for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    place = next(
        (place for place, (one, other) in enumerate(zip(everyone[0], theirs, strict=False)) if one != other),
        min(len(everyone[0]), len(theirs)),
    )
    first, other = (found[place] if place < len(found) else "nothing more" for found in (everyone[0], theirs))
    raise ConfigurationError(f"the ranks differ: rank 0 has {first}, and rank {rank} has {other}. {fix}")


def _decides(callback: Callback) -> bool:
    """True for the callbacks that talk to those of other ranks."""
    # Imported here: one rank needs none of them.
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.callbacks.early_stopping import EarlyStopping
    from leyden.callbacks.gradient_accumulation import GradientAccumulation
    from leyden.callbacks.timer import Timer

    return isinstance(callback, (EarlyStopping, GradientAccumulation, ModelCheckpoint, Timer))


def _option(value: Any) -> Any:
    """An optimizer's option as text that is the same on every rank where the option is."""
    if isinstance(value, (int, float, str, bool, type(None), tuple)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value).__name__ if not isinstance(value, Mapping) else sorted(value)
