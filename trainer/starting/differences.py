"""Checks that ranks agree on arguments, module, optimizers and the number of batches.

An error names the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from leyden.core.errors import ConfigurationError
from leyden.core.tree import shape_and_dtype

if TYPE_CHECKING:
    from torch import nn

    from leyden.callbacks.base import Callback
    from leyden.strategies.ranks import Ranks
    from leyden.trainer.arguments.arguments import Arguments
    from leyden.trainer.engine.engine import Engine
    from leyden.trainer.engine.schedulers import SchedulerConfig

# Arguments that may differ between ranks, because only one rank displays and logs.
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
    """Compares stage, arguments, communicating callbacks, and the names, shapes and dtypes of parameters and buffers.

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
    lines += [f"the callback {type(callback).__name__}" for callback in callbacks if _communicates(callback)]
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
            "Leyden shards one loader over the ranks, so every rank needs the same loader over the whole data. Set "
            "use_distributed_sampler=False if each rank's loader already yields its own shard."
        )
        agree(ranks, [f"{'an unknown number of' if count is None else count} training batches"], fix)


def agree(ranks: Ranks, lines: Sequence[str], fix: str) -> None:
    """Raises on every rank if any rank's lines differ from rank 0's.

    Args:
        ranks: the ranks to compare; all of them must call this.
        lines: a description of this rank, in a fixed order.
        fix: the last sentence of the message.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.all_gather_object(digest))) == 1:
        return
    all_lines = ranks.all_gather_object(list(lines))
    expected = all_lines[0]
    rank, found = next((rank, found) for rank, found in enumerate(all_lines) if found != expected)
    pairs = zip_longest(expected, found, fillvalue="nothing more")
    first, other = next((first, other) for first, other in pairs if first != other)
    raise ConfigurationError(f"the ranks differ: rank 0 has {first}, and rank {rank} has {other}. {fix}")


def _communicates(callback: Callback) -> bool:
    """Returns True for callbacks that communicate across ranks, and so must exist on every rank."""
    # Imported here, because a run on one rank needs none of them.
    from leyden.callbacks.checkpointing.model_checkpoint import ModelCheckpoint
    from leyden.callbacks.early_stopping import EarlyStopping
    from leyden.callbacks.gradient_accumulation import GradientAccumulation
    from leyden.callbacks.timer import Timer

    return isinstance(callback, (EarlyStopping, GradientAccumulation, ModelCheckpoint, Timer))


def _option(value: Any) -> Any:
    """Returns a form of an optimizer's option that is equal on all ranks if the option is."""
    if isinstance(value, (int, float, str, bool, type(None), tuple)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return type(value).__name__ if not isinstance(value, Mapping) else sorted(value)
