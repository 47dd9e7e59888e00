"""Guard: a model of which a rank holds only some stages runs in the steps of its pipeline, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from leyden.strategies.errors import ConfigurationError


class Guard:
    """Refuses to run modules that lack parameters, unless a step of the pipeline runs, in which stand-ins do.

    It stays with the model when its run is over, since what other ranks hold stays away. A copy of the model has a
    guard of its own, which no step opens.
    """

    def __init__(self) -> None:
        self._watched: set[nn.Module] = set()
        self._is_open = False

    def watch(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Lets these modules run only in steps. Called once FSDP's hooks exist, which it precedes.

        Args:
            named: their full names, and the modules.
        """
        for name, module in named:
            if module not in self._watched:
                self._watched.add(module)
                module.register_forward_pre_hook(partial(self._refuse, name), prepend=True)

    def open(self, is_open: bool) -> bool:
        """Lets steps of the pipeline run, or stops it; returns whether they could before."""
        before, self._is_open = self._is_open, is_open
        return before

    def _refuse(self, name: str, module: nn.Module, args: Any) -> None:
        if self._is_open:
            return
        raise ConfigurationError(
            f"{repr(name) if name else 'the model'} was run outside of a step, and this rank holds only some stages of "
            "the pipeline that it is part of: run it in training_step, validation_step, test_step or predict_step "
            "(trainer.predict gives outputs on every rank), or load a checkpoint of the run into a model that has not "
            "been under pp."
        )
