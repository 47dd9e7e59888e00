"""DriftGuard, a callback that detects replicas of the weights that have drifted apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leyden.callbacks.base import Callback
from leyden.checkpoint.digests import DigestReader, combined, merged
from leyden.core.checks import check_choice, check_whole
from leyden.core.errors import ConfigurationError, LeydenError
from leyden.core.rank_zero import warn

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

ACTIONS = ("stop", "warn")
SHOWN = 8
"""The number of ranks, or sets of ranks, that a message lists."""


class DriftError(LeydenError):
    """Replicas of the weights that should be identical differ between ranks."""


class DriftGuard(Callback):
    """Compares the replicas of the parameters between ranks, and acts if they have drifted apart.

    Ranks that average their gradients each take the same step on their own replica. A rank with faulty memory or
    arithmetic, with a different library, or with a hook that writes weights drifts away, and no loss shows it. With
    three or more replicas the majority identifies the rank; with two, both ranks are named.

    A check reads this rank's parameters, as `WeightDigests` does, and all-gathers one digest per rank. Steps between
    two checks cost nothing. The check runs before the checkpoint of its step, so drifted weights that it detects are
    never saved. It compares neither buffers, which may differ (batch norm's statistics), nor parameters that DDP was
    told to ignore.

    Under DDP all ranks are compared; under HSDP and on a mesh with `dp_replicate`, those that hold the same shards. In
    a single process this callback is a no-op.

    Args:
        every_n_steps: the number of optimizer steps between checks.
        action: "stop" raises `DriftError` on every rank. "warn" warns once for each set of ranks and continues.

    Attributes:
        drifted: the ranks outside the majority, or all ranks if there is none, at the last check; empty if all agreed.

    Raises:
        ConfigurationError: for an unknown action or a number of steps below 1; at the start of fit, if no two ranks
            hold the same weights (FSDP, ZeRO).

    Example:
        >>> guard = DriftGuard(every_n_steps=50, action="warn")
        >>> # Trainer(strategy="ddp", callbacks=[guard]).fit(module, loader)
        >>> guard.drifted
        []
    """

    # Before early stopping and checkpoints; also called on a rank without a sample of the batch.
    order: ClassVar[int] = 91
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, every_n_steps: int = 100, action: Literal["stop", "warn"] = "stop") -> None:
        check_whole("DriftGuard", 1, every_n_steps=every_n_steps)
        check_choice("DriftGuard", ACTIONS, action=action)
        self.every_n_steps, self.action = every_n_steps, action
        self.drifted: list[int] = []
        self._checked = self._agreed = -1
        """The step of the last check, and of the last check at which all replicas agreed."""
        self._reader = DigestReader()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        strategy = trainer.strategy
        if stage != "fit" or trainer.world_size == 1 or any(len(group) > 1 for group in strategy.replicas):
            return
        raise ConfigurationError(
            f"DriftGuard compares replicas, and strategy={strategy.name!r} has none: each of the {trainer.world_size} "
            "ranks steps its own part of the weights. Remove the callback; digest_every_n_steps compares runs."
        )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        # All ranks start, or resume, with the same weights.
        self.drifted, self._checked = [], trainer.global_step
        self._agreed = trainer.global_step

    def go_back(self, state: dict[str, Any], step: int) -> None:
        # All ranks now have the checkpoint's weights, and repeated steps are checked again.
        self._checked = self._agreed = step

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # `global_step` changes only at the end of an accumulation window.
        if step % self.every_n_steps or step == self._checked or trainer.world_size == 1:
            return
        self._checked = step
        self._check(trainer, module)

    def _check(self, trainer: Trainer, module: TrainModule) -> None:
        ranks, own = trainer.strategy.ranks, self._digests(trainer, module)
        groups = trainer.strategy.replicas
        values = ranks.all_gather_object(combined(own.values()))
        if all(len({values[rank] for rank in group}) == 1 for group in groups):
            self._agreed, self.drifted = trainer.global_step, []
            return
        # Each tensor's digest is sent only after a mismatch.
        digests = ranks.all_gather_object(own)
        drifted_before, self.drifted = self.drifted, []
        descriptions = []
        for group in groups:
            drifted, description = _compare({rank: digests[rank] for rank in group})
            if drifted:
                self.drifted += drifted
                descriptions.append(description)
        message = self._message(trainer, descriptions)
        if self.action == "stop":
            raise DriftError(message)
        if self.drifted != drifted_before and trainer.is_global_zero:
            warn(message)

    def _digests(self, trainer: Trainer, module: TrainModule) -> dict[str, str]:
        """Returns the digest of this rank's part of each compared parameter, in the module's order."""
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        names -= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        held = self._reader.held(trainer.strategy, module, lambda name, _: name in names)
        return {name: digest.value for name, digest in merged([held]).items()}

    def _message(self, trainer: Trainer, descriptions: Sequence[str]) -> str:
        hidden = len(descriptions) - SHOWN
        shown = "; ".join(descriptions[:SHOWN]) + (f"; and {hidden} more sets" if hidden > 0 else "")
        return (
            f"after step {trainer.global_step} {shown}. All agreed after step {self._agreed}. Weights or gradients "
            "changed on one rank only, through faulty memory or arithmetic, a hook that writes them or draws random "
            f"numbers, or a skipped collective. Resume from a checkpoint of step {self._agreed} or earlier."
        )


def _compare(digests: Mapping[int, Mapping[str, str]]) -> tuple[list[int], str]:
    """Compares the replicas of one part of the weights.

    Args:
        digests: the digests by rank, then by parameter.

    Returns:
        The ranks outside the majority (all ranks if there is none) and a description; empty if all replicas agree.
    """
    ranks_by_digests: dict[tuple[str, ...], list[int]] = {}
    for rank, own in digests.items():
        ranks_by_digests.setdefault(tuple(own.values()), []).append(rank)
    if len(ranks_by_digests) == 1:
        return [], ""
    largest = max(ranks_by_digests.values(), key=len)
    has_majority = 2 * len(largest) > len(digests)
    drifted = [rank for rank in digests if not has_majority or rank not in largest]
    names = [name for name in digests[drifted[0]] if len({own[name] for own in digests.values()}) > 1]
    if has_majority:
        verdict = f"{_listed(drifted)} {'has' if len(drifted) == 1 else 'have'} drifted from {_listed(largest)}"
    else:
        verdict = f"{_listed(drifted)} have drifted apart"
    more = "" if len(names) == 1 else f", the first of {len(names)} parameters that do"
    return drifted, f"{verdict}: {names[0]} differs{more}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > SHOWN:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:SHOWN]))}, …)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
