"""GarbageCollection, a callback that runs Python's garbage collector at the same steps on all ranks."""

from __future__ import annotations

import functools
import gc
import os
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.core.checks import check_whole
from leyden.core.errors import ConfigurationError

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class GarbageCollection(Callback):
    """Disables Python's automatic garbage collection during training, and collects every n steps instead.

    Automatic collection depends on the number of objects that a process has allocated, so each rank pauses at a
    different step, and all others wait for it there. With this callback all ranks pause together: once at the start of
    training, every `every_n_steps` steps, and every `every_n_steps` batches of a validation in fit. Objects outside
    reference cycles are freed immediately, as always. The previous setting is restored at the end of fit, also after
    an error. Processes forked from a rank, such as a loader's workers, collect automatically.

    If a step's objects form cycles, their memory is kept until the next collection. Use a smaller number if memory
    grows.

    Args:
        every_n_steps: the number of optimizer steps between collections.
        generation: 2 collects everything. 1 examines only objects created since the last collection, which is faster,
            but a cycle that survives one collection is not freed before the fit ends.

    Attributes:
        collections: the number of collections in this fit.

    Raises:
        ConfigurationError: for a number of steps below 1, or a generation other than 0, 1 or 2.

    Example:
        >>> collection = GarbageCollection(every_n_steps=500)
        >>> # Trainer(strategy="ddp", callbacks=[collection]).fit(module, loader)
        >>> collection.collections
        0
    """

    # Before checkpoints are saved; also called on a rank without a sample of the batch.
    order: ClassVar[int] = 92
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, every_n_steps: int = 1000, generation: int = 2) -> None:
        check_whole("GarbageCollection", 1, every_n_steps=every_n_steps)
        if type(generation) is not int or generation not in (0, 1, 2):
            raise ConfigurationError(f"GarbageCollection(generation={generation!r}): give 2, 1 or 0.")
        self.every_n_steps, self.generation = every_n_steps, generation
        self.collections = 0
        self._has_disabled = False
        self._last_step = -1

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.collections, self._last_step = 0, trainer.global_step
        if gc.isenabled():
            self._has_disabled = True
            _active().add(self)
            gc.disable()
        self._collect()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # `global_step` changes only at the end of an accumulation window.
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
        # Also called after an error.
        self._restore()

    def _collect(self) -> None:
        self.collections += 1
        gc.collect(self.generation)

    def _restore(self) -> None:
        if self._has_disabled:
            self._has_disabled = False
            _active().discard(self)
            gc.enable()


@functools.cache
def _active() -> weakref.WeakSet[GarbageCollection]:
    """Returns the callbacks that have disabled automatic collection. If there are any, forked processes enable it."""
    active: weakref.WeakSet[GarbageCollection] = weakref.WeakSet()

    def enable_in_child() -> None:
        if active:
            gc.enable()

    # Registered once per process, since it cannot be undone. Windows has no fork, and no such function.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=enable_in_child)
    return active
