"""SpikeDetection, a callback that ends a run whose loss jumps, and writes down the batches that may be the cause."""

from __future__ import annotations

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
from leyden.strategies.errors import ConfigurationError, LeydenError, kind_of
from leyden.strategies.saved_state import SavedState
from leyden.trainer.arguments.checks import check_choice, check_flags, check_whole
from leyden.trainer.data.sharding import NO_SAMPLES
from leyden.trainer.format.text import listed
from leyden.trainer.logging.values import start_reading

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

FILE = "skip_batches.json"


class TrainingSpikeException(LeydenError):
    """The loss of a batch was far from the mean of those before it, or not finite.

    Args:
        message: which batch, and how far.
        batch_idx: its index in the epoch.

    Attributes:
        batch_idx: the same.
    """

    def __init__(self, message: str, batch_idx: int = -1) -> None:
        super().__init__(message)
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """Ends the run with `TrainingSpikeException` when the loss of a batch jumps, and names the batch and its samples.

    A loss is a spike if it is worse than the one before, and worse than the mean of the last `window` losses by `atol`
    and by `rtol` times that mean, as far as they are given. What `training_step` returns is looked at; where it returns
    `num_items`, the loss of one item.

    Each rank compares its own losses, and a spike on one ends all of them. No step waits for the device: a loss is
    looked at when the next batch is done, and on several ranks the answer is known one batch later still, so that the
    run ends one or two steps after the spike. A checkpoint with the run's state waits for the answer, and is not
    written after a spike; one of the weights alone does not.

    The batch, and the one before it (whose step may be to blame), are added to a file, a list of
    `{"epoch": 0, "batch": 37, "samples": [5, 3]}`, with the indices of all ranks' samples in the data set (see
    `Trainer.sample_indices`), or null where the order is not known, as of the last batch of the epoch before.

    Args:
        mode: "min" if a smaller loss is better, "max" if a larger one is.
        window: losses that the mean is taken of.
        warmup: batches of the run before the first one that is looked at.
        atol: how much worse than the mean a spike is, in the loss's unit.
        rtol: how much worse, as a multiple of the mean.
        exclude_batches_path: the file, or its folder; None for `skip_batches.json` in `default_root_dir`.
        finite_only: nan and infinity are spikes. Otherwise nan is passed over; neither comes into the mean.

    Attributes:
        bad_batches: the indices of the batches that were written to the file.

    Raises:
        ConfigurationError: for invalid arguments; at the start of fit, if the file holds something else.

    Example:
        >>> spikes = SpikeDetection(window=20, rtol=1.5, exclude_batches_path="logs")
        >>> # Trainer(callbacks=[spikes]).fit(module, loader)
        >>> spikes.bad_batches
        []
    """

    # Before early stopping and checkpoints. On a rank without a sample it is called too.
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
            raise ConfigurationError("SpikeDetection(atol=None, rtol=None) knows no spike: give one of them.")
        self.mode, self.window, self.warmup, self.atol, self.rtol = mode, window, warmup, atol, rtol
        if exclude_batches_path is not None and not isinstance(exclude_batches_path, (str, os.PathLike)):
            raise ConfigurationError(
                f"SpikeDetection(exclude_batches_path={exclude_batches_path!r}): give the path of a file or a folder, "
                "or None."
            )
        check_flags("SpikeDetection", finite_only=finite_only)
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self._begin()

    def _begin(self) -> None:
        """Forgets all batches."""
        self.bad_batches: list[int] = []
        self._losses: deque[float] = deque(maxlen=self.window)
        self._last: float | None = None
        self._seen = 0
        """Losses that were looked at."""
        self._next: _Batch | None = None
        """The last batch, whose loss is on its way from the device."""
        self._asked: tuple[_Batch, Callable[[], list[bool]]] | None = None
        """The batch before it, and the answer of all ranks."""
        self._unanswered: _Batch | None = None
        """That batch in a run that was saved before the answer came: it is asked for again."""
        self._former: tuple[int, int] | None = None
        """Epoch and index of the last batch of the epoch before."""
        self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        last, asked = self._next, self._unanswered if self._asked is None else self._asked[0]
        return {
            "losses": list(self._losses),
            "last": self._last,
            "seen": self._seen,
            "bad_batches": list(self.bad_batches),
            "next": None if last is None else last.state_dict(),
            "asked": None if asked is None else asked.state_dict(),
            "former": None if self._former is None else list(self._former),
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        self._read(state)
        self._read_batches(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        losses, self._last, self._seen, self.bad_batches = self._read(state)
        self._losses = deque(losses, maxlen=self.window)
        self._next, self._unanswered, self._former = self._read_batches(state)

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Goes back, on all ranks alike: an answer that is on its way is on a batch that is undone."""
        if self._asked is not None:
            self._asked[1]()
        self._asked, self._next = None, None
        super().go_back(state, step)

    def _read(self, state: dict[str, Any]) -> tuple[list[float], float | None, int, list[int]]:
        saved = SavedState(state)
        losses = [SavedState({"loss": loss}, "losses").number("loss") for loss in saved.items("losses")]
        last = None if saved.is_none("last") else saved.number("last")
        bad = [SavedState({"batch": index}, "bad_batches").integer("batch") for index in saved.items("bad_batches")]
        return losses, last, saved.integer("seen", least=0), bad

    def _read_batches(self, state: dict[str, Any]) -> tuple[_Batch | None, _Batch | None, tuple[int, int] | None]:
        saved = SavedState(state)
        batches = [None if saved.is_none(name) else _Batch.of(saved.nested(name)) for name in ("next", "asked")]
        if saved.is_none("former"):
            return batches[0], batches[1], None
        former = SavedState(dict(enumerate(saved.items("former"))), "former")
        epoch, batch = (former.integer(key, least=0) for key in (0, 1))  # type: ignore[arg-type]
        return batches[0], batches[1], (epoch, batch)

    # hooks ------------------------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # Another fit, even of another Trainer; one that resumes loads its state later.
        if stage == "fit" and trainer.global_step == 0:
            self._begin()

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._asked, self._is_over = None, False
        if self._unanswered is not None:
            batch, self._unanswered = self._unanswered, None
            self._asked = batch, trainer.strategy.ranks.exchange_flags([batch.is_spike])
        if trainer.is_global_zero:
            _entries(self._path(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._settle(trainer, waits=False)
        loss = None if outputs is None else _loss_of(outputs)
        if loss is None and batch is not NO_SAMPLES and trainer.strategy.outputs.are_here:
            raise ConfigurationError(
                "SpikeDetection looks at the loss that training_step returns, which was None: return it, or leave the "
                "callback out."
            )
        self._next = _Batch(trainer.current_epoch, batch_idx, (lambda: [None]) if loss is None else _reading(loss))

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        last = self._next
        self._settle(trainer, waits=True)
        if last is not None:
            self._former = last.epoch, last.index

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if not self._is_over and trainer.state.stage == "fit":
            self._settle(trainer, waits=True)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        # The state still holds what was not looked at.
        self._is_over = True

    # judging ----------------------------------------------------------------------------------------------------------
    def _settle(self, trainer: Trainer, waits: bool) -> None:
        """Takes the ranks' answer on the batch before the last, and asks for one on the last.

        Args:
            trainer: of the run.
            waits: for that answer too.
        """
        self._take(trainer)
        if self._next is None:
            return
        batch, self._next = self._next, None
        self._asked = batch, trainer.strategy.ranks.exchange_flags([self._is_spike(batch)])
        if waits or trainer.world_size == 1:
            self._take(trainer)

    def _take(self, trainer: Trainer) -> None:
        if self._asked is None:
            return
        (batch, answer), self._asked = self._asked, None
        if answer()[0]:
            self._next = None
            self._raise(trainer, batch)

    def _is_spike(self, batch: _Batch) -> bool:
        """Judges a batch by this rank's losses before it, and counts it in with them unless it is a spike."""
        loss = batch.loss
        if loss is None:
            return False
        batch.compare(self._losses)
        is_finite = math.isfinite(loss)
        if self._seen >= self.warmup:
            batch.is_spike = (self.finite_only and not is_finite) or self._jumps(batch)
        self._seen += 1
        if is_finite and not batch.is_spike:
            self._losses.append(loss)
            self._last = loss
        return batch.is_spike

    def _jumps(self, batch: _Batch) -> bool:
        loss, mean, last = batch.loss, batch.mean, self._last
        if loss is None or mean is None or last is None:
            return False
        sign = 1.0 if self.mode == "min" else -1.0
        if not sign * (loss - last) > 0:
            # No worse than the one before, or nan.
            return False
        by = sign * (loss - mean)
        return (self.atol is None or by >= self.atol) and (self.rtol is None or by >= self.rtol * abs(mean))

    def _raise(self, trainer: Trainer, batch: _Batch) -> None:
        """Writes the file on the first rank, and raises on all."""
        found = trainer.strategy.ranks.all_gather_object(batch.described() if batch.is_spike else None)
        spikes = [(rank, words) for rank, words in enumerate(found) if words]
        places = [(batch.epoch, batch.index)]
        if batch.index > 0:
            places.insert(0, (batch.epoch, batch.index - 1))
        elif self._former is not None:
            places.insert(0, self._former)
        epoch = trainer.current_epoch
        # The order of an epoch that is over is not there any more.
        samples = [
            _plain(trainer.sample_indices(all_ranks=True, batch_idx=index)) if of == epoch else None
            for of, index in places
        ]
        self.bad_batches += [index for _, index in places]
        path = self._path(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            excluded = zip(places, samples, strict=True)
            new = [{"epoch": of, "batch": index, "samples": own} for (of, index), own in excluded]
            _write(path, [*_entries(path), *new])
        where = f" on rank {spikes[0][0]}" if trainer.world_size > 1 else ""
        named = f" Its samples are {listed(samples[-1])} of the data set." if samples[-1] else ""
        before = "resume from a checkpoint before them, without their samples."
        written = f"It is in {path} with the batch before it: {before}"
        if trainer.fast_dev_run:
            written = "fast_dev_run writes no file of it."
        raise TrainingSpikeException(
            f"the loss of batch {batch.index} in epoch {batch.epoch}{where} {spikes[0][1]}.{named} {written}",
            batch.index,
        )

    def _path(self, trainer: Trainer) -> Path:
        given = trainer.default_root_dir if self.exclude_batches_path is None else self.exclude_batches_path
        path = Path(os.path.expanduser(given))
        return path if path.suffix == ".json" else path / FILE


@dataclass(slots=True)
class _Batch:
    """A batch of this rank.

    Args:
        epoch: from 0.
        index: in the epoch.
        read: waits for its loss; [None] on a rank that has none.
    """

    epoch: int
    index: int
    read: Callable[[], list[Any]]
    is_spike: bool = False
    mean: float | None = None
    before: int = 0

    @classmethod
    def of(cls, saved: SavedState) -> _Batch:
        loss = None if saved.is_none("loss") else saved.number("loss")
        place = saved.integer("epoch", least=0), saved.integer("index", least=0)
        mean = saved.number("mean") if "mean" in saved and not saved.is_none("mean") else None
        before = saved.integer("before", 0, least=0)
        return cls(*place, lambda: [loss], saved.flag("is_spike", False), mean, before)

    def state_dict(self) -> dict[str, Any]:
        judged = {"is_spike": self.is_spike, "mean": self.mean, "before": self.before}
        return {"epoch": self.epoch, "index": self.index, "loss": self.loss, **judged}

    @property
    def loss(self) -> float | None:
        [loss] = self.read()
        return None if loss is None else float(loss)

    def compare(self, losses: deque[float]) -> None:
        self.before = len(losses)
        self.mean = math.fsum(losses) / len(losses) if losses else None

    def described(self) -> str:
        beside = "" if self.mean is None else f", after a mean of {self.mean:.6g} over {self.before} batches"
        return f"was {self.loss:.6g}{beside}"


def _loss_of(outputs: Any) -> Tensor:
    """The loss of a batch, or of an item where `training_step` counts them: one element on its device."""
    loss, items = outputs, None
    if isinstance(outputs, Mapping):
        loss, items = outputs.get("loss"), outputs.get("num_items")
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"SpikeDetection looks at the loss that training_step returns, which was {kind_of(loss)}: return a tensor, "
            "or a dict with the key 'loss'."
        )
    loss, items = (_whole(value) for value in (loss.detach(), items))
    if items is None:
        return loss  # type: ignore[no-any-return]
    # A batch without items has a loss of 0.
    divisor = items.masked_fill(items == 0, 1) if isinstance(items, Tensor) else items or 1
    return loss / divisor  # type: ignore[no-any-return]


def _whole(value: Any) -> Any:
    """On a mesh, a loss is a DTensor where its logits are split."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _reading(loss: Tensor) -> Callable[[], list[float]]:
    # A copy, as the user may change the loss in place.
    return start_reading(loss.reshape(1).to(torch.float32 if loss.dtype != torch.float64 else loss.dtype, copy=True))


def _plain(samples: list[Any] | None) -> list[Any] | None:
    """Indices as JSON has them: numbers as they are, others as text."""
    if samples is None:
        return None
    return [int(index) if isinstance(index, (int, Tensor)) else str(index) for index in samples]


def _entries(path: Path) -> list[Any]:
    """What the file of excluded batches holds; an empty list if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"SpikeDetection cannot add to {path} ({error}): give another exclude_batches_path."
        ) from error
    if not isinstance(found, list):
        raise ConfigurationError(
            f"SpikeDetection cannot add to {path}, which holds {kind_of(found)}: give another exclude_batches_path."
        )
    return found


def _write(path: Path, entries: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(entries, indent=4) + "\n", encoding="utf-8")
    beside.replace(path)
