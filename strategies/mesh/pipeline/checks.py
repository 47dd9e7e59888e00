"""Finds what a pipeline cannot run, before any weight is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.cut import Cut, Holdings

RECORDS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Options of `transformers` models that take something from every layer."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Checks what is set up for a pipeline.

    Raises:
        ConfigurationError: for several models, or one that goes backward by itself.
    """
    if len(modules) != 1:
        raise ConfigurationError(
            f"a pipeline cuts one model into stages, and {len(modules)} were set up: make them parts of one, or use a "
            "strategy without pp."
        )
    if not getattr(modules[0], "automatic_optimization", True):
        raise ConfigurationError(
            "manual optimisation cannot go with pp: a pipeline runs forward and backward together, in the order of its "
            "schedule. Use automatic optimisation, or a strategy without pp."
        )


def check_stages(root: nn.Module, cut: Cut, groups: Iterable[str]) -> None:
    """Checks a model that is about to be cut.

    Args:
        root: the model.
        cut: where it is to be cut.
        groups: names of the modules that FSDP gathers together.

    Raises:
        ConfigurationError: for a part that a pipeline cannot run; names it.
    """
    for name, module in root.named_modules():
        if isinstance(module, BATCH_NORM) and module.track_running_stats:
            raise ConfigurationError(
                f"{name!r} is a {type(module).__name__}, whose statistics would be those of micro-batches: use a norm "
                "that works on single samples, such as LayerNorm, or a strategy without pp."
            )
        for option in RECORDS:
            if getattr(getattr(module, "config", None), option, False) is True:
                raise ConfigurationError(
                    f"{name or 'the model'!r} has {option}=True, which takes something from every layer, and a stage "
                    "of the pipeline has only some: set it to False in the config, or use a strategy without pp."
                )
    for name in groups:
        if cut.container == name or cut.container.startswith(f"{name}."):
            raise ConfigurationError(
                f"auto_wrap_policy makes a group of {name!r}, which the pipeline cuts into stages: let it choose the "
                "blocks, as 'auto' does."
            )


def check_again(holdings: Holdings | None, cut: Cut | None, stages: Sequence[int]) -> None:
    """Checks a model that an earlier run has set up.

    Args:
        holdings: what that run has left of it on this rank; None if it was not cut.
        cut: where this run cuts it; None if it does not.
        stages: those of this rank.

    Raises:
        ConfigurationError: if it was cut otherwise, so that a part of it is elsewhere.
    """
    before = None if holdings is None else holdings.cut
    if before == cut and (holdings is None or holdings.stages == tuple(stages)):
        return
    raise ConfigurationError(
        f"the module was {_in_words(before)} by an earlier run, and is to be {_in_words(cut)} by this one: use the "
        "same pp, schedule and split, or a new module that loads the checkpoint."
    )


def _in_words(cut: Cut | None) -> str:
    if cut is None:
        return "left without pipeline stages"
    starts = ", ".join(f"{cut.container}.{cut.blocks[start]}" for start in cut.starts)
    return f"cut into {cut.stages} pipeline stages at {starts}"


def refuse_records(root: nn.Module, cut: Cut) -> list[RemovableHandle]:
    """Refuses the same options where a step gives them as arguments of a model's forward.

    Args:
        root: the model.
        cut: where it is cut.

    Returns:
        What ends that.
    """
    models = [
        module
        for name, module in root.named_modules()
        if any(hasattr(getattr(module, "config", None), option) for option in RECORDS)
        and not name.startswith(f"{cut.container}.")
    ]
    return [module.register_forward_pre_hook(_refuse_records, with_kwargs=True) for module in models]


def _refuse_records(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for option in RECORDS:
        if kwargs.get(option):
            raise ConfigurationError(
                f"{type(module).__name__} was called with {option}=True, which takes something from every layer, and a "
                "stage of the pipeline has only some: leave it out, or use a strategy without pp."
            )
