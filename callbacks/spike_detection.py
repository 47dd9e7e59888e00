"""SpikeDetection, a callback that ends a run when its loss spikes, and records the batches that may be the cause."""

from __future__ import annotations

import copy
import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from leyden.callbacks.base import Callback
from leyden.callbacks.early_stopping import MODES
from leyden.checkpoint.format import staging
from leyden.core.checks import check_choice, check_flags, check_whole
from leyden.core.devices import start_reading
from leyden.core.errors import ConfigurationError, LeydenError, kind_of
from leyden.core.paths import local_path
from leyden.core.saved_state import SavedState
from leyden.core.text import listed
from leyden.data.sharding import NO_SAMPLES

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

FILE = "skip_batches.json"


class TrainingSpikeException(LeydenError):
    """The loss of a batch was not finite, or far from the mean of the previous losses.

    Args:
        message: the error message.
        batch_idx: the index of the batch in its epoch.

    Attributes:
        batch_idx: the index of the batch in its epoch.
    """

    def __init__(self, message: str, batch_idx: int = -1) -> None:
        super().__init__(message)
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Ends the run with `TrainingSpikeException` when the loss of a batch spikes, and names the batch and its samples.

    A loss is a spike if it is worse than the previous loss, and worse than the mean of the last `window` losses by
    `atol` and by `rtol` times that mean (either may be None). The loss is the one that `training_step` returns, divided
    by `num_items` if it returns that too.

    Each rank compares its own losses, and a spike on one rank ends all of them. No step waits for the device: a loss is
    checked after the next batch, and with several ranks the result is known another batch later, so the run ends one or
    two steps after the spike. Saving a checkpoint with the run's state waits for the result, and fails after a spike;
    saving a checkpoint of the weights alone does not wait.

    The batch and the previous one (whose step may be the cause) are appended to a JSON file, a list of
    `{"epoch": 0, "batch": 37, "samples": [5, 3]}`. The samples are the indices in the data set of all ranks' samples
    (see `Trainer.sample_indices`), or null if the order is unknown, as for the last batch of the previous epoch.

    Args:
        mode: "min" if lower losses are better, "max" if higher ones are.
        window: the number of losses in the mean.
        warmup: the number of batches, from the start of the run, that are not checked.
        atol: the least distance from the mean, in the loss's unit, that is a spike.
        rtol: the least distance from the mean, as a multiple of the mean, that is a spike.
        exclude_batches_path: the file, or its folder. None: `skip_batches.json` in the run's folder.
        finite_only: whether nan and infinity are spikes. If not, nan is ignored. The mean never includes either.

    Attributes:
        bad_batches: the indices of the batches written to the file.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, if the file has other content.

    Example:
        >>> spikes = SpikeDetection(window=20, rtol=1.5, exclude_batches_path="logs")
        >>> # Trainer(callbacks=[spikes]).fit(module, loader)
        >>> spikes.bad_batches
        []
    """

    # Before early stopping and checkpoints; also called on a rank without a sample of the batch.
    order: ClassVar[int] = 91
    closing_hooks = frozenset({"on_train_batch_end"})
    state_per_rank = True

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        check_choice("SpikeDetection", MODES, mode=mode)
        check_whole("SpikeDetection", 1, window=window)
        check_whole("SpikeDetection", 0, warmup=warmup)
        for name, tolerance in (("atol", atol), ("rtol", rtol)):
            is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
            if tolerance is not None and not (is_number and tolerance >= 0):
                raise ConfigurationError(f"SpikeDetection({name}={tolerance!r}): give a number from 0, or None.")
        if atol is None and rtol is None:
            raise ConfigurationError("SpikeDetection(atol=None, rtol=None) detects nothing: give at least one of them.")
        self.mode, self.window, self.warmup, self.atol, self.rtol = mode, window, warmup, atol, rtol
        if exclude_batches_path is not None and not isinstance(exclude_batches_path, (str, os.PathLike)):
            raise ConfigurationError(
                f"SpikeDetection(exclude_batches_path={exclude_batches_path!r}): give the path of a file or a folder, "
                "or None."
            )
        check_flags("SpikeDetection", finite_only=finite_only)
        if exclude_batches_path is not None:
            local_path(exclude_batches_path, "exclude_batches_path")
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self._begin()

    def _begin(self) -> None:
        """Resets the state for a new run."""
        self.bad_batches: list[int] = []
        self._losses: deque[float] = deque(maxlen=self.window)
        self._last_loss: float | None = None
        self._checked = 0
        """The number of losses checked so far."""
        self._copying: _Batch | None = None
        """The last batch, whose loss is being copied from the device."""
        self._exchanging: tuple[_Batch, Callable[[], list[bool]]] | None = None
        """The batch before it, and a function that waits until the ranks have exchanged whether it is a spike."""
        self._to_exchange: _Batch | None = None
        """That batch in a resumed run, whose checkpoint was saved before the exchange ended."""
        self._last_of_previous_epoch: tuple[int, int] | None = None
        """Epoch and index of the last batch of the previous epoch."""
        self._has_failed = False

    def state_dict(self) -> dict[str, Any]:
        copying = self._copying
        exchanging = self._to_exchange if self._exchanging is None else self._exchanging[0]
        return {
            "losses": list(self._losses),
            "last": self._last_loss,
            "seen": self._checked,
            "bad_batches": list(self.bad_batches),
            "next": None if copying is None else copying.state_dict(),
            "asked": None if exchanging is None else exchanging.state_dict(),
            "former": None if self._last_of_previous_epoch is None else list(self._last_of_previous_epoch),
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        SpikeDetection.load_state_dict(copy.copy(self), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = SavedState(state)
        losses = [SavedState({"loss": loss}, "losses").number("loss") for loss in saved.items("losses")]
        self._losses = deque(losses, maxlen=self.window)
        self._last_loss = None if saved.is_none("last") else saved.number("last")
        self._checked = saved.integer("seen", least=0)
        bad = [SavedState({"batch": index}, "bad_batches").integer("batch") for index in saved.items("bad_batches")]
        self.bad_batches = bad
        self._copying = None if saved.is_none("next") else _Batch.of(saved.nested("next"))
        self._to_exchange = None if saved.is_none("asked") else _Batch.of(saved.nested("asked"))
        self._last_of_previous_epoch = None
        if not saved.is_none("former"):
            former = SavedState(dict(enumerate(saved.items("former"))), "former")
            epoch, batch = (former.integer(key, least=0) for key in (0, 1))  # type: ignore[arg-type]
            self._last_of_previous_epoch = epoch, batch

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Discards the exchange in flight, which concerns a batch that is undone, and loads the state."""
        if self._exchanging is not None:
            # All ranks must complete it.
            self._exchanging[1]()
        self._exchanging, self._copying = None, None
        super().go_back(state, step)

    # hooks ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # Drops the state of an earlier fit. A resume loads its own later.
        if stage == "fit" and trainer.global_step == 0:
            self._begin()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._exchanging, self._has_failed = None, False
        if self._to_exchange is not None:
            batch, self._to_exchange = self._to_exchange, None
            self._exchanging = batch, trainer.strategy.ranks.exchange_flags([batch.is_spike])
        if trainer.is_global_zero:
            _entries(self._path(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._advance(trainer, waits=False)
        loss = None if outputs is None else _loss_of(outputs)
        if loss is None and batch is not NO_SAMPLES and trainer.strategy.outputs.are_here:
            raise ConfigurationError(
                "SpikeDetection checks the loss that training_step returns, which was None: return the loss, or remove "
                "the callback."
            )
        read = (lambda: [None]) if loss is None else _start_copy(loss)
        self._copying = _Batch(trainer.current_epoch, batch_idx, read)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        last = self._copying
        self._advance(trainer, waits=True)
        if last is not None:
            self._last_of_previous_epoch = last.epoch, last.index

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if not self._has_failed and trainer.state.stage == "fit":
            self._advance(trainer, waits=True)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        # A checkpoint of the failed run saves the batches in flight unchecked, and the resume checks them.
        self._has_failed = True

    # checks -----------------------------------------------------------------------------------------------------------
    def _advance(self, trainer: Trainer, waits: bool) -> None:
        """Completes the exchange in flight, then checks the last batch and starts its exchange.

        Args:
            trainer: the Trainer of the run.
            waits: whether to complete that exchange too.
        """
        self._finish_exchange(trainer)
        if self._copying is None:
            return
        batch, self._copying = self._copying, None
        self._exchanging = batch, trainer.strategy.ranks.exchange_flags([self._is_spike(batch)])
        if waits or trainer.world_size == 1:
            self._finish_exchange(trainer)

    def _finish_exchange(self, trainer: Trainer) -> None:
        if self._exchanging is None:
            return
        (batch, wait), self._exchanging = self._exchanging, None
        [is_spike_on_any_rank] = wait()
        if is_spike_on_any_rank:
            self._copying = None
            self._raise(trainer, batch)

    def _is_spike(self, batch: _Batch) -> bool:
        """Compares a batch with this rank's previous losses, and adds its loss to them unless it is a spike."""
        loss = batch.loss
        if loss is None:
            return False
        batch.set_mean(self._losses)
        is_finite = math.isfinite(loss)
        if self._checked >= self.warmup:
            batch.is_spike = (self.finite_only and not is_finite) or self._is_far_from_mean(batch)
        self._checked += 1
        if is_finite and not batch.is_spike:
            self._losses.append(loss)
            self._last_loss = loss
        return batch.is_spike

    def _is_far_from_mean(self, batch: _Batch) -> bool:
        loss, mean, last = batch.loss, batch.mean, self._last_loss
        if loss is None or mean is None or last is None:
            return False
        sign = 1.0 if self.mode == "min" else -1.0
        if not sign * (loss - last) > 0:
            # Not worse than the previous loss, or nan.
            return False
        distance = sign * (loss - mean)
        return (self.atol is None or distance >= self.atol) and (self.rtol is None or distance >= self.rtol * abs(mean))

    def _raise(self, trainer: Trainer, batch: _Batch) -> None:
        """Writes the file on rank 0, and raises on all ranks."""
        descriptions = trainer.strategy.ranks.all_gather_object(batch.description() if batch.is_spike else None)
        spikes = [(rank, description) for rank, description in enumerate(descriptions) if description]
        places = [(batch.epoch, batch.index)]
        if batch.index > 0:
            places.insert(0, (batch.epoch, batch.index - 1))
        elif self._last_of_previous_epoch is not None:
            places.insert(0, self._last_of_previous_epoch)
        current = trainer.current_epoch
        # Only the order of the current epoch is known.
        samples = [
            _as_json(trainer.sample_indices(all_ranks=True, batch_idx=index)) if epoch == current else None
            for epoch, index in places
        ]
        self.bad_batches += [index for _, index in places]
        path = self._path(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            excluded = zip(places, samples, strict=True)
            new = [{"epoch": epoch, "batch": index, "samples": indices} for (epoch, index), indices in excluded]
            _write(path, [*_entries(path), *new])
        rank, description = spikes[0]
        where = f" on rank {rank}" if trainer.world_size > 1 else ""
        sample_text = f" Its samples are {listed(samples[-1])} of the data set." if samples[-1] else ""
        file_text = (
            "fast_dev_run writes no file about it."
            if trainer.fast_dev_run
            else f"{path} lists it and the previous batch: resume from an earlier checkpoint, without their samples."
        )
        raise TrainingSpikeException(
            f"the loss of batch {batch.index} in epoch {batch.epoch}{where} {description}.{sample_text} {file_text}",
            batch.index,
        )

    def _path(self, trainer: Trainer) -> Path:
        folder = trainer.run_folder or trainer.default_root_dir
        root = folder if self.exclude_batches_path is None else self.exclude_batches_path
        path = Path(os.path.expanduser(root))
        return path if path.suffix == ".json" else path / FILE


@dataclass(slots=True)
class _Batch:
    """A batch of this rank.

    Args:
        epoch: the epoch, from 0.
        index: the index of the batch in its epoch.
        read: returns the loss, once it is copied to the host; [None] on a rank without a loss.
        is_spike: whether its loss is a spike on this rank.
        mean: the mean of the previous losses; None before the first.
        count: the number of losses in the mean.
    """

    epoch: int
    index: int
    read: Callable[[], list[Any]]
    is_spike: bool = False
    mean: float | None = None
    count: int = 0

    @classmethod
    def of(cls, saved: SavedState) -> _Batch:
        loss = None if saved.is_none("loss") else saved.number("loss")
        epoch, index = saved.integer("epoch", least=0), saved.integer("index", least=0)
        mean = saved.number("mean") if "mean" in saved and not saved.is_none("mean") else None
        count = saved.integer("before", 0, least=0)
        return cls(epoch, index, lambda: [loss], saved.flag("is_spike", False), mean, count)

    def state_dict(self) -> dict[str, Any]:
        checked = {"is_spike": self.is_spike, "mean": self.mean, "before": self.count}
        return {"epoch": self.epoch, "index": self.index, "loss": self.loss, **checked}

    @property
    def loss(self) -> float | None:
        [loss] = self.read()
        return None if loss is None else float(loss)

    def set_mean(self, losses: deque[float]) -> None:
        self.count = len(losses)
        self.mean = math.fsum(losses) / len(losses) if losses else None

    def description(self) -> str:
        comparison = "" if self.mean is None else f", after a mean of {self.mean:.6g} over {self.count} batches"
        return f"was {self.loss:.6g}{comparison}"


def _loss_of(outputs: Any) -> Tensor:
    """Returns the loss of a batch, per item if `training_step` returns `num_items`: one element, on its device."""
    loss, items = outputs, None
    if isinstance(outputs, Mapping):
        loss, items = outputs.get("loss"), outputs.get("num_items")
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"SpikeDetection checks the loss that training_step returns, which was {kind_of(loss)}: return a tensor, "
            "or a dict with the key 'loss'."
        )
    loss, items = (_whole(value) for value in (loss.detach(), items))
    if items is None:
        return loss  # type: ignore[no-any-return]
    # Avoids 0/0: a batch without items has a loss of 0.
    divisor = items.masked_fill(items == 0, 1) if isinstance(items, Tensor) else items or 1
    return loss / divisor  # type: ignore[no-any-return]


def _whole(value: Any) -> Any:
    """Returns the whole tensor of a DTensor. On a mesh, a loss is a DTensor if the logits are sharded."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _start_copy(loss: Tensor) -> Callable[[], list[float]]:
    """Starts copying a loss to the host; returns a function that waits for the value."""
    # `copy` protects against a user who changes the loss in place.
    return start_reading(loss.reshape(1).to(torch.float32 if loss.dtype != torch.float64 else loss.dtype, copy=True))


def _as_json(samples: list[Any] | None) -> list[Any] | None:
    """Converts sample indices for JSON: whole numbers to int, others to text."""
    if samples is None:
        return None
    return [int(index) if isinstance(index, (int, Tensor)) else str(index) for index in samples]


def _entries(path: Path) -> list[Any]:
    """Returns the content of the file of excluded batches; an empty list if there is no file."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"SpikeDetection cannot append to {path} ({error}): give another exclude_batches_path."
        ) from error
    if not isinstance(saved, list):
        raise ConfigurationError(
            f"SpikeDetection cannot append to {path}, which holds {kind_of(saved)}: give another exclude_batches_path."
        )
    return saved


def _write(path: Path, entries: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with staging.replacing(path) as temporary:
        temporary.write_text(json.dumps(entries, indent=4) + "\n", encoding="utf-8")
