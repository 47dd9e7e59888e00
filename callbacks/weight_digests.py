"""WeightDigests, a callback that records digests of the weights, which `leyden bisect` compares between runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import folder_of
from leyden.checkpoint.digests import DigestReader, merged
from leyden.checkpoint.format.digests import DigestFile, Place
from leyden.checkpoint.format.tensors import is_sharded
from leyden.core.checks import check_whole
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class WeightDigests(Callback):
    """Records a digest of every parameter and buffer in `digests.jsonl`, in the run's folder.

    `Trainer(digest_every_n_steps=…)` adds it; `leyden bisect` names the first step and tensor in which two runs differ.
    The first line describes the weights before the first step. A resume truncates the lines after the checkpoint, so
    a killed and resumed run leaves the same file as an uninterrupted one.

    The digests cover the module's part of a checkpoint: parameters and persistent buffers, without optimizer state. Of
    replicas, only rank 0's is read (`DriftGuard` compares the others). Of sharded weights each rank reads its shards,
    whose digests are comparable between runs with the same sharding. The digest is XXH3 of the bytes. At each recorded
    step a GPU's part of the weights is copied to the host, which waits once.

    `fast_dev_run` writes none.

    Args:
        every_n_steps: the number of optimizer steps between lines.

    Raises:
        ConfigurationError: if `every_n_steps` is below 1.

    Example:
        >>> WeightDigests(every_n_steps=10).path is None
        True
    """

    # After callbacks that write weights, before checkpoints; also called on a rank without a sample of the batch.
    order: ClassVar[int] = 90
    closing_hooks = frozenset({"on_train_batch_end"})
    state_per_rank = False
    uses_run_folder = True

    def __init__(self, every_n_steps: int = 1) -> None:
        check_whole("WeightDigests", 1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._place = Place()
        """The position in the file at the last save, or at the end of the last fit."""
        self._file: DigestFile | None = None
        self._recorded = -1
        """The step of the last line; the same on every rank."""
        self._reader = DigestReader()

    @property
    def path(self) -> Path | None:
        """The file being written; None outside of fit and on ranks other than 0."""
        return None if self._file is None else self._file.path

    def state_dict(self) -> dict[str, Any]:
        return (self._place if self._file is None else self._file.place).to_dict()

    def check_state_dict(self, state: dict[str, Any]) -> None:
        Place.of(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = Place.of(state)

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Truncates the lines of steps that are undone, so the file describes only steps that led to the weights."""
        if self._file is not None:
            self._file.go_back(step)
        self._recorded = min(self._recorded, step - step % self.every_n_steps)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.fast_dev_run:
            return
        if trainer.is_global_zero:
            self._file = self._open(trainer)
        self._recorded = trainer.strategy.ranks.broadcast(-1 if self._file is None else self._file.step)
        # Records the weights before the first step; on resume, those of a step whose checkpoint preceded its line.
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

    def _open(self, trainer: Trainer) -> DigestFile:
        folder, place = folder_of(trainer), self._place
        # A new run does not append to the file of an earlier fit.
        is_new = trainer.global_step == 0 and trainer.ckpt_path is None
        if is_new or not place.file or place.step > trainer.global_step:
            return DigestFile.begin(folder)
        file = DigestFile.resume(folder, place)
        if file is not None:
            return file
        file = DigestFile.begin(folder)
        warn(
            f"{folder / place.file} is not the digest file that the resumed run wrote: {file.path} begins after step "
            f"{trainer.global_step}."
        )
        return file

    def _record_if_due(self, trainer: Trainer, module: TrainModule) -> None:
        step = trainer.global_step
        # `global_step` changes only at the end of an accumulation window.
        if step % self.every_n_steps or step <= self._recorded or trainer.fast_dev_run:
            return
        self._recorded = step
        strategy, is_first = trainer.strategy, trainer.is_global_zero
        held = self._reader.held(strategy, module, lambda _, tensor: is_first or is_sharded(tensor))
        # `drives_one`: an engine may shard the update even though each rank has whole weights (ZeRO).
        has_all = trainer.world_size == 1 or (strategy.replicates and not strategy.drives_one)
        gathered = [held] if has_all else strategy.ranks.gather_object(held)
        if self._file is not None and gathered is not None:
            self._file.append(step, merged(gathered))
