"""SequenceLengthWarmup, a callback that starts training with short sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.core.checks import check_whole
from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.core.saved_state import SavedState
from leyden.core.text import listed
from leyden.core.tree import map_children, map_tensors

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class SequenceLengthWarmup(Callback):
    """Truncates the sequences of training batches to a length that grows with the steps (Li et al., arXiv:2108.06084).

    The length grows linearly from `min_seq_length` to `max_seq_length`, rounded down to a multiple of `step_size`. All
    batches of a step have the same length. It depends only on the number of steps, so it is the same on all ranks and
    after a resume. Samples keep their order. Validation uses whole sequences.

    The sequence length T of a batch is that of its tokens, the integer tensors (B, T), which must all have the same
    length; without any, it is the second dimension of the first tensor. Every tensor of the batch (in dicts, lists,
    tuples and dataclasses) whose second dimension has this length is truncated, labels and embeddings (B, T, D)
    included. Masks (B, 1, T, T), and integer or bool masks (B, T, T), are truncated in both dimensions. Set `keys` if
    other entries have this length by chance, such as dense labels (B, C), or if lengths differ. The loader's batch is
    not modified. A loss that is a mean over the batch's tokens needs no change, nor does one with `num_items`.

    Args:
        duration: the number of steps over which the length grows; a float is a fraction of the run's steps
            (`trainer.estimated_stepping_batches` at its start; a resume keeps the number).
        min_seq_length: the first length, in tokens.
        max_seq_length: the last length, in tokens. Longer sequences are still truncated to it afterwards.
        step_size: the multiple that lengths are rounded to, except the first and the last. 8 suits tensor cores. A
            compiled module is recompiled for each length.
        truncate: must be True. False, with which Composer makes new samples of the truncated parts, is not supported.
        keys: the names of the entries to truncate in batches that are dicts or dataclasses, each by its own length.
            The batch must have all of them. None: the tensors described above.

    Attributes:
        length: the length of the current or last step, in tokens.

    Raises:
        ConfigurationError: for invalid arguments; at the first batch, if nothing in it can be truncated, if its tokens
            differ in length, or if it lacks one of the `keys`.

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
        is_fraction = isinstance(duration, float) and 0 < duration <= 1
        if not is_fraction and (type(duration) is not int or duration < 1):
            raise ConfigurationError(
                f"SequenceLengthWarmup(duration={duration!r}): give a number of steps from 1, or a fraction of the "
                "run, such as 0.3."
            )
        check_whole("SequenceLengthWarmup", 1, min_seq_length=min_seq_length, step_size=step_size)
        if type(max_seq_length) is not int or max_seq_length < min_seq_length:
            raise ConfigurationError(
                f"SequenceLengthWarmup(max_seq_length={max_seq_length!r}): give a whole number from {min_seq_length}, "
                "the min_seq_length."
            )
        if not truncate:
            raise ConfigurationError(
                "SequenceLengthWarmup(truncate=False) would create samples that the loader does not count: leave it "
                "out, or split the data into shorter samples."
            )
        is_collection = isinstance(keys, Collection) and not isinstance(keys, (str, bytes)) and len(keys) > 0
        if keys is not None and not (is_collection and all(isinstance(key, str) for key in keys)):
            raise ConfigurationError(f"SequenceLengthWarmup(keys={keys!r}): give names, such as {{'input_ids'}}.")
        self.duration, self.min_seq_length, self.max_seq_length = duration, min_seq_length, max_seq_length
        self.step_size, self.keys = step_size, None if keys is None else frozenset(keys)
        self.length = min_seq_length
        self._steps: int | None = None if is_fraction else int(duration)

    def length_at(self, step: int) -> int:
        """Returns the length after `step` steps, in tokens.

        Raises:
            ConfigurationError: before the fit, if `duration` is a fraction.
        """
        if self._steps is None:
            raise ConfigurationError(f"duration={self.duration!r} is unknown in steps before the fit starts.")
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
            self._steps = state.get("steps")

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # A new fit may have another number of steps. A resume loads it from the checkpoint.
        if stage == "fit" and trainer.global_step == 0 and isinstance(self.duration, float):
            self._steps = None

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self._steps is None:
            steps = trainer.estimated_stepping_batches
            if steps == float("inf"):
                raise ConfigurationError(
                    f"SequenceLengthWarmup(duration={self.duration!r}) is a fraction, but the run has no end: give a "
                    "number of steps, or set the Trainer's max_steps."
                )
            self._steps = max(1, int(self.duration * steps))

    def transform_train_batch(self, trainer: Trainer, module: TrainModule, batch: Any) -> Any:
        self.length = self.length_at(trainer.global_step)
        if self.keys is not None:
            truncation = _NamedTruncation(self.keys, self.length)
            result = truncation.visit(batch)
            truncation.check()
            return result
        tensors: list[Tensor] = []
        map_tensors(batch, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        whole = _sequence_length(tensors, type(batch).__name__)
        return batch if whole <= self.length else map_tensors(batch, lambda part: _truncate(part, whole, self.length))


def _sequence_length(tensors: list[Tensor], batch: str) -> int:
    sequences = [tensor for tensor in tensors if tensor.dim() > 1]
    if not sequences:
        raise ConfigurationError(
            f"SequenceLengthWarmup found nothing to truncate in the batch ({batch}): it needs a tensor (B, T). For a "
            "dict, `keys` names the entries."
        )
    tokens = {part.shape[1]: tuple(part.shape) for part in sequences if part.dim() == 2 and _is_tokens(part)}
    if len(tokens) > 1:
        raise ConfigurationError(
            f"SequenceLengthWarmup cannot tell which tensors of the batch ({batch}) are sequences: integer tensors "
            f"have the shapes {listed(list(tokens.values()))}. Make it a dict, and name the sequences with `keys`."
        )
    # Tokens take precedence: features of another width may precede them.
    return next(iter(tokens), sequences[0].shape[1])


def _is_tokens(tensor: Tensor) -> bool:
    return not _has_fractions(tensor) and tensor.dtype != torch.bool


def _truncate(tensor: Tensor, whole: int, length: int) -> Tensor:
    """Truncates sequences of the length `whole`; a mask in both of its dimensions."""
    if tensor.dim() < 2:
        return tensor
    if _is_mask(tensor) and tensor.shape[-1] == whole:
        tensor = tensor[..., :length, :length]
    elif tensor.shape[1] == whole:
        tensor = tensor[:, :length]
    # Contiguous, since modules call `labels.view(-1)`.
    return tensor.contiguous()


def _is_mask(tensor: Tensor) -> bool:
    """Returns True for (B, 1, T, T), and for (B, T, T) unless it is floating-point, as embeddings of width T are."""
    shape = tensor.shape
    is_square = tensor.dim() > 2 and shape[-1] == shape[-2]
    return is_square and ((tensor.dim() == 4 and shape[1] == 1) or (tensor.dim() == 3 and not _has_fractions(tensor)))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _NamedTruncation:
    """Truncates the entries with these names, in the mappings and dataclasses of a batch, to a length."""

    def __init__(self, keys: frozenset[str], length: int) -> None:
        self.keys, self.length = keys, length
        self.found: set[str] = set()
        self.known: set[str] = set()

    def visit(self, item: Any) -> Any:
        if isinstance(item, Mapping):
            names = [str(key) for key in item]
        elif dataclasses.is_dataclass(item):
            names = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]
        else:
            return item if isinstance(item, Tensor) else map_children(item, self.visit)
        self.known.update(names)
        # map_children visits the children in the order of `names`.
        next_name = iter(names)
        return map_children(item, lambda value: self._entry(next(next_name), value))

    def _entry(self, name: str, value: Any) -> Any:
        if name not in self.keys:
            return self.visit(value)
        self.found.add(name)
        if not isinstance(value, Tensor) or value.dim() < 2:
            kind = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise ConfigurationError(
                f"SequenceLengthWarmup(keys=…) names {name!r}, which is {kind}, not a tensor (B, T, …): leave it out."
            )
        whole = value.shape[-1] if _is_mask(value) else value.shape[1]
        return _truncate(value, whole, self.length) if whole > self.length else value

    def check(self) -> None:
        """Raises ConfigurationError for a key that the batch does not have."""
        for name in sorted(self.keys - self.found):
            hint = nearest(name, sorted(self.known)) if self.known else "It has no named entries: leave keys out."
            raise ConfigurationError(f"SequenceLengthWarmup(keys=…) names {name!r}, which the batch lacks. {hint}")
