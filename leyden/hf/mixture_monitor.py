"""MixtureMonitor, a callback that logs how many samples of each source of a mixture have been trained on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, SequentialSampler

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import is_logged, log_to_all
from leyden.core.errors import ConfigurationError
from leyden.core.saved_state import SavedState
from leyden.data.sample_rng import SampleRNG
from leyden.data.samples import Samples
from leyden.hf.data import MixedDataset

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class MixtureMonitor(Callback):
    """Logs as `samples/<source>` how many samples of each source of a `MixedDataset` have been trained on.

    The counts are of all ranks and all epochs, also after a resume, and are computed from the position alone, without
    communication. They are logged every `log_every_n_steps`. Repeats of `even_batches=True` do not count.

    Raises:
        ConfigurationError: in fit, if the training loader is not a `DataLoader` that reads a `MixedDataset` in its
            order, or if the batches have no known number of samples.

    Example:
        >>> MixtureMonitor().counts
        {}
    """

    def __init__(self) -> None:
        self._mixture: MixedDataset | None = None
        self._earlier: Counter[str] = Counter()
        """The counts of earlier epochs."""
        self._begun = 0
        """The samples read before this epoch, over all ranks."""
        self.counts: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"earlier": dict(self._earlier), "begun": self._begun}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        saved.integer("begun", least=0)
        earlier = saved.nested("earlier")
        for name in earlier.entries:
            earlier.integer(name, least=0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earlier, self._begun = Counter(state["earlier"]), state["begun"]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        loader = trainer.train_dataloader
        dataset = getattr(loader, "dataset", None)
        # Leyden's own wrappers.
        while isinstance(dataset, (SampleRNG, Samples)):
            dataset = dataset.dataset
        self._mixture = dataset if isinstance(dataset, MixedDataset) else None
        in_order = isinstance(getattr(loader, "sampler", None), SequentialSampler)
        if self._mixture is None or not in_order or type(loader.batch_sampler) is not BatchSampler:
            raise ConfigurationError(
                "MixtureMonitor: the training loader must be a DataLoader over a MixedDataset, without shuffle and "
                "without a sampler, since a mixture is shuffled already. Use such a loader, or leave the callback out."
            )
        if not _read(trainer):
            self._earlier, self._begun = Counter(), 0

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._earlier, self._begun = self._now(trainer), _read(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _read(trainer):
            raise ConfigurationError(
                "MixtureMonitor: the batches have no known number of samples. Let collate_fn return tensors whose "
                "first dimension is the sample, or leave the callback out."
            )
        if trainer.window.closes and is_logged(trainer, trainer.global_step):
            self.counts = dict(self._now(trainer))
            values = {f"samples/{name}": float(count) for name, count in self.counts.items()}
            trainer.logs.show(values)
            log_to_all(trainer, values, trainer.global_step)

    def _now(self, trainer: Trainer) -> Counter[str]:
        assert self._mixture is not None
        counts = Counter(dict.fromkeys(self._mixture.sources, 0))
        counts.update(self._earlier)
        counts.update(self._mixture.counts(min(_read(trainer) - self._begun, len(self._mixture))))
        return counts


def _read(trainer: Trainer) -> int:
    """Returns how many samples all ranks have read, including those that `on_bad_sample="skip"` left out."""
    return trainer.progress.samples + trainer.progress.bad_samples
