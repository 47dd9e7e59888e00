"""WeightDigests, a callback that records digests of the weights, by which `leyden bisect` compares two runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.run_loggers import folder_of
from leyden.trainer.arguments.checks import check_whole
from leyden.trainer.checkpoint.digests import DigestReader, merged
from leyden.trainer.format.digests import DigestFile, Place
from leyden.trainer.format.tensors import is_sharded

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class WeightDigests(Callback):
    """Records a digest of every parameter and buffer, in `digests.jsonl` in the run's folder.

    `Trainer(digest_every_n_steps=…)` adds it; `leyden bisect` names the first step and tensor in which two runs differ.
    The first line is of the weights before the first step. A resume cuts the lines after the checkpoint, so the file of
    a run that was killed and resumed is that of one that was not.

    It records what a checkpoint holds of the module, without optimizer state: parameters and persistent buffers. Of
    replicas rank 0 reads its own (`DriftGuard` watches the others); of sharded weights each rank reads its shards, and
    their digests compare between runs whose ranks hold the same shards. The digest is XXH3 of the bytes. A GPU copies
    its part of the weights to the host at each recorded step, which waits for it once.

    The file is in `trainer.log_dir`, without loggers in `default_root_dir`; with `fast_dev_run` there is none.

    Args:
        every_n_steps: optimizer steps from one line to the next.

    Raises:
        ConfigurationError: if it is below 1.

    Example:
        >>> WeightDigests(every_n_steps=10).path is None
        True
    """

    # After those that write weights, before checkpoints. On a rank without a sample it is called too.
    order: ClassVar[int] = 90
    closing_hooks = frozenset({"on_train_batch_end"})
    state_per_rank = False

    def __init__(self, every_n_steps: int = 1) -> None:
        check_whole("WeightDigests", 1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._place = Place()
        """How far the file was written when the run was saved, or when the last fit ended."""
        self._file: DigestFile | None = None
        self._recorded = -1
        """The step of the last line, known on every rank."""
        self._reader = DigestReader()

    @property
    def path(self) -> Path | None:
        """The file that is written; None outside of a fit, and on other ranks than the first."""
        return None if self._file is None else self._file.path

    def state_dict(self) -> dict[str, Any]:
        return (self._place if self._file is None else self._file.place).to_dict()

    def check_state_dict(self, state: dict[str, Any]) -> None:
        Place.of(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = Place.of(state)

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Cuts the lines of the steps that are undone, so that the file is of the steps which led to the weights."""
        if self._file is not None:
            self._file.go_back(step)
        self._recorded = min(self._recorded, step - step % self.every_n_steps)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.fast_dev_run:
            return
        if trainer.is_global_zero:
            self._file = self._opened(trainer)
        self._recorded = trainer.strategy.ranks.broadcast(-1 if self._file is None else self._file.step)
        # The weights before the first step; in a resume those of a step that was saved before it was recorded.
        self._record_if_due(trainer, module)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._record_if_due(trainer, module)

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.flush()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._file is not None:
            self._place = self._file.place
            self._file.close()
            self._file = None

    def _opened(self, trainer: Trainer) -> DigestFile:
        folder, place = folder_of(trainer), self._place
        # A new run leaves the file of the fit before it as it is.
        is_new = trainer.global_step == 0 and trainer.ckpt_path is None
        if is_new or not place.file or place.step > trainer.global_step:
            return DigestFile.begin(folder)
        file = DigestFile.resume(folder, place)
        if file is not None:
            return file
        file = DigestFile.begin(folder)
        warnings.warn(
            f"{folder / place.file} is not the file of digests that the resumed run has written: {file.path} begins "
            f"after step {trainer.global_step}.",
            stacklevel=2,
        )
        return file

    def _record_if_due(self, trainer: Trainer, module: TrainModule) -> None:
        step = trainer.global_step
        # Within an accumulation window the step is still the last one.
        if step % self.every_n_steps or step <= self._recorded or trainer.fast_dev_run:
            return
        self._recorded = step
        strategy, is_first = trainer.strategy, trainer.is_global_zero
        held = self._reader.held(strategy, module, lambda _, tensor: is_first or is_sharded(tensor))
        # An engine may step shards of weights that each rank has whole (ZeRO).
        is_alone = trainer.world_size == 1 or (strategy.replicates and not strategy.drives_one)
        found = [held] if is_alone else strategy.ranks.gather_object(held)
        if self._file is not None and found is not None:
            self._file.append(step, merged(found))
