"""SequenceLengthWarmup, a callback that begins a fit with short sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.strategies.batch import map_children, map_tensors
from leyden.strategies.errors import ConfigurationError, kind_of, nearest
from leyden.strategies.saved_state import SavedState
from leyden.trainer.arguments.checks import check_whole
from leyden.trainer.format.text import listed

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer


class SequenceLengthWarmup(Callback):
    """Cuts the sequences of training batches to a length that grows with the steps (Li et al., arXiv:2108.06084).

    The length grows in a straight line from `min_seq_length` to `max_seq_length`, rounded down to a multiple of
    `step_size`, and all batches of a step have the same. It follows from the number of steps alone, so that it is the
    same on all ranks and after a resume; samples keep their order. Validation has whole sequences.

    What is cut are the tensors in a batch (in dicts, lists, tuples and dataclasses) whose second dimension is as long
    as that of its tokens, the integer tensors (B, T), which must have one length; without any, as that of the first
    tensor. So are labels and embeddings (B, T, D), and masks in both dimensions: (B, 1, T, T), and (B, T, T) of whole
    numbers or flags. Name the entries by `keys` where others have that length by chance, such as dense labels (B, C),
    or where lengths differ. The batch that the loader has made is left as it is. A loss that is a mean over the tokens
    of its batch needs no change; so does one that returns `num_items`.

    Args:
        duration: steps over which the length grows; a float is a part of the steps of the run
            (`trainer.estimated_stepping_batches` at its start; a resume keeps that number).
        min_seq_length: the first length, in tokens.
        max_seq_length: the last length; longer sequences are cut to it from then on, too.
        step_size: the length is a multiple of this, apart from both ends; 8 suits tensor cores, and a compiled module
            is compiled again for each length.
        truncate: False, by which Composer makes samples of what is cut off, is refused.
        keys: the names to cut in batches that are dicts or dataclasses, each with its own length; None for those
            described above. The batch must have all of them.

    Attributes:
        length: the length of the step that runs or ran last, in tokens.

    Raises:
        ConfigurationError: for invalid arguments; at the first batch, if nothing in it can be cut, if
            its tokens differ in length, or if it lacks one of the `keys`.

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
        check_whole("SequenceLengthWarmup", 1, min_seq_length=min_seq_length, step_size=step_size)
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
        is_names = isinstance(keys, Collection) and not isinstance(keys, (str, bytes)) and len(keys) > 0
        if keys is not None and not (is_names and all(isinstance(key, str) for key in keys)):
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
            self._steps = state.get("steps")

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # Another fit, even of another Trainer, has another number of steps; one that resumes loads it.
        if stage == "fit" and trainer.global_step == 0 and isinstance(self.duration, float):
            self._steps = None

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
        if self.keys is not None:
            cut = _Named(self.keys, self.length)
            result = cut.visit(batch)
            cut.check()
            return result
        found: list[Tensor] = []
        map_tensors(batch, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        whole = _whole_length(found, type(batch).__name__)
        return batch if whole <= self.length else map_tensors(batch, lambda part: _cut(part, whole, self.length))


def _whole_length(tensors: list[Tensor], batch: str) -> int:
    """The length of the first sequences in a batch."""
    sequences = [tensor for tensor in tensors if tensor.dim() > 1]
    if not sequences:
        raise ConfigurationError(
            f"SequenceLengthWarmup found nothing to cut in the batch, {batch}: it needs a tensor (B, T); `keys` names "
            "the entries of a dict."
        )
    tokens = {part.shape[1]: tuple(part.shape) for part in sequences if part.dim() == 2 and _is_tokens(part)}
    if len(tokens) > 1:
        raise ConfigurationError(
            f"SequenceLengthWarmup cannot find the sequences of the batch, {batch}, which has integer tensors of the "
            f"shapes {listed(list(tokens.values()))}: name those to cut by `keys`, in a batch that is a dict."
        )
    # Tokens are whole numbers; features of another width may stand before them.
    return next(iter(tokens), sequences[0].shape[1])


def _is_tokens(tensor: Tensor) -> bool:
    return not _has_fractions(tensor) and tensor.dtype != torch.bool


def _cut(tensor: Tensor, whole: int, length: int) -> Tensor:
    """A tensor of which the sequences are cut; a mask in both of its dimensions."""
    if tensor.dim() < 2:
        return tensor
    if _is_mask(tensor) and tensor.shape[-1] == whole:
        tensor = tensor[..., :length, :length]
    elif tensor.shape[1] == whole:
        tensor = tensor[:, :length]
    # Modules call `labels.view(-1)`.
    return tensor.contiguous()


def _is_mask(tensor: Tensor) -> bool:
    """True for (B, 1, T, T), and for (B, T, T) unless it has fractions, as embeddings of the width T have."""
    shape = tensor.shape
    is_square = tensor.dim() > 2 and shape[-1] == shape[-2]
    return is_square and ((tensor.dim() == 4 and shape[1] == 1) or (tensor.dim() == 3 and not _has_fractions(tensor)))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class _Named:
    """Cuts the entries of some names in the mappings and dataclasses of a batch.

    Args:
        keys: their names.
        length: to which they are cut.
    """

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
        # Children come in the order of their names.
        following = iter(names)
        return map_children(item, lambda value: self._named(next(following), value))

    def _named(self, name: str, value: Any) -> Any:
        if name not in self.keys:
            return self.visit(value)
        self.found.add(name)
        if not isinstance(value, Tensor) or value.dim() < 2:
            what = f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise ConfigurationError(
                f"SequenceLengthWarmup(keys=…) names {name!r}, which is {what} and no tensor (B, T, …): leave it out."
            )
        whole = value.shape[-1] if _is_mask(value) else value.shape[1]
        return _cut(value, whole, self.length) if whole > self.length else value

    def check(self) -> None:
        """Refuses names that the batch does not have."""
        for name in sorted(self.keys - self.found):
            hint = nearest(name, sorted(self.known)) if self.known else "It has no names: leave keys out."
            raise ConfigurationError(f"SequenceLengthWarmup(keys=…) names {name!r}, which the batch lacks. {hint}")
