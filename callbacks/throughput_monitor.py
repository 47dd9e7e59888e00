"""ThroughputMonitor, a callback that logs how many samples and items a run processes per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from leyden.callbacks.base import Callback
from leyden.callbacks.loggers.logger import log_to_all
from leyden.callbacks.peak_flops import peak_flops
from leyden.core.checks import check_whole
from leyden.core.devices import peak_memory
from leyden.core.errors import ConfigurationError, kind_of
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

PARTS = ("data", "forward", "backward", "optimizer")
STAGES = ("train", "validate", "test", "predict")


class ThroughputMonitor(Callback):
    """Logs the throughput of training, validation, test and prediction: batches, samples, items and flops per second.

    Rates cover the last `window_size` batches, and are logged once there are that many. `time`, `batches`, `samples`
    and `lengths` are totals, in seconds and counts, which a resumed fit continues. Names begin with the stage:
    `train/time`, `train/device/samples_per_sec` (this rank) and `train/samples_per_sec` (all ranks, assuming that each
    has as many as rank 0). Values are logged at the steps that the Trainer logs (or at the next one for which rank 0
    has a sample) and at every `log_every_n_steps`-th batch of an evaluation. `trainer.callback_metrics` includes them.

    `train/device/peak_memory_gb` is the most memory used so far: by torch on CUDA, by the process elsewhere.

    For a module with `flops_per_batch` (the operations of forward and backward, see `measure_flops`; a number, or a
    function of the batch), `flops_per_sec` of training is logged too. If the device's peak rate is known, so is `mfu`,
    the fraction of that rate that the model uses (PaLM, arXiv:2204.02311, appendix B).

    Time is measured on the host, without waiting for the device. A GPU lags the host by a few batches at most, so rates
    over a window are accurate; `split=True` shows where the host spends its time, not the GPU. Training time excludes
    validation.

    Args:
        batch_size_fn: a function that returns the number of samples in a batch of this rank.
        length_fn: a function that returns the number to add to `lengths` for a batch, such as its tokens. Enables
            `items_per_sec`.
        available_flops: the peak rate of one device, in operations per second. None looks it up by the device's name.
        window_size: the number of batches that a rate is averaged over, from 2.
        separator: the separator between the parts of a name.
        split: also log the fractions of a step's time, which sum to 1: `train/split/data` (from the end of a batch to
            the start of the next, saves included), `forward`, `backward` and `optimizer` (everything after backward).
        prog_bar: also show the items (or samples) per second, the MFU and the peak memory of training in the bar.

    Raises:
        ConfigurationError: for invalid arguments.

    Example:
        >>> monitor = ThroughputMonitor(batch_size_fn=len, window_size=10)
        >>> monitor.window_size
        10
    """

    # The clocks of the ranks differ.
    state_per_rank = False

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        *,
        available_flops: float | None = None,
        window_size: int = 100,
        separator: str = "/",
        split: bool = False,
        prog_bar: bool = False,
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
        self.split, self.prog_bar = split, prog_bar
        self._stages = {stage: _StageCounts(window_size) for stage in STAGES}
        self._clock = _Clock()
        self._peak: float | None = None
        self._logged_step = 0
        """The last training step that was logged."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._stages["train"].totals)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        _Totals.of(SavedState(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stages["train"] = _StageCounts(self.window_size, _Totals.of(SavedState(state)))

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the totals: batches that are undone were still processed."""
        # Repeated steps are logged again.
        self._logged_step = min(self._logged_step, step)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if not trainer.loggers and not self.prog_bar and not trainer.fast_dev_run and trainer.is_global_zero:
            warn(
                "ThroughputMonitor has no logger to write to: its values are only in trainer.callback_metrics. Use "
                "Trainer(logger=True), or remove the callback."
            )
        self._stages |= {name: _StageCounts(self.window_size) for name in self._stages if name != "train"}
        dtype = _compute_dtype(trainer)
        self._peak = self.available_flops
        if self._peak is None and dtype is not None:
            self._peak = peak_flops(trainer.strategy.root_device, dtype)

    # training ---------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        # A continued fit keeps its totals.
        totals = self._stages["train"].totals if trainer.global_step else _Totals()
        self._stages["train"] = _StageCounts(self.window_size, totals)
        self._logged_step = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._clock.restart()

    # Restarting excludes the time between epochs, and between an evaluation and the next batch.
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
        if trainer.window.closes and self._due(trainer, trainer.global_step, self._logged_step):
            self._logged_step = trainer.global_step
            self._log(trainer, "train", self._logged_step)

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
            # Validation is logged under the current step. Test and predict do not belong to a step, so they are logged
            # under the number of batches.
            self._log(trainer, stage, trainer.global_step if stage == "validate" else batches)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    # training and evaluation ------------------------------------------------------------------------------------------
    def _count(self, stage: str, module: TrainModule, batch: Any, parts: dict[str, float]) -> None:
        # They include the backward pass.
        flops = getattr(module, "flops_per_batch", None) if stage == "train" else None
        self._stages[stage].add(
            parts,
            self.batch_size_fn(batch),
            0 if self.length_fn is None else self.length_fn(batch),
            flops(batch) if callable(flops) else flops,
        )

    def _due(self, trainer: Trainer, now: int, last: int) -> bool:
        """Returns True if a multiple of `log_every_n_steps` lies after `last`, up to `now`.

        Hooks are not called on a rank without a sample, so the step itself may pass without one: the next step logs.
        """
        every = trainer.log_every_n_steps
        return every > 0 and now // every > last // every

    def _log(self, trainer: Trainer, stage: str, step: int) -> None:
        values = self._values(trainer, self._stages[stage])
        named = {self.separator.join((stage, *name)): value for name, value in values.items()}
        rate = "items_per_sec" if ("items_per_sec",) in values else "samples_per_sec"
        shown = ((rate,), ("device", "mfu"), ("device", "peak_memory_gb")) if self.prog_bar and stage == "train" else ()
        in_bar = {self.separator.join((stage, *name)) for name in shown}
        trainer.logs.show(named, in_bar)
        log_to_all(trainer, named, step)

    def _values(self, trainer: Trainer, counts: _StageCounts) -> dict[tuple[str, ...], float]:
        """Returns the values to log, by the parts of their names."""
        totals = counts.totals
        values: dict[tuple[str, ...], float] = {
            ("time",): totals.time,
            ("batches",): totals.batches,
            ("samples",): totals.samples,
        }
        if self.length_fn is not None:
            values["lengths",] = totals.lengths
        if peak := peak_memory(trainer.strategy.root_device):
            values["device", "peak_memory_gb"] = peak / 1e9
        if len(counts.window) < self.window_size:
            return values
        size, world = trainer.strategy.data_size, trainer.world_size
        rates = counts.rates()
        if not rates["items"]:
            del rates["items"]
        # Ranks that share a batch (data_size < world_size) also share its operations.
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
            values |= {("split", part): fraction for part, fraction in counts.fractions().items()}
        return values


@dataclass
class _Totals:
    """Seconds and counts since the start of the run."""

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
class _StageCounts:
    """The totals and the window of recent batches of a stage."""

    size: int
    totals: _Totals = field(default_factory=_Totals)
    window: deque[_Batch] = field(init=False)

    def __post_init__(self) -> None:
        self.window = deque(maxlen=self.size)

    def add(self, parts: dict[str, float], samples: int, length: int, flops: float | None) -> None:
        self.window.append(_Batch(parts, samples, length, flops))
        self.totals.add(sum(parts.values()), samples, length)

    def rates(self) -> dict[str, float]:
        """Returns the window's rates per second; "flops" only if every batch has a number."""
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

    def fractions(self) -> dict[str, float]:
        """Returns the fraction of the window's time that each part of a step takes."""
        sums = {part: sum(batch.parts.get(part, 0.0) for batch in self.window) for part in PARTS}
        whole = max(sum(sums.values()), 1e-9)
        return {part: seconds / whole for part, seconds in sums.items()}


class _Clock:
    """Measures the parts of a batch; each part ends with a mark."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def restart(self) -> None:
        """Discards the parts and the time since the last mark."""
        self._last, self._parts = time.perf_counter(), {}

    def mark(self, part: str) -> None:
        """Ends a part of the batch. Parts of the same name add up."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part, and starts a new batch."""
        parts, self._parts = self._parts, {}
        return parts


def _compute_dtype(trainer: Trainer) -> torch.dtype | None:
    """Returns the dtype of matrix products, from the name of the precision; None if there are several (fp8)."""
    known = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32, "64": torch.float64}
    return known.get(str(trainer.precision).partition("-")[0])
