"""Detects stages that compute with values or parameters that only another stage of the pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from leyden.core.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.schedule import Pipeline

MAX_NAMES = 3
"""Number of names that an error lists."""


def check_cross_stage_reads(pipeline: Pipeline, holdings: Holdings, rehearse: Callable[[], object]) -> None:
    """Refuses a stage that computes with values of another stage. Every rank that rehearsed must call it.

    Stand-ins and placeholders make such values nan, and so the stage's output. An output may also be nan for reasons of
    its own, as in a single process. So if an output is nan, the rehearsal is repeated with 0 in place of these nans: an
    output that is no longer nan depends on one of the values. Further rehearsals, with nan for one module at a time,
    find out on which.

    Args:
        pipeline: the pipeline, right after a rehearsal.
        holdings: the parts of the model that this rank's stages hold.
        rehearse: repeats the rehearsal.

    Raises:
        ConfigurationError: names the stage and the modules that it reads. Raised on every rank.
    """

    def nan_stages_with_zeros(except_name: str | None = None) -> set[int]:
        with pipeline.runner.zeros_except(except_name), _zero_placeholders(holdings.placeholders, except_name):
            rehearse()
        return pipeline.nan_stages

    found = pipeline.nan_stages
    reading = found - nan_stages_with_zeros() if found else set()
    if not reading:
        return
    stage = min(reading)
    read = [repr(name) for name in _names_elsewhere(pipeline, stage) if stage in nan_stages_with_zeros(name)]
    if len(read) > MAX_NAMES:
        read = [*read[:MAX_NAMES], f"{len(read) - MAX_NAMES} more"]
    raise ConfigurationError(
        f"stage {stage} of the pipeline ({_described(pipeline, stage)}) computes with "
        f"{' and '.join(read) or 'a value'} of another stage: only the output of a stage's last block is sent to the "
        "next. Let the blocks return such a value too, or move its module to the stage that uses it by "
        "MeshStrategy(first_stage=…) or (last_stage=…)."
    )


def _names_elsewhere(pipeline: Pipeline, stage: int) -> list[str]:
    """Returns the full names of the blocks, modules and parameters that a stage does not hold; equal on every rank."""
    cut = pipeline.cut
    own = cut.blocks_of(stage)
    around = [name for name in (*cut.before, *cut.after) if cut.stage_of(name) != stage]
    return around + [f"{cut.container}.{name}" for index, name in enumerate(cut.blocks) if index not in own]


def _described(pipeline: Pipeline, stage: int) -> str:
    """Returns a description of a stage by its blocks, such as `blocks.2 to 3 and the modules after them`."""
    last = " and the modules after them" if stage == pipeline.cut.stages - 1 else ""
    return f"{pipeline.cut.described(stage)}{last}"


@contextmanager
def _zero_placeholders(placeholders: dict[str, nn.Parameter], name: str | None) -> Iterator[None]:
    """Sets the placeholders of other stages' parameters to 0 within this context, except those of one module."""
    chosen = [
        parameter
        for own, parameter in placeholders.items()
        if parameter.is_floating_point() and (name is None or not (own == name or own.startswith(f"{name}.")))
    ]
    _fill(chosen, 0.0)
    try:
        yield
    finally:
        _fill(chosen, torch.nan)


def _fill(parameters: list[nn.Parameter], value: float) -> None:
    for parameter in parameters:
        # A placeholder has a single element, expanded to its shape.
        parameter.detach().as_strided((), ()).fill_(value)
