"""ThroughputMonitor, a callback that logs how many samples and items a run takes in per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.run_loggers import check_has_logger, log_to_all
from leyden.callbacks.peak_flops import peak_flops
from leyden.strategies.errors import ConfigurationError, kind_of
from leyden.strategies.saved_state import SavedState
from leyden.trainer.arguments.checks import check_whole

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

PARTS = ("data", "forward", "backward", "optimizer")
STAGES = ("train", "validate", "test", "predict")


class ThroughputMonitor(Callback):
    """Logs the throughput of training, validation, test and prediction: batches, samples, items and flops per second.

    Rates are of the last `window_size` batches, once there are so many; `time`, `batches`, `samples` and `lengths` are
    totals, in seconds and counts, which a resumed fit takes up again. Names begin with the stage: `train/time`,
    `train/device/samples_per_sec` (of this rank) and `train/samples_per_sec` (of all ranks, as many as rank 0 each).
    Values are logged at the steps that the Trainer logs (or at the next one for which rank 0 has a sample), at every
    `log_every_n_steps`-th batch of an evaluation, and are in `trainer.callback_metrics`.

    A module with `flops_per_batch` (the operations of forward and backward, see `measure_flops`; a number, or a
    function of the batch) also has `flops_per_sec`, and `mfu` where the device's peak rate is known: the share of it
    that the model uses (PaLM, arXiv:2204.02311, appendix B).

    Time is taken on the host, and nothing waits for the device. A GPU works behind the host by a few batches at most,
    so rates over a window hold; `split=True` shows where the host spends its time, not the GPU. Validation in between
    is no part of the training's time.

    Args:
        batch_size_fn: returns the number of samples in a batch of this rank.
        length_fn: returns what a batch adds to `lengths`, such as its tokens; with it `items_per_sec` is logged.
        available_flops: the peak rate of one device in operations per second; None looks it up by the device's name.
        window_size: batches that a rate is the mean of, from 2.
        separator: between the parts of a name.
        split: also log how a step's time divides: the shares `train/split/data` (from the end of a batch to the start
            of the next, saves included), `forward`, `backward` and `optimizer` (all that follows backward) sum to 1.

    Raises:
        ConfigurationError: for invalid arguments, and if a run starts without a logger.

    Example:
        >>> monitor = ThroughputMonitor(batch_size_fn=len, window_size=10)
        >>> monitor.window_size
        10
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        *,
        available_flops: float | None = None,
        window_size: int = 100,
        separator: str = "/",
        split: bool = False,
    ) -> None:
        for name, function in (("batch_size_fn", batch_size_fn), ("length_fn", length_fn)):
            if not callable(function) and not (name == "length_fn" and function is None):
                raise ConfigurationError(
                    f"ThroughputMonitor({name}={function!r}) is {kind_of(function)}: give a function of the batch, "
                    "such as lambda batch: len(batch[0])."
                )
        check_whole("ThroughputMonitor", 2, window_size=window_size)
        if available_flops is not None and not available_flops > 0:
            raise ConfigurationError(f"ThroughputMonitor(available_flops={available_flops!r}): give a number above 0.")
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.available_flops, self.window_size, self.separator = available_flops, window_size, separator
        self.split = split
        self._stages = {stage: _Counted(window_size) for stage in STAGES}
        self._clock = _Clock()
        self._peak: float | None = None
        self._row = 0
        """The step of the last row of training."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._stages["train"].totals)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        _Totals.of(SavedState(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stages["train"] = _Counted(self.window_size, _Totals.of(SavedState(state)))

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps its totals: what was read and computed still counts once it is undone."""
        # Steps that come again get their rows again.
        self._row = min(self._row, step)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        check_has_logger(self, trainer)
        self._stages |= {name: _Counted(self.window_size) for name in self._stages if name != "train"}
        dtype = _computed_in(trainer)
        self._peak = self.available_flops
        if self._peak is None and dtype is not None:
            self._peak = peak_flops(trainer.strategy.root_device, dtype)

    # training ---------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        # A fit that goes on keeps its totals.
        totals = self._stages["train"].totals if trainer.global_step else _Totals()
        self._stages["train"] = _Counted(self.window_size, totals)
        self._row = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._clock.begin()

    # The time between two epochs, and from an evaluation to the next batch, does not count.
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = on_train_epoch_start
    on_validation_end = on_train_epoch_start

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._clock.mark("data")

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Any) -> None:
        self._clock.mark("forward")

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        self._clock.mark("backward")

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._clock.mark("optimizer")
        self._count("train", module, batch, self._clock.take())
        if trainer.window.closes and self._due(trainer, trainer.global_step, self._row):
            self._row = trainer.global_step
            self._log(trainer, "train", self._row)

    # evaluation -------------------------------------------------------------------------------------------------------
    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            return
        stage = "validate" if trainer.state.stage == "fit" else str(trainer.state.stage)
        self._clock.mark("forward")
        self._count(stage, module, batch, self._clock.take())
        batches = self._stages[stage].totals.batches
        if self._due(trainer, batches, batches - 1):
            # Beside the steps of a fit; else by its own batches, which no other step counts.
            self._log(trainer, stage, trainer.global_step if stage == "validate" else batches)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    # both -------------------------------------------------------------------------------------------------------------
    def _count(self, stage: str, module: TrainModule, batch: Any, parts: dict[str, float]) -> None:
        flops = getattr(module, "flops_per_batch", None)
        self._stages[stage].add(
            parts,
            self.batch_size_fn(batch),
            0 if self.length_fn is None else self.length_fn(batch),
            flops(batch) if callable(flops) else flops,
        )

    def _due(self, trainer: Trainer, now: int, before: int) -> bool:
        """True if a row is due by now that was not yet due before.

        A rank may have had no sample at the row's own step (its hooks are not called then): the row comes at the next.
        """
        every = trainer.log_every_n_steps
        return every > 0 and now // every > before // every

    def _log(self, trainer: Trainer, stage: str, step: int) -> None:
        values = self._values(trainer, self._stages[stage])
        named = {self.separator.join((stage, *name)): value for name, value in values.items()}
        trainer.logs.show(named)
        log_to_all(trainer, named, step)

    def _values(self, trainer: Trainer, counted: _Counted) -> dict[tuple[str, ...], float]:
        """Returns what is logged, by the parts of its name."""
        totals = counted.totals
        values: dict[tuple[str, ...], float] = {
            ("time",): totals.time,
            ("batches",): totals.batches,
            ("samples",): totals.samples,
        }
        if self.length_fn is not None:
            values["lengths",] = totals.lengths
        if len(counted.window) < self.window_size:
            return values
        size, world = trainer.strategy.data_size, trainer.world_size
        rates = counted.rates()
        if self.length_fn is None:
            del rates["items"]
        # Ranks that share a batch share its operations too.
        flops = rates.pop("flops", None)
        for name, rate in rates.items():
            values["device", f"{name}_per_sec"] = rate
            values[f"{name}_per_sec",] = rate * size
        if flops is not None:
            values["device", "flops_per_sec"] = flops * size / world
            values["flops_per_sec",] = flops * size
            if self._peak is not None:
                values["device", "mfu"] = flops * size / world / self._peak
        if self.split:
            values |= {("split", part): share for part, share in counted.shares().items()}
        return values


@dataclass
class _Totals:
    """Since the run began: seconds and counts."""

    time: float = 0.0
    batches: int = 0
    samples: int = 0
    lengths: int = 0

    @classmethod
    def of(cls, saved: SavedState) -> _Totals:
        counts = {name: saved.integer(name) for name in ("batches", "samples", "lengths")}
        return cls(saved.number("time"), **counts)

    def add(self, seconds: float, samples: int, length: int) -> None:
        self.time += seconds
        self.batches += 1
        self.samples += samples
        self.lengths += length


@dataclass(frozen=True, slots=True)
class _Batch:
    parts: dict[str, float]
    samples: int
    length: int
    flops: float | None


@dataclass
class _Counted:
    """The batches of a stage.

    Args:
        size: of the window.
    """

    size: int
    totals: _Totals = field(default_factory=_Totals)
    window: deque[_Batch] = field(init=False)

    def __post_init__(self) -> None:
        self.window = deque(maxlen=self.size)

    def add(self, parts: dict[str, float], samples: int, length: int, flops: float | None) -> None:
        self.window.append(_Batch(parts, samples, length, flops))
        self.totals.add(sum(parts.values()), samples, length)

    def rates(self) -> dict[str, float]:
        """Returns the rates of the window's batches per second; flops only if all of them report theirs."""
        seconds = max(sum(sum(batch.parts.values()) for batch in self.window), 1e-9)
        found = {
            "batches": len(self.window) / seconds,
            "samples": sum(batch.samples for batch in self.window) / seconds,
            "items": sum(batch.length for batch in self.window) / seconds,
        }
        flops = [batch.flops for batch in self.window if batch.flops is not None]
        if len(flops) == len(self.window):
            found["flops"] = sum(flops) / seconds
        return found

    def shares(self) -> dict[str, float]:
        """Returns how the window's time divides."""
        sums = {part: sum(batch.parts.get(part, 0.0) for batch in self.window) for part in PARTS}
        whole = max(sum(sums.values()), 1e-9)
        return {part: seconds / whole for part, seconds in sums.items()}


class _Clock:
    """Divides time into parts that end with a mark."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def begin(self) -> None:
        """Drops the time since the last mark."""
        self._last, self._parts = time.perf_counter(), {}

    def mark(self, part: str) -> None:
        """Ends a part of the batch; several of a name add up."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Returns the parts of the batch that has ended."""
        parts, self._parts = self._parts, {}
        return parts


def _computed_in(trainer: Trainer) -> torch.dtype | None:
    """Returns the dtype of a run's matrix products, as the name of its precision says; None for several (fp8)."""
    known = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
    return known.get(str(trainer.precision).partition("-")[0])
