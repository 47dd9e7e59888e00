"""Guard: a model whose stages are spread over ranks runs only in its pipeline's steps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from leyden.core.errors import ConfigurationError


class Guard:
    """Refuses to run modules that lack parameters, except within the pipeline's steps, where stand-ins run.

    The guard outlives the run, because the parameters stay on other ranks. A copy of the model has its own copy of the
    guard, which no step opens.
    """

    def __init__(self) -> None:
        self._protected: set[nn.Module] = set()
        self._is_open = False

    def protect(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Adds modules. Must be called after FSDP has registered its hooks, so that the guard's hooks run first.

        Args:
            named: pairs of full name and module.
        """
        for name, module in named:
            if module not in self._protected:
                self._protected.add(module)
                module.register_forward_pre_hook(partial(self._refuse, name), prepend=True)

    def open(self, is_open: bool) -> bool:
        """Opens or closes the guard; returns whether it was open."""
        was_open, self._is_open = self._is_open, is_open
        return was_open

    def _refuse(self, name: str, module: nn.Module, args: Any) -> None:
        if self._is_open:
            return
        raise ConfigurationError(
            f"{repr(name) if name else 'the model'} was run outside of a step, and this rank holds only some stages of "
            "its pipeline: run it in training_step, validation_step, test_step or predict_step (trainer.predict "
            "returns outputs on every rank). Or load a checkpoint into a new model, and run that one without pp."
        )
