"""DriftGuard, a callback that finds replicas of the weights that have drifted apart."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from leyden.callbacks.base import Callback
from leyden.strategies.errors import ConfigurationError, LeydenError
from leyden.trainer.arguments.checks import check_choice, check_whole
from leyden.trainer.checkpoint.digests import DigestReader, combined, merged

if TYPE_CHECKING:
    from leyden.trainer.module import TrainModule
    from leyden.trainer.trainer import Trainer

ACTIONS = ("stop", "warn")
SHOWN = 8
"""So many ranks, or sets of them, a message lists."""


class DriftError(LeydenError):
    """Replicas of the weights differ, which the ranks should hold alike."""


class DriftGuard(Callback):
    """Compares the replicas of the parameters between ranks, and acts if they have drifted apart.

    Ranks that average their gradients step the same weights, each by itself. A rank whose memory or arithmetic fails,
    whose library differs, or that writes weights in a hook of its own drifts away, and no loss shows it. With three
    replicas or more the majority names the rank; two name the pair.

    A check reads this rank's parameters, as `WeightDigests` does, and sends one digest to the other ranks, which wait
    for each other; steps between two checks have no cost. It comes before the checkpoint of its step, so that no
    checkpoint holds weights that were found to have drifted. Buffers, such as the statistics of batch norm, may differ
    and are not compared; nor are parameters that DDP was told to ignore.

    DDP compares all ranks, HSDP and a mesh with `dp_replicate` those that hold the same shards. On one process it does
    nothing.

    Args:
        every_n_steps: optimizer steps from one check to the next.
        action: "stop" raises `DriftError` on every rank; "warn" warns once for each set of ranks, and trains on.

    Attributes:
        drifted: the ranks outside the majority, or of the pair, at the last check that found any.

    Raises:
        ConfigurationError: for an unknown action, and for steps below 1; at the start of fit, where no two ranks hold
            the same weights (FSDP, ZeRO).

    Example:
        >>> guard = DriftGuard(every_n_steps=50, action="warn")
        >>> # Trainer(strategy="ddp", callbacks=[guard]).fit(module, loader)
        >>> guard.drifted
        []
    """

    # Before early stopping and checkpoints. On a rank without a sample it is called too.
    order: ClassVar[int] = 91
    closing_hooks = frozenset({"on_train_batch_end"})

    def __init__(self, every_n_steps: int = 100, action: Literal["stop", "warn"] = "stop") -> None:
        check_whole("DriftGuard", 1, every_n_steps=every_n_steps)
        check_choice("DriftGuard", ACTIONS, action=action)
        self.every_n_steps, self.action = every_n_steps, action
        self.drifted: list[int] = []
        self._checked = self._agreed = -1
        """The step of the last check, and of the last one that all replicas have passed."""
        self._reader = DigestReader()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        strategy = trainer.strategy
        if stage != "fit" or trainer.world_size == 1 or any(len(group) > 1 for group in strategy.replicas):
            return
        raise ConfigurationError(
            f"DriftGuard compares replicas, and strategy={strategy.name!r} has none on these {trainer.world_size} "
            "ranks: each steps its own part of the weights. Leave the callback out; digest_every_n_steps compares runs."
        )

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Where a run starts or resumes, all ranks are given the same weights.
        self.drifted, self._checked = [], trainer.global_step
        self._agreed = trainer.global_step

    def go_back(self, state: dict[str, Any], step: int) -> None:
        # All ranks have the checkpoint's weights; steps that are taken again are checked again.
        self._checked = self._agreed = step

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Within an accumulation window the step is still the last one.
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
        # Only now each tensor's digest is sent.
        everywhere = ranks.all_gather_object(own)
        before, self.drifted = self.drifted, []
        lines = []
        for group in groups:
            apart, line = _described({rank: everywhere[rank] for rank in group})
            self.drifted += apart
            lines += [line] if apart else []
        text = self._message(trainer, lines)
        if self.action == "stop":
            raise DriftError(text)
        if self.drifted != before and trainer.is_global_zero:
            warnings.warn(text, stacklevel=2)

    def _digests(self, trainer: Trainer, module: TrainModule) -> dict[str, str]:
        """Returns the digest of this rank's part of each parameter that others may hold too, in the module's order."""
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        names -= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        held = self._reader.held(trainer.strategy, module, lambda name, _: name in names)
        return {name: digest.value for name, digest in merged([held]).items()}

    def _message(self, trainer: Trainer, found: Sequence[str]) -> str:
        shown = "; ".join(found[:SHOWN]) + (f"; and {len(found) - SHOWN} more sets" if len(found) > SHOWN else "")
        return (
            f"after step {trainer.global_step} {shown}. All agreed after step {self._agreed}. Something has changed "
            "weights or gradients on one rank alone: its memory or arithmetic, a hook that writes them or draws at "
            f"random, an exchange that was left out. Resume from a checkpoint of step {self._agreed} or before."
        )


def _described(digests: Mapping[int, Mapping[str, str]]) -> tuple[list[int], str]:
    """Compares the replicas of one part of the weights.

    Args:
        digests: by rank, then by parameter.

    Returns:
        The ranks outside the majority, all of them if there is none, and a sentence; nothing if all are the same.
    """
    versions: dict[tuple[str, ...], list[int]] = {}
    for rank, own in digests.items():
        versions.setdefault(tuple(own.values()), []).append(rank)
    if len(versions) == 1:
        return [], ""
    common = max(versions.values(), key=len)
    has_majority = 2 * len(common) > len(digests)
    odd = [rank for rank in digests if not has_majority or rank not in common]
    names = [name for name in digests[odd[0]] if len({own[name] for own in digests.values()}) > 1]
    if has_majority:
        found = f"{_listed(odd)} {'has' if len(odd) == 1 else 'have'} drifted from {_listed(common)}"
    else:
        found = f"{_listed(odd)} have drifted apart"
    which = "" if len(names) == 1 else f", the first of {len(names)} parameters that do"
    return odd, f"{found}: {names[0]} differs{which}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > SHOWN:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:SHOWN]))}, …)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
