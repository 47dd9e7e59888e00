"""SequenceLengthWarmup, a callback that begins a fit with short sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError
from leyden.strategies.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class SequenceLengthWarmup(Callback):
    """Cuts the sequences of training batches to a length that grows with the steps (Li et al., arXiv:2108.06084).

    The length grows in a straight line from `min_seq_length` to `max_seq_length`, rounded down to a multiple of
    `step_size`, and all batches of a step have the same. It follows from the number of steps alone, so that it is the
    same on all ranks and after a resume; samples keep their order. Validation has whole sequences.

    What is cut are the tensors in a batch (in dicts, lists and tuples) whose second dimension is as long as that of the
    first of them: tokens (B, T), labels, masks, embeddings (B, T, D). The batch that the loader has made is left as it
    is. A loss that is a mean over the tokens of its batch needs no change; so does one that returns `num_items`.

    Args:
        duration: steps over which the length grows; a float is a part of the steps of the run
            (`trainer.estimated_stepping_batches` at its start; a resume keeps that number).
        min_seq_length: the first length, in tokens.
        max_seq_length: the last length; longer sequences are cut to it from then on, too.
        step_size: the length is a multiple of this, apart from both ends; 8 suits tensor cores, and a compiled module
            is compiled again for each length.
        truncate: False, by which Composer makes samples of what is cut off, is refused.
        keys: the names to cut in batches that are dicts, whatever their size; None for those described above.

    Attributes:
        length: the length of the step that runs or ran last, in tokens.

    Raises:
        ConfigurationError: for invalid arguments; at the first batch, if nothing in it can be cut.

    Example:
        >>> warmup = SequenceLengthWarmup(duration=100, min_seq_length=8, max_seq_length=64, step_size=8)
        >>> [warmup.length_at(step) for step in (0, 10, 25, 50, 99, 100)]
        [8, 8, 16, 32, 56, 64]
    """

    state_per_rank = False

    def __init__(
        self,
        duration: int | float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        keys: Collection[str] | None = None,
    ) -> None:
        is_part = isinstance(duration, float) and 0 < duration <= 1
        if not is_part and (type(duration) is not int or duration < 1):
            raise ConfigurationError(
                f"SequenceLengthWarmup(duration={duration!r}): give a number of steps from 1, or a part of the run, "
                "such as 0.3."
            )
        for name, value in (("min_seq_length", min_seq_length), ("step_size", step_size)):
            if type(value) is not int or value < 1:
                raise ConfigurationError(f"SequenceLengthWarmup({name}={value!r}): give a whole number from 1.")
        if type(max_seq_length) is not int or max_seq_length < min_seq_length:
            raise ConfigurationError(
                f"SequenceLengthWarmup(max_seq_length={max_seq_length!r}): give a whole number from {min_seq_length}, "
                "the min_seq_length."
            )
        if not truncate:
            raise ConfigurationError(
                "SequenceLengthWarmup(truncate=False) would make other samples than those that the loader counts: "
                "leave it out, or cut the data into shorter samples."
            )
        if keys is not None and (isinstance(keys, str) or not keys):
            raise ConfigurationError(f"SequenceLengthWarmup(keys={keys!r}): give names, such as {{'input_ids'}}.")
        self.duration, self.min_seq_length, self.max_seq_length = duration, min_seq_length, max_seq_length
        self.step_size, self.keys = step_size, None if keys is None else frozenset(keys)
        self.length = min_seq_length
        self._steps: int | None = None if is_part else int(duration)

    def length_at(self, step: int) -> int:
        """Returns the length after so many steps, in tokens.

        Raises:
            ConfigurationError: before the fit, if `duration` is a part of it.
        """
        if self._steps is None:
            raise ConfigurationError(f"duration={self.duration!r} is known in steps once the fit has begun.")
        if step >= self._steps:
            return self.max_seq_length
        grown = self.min_seq_length + (self.max_seq_length - self.min_seq_length) * step // self._steps
        return max(self.min_seq_length, grown - grown % self.step_size)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        if not saved.is_none("steps"):
            saved.integer("steps", least=1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.duration, float):
            self._steps = state["steps"]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._steps is None:
            steps = trainer.estimated_stepping_batches
            if steps == float("inf"):
                raise ConfigurationError(
                    f"SequenceLengthWarmup(duration={self.duration!r}) is a part of a run without an end: give it in "
                    "steps, or the Trainer max_steps."
                )
            self._steps = max(1, int(self.duration * steps))

    def transform_train_batch(self, trainer: Trainer, module: TrainModule, batch: Any) -> Any:
        self.length = self.length_at(trainer.global_step)
        found = _whole_length(batch, self.keys)
        if found is None:
            wanted = "a tensor (B, T)" if self.keys is None else f"any of {', '.join(sorted(self.keys))}"
            raise ConfigurationError(
                f"SequenceLengthWarmup found nothing to cut in the batch, {type(batch).__name__}: it needs {wanted}; "
                "`keys` names the entries of a dict."
            )
        return _cut(batch, found, self.length, self.keys) if found > self.length or self.keys else batch


def _whole_length(batch: Any, keys: frozenset[str] | None) -> int | None:
    """The length of the first sequences in a batch; None without any."""
    if isinstance(batch, Tensor):
        return batch.shape[1] if batch.dim() > 1 and keys is None else None
    parts: Any = ()
    if isinstance(batch, Mapping):
        named = [value for key, value in batch.items() if keys is not None and key in keys]
        if named:
            return _whole_length(named[0], None)
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    return next((length for part in parts if (length := _whole_length(part, keys)) is not None), None)


def _cut(batch: Any, whole: int, length: int, keys: frozenset[str] | None) -> Any:
    """The batch with shorter sequences, which share their memory with the whole ones."""
    if isinstance(batch, Tensor):
        is_sequence = keys is None and batch.dim() > 1 and batch.shape[1] == whole
        return batch[:, :length] if is_sequence else batch
    if isinstance(batch, Mapping):
        cut = {
            key: value[:, :length] if keys is not None and key in keys else _cut(value, whole, length, keys)
            for key, value in batch.items()
        }
        # A BatchEncoding of transformers and the like keep their class.
        return cut if type(batch) is dict else type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(part, whole, length, keys) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cut(part, whole, length, keys) for part in batch)
    return batch
