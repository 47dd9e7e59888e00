"""Readings: finds what a stage of a pipeline computes with although another stage holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from leyden.strategies.errors import ConfigurationError
from leyden.strategies.mesh.pipeline.cut import Holdings
from leyden.strategies.mesh.pipeline.schedule import Pipeline
from leyden.strategies.ranks import Ranks

SHOWN = 3
"""So many names an error lists."""


def check_readings(pipeline: Pipeline, holdings: Holdings, ranks: Ranks, rehearse: Callable[[], object]) -> None:
    """Refuses a stage that computes with what another one holds, after a rehearsal. Every rank of the run calls it.

    Such a value is nan, and so is what the stage returns. That is also nan for other reasons, as in one process; but if
    it is not where 0 stands for all these values, it depends on one of them.

    Args:
        pipeline: whose rehearsal was the last.
        holdings: what stages hold.
        ranks: of the run.
        rehearse: repeats the rehearsal.

    Raises:
        ConfigurationError: on every rank alike; names what is read, and the stage.
    """

    def nan_stages() -> set[int]:
        return set().union(*ranks.all_gather_object(pipeline.nan_stages))

    def with_nan_of(name: str | None) -> set[int]:
        with pipeline.passages.zeros_but(name), _zeros_but(holdings.placeholders, name):
            rehearse()
        return nan_stages()

    before = nan_stages()
    reading = before - with_nan_of(None) if before else set()
    if not reading:
        return
    stage = min(reading)
    read = [repr(name) for name in _elsewhere(pipeline, stage) if stage in with_nan_of(name)]
    if len(read) > SHOWN:
        read = [*read[:SHOWN], f"{len(read) - SHOWN} more"]
    raise ConfigurationError(
        f"stage {stage} of the pipeline ({_described(pipeline, stage)}) computes with "
        f"{' and '.join(read) or 'a value'} of another stage: only what the last block of a stage returns is "
        "sent to the next. Let the blocks return such a value too, or hold it where it is used, by "
        "MeshStrategy(first_stage=…) or (last_stage=…)."
    )


def _elsewhere(pipeline: Pipeline, stage: int) -> list[str]:
    """The full names of what a stage does not hold, the same on every rank."""
    cut, parts = pipeline.cut, []
    own = cut.blocks_of(stage)
    parts += [name for name in (*cut.before, *cut.after) if cut.stage_of(name) != stage]
    parts += [f"{cut.container}.{name}" for place, name in enumerate(cut.blocks) if place not in own]
    return parts


def _described(pipeline: Pipeline, stage: int) -> str:
    names = [pipeline.cut.blocks[place] for place in pipeline.cut.blocks_of(stage)]
    through = f" to {names[-1]}" if len(names) > 1 else ""
    last = " and what comes after them" if stage == pipeline.cut.stages - 1 else ""
    return f"{pipeline.cut.container}.{names[0]}{through}{last}"


@contextmanager
def _zeros_but(placeholders: dict[str, nn.Parameter], name: str | None) -> Iterator[None]:
    """In this context parameters of other stages are 0, but for those of one module."""
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
        # All of its elements are one number.
        parameter.detach().as_strided((), ()).fill_(value)
