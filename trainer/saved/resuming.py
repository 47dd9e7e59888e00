"""Resolves `ckpt_path` to a checkpoint, opens it, and checks that the same training saved it."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from leyden.checkpoint.checkpoint_io import CheckpointIO, is_packed, unpack
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import all_checkpoints, identity, newest_reader
from leyden.checkpoint.foreign import OPTIMIZERS, ForeignWeights
from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.checkpoint.format.errors import CheckpointError, blame
from leyden.checkpoint.format.manifest import MANIFEST, PROGRESS, read_manifest
from leyden.checkpoint.hugging_face import HuggingFaceFolder
from leyden.checkpoint.lock import RunLock, lock_on
from leyden.checkpoint.nodes import is_shared
from leyden.checkpoint.owners import saved_data_ranks
from leyden.checkpoint.reader import CheckpointReader, open_verified
from leyden.checkpoint.staged import upload
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import inform, to_stderr, warn
from leyden.launch.heartbeat import Phase
from leyden.trainer.events.progress import Progress
from leyden.trainer.saved.checkpoint_folders import (
    are_on_each_node,
    checkpoint_callbacks,
    copies_are_on_each_node,
    copies_of,
    folder_of_last,
    original_of,
    places_of,
)
from leyden.trainer.saved.goal import PARTS, Goal
from leyden.trainer.saved.identity import FILE as IDENTITY
from leyden.trainer.saved.identity import Difference, Identity
from leyden.trainer.saved.run_folder import Versions, accepts

if TYPE_CHECKING:
    from leyden.callbacks.base import Callback
    from leyden.strategies.base import Strategy
    from leyden.trainer.run import Run

ROLLBACK_PATHS = "goes_back"
"""File in a checkpoint saved at the end of a run: earlier checkpoints to roll back to, relative to its folder."""
WORDS = ("last", "best", "auto", "current")
"""The values of `ckpt_path` that are not paths."""


Reader: TypeAlias = CheckpointReader | ForeignWeights | HuggingFaceFolder


def open_reader(run: Run, goal: Goal, folder: str | None) -> tuple[Reader | None, str]:
    """Opens and verifies the checkpoint that a run resumes, before any state of the run has changed.

    `folder` is the run folder in which "last" and "auto" search, if there is one.

    Returns:
        The reader, or None to start from scratch; and a description of the starting point, for the user.
    """
    if goal.path is None:
        return None, "from scratch"
    if goal.continues:
        return None, f"where the last fit ended (epoch {run.progress.epoch}, step {run.progress.global_step})"
    strategy, is_fit = run.strategy, run.state.stage == "fit"
    root = folder or Versions(run).root
    on_each_node = are_on_each_node(run.callbacks) or copies_are_on_each_node(run.callbacks)
    ranks = CheckpointRanks(strategy, root, on_each_node)
    plugin = run.checkpoint_io
    if plugin is not None and not _is_folder(goal.path):
        name = os.path.expanduser(os.fspath(goal.path))
        if name in ("auto", "last"):
            raise ConfigurationError(
                f"ckpt_path={name!r}: {type(plugin).__name__} cannot list its checkpoints. Pass the path of one, such "
                "as trainer.last_checkpoint."
            )
        found = _load_through(plugin, name, Path(run.arguments.local_root), ranks)
        if isinstance(found, ForeignWeights):
            return found, _description_of_file(found, goal, is_fit, strategy.ranks.is_global_zero)
        return found, _description(found, Path(name), goal, strategy.data_size)
    # Reads optimizer states while it verifies them, into memory that the Restorer then uses without a copy.
    ahead = CheckpointReader.read_ahead if is_fit and _needs_whole_optimizers(strategy, goal) else None
    if goal.path in ("last", "auto"):
        newest = _newest(run, folder, goal, ranks, ahead)
        if newest is None:
            return None, "from scratch (there is no checkpoint yet)"
        return _opened(newest, goal, strategy.data_size)
    path = _path_of(goal)
    if isinstance(path, BucketPath):
        return _opened(open_verified(path, ranks, ahead), goal, strategy.data_size)
    if path.is_file():
        weights = ForeignWeights(path, goal.trust, goal.weights_only)
        return weights, _description_of_file(weights, goal, is_fit, strategy.ranks.is_global_zero)
    if HuggingFaceFolder.is_one(path):
        return HuggingFaceFolder(path), f"weights of {path}"
    return _opened(open_verified(path, ranks, ahead), goal, strategy.data_size)


def _opened(reader: CheckpointReader, goal: Goal, data_size: int) -> tuple[CheckpointReader, str]:
    if goal.weights_only and goal.parts != {"weights"}:
        warn(
            "weights_only=True only affects how pickle files of other trainers are read. "
            f"{reader.path} is a Leyden checkpoint, which holds no pickle, and is resumed in full. To load only its "
            "weights, pass restore='weights'.",
        )
    return reader, _description(reader, reader.path, goal, data_size)


def _needs_whole_optimizers(strategy: Strategy, goal: Goal) -> bool:
    """Returns True if every rank of a fit restores the full states of the optimizers."""
    return strategy.replicates and not strategy.drives_one and "optimizers" in goal.parts


def _description(reader: CheckpointReader, path: Place, goal: Goal, data_size: int) -> str:
    """Returns a description of a checkpoint, for the user."""
    progress = progress_of(reader)
    if goal.parts == {"weights"}:
        return f"weights of {path}"
    notes = "" if progress.exact else "; saved inside an accumulation window, which is repeated"
    readers = len(set(saved_data_ranks(reader)))
    if "rng" in goal.parts and readers not in (0, data_size):
        notes += f"; saved by {readers} rank(s): the random generators of ranks from 1 on are reseeded"
    return f"{path} (epoch {progress.epoch}, step {progress.global_step}{notes})"


def _description_of_file(weights: ForeignWeights, goal: Goal, is_fit: bool, warns: bool) -> str:
    """Returns a description of another trainer's file, for the user. Warns if the file holds only weights."""
    path = weights.path
    continues = is_fit and goal.parts != {"weights"}
    if continues and weights.holds_run:
        return f"{path} (epoch {weights.entry('epoch')}, step {weights.entry('global_step')})"
    if continues and weights.is_lightning and warns:
        warn(
            f"{path} has no {OPTIMIZERS}, like files of Lightning's ModelCheckpoint(save_weights_only=True): fit loads "
            "its weights, and training starts from step 0. Pass restore='weights' to avoid this warning.",
        )
    return f"weights of {path}"


def _is_folder(path: str | os.PathLike[str]) -> bool:
    """Returns True for a checkpoint folder. A CheckpointIO plugin does not change how folders are read."""
    return os.path.isfile(os.path.join(os.fspath(path), MANIFEST))


def _load_through(
    plugin: CheckpointIO, path: str, root: Path, ranks: CheckpointRanks
) -> CheckpointReader | ForeignWeights:
    """Loads a checkpoint from a plugin. The first rank unpacks it below `root`, into a folder that all ranks read."""
    loaded: list[dict[str, Any]] = []

    def unpacked() -> str | None:
        loaded.append(plugin.load_checkpoint(path))
        if not is_packed(loaded[0]):
            return None
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".checkpoint-", dir=root)).absolute()
        return str(unpack(loaded.pop(), path, folder))

    folder = ranks.first(unpacked)
    if folder is None:
        return ForeignWeights(Path(path), True, loaded=loaded[0] if loaded else plugin.load_checkpoint(path))
    reader = open_verified(folder, ranks)
    if ranks.rank == 0:
        weakref.finalize(reader, shutil.rmtree, Path(folder).parent, ignore_errors=True)
    return reader


def progress_of(reader: CheckpointReader) -> Progress:
    """Returns the progress of the run that saved a checkpoint."""
    with blame(reader.path / PROGRESS):
        return Progress.from_dict(reader.progress())


def detect_shared_folders(run: Run) -> None:
    """Determines for each ModelCheckpoint whether all machines share its folder.

    Raises:
        ConfigurationError: if fit would save into folders that are not shared, without `save_on_each_node`.
    """
    if run.strategy.ranks.num_nodes == 1:
        return
    for callback in checkpoint_callbacks(run.callbacks):
        # The versions of a run lie in one file system.
        folder = run.arguments.local_root if callback.uses_run_folder else callback.folder_below("")
        is_local = not isinstance(place_of(folder, "dirpath"), BucketPath)
        apart = is_local and not is_shared(folder, CheckpointRanks(run.strategy, folder))
        copies = None if callback.copied is None else callback.copied[1]
        are_apart = copies is not None and not is_shared(copies, CheckpointRanks(run.strategy, copies))
        callback.keep_on_each_node(apart, are_apart)
        if callback.saves_on_each_node and not callback.save_on_each_node and run.state.stage == "fit":
            raise ConfigurationError(
                f"{folder} is not shared by all machines. Save checkpoints to a shared file system (default_root_dir "
                "or dirpath), or pass ModelCheckpoint(save_on_each_node=True): every machine then keeps complete "
                "checkpoints of its own."
            )


def _newest(
    run: Run, folder: str | None, goal: Goal, ranks: CheckpointRanks, ahead: Callable[[CheckpointReader], None] | None
) -> CheckpointReader | None:
    own: Sequence[Callback] = checkpoint_callbacks(run.callbacks)
    if goal.parts != {"weights"}:
        own = [callback for callback in checkpoint_callbacks(run.callbacks) if not callback.save_weights_only] or own
    places = places_of(own, folder if run.arguments.bucket is None else run.checkpoint_root)
    # A checkpoint and its copy have the same age, and the first of them is read: the copy.
    copies, accepted = copies_of(own), accepts(run, goal, folder)
    found = newest_reader([*copies, *places], goal.path == "auto", ranks, ahead, accepted)
    if found is None and goal.path == "last":
        raise CheckpointError(
            places[0][0] if places else Versions(run).root,
            "holds no complete checkpoint, but ckpt_path='last' needs one. Use 'auto' to start from scratch.",
        )
    if copies and run.state.stage == "fit" and not run.arguments.fast_dev_run:
        # Those of another training stay as they are.
        check_same_run(Identity.of(run.module, run.datamodule), found, goal, False)
        if goal.path == "auto":
            # Nobody else saves here.
            every = (path for place, depth in copies for path in all_checkpoints(place, depth))
            run.saves.replace_local_copies(path for path in every if accepted is None or accepted(path))
        if found is not None:
            _finish_upload(run, found, ranks)
    return found


def _finish_upload(run: Run, reader: CheckpointReader, ranks: CheckpointRanks) -> None:
    """Uploads the local copy that a fit resumes if the bucket lacks it, as the killed run would have."""
    copy, url = reader.path, original_of(reader.path, run.callbacks)
    if url is None or not isinstance(copy, Path):
        return

    def is_missing() -> bool:
        try:
            return identity(read_manifest(url)) != identity(reader.manifest)
        except CheckpointError:
            return True

    if ranks.first(is_missing):
        inform(f"leyden: uploading {copy} to {url}, as the run was stopped before it had", to_stderr)
        # As long as the link takes, which no watchdog knows.
        with run.heartbeat.during(Phase.PREPARING):
            upload(copy, reader.manifest, url, ranks, True, run.saves.check_lock)
    run.saves.keep_local_copy(copy, ranks)
    reader.stand_for(url)


def _path_of(goal: Goal) -> Place:
    assert goal.path is not None
    path = place_of(goal.path, "ckpt_path")
    if isinstance(path, BucketPath):
        return path
    if not os.path.lexists(staging.standing(path)) and path.name == str(goal.path):
        raise CheckpointError(
            path, f"does not exist, and is not a special value of ckpt_path. {nearest(path.name, WORDS)}"
        )
    return path


def lock_of(run: Run) -> RunLock | None:
    """Returns the lock of the folder that a fit saves into; None if it saves nothing."""
    saves = bool(checkpoint_callbacks(run.callbacks)) or run.arguments.preemption is not None
    if run.state.stage != "fit" or run.arguments.fast_dev_run or not saves:
        return None
    first = next(iter(checkpoint_callbacks(run.callbacks)), None)
    if run.checkpoint_root is None and (first is None or first.uses_run_folder):
        return None
    folder = folder_of_last(run.callbacks, run.checkpoint_root or "")
    # Only the plugin can reach what it stores in a bucket.
    return lock_on(folder) if isinstance(folder, Path) or run.checkpoint_io is None else None


def check_same_run(identity: Identity | None, reader: Reader | None, goal: Goal, warns: bool) -> None:
    """Compares the run that saved a checkpoint with the one that resumes it. One rank `warns` of differences.

    Called twice: at the start, and again when the optimizers exist. An evaluation has no identity.

    Raises:
        ConfigurationError: if "auto" found the checkpoint of another run; lists the differences and the options.
    """
    resumes = bool(goal.parts & {"progress", "optimizers"})
    if isinstance(reader, CheckpointReader) and identity is not None and resumes and reader.has("user"):
        _compare(identity, reader, goal, warns)
    elif isinstance(reader, ForeignWeights) and identity is not None and resumes and warns:
        found = identity.differences(identity.as_in(reader)) if identity.optimizers is not None else []
        if found:
            warn(
                f"fit continues {reader.path}, whose run differed from this one: {_listed(found)}. The run continues "
                "with its own values.",
            )


def rollback_paths_after(path: Place, reader: Reader | None) -> list[Place]:
    """Returns the checkpoints that a run may roll back to after resuming from one, the newest last.

    Normally that checkpoint itself. If it was saved only because its run ended, the checkpoints saved before it: an
    uninterrupted run would roll back to those.

    Raises:
        CheckpointError: if its list of earlier checkpoints is damaged.
    """
    if not isinstance(reader, CheckpointReader) or not reader.has(ROLLBACK_PATHS):
        return [path]
    found = reader.json(ROLLBACK_PATHS)
    if not isinstance(found, list) or not all(isinstance(place, str) for place in found):
        raise CheckpointError(reader.path / f"{ROLLBACK_PATHS}.json", "is not a list of earlier checkpoints.")
    with blame(reader.path / f"{ROLLBACK_PATHS}.json"):
        places = [place_of(place, ROLLBACK_PATHS) for place in found]
    home = "" if isinstance(path, BucketPath) else os.path.realpath(path.parent)
    return [
        place if isinstance(place, BucketPath) else Path(os.path.realpath(os.path.join(home, place)))
        for place in places
    ]


def continued_path(identity: Identity, reader: Reader | None, goal: Goal) -> Place | None:
    """Returns the path of the checkpoint if the fit restores all parts of it and it is this run's own, else None.

    A checkpoint is the run's own if "auto" would accept it, or if `same_run` is given.
    """
    if not isinstance(reader, CheckpointReader) or goal.parts != frozenset(PARTS):
        return None
    before = Identity.read(reader)
    if before is None or any(difference.counts for difference in identity.differences(before)):
        return reader.path if goal.same_run else None
    return reader.path


def _compare(identity: Identity, reader: CheckpointReader, goal: Goal, warns: bool) -> None:
    refuses = goal.path == "auto" and "progress" in goal.parts and not goal.same_run
    before, at_start = Identity.read(reader), identity.optimizers is None
    if before is None:
        if refuses and at_start and warns:
            warn(
                f"{reader.path} was saved by an earlier version, which did not record its run. ckpt_path='auto' "
                "assumes that it was this run.",
            )
        return
    with blame(reader.path / f"{IDENTITY}.json"):
        differences = identity.differences(before)
    found = [d for d in differences if not d.replaced or "optimizers" in goal.parts]
    if refuses and any(difference.counts for difference in found):
        raise ConfigurationError(
            f"{reader.path} was saved by another run, and ckpt_path='auto' only continues its own: {_listed(found)}. "
            "Give each run a folder, with Trainer(default_root_dir=…) or ModelCheckpoint(dirpath=…). Or name "
            "what differs in save_hyperparameters or TrainModule.run_identity: 'auto' then tells them apart. To "
            f"continue this checkpoint anyway, pass fit(ckpt_path={str(reader.path)!r}) or fit(ckpt_path='auto', "
            "same_run=True); to load only its weights, add restore='weights'."
        )
    if found and not at_start and warns:
        replaced = any(difference.replaced for difference in found)
        effect = (
            "The checkpoint's options replace those that configure_optimizers returned"
            if replaced
            else "The run continues with its own values"
        )
        warn(
            f"fit continues {reader.path}, whose run differed from this one: {_listed(found)}. "
            f"{effect}. To load only its weights, pass restore='weights'.",
        )


def _listed(found: Sequence[Difference]) -> str:
    shown = [difference.text for difference in found[:12]]
    return "; ".join(shown) + (f"; and {len(found) - 12} more" if len(found) > 12 else "")
