"""Restores a run: reads and checks the whole checkpoint up front, then loads each part once its owner exists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.foreign import ForeignWeights
from leyden.checkpoint.format.errors import CheckpointError, blame, naming
from leyden.checkpoint.frozen import FrozenPart, digests_of
from leyden.checkpoint.gained import add_gained_groups, drop_gained_groups, has_more_groups, names_gained
from leyden.checkpoint.hugging_face import HuggingFaceFolder
from leyden.checkpoint.owners import RankStates, Unclaimed
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.step_states import SCHEDULERS
from leyden.core.errors import ConfigurationError, StateError
from leyden.core.paths import local_path
from leyden.core.rank_zero import warn
from leyden.core.saved_state import SavedState
from leyden.data.positions import check_loaders
from leyden.strategies.weights import check_partial
from leyden.trainer.events.progress import Progress
from leyden.trainer.logging.history import FILE as HISTORY
from leyden.trainer.saved.checkpoint_folders import checkpoint_callbacks
from leyden.trainer.saved.goal import Goal
from leyden.trainer.saved.identity import Identity
from leyden.trainer.saved.resuming import Reader, progress_of
from leyden.trainer.saved.states import OWN, UserStates, rank_owners, step_states_of

if TYPE_CHECKING:
    from torch import Tensor

    from leyden.compat.lightning.run import LightningRun
    from leyden.trainer.run import Run

UNLIKE = "configure_optimizers made {here}: make as many, or leave 'optimizers' out of restore."
NEEDED = ("loader", "logs", "metrics", "rng")
"""The states of each rank that every checkpoint has."""


def _ignore(folder: str | Path) -> None:
    """Loads no pretrained weights, because those of a checkpoint follow."""


class Restorer:
    """Restores a run from a checkpoint, in the order of the setup: weights, optimizers, then the loop's loaders.

    The constructor reads all states and has their owners check them, so a bad file is found before anything changes.
    Only the states of optimizers are checked later, when the optimizers exist. A rollback `within` a fit restores parts
    that have stepped since the checkpoint; see `rolling_back.py`.

    Raises:
        CheckpointError: if a state is damaged, or its owner cannot have saved it; names file and entry.
    """

    def __init__(self, run: Run, reader: Reader | None, goal: Goal, within: bool = False) -> None:
        self.reader = reader
        self._run, self._parts, self._within = run, goal.parts, within
        self._users = UserStates(run)
        self._progress: Progress | None = None
        self._rank: Unclaimed | None = None
        self._history: dict[str, Any] = {}
        self._schedulers: dict[str, Any] | None = None
        self._optimizers: list[dict[str, Any]] | None = None
        self._lightning: LightningRun | None = None
        self._frozen: FrozenPart | None = None
        if isinstance(reader, CheckpointReader):
            self._read(reader)
        elif isinstance(reader, ForeignWeights) and reader.is_lightning:
            self._read_lightning(reader)

    def _read(self, reader: CheckpointReader) -> None:
        run, parts = self._run, self._parts
        if "weights" in parts:
            self._frozen = FrozenPart.read(reader)
        is_fit, has_states = run.state.stage == "fit", reader.has("user")
        like = None
        if is_fit and has_states:
            rank_files = RankStates(reader, run.strategy).files if run.strategy.ranks.world_size > 1 else []
            like = self._users.classes(reader, ["user", "callbacks", *rank_files], run.progress)
        if has_states:
            self._users.read(reader, like)
        if not is_fit or parts == {"weights"}:
            return
        if not has_states:
            raise CheckpointError(
                reader.path,
                "was saved with weights_only=True and cannot be resumed. To load its weights, pass restore='weights'.",
            )
        self._progress = progress_of(reader) if "progress" in parts else None
        if "progress" in parts and reader.has(HISTORY):
            self._history = reader.state(HISTORY)
            with blame(reader.path / f"{HISTORY}.json"):
                run.history.check_state_dict(self._history)
        # A fused engine allocates its memory later in each fit; parts that exist now belong to an earlier fit.
        shapes = None if run.strategy.drives_one else run.strategy.master_weights.parts(run.module)
        self._read_rank(reader, like, shapes)
        if "optimizers" in parts:
            self._schedulers = reader.state(SCHEDULERS)
            self._optimizers = None if shapes is None else reader.optimizers(like=shapes)

    def _read_lightning(self, file: ForeignWeights) -> None:
        from leyden.compat.lightning.run import LightningRun

        run, parts = self._run, self._parts
        if run.state.stage == "fit" and parts != {"weights"} and file.holds_run:
            self._lightning = lightning = LightningRun(file, run, parts)
            self._progress, self._rank = lightning.progress, lightning.rank
        callbacks = {} if self._lightning is None else self._lightning.callbacks
        self._users.take_lightning(file.path, file.loaded, callbacks)

    def gained(self) -> list[str]:
        """Returns the names of parameters in groups that were added to the optimizers since the checkpoint."""
        pairs = zip(self._run.engine.optimizers, self._optimizers or (), strict=False)
        return [name for optimizer, own in pairs for name in names_gained(optimizer, own, self._run.module)]

    def _read_rank(self, reader: CheckpointReader, like: Any, shapes: Mapping[str, Tensor] | None) -> None:
        run, parts, strategy = self._run, self._parts, self._run.strategy
        saved = RankStates(reader, strategy)
        owners, file = rank_owners(run, CheckpointRanks(strategy)), saved.path
        states = saved.read(owners, like)
        self._rank = Unclaimed(file, states, owners, NEEDED)
        if states["loader"] is not None:
            with blame(file):
                loader = SavedState(states["loader"], "loader")
                _check_same_place(loader, self._progress)
                check_loaders(loader)
        if "callbacks" in parts:
            has_own = self._users.read_callbacks(reader, like, states.get(OWN), file, shapes)
            if has_own and strategy.ranks.is_global_zero and not saved.fits:
                warn(
                    f"{reader.path} was saved by {saved.saved} rank(s), but {strategy.data_size} resume it: all ranks "
                    "load rank 0's state of callbacks or a DataModule with state_per_rank.",
                )
        names_by_part = {
            "optimizers": ("gradients", "unreduced"),
            "progress": ("logs", "metrics", "trained"),
            "loaders": ("loader",),
            "rng": ("rng",),
        }
        self._rank.drop(*(name for part, names in names_by_part.items() if part not in parts for name in names))

    def restore_weights(self) -> None:
        """Restores the weights, and in fit the DataModule and callbacks: everything before the optimizers."""
        run, reader = self._run, self.reader
        restores = reader is not None and "weights" in self._parts
        own = checkpoint_callbacks(run.callbacks) if run.state.stage == "fit" else []
        needs_base = self._frozen is not None or any(callback.trainable_only for callback in own)
        if not self._within:
            run.module.configure_weights(_ignore if restores and not needs_base else self._load_folder)
        if needs_base:
            self._compare_base()
        if reader is None:
            return
        if restores:
            self._users.load_into_module()
            self._load(reader.within(run.module) if isinstance(reader, HuggingFaceFolder) else reader)
        if run.state.stage == "fit" and "callbacks" in self._parts:
            if self._within and self._progress is not None:
                self._users.go_back(self._progress.global_step)
            else:
                self._users.load()
        if self._rank is not None and "weights" in self._parts:
            self._users.end_weights()
            # After the callbacks, because some of them swap in other weights.
            self._rank.load("buffers")
        if run.state.stage != "fit":
            self._release()

    def _compare_base(self) -> None:
        """Notes the weights before training, and checks those that the checkpoint leaves out."""
        run = self._run
        reason = run.strategy.refusals.get("trainable_only")
        if reason is not None:
            raise ConfigurationError(f"trainable_only=True with strategy={run.strategy.name!r}: {reason}.")
        now = digests_of(run.module, run.strategy)
        if not self._within:
            run.trained.note_base(run.module, now)
        if self._frozen is not None:
            assert isinstance(self.reader, CheckpointReader)
            self._frozen.check(self.reader, run.module, now, run.module.strict_loading)

    def _load(self, reader: Reader, strict: bool | None = None) -> None:
        run = self._run
        strict = run.module.strict_loading if strict is None else strict
        if self._frozen is not None and reader is self.reader:
            # What is missing has been compared.
            strict = False
        elif not strict:
            check_partial(run.module, reader.names(), warns=run.strategy.ranks.is_global_zero)
        with naming(reader.weights_file):
            run.strategy.load_module(reader, run.module, strict)

    def _load_folder(self, folder: str | Path) -> None:
        # A new head is not in the folder, and the folder's head may not be in the module.
        self._load(HuggingFaceFolder(local_path(folder, "configure_weights")).within(self._run.module), strict=False)

    def restore_run(self) -> Unclaimed | None:
        """Restores optimizers, schedulers, scaler and progress.

        Returns:
            The states that the fit loop restores once its loaders exist: loader positions, logged values, metrics and
            random state. None to start from scratch.
        """
        run, reader = self._run, self.reader
        if reader is not None and "weights" in self._parts:
            run.strategy.master_weights.load(reader, run.module)
        if self._rank is None:
            self._release()
            return None
        if self._schedulers is not None and isinstance(reader, CheckpointReader):
            if self._within:
                for optimizer, own in zip(run.engine.optimizers, self._optimizers or (), strict=False):
                    drop_gained_groups(optimizer, own)
                    # Freed before loading, because the device may not have memory for both states.
                    optimizer.state.clear()
            else:
                self._regain_groups(reader)
            step_states = step_states_of(run)
            step_states.check(reader.path / f"{SCHEDULERS}.json", self._schedulers, reader.optimizer_count(), UNLIKE)
            step_states.load(reader, self._schedulers, self._optimizers)
        if self._lightning is not None:
            if "optimizers" in self._parts:
                self._lightning.restore_steps()
            self._lightning.settle()
        self._rank.load("trained")
        run.strategy.check_trained()
        self._rank.load("gradients", "unreduced")
        if self._progress is not None:
            run.progress.continue_from(self._progress)
            if self._within:
                run.history.go_back(self._progress.global_step)
            else:
                run.history.load_state_dict(self._history)
        self._release()
        return self._rank

    def _release(self) -> None:
        """Frees the content of another trainer's file, which is held in memory as a whole."""
        if isinstance(self.reader, ForeignWeights):
            self.reader = self._lightning = None
            self._users = UserStates(self._run)

    def _regain_groups(self, reader: CheckpointReader) -> None:
        """Adds the parameter groups that hooks of the saved run had added to its optimizers.

        The run's identity records how many groups `configure_optimizers` returned then. Those are not added, even if
        it returns fewer now.
        """
        run, saved_form = self._run, self._run.strategy.master_weights.saved_form
        pairs = list(zip(run.engine.optimizers, self._optimizers or (), strict=False))
        # A fused engine steps its own memory, and its optimizers cannot gain groups.
        if not any(has_more_groups(own, optimizer) for optimizer, own in pairs):
            return
        identity = Identity.read(reader)
        made = (identity.optimizers if identity is not None else None) or ()
        for (optimizer, own), before in zip(pairs, made, strict=False):
            if saved_form(optimizer) is optimizer:
                add_gained_groups(optimizer, own, len(before["groups"]), run.module)


def kept_state(run: Run, states: Mapping[str, Any]) -> Unclaimed:
    """Returns the states of this Trainer's last fit, to continue it from memory: `ckpt_path="current"`."""
    return Unclaimed("this run's own state", states, rank_owners(run, CheckpointRanks()))


def _check_same_place(loader: SavedState, progress: Progress | None) -> None:
    """Raises StateError if the saved loader position disagrees with the progress."""
    if progress is None:
        return
    if not loader.is_none("place"):
        place = loader.nested("place")
        batches = place.integer("batches")
        if batches != progress.batch:
            raise StateError(place.path("batches"), f"is {batches}, but progress.json has {progress.batch}")
    elif progress.is_inside:
        raise StateError(loader.path("place"), f"is missing, but the run was inside an epoch ({progress.phase})")
