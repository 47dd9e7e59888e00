"""NonFiniteGuard, a callback that keeps nan and infinite gradients out of the weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from leyden.callbacks.base import Callback, refusal
from leyden.callbacks.replayed_step import ReplayedStep
from leyden.core.checks import check_choice
from leyden.core.errors import ConfigurationError, LeydenError, StateError
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState
from leyden.core.text import listed
from leyden.trainer.logging.values import are_finite

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

ACTIONS = ("stop", "skip", "rollback")
SHOWN = 3
"""The number of parameter names that a message lists."""


class NonFiniteError(LeydenError):
    """Gradients contained nan or infinity. They have not changed any weight."""


class NonFiniteGuard(Callback):
    """Checks the gradients before each optimizer step, and acts if any is nan or infinite.

    All ranks act alike. A check costs one reduction over the gradients and one flag per optimizer step, for which the
    host waits if it is on a GPU. Sharded gradients (FSDP, a mesh) exchange the flag between ranks. Weights and
    optimizer state stay as they were before the step.

    A gradient scaler (precision 16-mixed) produces infinite gradients while it searches for a scale, and skips their
    steps on its own. With a scaler, only `patience` applies.

    Args:
        action: "stop" raises `NonFiniteError`. "skip" skips the step with a warning and continues with the next batch;
            a skipped step counts in `global_step` and for schedulers. "rollback" returns the model to the last
            checkpoint with a warning and continues with the next batch: the batches since the checkpoint are not used
            again (see `Trainer.roll_back`, and "Bad steps" in docs/trainer.md).
        patience: the number of consecutive steps that may be skipped, or of consecutive rollbacks to the same step; the
            next one raises. With a scaler, "rollback" acts only after this many bad steps. None for no limit.
        further_batches: the number of batches that "rollback" skips after the bad step, at most to the epoch's end.

    Attributes:
        skipped: the skipped global steps, numbered from 1.
        rolled_back: for each rollback, the bad step and the step of the checkpoint.

    Raises:
        ConfigurationError: for an unknown action, a patience below 1, or further batches that are negative or without
            "rollback"; at the start of fit, if "rollback" has no checkpoint to return to or is not supported.

    Example:
        >>> guard = NonFiniteGuard("skip", patience=5)
        >>> # Trainer(callbacks=[guard]).fit(module, loader)
        >>> guard.skipped
        []
    """

    state_per_rank = False
    # Also called on a rank without a sample of the batch. Before digests and checkpoints of the weights.
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
        self._in_a_row = self._in_a_row_before = 0
        """Consecutive bad steps, with the current step and without it."""
        self._batches = -1
        """`progress.batches` at the last checked step."""
        self._bad_step: tuple[int, str] | None = None
        """The step that calls for a rollback, and its description; None if there is none."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        # An error may have ended the previous fit during a bad step.
        self._bad_step, self._batches = None, -1
        if stage == "fit" and trainer.strategy.drives_one:
            raise ConfigurationError(
                f"NonFiniteGuard reads gradients before each step, and {trainer.strategy.name} gives no access to "
                "them: remove the callback. The engine skips steps whose gradients overflow in fp16."
            )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.action != "rollback":
            return
        why = refusal(trainer.callbacks)
        if why is not None:
            raise ConfigurationError(
                f"NonFiniteGuard('rollback') cannot roll back this run: {why}. Use NonFiniteGuard('skip') to skip bad "
                "steps."
            )
        is_replay = any(isinstance(callback, ReplayedStep) for callback in trainer.callbacks)
        if not (
            is_replay or trainer.fast_dev_run or any(c.saves_within(trainer) for c in trainer.checkpoint_callbacks)
        ):
            raise ConfigurationError(
                "NonFiniteGuard('rollback') needs a checkpoint, and no ModelCheckpoint saves one before the end of "
                "training: add ModelCheckpoint(every_n_train_steps=…)."
            )

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        is_bad, batches = self._is_bad(trainer, parameters), trainer.progress.batches
        if batches != self._batches:
            # The first optimizer of a new step. The step is bad if the gradients of any of its optimizers are.
            self._batches, self._in_a_row_before, self._in_a_row = batches, self._in_a_row, 0
        if not is_bad:
            return
        self._in_a_row = self._in_a_row_before + 1
        has_scaler = trainer.strategy.precision.may_skip
        is_patience_exhausted = self.patience is not None and self._in_a_row > self.patience
        rolls_back = self.action == "rollback" and (is_patience_exhausted or not has_scaler)
        step = trainer.global_step + 1
        if rolls_back:
            self._bad_step = self._bad_step or (step, self._description(trainer, module, parameters))
        elif is_patience_exhausted or (self.action == "stop" and not has_scaler):
            raise NonFiniteError(self._description(trainer, module, parameters))
        if has_scaler:
            return
        for parameter in parameters:
            # Optimizers skip parameters without a gradient: no update of weights or state, no weight decay.
            parameter.grad = None
        if rolls_back:
            return
        self.skipped.append(step)
        if trainer.is_global_zero:
            where = f"epoch {trainer.current_epoch}, batch {trainer.progress.batch}"
            samples = _samples(trainer.sample_indices(window=True, all_ranks=True))
            warn(f"step {step} ({where}) was skipped: its gradients were not finite.{samples}")

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bad_step is None or not trainer.window_is_over:
            return
        (step, description), self._bad_step, self._in_a_row = self._bad_step, None, 0
        epoch, samples = trainer.current_epoch, _samples(trainer.sample_indices(window=True, all_ranks=True))
        try:
            path = trainer.roll_back(self.further_batches)
        except LeydenError as error:
            raise NonFiniteError(f"{description} The run cannot be rolled back: {error}") from error
        target = trainer.global_step
        self.rolled_back.append((step, target))
        same_target = itertools.takewhile(lambda pair: pair[1] == target, reversed(self.rolled_back))
        if self.patience is not None and len(list(same_target)) > self.patience:
            raise NonFiniteError(
                f"{description} The run has been rolled back to step {target} {self.patience} times in a row without "
                "getting past this point."
            )
        if trainer.is_global_zero:
            warn(
                f"step {step} (epoch {epoch}, batch {batch_idx}) had gradients that were not finite.{samples} The run "
                f"is rolled back to {path} and continues with the next batch."
            )

    def go_back(self, state: dict[str, Any], step: int) -> None:
        """Keeps the record of bad steps, which led to the rollback."""

    def _is_bad(self, trainer: Trainer, parameters: Sequence[Tensor]) -> bool:
        strategy = trainer.strategy
        is_bad = 1.0 - _are_finite(parameters).to(strategy.root_device, torch.float32)
        if not strategy.replicates and strategy.ranks.world_size > 1:
            is_bad = strategy.ranks.reduce(is_bad, reduction="max")
        return bool(is_bad)

    def _description(self, trainer: Trainer, module: TrainModule, parameters: Sequence[Tensor]) -> str:
        ranks = trainer.strategy.ranks
        ids = {id(parameter) for parameter in parameters}
        own_names = [name for name, p in module.named_parameters() if id(p) in ids and not _are_finite([p])]
        gathered = ranks.all_gather_object((own_names, trainer.strategy.data_rank, trainer.sample_indices(window=True)))
        bad_names = list(dict.fromkeys(name for names, _, _ in gathered for name in names))
        # By data rank, since the ranks of one tensor-parallel group have the same samples.
        samples = {rank: indices for _, rank, indices in gathered if indices is not None}
        repeated = f" for {self._in_a_row} steps in a row" if self._in_a_row > 1 else ""
        return (
            f"the gradients of step {trainer.global_step + 1} (epoch {trainer.current_epoch}, batch "
            f"{trainer.progress.batch}) were not finite{repeated}: {listed(bad_names, SHOWN)}. They changed no weight."
            f"{_samples(list(itertools.chain(*samples.values())))} Inspect that batch, lower the learning rate, clip "
            "gradients (gradient_clip_val=1.0), or skip such steps with NonFiniteGuard('skip')."
        )

    def state_dict(self) -> dict[str, Any]:
        rolled_back = [list(pair) for pair in self.rolled_back]
        return {"skipped": list(self.skipped), "in_a_row": self._in_a_row, "rolled_back": rolled_back}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        self._read(SavedState(state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self._in_a_row, self.rolled_back = self._read(SavedState(state_dict))

    def _read(self, saved: SavedState) -> tuple[list[int], int, list[tuple[int, int]]]:
        # Earlier versions did not save "rolled_back".
        pairs = [_steps(f"rolled_back[{number}]", pair) for number, pair in enumerate(saved.items("rolled_back", ()))]
        if any(len(pair) != 2 for pair in pairs):
            raise StateError("rolled_back", "must be a list of pairs")
        rolled_back = [(step, target) for step, target in pairs]
        return _steps("skipped", saved.value("skipped")), saved.integer("in_a_row", least=0), rolled_back


def _steps(key: str, value: Any) -> list[int]:
    """Reads a list of whole numbers from saved state."""
    entries = SavedState({key: value}).items(key)
    return [SavedState({key: entry}).integer(key) for entry in entries]


def _samples(indices: Sequence[Any] | None) -> str:
    return f" Its samples are {listed(indices)} of the data set." if indices else ""


def _are_finite(parameters: Sequence[Tensor]) -> Tensor:
    """Returns a 0-d bool tensor: whether all of this rank's gradients are finite."""
    return are_finite(p.grad for p in parameters if p.grad is not None)
