"""GarbageCollection, a callback that has Python collect garbage at the same steps on all ranks."""

from __future__ import annotations

import functools
import gc
import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.arguments.checks import check_whole

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class GarbageCollection(Callback):
    """Turns Python's automatic garbage collection off during training, and collects every n steps instead.

    Python collects by the number of objects that each process has made, so that every rank stops for it at a step of
    its own, and all others wait there. With this callback they stop together: after the first hooks of the fit, at
    every `every_n_steps`-th step, and at every `every_n_steps`-th batch of a validation in it. What is not part of a
    cycle of references is freed at once, as always. At the end of the fit, also after an error, automatic collection is
    what it was before. Processes that are forked from a rank, such as a loader's workers, collect automatically.

    A step whose objects form cycles keeps their memory until the next collection: give a smaller number if memory
    grows.

    Args:
        every_n_steps: optimizer steps from one collection to the next.
        generation: 2 collects everything. 1 looks at objects that are new since the last collection alone, which is
            quicker; cycles that survive it once are never freed before the fit ends.

    Attributes:
        collections: how often it has collected in this fit.

    Raises:
        ConfigurationError: for steps below 1, and another generation than 0, 1 or 2.

    Example:
        >>> collection = GarbageCollection(every_n_steps=500)
        >>> # Trainer(strategy="ddp", callbacks=[collection]).fit(module, loader)
        >>> collection.collections
        0
    """

    # On a rank without a sample it is called too. Before checkpoints are saved.
    order: ClassVar[int] = 92
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, every_n_steps: int = 1000, generation: int = 2) -> None:
        check_whole("GarbageCollection", 1, every_n_steps=every_n_steps)
        if type(generation) is not int or generation not in (0, 1, 2):
            raise ConfigurationError(f"GarbageCollection(generation={generation!r}): give 2, 1 or 0.")
        self.every_n_steps, self.generation = every_n_steps, generation
        self.collections = 0
        self._turned_off = False
        self._last_step = -1

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.collections, self._last_step = 0, trainer.global_step
        if gc.isenabled():
            self._turned_off = True
            _active().add(self)
            gc.disable()
        self._collect()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Within an accumulation window the step is still the last one.
        if step % self.every_n_steps == 0 and step != self._last_step:
            self._last_step = step
            self._collect()

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.stage == "fit" and not trainer.sanity_checking and (batch_idx + 1) % self.every_n_steps == 0:
            self._collect()

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._restore()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # After an error too.
        self._restore()

    def _collect(self) -> None:
        self.collections += 1
        gc.collect(self.generation)

    def _restore(self) -> None:
        if self._turned_off:
            self._turned_off = False
            _active().discard(self)
            gc.enable()


@functools.cache
def _active() -> weakref.WeakSet[GarbageCollection]:
    """The callbacks that have turned automatic collection off; a forked process turns it on again if there is one."""
    active: weakref.WeakSet[GarbageCollection] = weakref.WeakSet()

    def turn_on() -> None:
        if active:
            gc.enable()

    # Not there on Windows, where no process is forked. It cannot be undone, hence once in a process.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=turn_on)
    return active
