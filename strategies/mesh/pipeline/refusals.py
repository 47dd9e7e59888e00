"""Refuses models that a pipeline cannot run, before any weight changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.cut import Cut, Holdings

PER_LAYER_OUTPUTS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Options of `transformers` models that collect an output of every layer."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm


USES = {"pp": "a pipeline", "cp": "context parallelism"}


def refuse_arguments(dimension: Literal["pp", "cp"], **arguments: Any) -> None:
    """Refuses arguments of a dimension that a mesh does not have; None for those that were not given.

    Raises:
        ConfigurationError: names the argument.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ConfigurationError(
                f"{name}={value!r} without {dimension}: only {USES[dimension]} uses it. Set {dimension} to 2 or more, "
                f"or leave out {name}."
            )


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Checks the models that are set up for a pipeline.

    Raises:
        ConfigurationError: for several models, or one that uses manual optimization.
    """
    if len(modules) != 1:
        raise ConfigurationError(
            f"a pipeline cuts one model into stages, and {len(modules)} were set up: make them submodules of one "
            "model, or use a strategy without pp."
        )
    if not getattr(modules[0], "automatic_optimization", True):
        raise ConfigurationError(
            "manual optimization does not work with pp: a pipeline runs forward and backward interleaved, in the order "
            "of its schedule. Use automatic optimization, or a strategy without pp."
        )


def check_stages(root: nn.Module, cut: Cut, groups: Iterable[str]) -> None:
    """Checks a model that is about to be cut.

    Args:
        root: the model.
        cut: how it will be divided into stages.
        groups: names of the modules that become FSDP groups.

    Raises:
        ConfigurationError: for a module that a pipeline cannot run; names it.
    """
    for name, module in root.named_modules():
        if isinstance(module, BATCH_NORM) and module.track_running_stats:
            raise ConfigurationError(
                f"{name!r} is a {type(module).__name__}, whose statistics would be those of micro-batches: use a norm "
                "that works on single samples, such as LayerNorm, or a strategy without pp."
            )
        for option in PER_LAYER_OUTPUTS:
            if getattr(getattr(module, "config", None), option, False) is True:
                raise ConfigurationError(
                    f"{name or 'the model'!r} has {option}=True, which collects outputs of every layer, and a pipeline "
                    "stage has only some of them: set it to False in the config, or use a strategy without pp."
                )
    for name in groups:
        if cut.container == name or cut.container.startswith(f"{name}."):
            raise ConfigurationError(
                f"auto_wrap_policy makes a group of {name!r}, which the pipeline cuts into stages: choose the blocks, "
                "as 'auto' does."
            )


def check_again(holdings: Holdings | None, cut: Cut | None, stages: Sequence[int]) -> None:
    """Checks a model that an earlier run may have set up.

    Args:
        holdings: the parts of the model that the earlier run left on this rank; None if it did not cut the model.
        cut: how this run cuts the model; None if it does not.
        stages: the stages of this rank in this run.

    Raises:
        ConfigurationError: if the earlier run cut the model differently, so that this rank lacks parts of it.
    """
    before = None if holdings is None else holdings.cut
    if before == cut and (holdings is None or holdings.stages == tuple(stages)):
        return
    raise ConfigurationError(
        f"the module was {_described(before)} by an earlier run, and would be {_described(cut)} by this one: use the "
        "same pp, schedule and split, or load the checkpoint into a new module."
    )


def _described(cut: Cut | None) -> str:
    if cut is None:
        return "left without pipeline stages"
    starts = ", ".join(f"{cut.container}.{cut.blocks[start]}" for start in cut.starts)
    return f"cut into {cut.stages} pipeline stages at {starts}"


def refuse_per_layer_outputs(root: nn.Module, cut: Cut) -> list[RemovableHandle]:
    """Registers hooks that refuse the options of `PER_LAYER_OUTPUTS` as arguments of a model's forward.

    Args:
        root: the model.
        cut: how it is divided into stages.

    Returns:
        The handles of the hooks.
    """
    models = [
        module
        for name, module in root.named_modules()
        if any(hasattr(getattr(module, "config", None), option) for option in PER_LAYER_OUTPUTS)
        and not name.startswith(f"{cut.container}.")
    ]
    return [module.register_forward_pre_hook(_refuse_per_layer_outputs, with_kwargs=True) for module in models]


def _refuse_per_layer_outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for option in PER_LAYER_OUTPUTS:
        if kwargs.get(option):
            raise ConfigurationError(
                f"{type(module).__name__} was called with {option}=True, which collects outputs of every layer, and a "
                "pipeline stage has only some of them: leave it out, or use a strategy without pp."
            )
