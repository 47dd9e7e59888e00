"""The search for a learning rate: records the loss while the rate grows from step to step (Smith, 2017)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from leyden.callbacks.base import CLOSING_ORDER, Callback
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import warn
from leyden.data.sharding import NO_SAMPLES
from leyden.trainer.tuning.trial import Subject, owners_of

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

Method: TypeAlias = Literal["valley", "steepest"]
MODES = ("exponential", "linear")
METHODS = ("valley", "steepest")
NAMES = ("lr", "learning_rate")
SMOOTHING = 0.98


@dataclass
class LRFinder:
    """The result of a search: rates in `results["lr"]`, smoothed losses after a step at each in `results["loss"]`.

    Attributes:
        mode: "exponential" or "linear".
        lr_min: the first rate.
        lr_max: the last rate.
        num_training: number of steps requested.
        results: rates and losses of all steps until the loss grew too large.

    Example:
        >>> finder = LRFinder("linear", 0.0, 1.0, 4, {"lr": [0.1, 0.2, 0.3, 0.4], "loss": [4.0, 3.0, 1.0, 2.0]})
        >>> finder.suggestion(skip_begin=0, skip_end=0)
        0.2
    """

    mode: str
    lr_min: float
    lr_max: float
    num_training: int
    results: dict[str, list[float]] = field(default_factory=lambda: {"lr": [], "loss": []})

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1, method: Method = "valley") -> float | None:
        """Returns a rate at which the loss falls; None, with a warning, if there is none.

        There is none where the fall is within the noise of single batches.

        Args:
            skip_begin: number of points to skip at the beginning.
            skip_end: number of points to skip at the end.
            method: "valley" for the middle of the longest fall, as fastai's default does, or "steepest" for the point
                where the loss falls most per factor of the rate.

        Raises:
            ConfigurationError: for an unknown method.

        References:
            The valley is the method "valley" of fastai's `lr_find`, by ESRI.
        """
        if method not in METHODS:
            raise ConfigurationError(f"method={method!r}: {nearest(str(method), METHODS)}")
        place, reason = self._place(skip_begin, skip_end, method)
        if place is None:
            warn(f"no learning rate is suggested: {reason}")
            return None
        return self.results["lr"][place]

    def _place(self, skip_begin: int, skip_end: int, method: Method) -> tuple[int | None, str]:
        """Returns the index of the suggested rate; or None, and the reason."""
        losses = self.results["loss"]
        places = range(len(losses))[skip_begin : len(losses) - skip_end]
        finite = [place for place in places if math.isfinite(losses[place])]
        if len(finite) < 2:
            return None, (
                f"too few finite losses, {len(losses)} minus {skip_begin} + {skip_end} skipped ones. Search with more "
                "steps or a lower max_lr."
            )
        fall, noise = _fall_and_noise(torch.tensor(_unsmoothed(losses), dtype=torch.float64)[finite])
        if not fall > 3 * noise:
            return None, (
                f"the loss falls by {max(fall, 0.0):.2g}, which its noise of {noise:.2g} may explain. Search with more "
                "steps, larger batches or a higher max_lr, and look at plot()."
            )
        values = torch.tensor([losses[place] for place in finite], dtype=torch.float64)
        if method == "valley":
            return finite[_middle_of_fall(values.tolist())], ""
        rates = torch.tensor([self.results["lr"][place] for place in finite], dtype=torch.float64)
        [slope] = torch.gradient(values, spacing=(rates.log(),))
        return finite[int(slope.argmin())], ""

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plots the loss over the rates with matplotlib.

        Args:
            suggest: mark the rate that `suggestion()` returns.
            show: show the figure.
            ax: axes to draw on; None for a new figure.

        Returns:
            The figure.

        Raises:
            ConfigurationError: if matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ConfigurationError("plot() needs matplotlib: pip install matplotlib.") from error
        if ax is None:
            _, ax = plt.subplots()
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        place = self._place(10, 1, "valley")[0] if suggest else None
        if place is not None:
            ax.plot(self.results["lr"][place], self.results["loss"][place], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return ax.figure


@dataclass(frozen=True)
class RateSearch:
    """A search whose settings are arguments of `Tuner.lr_find`. An invalid one raises ConfigurationError."""

    min_lr: float
    max_lr: float
    num_training: int
    mode: str
    early_stop_threshold: float | None
    update_attr: bool
    attr_name: str

    def __post_init__(self) -> None:
        if str(self.mode).lower() not in MODES:
            raise ConfigurationError(f"mode={self.mode!r}: {nearest(str(self.mode), MODES)}")
        if not 0 < self.min_lr < self.max_lr:
            raise ConfigurationError(
                f"min_lr={self.min_lr!r}, max_lr={self.max_lr!r}: give two rates with 0 < min_lr < max_lr."
            )
        if type(self.num_training) is not int or self.num_training < 2:
            raise ConfigurationError(f"num_training={self.num_training!r}: give a number of steps from 2.")

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0; the last step has `max_lr`."""
        fraction = step / (self.num_training - 1)
        if self.mode.lower() == "exponential":
            return float(self.min_lr * (self.max_lr / self.min_lr) ** fraction)
        return self.min_lr + (self.max_lr - self.min_lr) * fraction

    def owners(self, subject: Subject) -> tuple[str, list[Any]]:
        """Returns the name of the attribute to set, and the objects that have it.

        Raises:
            ConfigurationError: if no object has the attribute.
        """
        for name in (self.attr_name,) if self.attr_name else NAMES:
            owners = owners_of(name, subject.module, subject.datamodule)
            if owners:
                return name, owners
        wanted = self.attr_name or " or ".join(NAMES)
        raise ConfigurationError(
            f"{type(subject.module).__name__} and its hyperparameters have no {wanted} to set. Use self.lr in "
            "configure_optimizers, name another attribute with attr_name, or use update_attr=False."
        )

    def search(self, subject: Subject) -> LRFinder:
        """Searches with a copy of the module; the original is unchanged."""
        sweep = Sweep(self)
        with subject.restoring_rng():
            steps = {"max_steps": self.num_training, "max_epochs": -1, "limit_val_batches": 0}
            subject.copied().run([sweep], **steps)
        results = {"lr": sweep.rates, "loss": sweep.losses}
        return LRFinder(self.mode.lower(), self.min_lr, self.max_lr, self.num_training, results)


class Sweep(Callback):
    """Sets the rate of each step of a trial and records its loss, averaged over all samples and smoothed.

    It is a closing callback, because closing callbacks also run on a rank without a sample.
    """

    order = CLOSING_ORDER

    def __init__(self, search: RateSearch) -> None:
        self._search = search
        self.rates: list[float] = []
        """The rates of all steps so far, a plain list that forked or spawned ranks can send back."""
        self.losses: list[float] = []
        """The smoothed losses after these steps."""
        self._parts: list[Tensor] = []
        self._average, self._best = 0.0, math.inf

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                "a learning rate can be searched for a single optimizer, but configure_optimizers returned "
                f"{len(trainer.optimizers)}: return one, or search in your own loop."
            )
        trainer.rest_schedulers()
        self._set_rate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is not NO_SAMPLES:
            loss, items = _loss_of(outputs)
            weight = trainer.window.weight
            total, count = (loss * weight, weight) if items is None else (loss, items)
            self._parts.append(torch.stack([total.detach().float(), torch.as_tensor(count).to(total.device).float()]))
        if trainer.window.closes:
            self._record(trainer, torch.stack(self._parts).sum(0) if self._parts else torch.zeros(2))
            self._parts = []
            self._set_rate(trainer)

    def _set_rate(self, trainer: Trainer) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self._search.rate(trainer.global_step)

    def _record(self, trainer: Trainer, part: Tensor) -> None:
        ranks, device = trainer.strategy.ranks, trainer.strategy.root_device
        total, count = ranks.reduce(part.to(device), reduction="sum").tolist()
        current, rates, losses = total / count, self.rates, self.losses
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * current
        smoothed = self._average / (1 - SMOOTHING ** (len(losses) + 1))
        rates.append(self._search.rate(len(rates)))
        losses.append(smoothed)
        limit = self._search.early_stop_threshold
        if not math.isfinite(smoothed) or (limit is not None and len(losses) > 2 and smoothed > limit * self._best):
            trainer.should_stop = True
        self._best = min(self._best, smoothed)


def _unsmoothed(losses: list[float]) -> list[float]:
    """Returns the losses of which `losses` is the smoothed average."""
    sums = [0.0, *(loss * (1 - SMOOTHING**number) for number, loss in enumerate(losses, start=1))]
    return [(total - SMOOTHING * before) / (1 - SMOOTHING) for before, total in pairwise(sums)]


def _fall_and_noise(losses: Tensor) -> tuple[float, float]:
    """Returns how far the loss falls below its first quarter, where rates are too low to matter, and the error of that.

    The lowest loss is the lowest mean of a tenth of the points.
    """
    first, width = losses[: max(1, len(losses) // 4)], max(1, len(losses) // 10)
    fall = first.mean() - losses.unfold(0, width, 1).mean(1).min()
    noise = first.std(correction=0) * math.sqrt(1 / width + 1 / len(first))
    return float(fall), float(noise)


def _middle_of_fall(losses: list[float]) -> int:
    """Returns the index in the middle of the longest fall: as many indices as the longest falling subsequence has."""
    tails: list[float] = []
    """The negated last loss of the best falling subsequence of each length, so far."""
    end = 0
    for index, loss in enumerate(losses):
        length = bisect.bisect_left(tails, -loss)
        if length == len(tails):
            end = index
        tails[length : length + 1] = [-loss]
    return end - len(tails) // 2


def _loss_of(outputs: Any) -> tuple[Tensor, Any]:
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        return outputs["loss"], outputs.get("num_items")
    if not isinstance(outputs, Tensor):
        raise ConfigurationError(
            "a learning rate search needs the loss of each step: return the loss from training_step."
        )
    return outputs, None
