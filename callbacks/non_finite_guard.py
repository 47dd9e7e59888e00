"""NonFiniteGuard, a callback that keeps gradients with nan or infinity out of the weights."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.base import Callback, refusal
from leyden.callbacks.replayed_step import ReplayedStep
from leyden.strategies.errors import ConfigurationError, LeydenError, StateError
from leyden.strategies.local_weights import local_part
from leyden.strategies.saved_state import SavedState
from leyden.trainer.arguments.checks import check_choice
from leyden.trainer.format.text import listed

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

ACTIONS = ("stop", "skip", "rollback")
SHOWN = 3
"""So many names of parameters a message lists."""


class NonFiniteError(LeydenError):
    """Gradients had nan or infinity in them. No weight has been changed by them."""


class NonFiniteGuard(Callback):
    """Looks at the gradients of each step before the optimizer does, and acts if one is nan or infinite.

    All ranks act alike. Looking costs one reduction over the gradients and one flag per optimizer step, which on a GPU
    the host waits for; sharded gradients (FSDP, a mesh) exchange the flag. Weights and optimizer state stay as they
    were before the step.

    Under a gradient scaler (precision 16-mixed) infinite gradients are a part of its search for a scale, and the scaler
    leaves their steps out by itself: there only `patience` counts.

    Args:
        action: "stop" raises `NonFiniteError`; "skip" leaves the step out with a warning, and goes on with the next
            batch. A step that is left out counts as one: `global_step` and schedulers go on. "rollback" takes the run
            back to its last checkpoint with a warning, but not in the data: the batches since the checkpoint are not
            used again (see `Trainer.roll_back`, and "Bad steps" in docs/trainer.md).
        patience: steps in a row that may be left out, or times in a row that the run may go back to the same step; the
            next one raises. Under a scaler "rollback" goes back after so many. None for no limit.
        further_batches: how many batches after the bad step "rollback" passes over too, at most to the epoch's end.

    Attributes:
        skipped: the global steps that were left out, by their numbers from 1.
        rolled_back: for each time that the run went back, the bad step and the step of the checkpoint.

    Raises:
        ConfigurationError: for an unknown action, a patience below 1, and further batches below 0 or without
            "rollback"; at the start of fit, where "rollback" would have no checkpoint or could not go back.

    Example:
        >>> guard = NonFiniteGuard("skip", patience=5)
        >>> # Trainer(callbacks=[guard]).fit(module, loader)
        >>> guard.skipped
        []
    """

    state_per_rank = False
    # Also on a rank that has no sample of the batch. Before digests and checkpoints of the weights.
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(
        self,
        action: Literal["stop", "skip", "rollback"] = "stop",
        patience: int | None = 10,
        further_batches: int = 0,
    ) -> None:
        check_choice("NonFiniteGuard", ACTIONS, action=action)
        if patience is not None and (type(patience) is not int or patience < 1):
            raise ConfigurationError(f"NonFiniteGuard(patience={patience!r}): give a number from 1, or None.")
        if type(further_batches) is not int or further_batches < 0 or (further_batches and action != "rollback"):
            raise ConfigurationError(
                f"NonFiniteGuard({action!r}, further_batches={further_batches!r}): give a number from 0, and only with "
                "'rollback'."
            )
        self.action, self.patience, self.further_batches = action, patience, further_batches
        self.skipped: list[int] = []
        self.rolled_back: list[tuple[int, int]] = []
        self._in_a_row = self._before = 0
        """Bad steps in a row, this one included, and without it."""
        self._batches = -1
        """Batches done before the step that was looked at last."""
        self._bad: tuple[int, str] | None = None
        """The step after which the run goes back, and what was wrong with it; None if nothing was."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # An error may have ended the last fit within a bad step.
        self._bad, self._batches = None, -1
        if stage == "fit" and trainer.strategy.drives_one:
            raise ConfigurationError(
                f"NonFiniteGuard reads gradients before a step, and {trainer.strategy.name}'s engine keeps them: leave "
                "the callback out; the engine skips steps whose gradients overflow in fp16."
            )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.action != "rollback":
            return
        why = refusal(trainer.callbacks)
        if why is not None:
            raise ConfigurationError(
                f"NonFiniteGuard('rollback') cannot take this run back to a checkpoint: {why}. Leave bad steps out: "
                "NonFiniteGuard('skip')."
            )
        is_replay = any(isinstance(callback, ReplayedStep) for callback in trainer.callbacks)
        if not (
            is_replay or trainer.fast_dev_run or any(c.saves_within(trainer) for c in trainer.checkpoint_callbacks)
        ):
            raise ConfigurationError(
                "NonFiniteGuard('rollback') goes back to a checkpoint of this run, and no ModelCheckpoint saves one "
                "before the end of training: add ModelCheckpoint(every_n_train_steps=…)."
            )

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        is_bad, batches = self._is_bad(trainer, parameters), trainer.progress.batches
        if batches != self._batches:
            # The first of the step's optimizers: the step is good if all of them are.
            self._batches, self._before, self._in_a_row = batches, self._in_a_row, 0
        if not is_bad:
            return
        self._in_a_row = self._before + 1
        scales = trainer.strategy.precision.may_skip
        is_over = self.patience is not None and self._in_a_row > self.patience
        goes_back = self.action == "rollback" and (is_over or not scales)
        step = trainer.global_step + 1
        if goes_back:
            self._bad = self._bad or (step, self._described(trainer, module, parameters))
        elif is_over or (self.action == "stop" and not scales):
            raise NonFiniteError(self._described(trainer, module, parameters))
        if scales:
            return
        for parameter in parameters:
            # Optimizers leave parameters without a gradient alone, with their state and weight decay.
            parameter.grad = None
        if goes_back:
            return
        self.skipped.append(step)
        if trainer.is_global_zero:
            where = f"epoch {trainer.current_epoch}, batch {trainer.progress.batch}"
            samples = _samples(trainer.sample_indices(window=True, all_ranks=True))
            warnings.warn(f"step {step} ({where}) was left out: its gradients were not finite.{samples}", stacklevel=2)

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bad is None or not trainer.window_is_over:
            return
        (step, text), self._bad, self._in_a_row = self._bad, None, 0
        epoch, samples = trainer.current_epoch, _samples(trainer.sample_indices(window=True, all_ranks=True))
        try:
            path = trainer.roll_back(self.further_batches)
        except LeydenError as error:
            raise NonFiniteError(f"{text} The run cannot go back: {error}") from error
        self.rolled_back.append((step, trainer.global_step))
        places = [place for _, place in reversed(self.rolled_back)]
        times = len(list(itertools.takewhile(lambda place: place == places[0], places)))
        if self.patience is not None and times > self.patience:
            raise NonFiniteError(
                f"{text} The run has gone back to step {places[0]} {self.patience} times in a row, and got no further."
            )
        if trainer.is_global_zero:
            warnings.warn(
                f"step {step} (epoch {epoch}, batch {batch_idx}) had gradients that were not finite.{samples} The run "
                f"goes back to {path}, and on in the data.",
                stacklevel=2,
            )

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps its record, which says why the run went back."""

    def _is_bad(self, trainer: Trainer, parameters: Sequence[Tensor]) -> bool:
        strategy = trainer.strategy
        is_bad = 1.0 - _are_finite(parameters).to(strategy.root_device, torch.float32)
        if not strategy.replicates and strategy.ranks.world_size > 1:
            is_bad = strategy.ranks.reduce(is_bad, reduction="max")
        return bool(is_bad)

    def _described(self, trainer: Trainer, module: TrainModule, parameters: Sequence[Tensor]) -> str:
        ranks = trainer.strategy.ranks
        reached = {id(parameter) for parameter in parameters}
        here = [name for name, p in module.named_parameters() if id(p) in reached and not _are_finite([p])]
        everywhere = ranks.all_gather_object((here, trainer.strategy.data_rank, trainer.sample_indices(window=True)))
        found = list(dict.fromkeys(name for names, _, _ in everywhere for name in names))
        # By the rank of the data, as ranks of one tensor-parallel group have the same samples.
        samples = {rank: indices for _, rank, indices in everywhere if indices is not None}
        row = f" for {self._in_a_row} steps in a row" if self._in_a_row > 1 else ""
        return (
            f"the gradients of step {trainer.global_step + 1} (epoch {trainer.current_epoch}, batch "
            f"{trainer.progress.batch}) were not finite{row}: {listed(found, SHOWN)}. No weight was "
            f"changed by them.{_samples(list(itertools.chain(*samples.values())))} Look at that batch, lower the "
            "learning rate, clip gradients (gradient_clip_val=1.0), or leave such steps out: NonFiniteGuard('skip')."
        )

    def state_dict(self) -> dict[str, Any]:
        found = {"skipped": list(self.skipped), "in_a_row": self._in_a_row}
        return {**found, "rolled_back": [list(pair) for pair in self.rolled_back]}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        self._read(SavedState(state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self._in_a_row, self.rolled_back = self._read(SavedState(state_dict))

    def _read(self, saved: SavedState) -> tuple[list[int], int, list[tuple[int, int]]]:
        # Earlier versions did not have the last one.
        pairs = [_steps(f"rolled_back[{number}]", pair) for number, pair in enumerate(saved.items("rolled_back", ()))]
        if any(len(pair) != 2 for pair in pairs):
            raise StateError("rolled_back", "must be a list of pairs")
        places = [(step, place) for step, place in pairs]
        return _steps("skipped", saved.value("skipped")), saved.integer("in_a_row", least=0), places


def _steps(key: str, value: Any) -> list[int]:
    """A list of whole numbers in saved state."""
    entries = SavedState({key: value}).items(key)
    return [SavedState({key: entry}).integer(key) for entry in entries]


def _samples(indices: Sequence[Any] | None) -> str:
    return f" Its samples are {listed(indices)} of the data set." if indices else ""


def _are_finite(parameters: Sequence[Tensor]) -> Tensor:
    """True, 0-d, unless this rank's gradients have a nan or an infinity."""
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in dense:
        if grad.numel():
            by_device.setdefault(grad.device, []).append(grad)
    if not by_device:
        return torch.ones((), dtype=torch.bool)
    # The largest values: a norm of half-precision gradients may overflow where they do not.
    largest = [torch.stack([n.float() for n in torch._foreach_norm(own, math.inf)]) for own in by_device.values()]
    return torch.stack([found.max().to(largest[0].device) for found in largest]).max().isfinite()
