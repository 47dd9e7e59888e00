"""The folder of a run, `<default_root_dir>/<logger's name>/version_N`: that of the run to continue, or the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden.callbacks.loggers.logger import FolderLogger, Logger, claim_version, read_run_id, version_of, write_run_id
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.folder import all_checkpoints
from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.checkpoint.format.errors import CheckpointError, blame
from leyden.checkpoint.format.listing import ordered
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.rank_zero import warn
from leyden.trainer.arguments.replay import replay_of
from leyden.trainer.saved.checkpoint_folders import (
    CHECKPOINTS,
    are_on_each_node,
    checkpoint_callbacks,
    copies_of,
    places_of,
)
from leyden.trainer.saved.identity import FILE as IDENTITY
from leyden.trainer.saved.identity import Identity
from leyden.trainer.starting.build import loggers_of

if TYPE_CHECKING:
    from leyden.trainer.run import Run
    from leyden.trainer.saved.goal import Goal
    from leyden.trainer.saved.resuming import Reader

RECORD = "run"
"""File in a checkpoint: the folder of its run, relative to the checkpoint's folder, and the run's identifier."""


def find_folder(run: Run, goal: Goal) -> tuple[str | None, str | None]:
    """Finds the folder of a run that begins, as far as it is known before its checkpoint is open. All ranks call it.

    "auto" continues the newest version of the same training, and claims the next version if there is none.

    Returns:
        The folder in which "auto" and "last" search, and the run's folder. None if there is none yet: the checkpoint
        may decide, see `enter_folder`.
    """
    versions = Versions(run)
    if versions.writes_nothing:
        return None, None
    former, given = versions.former(run.folder), versions.given
    own = given or former
    if given is not None or goal.path not in ("auto", "last") or not versions.place_checkpoints:
        return own, own
    identity = _wanted(run, goal)
    continues = run.state.stage == "fit" and "progress" in goal.parts
    claims = goal.path == "auto" and continues

    def found() -> str | None:
        newest = versions.newest(identity, former)
        return newest if newest is not None or not claims else versions.empty() or versions.claim()

    folder = _agreed(run, versions, found)
    return folder, folder if continues else former


def enter_folder(run: Run, reader: Reader | None, goal: Goal) -> str | None:
    """Returns the folder of a fit, once its checkpoint is open: that of the checkpoint's run, or the next version.

    All ranks call it. The run's `folder` is what `find_folder` returned.
    """
    versions = Versions(run)
    if versions.writes_nothing or run.state.stage != "fit":
        return run.folder
    continued = reader if isinstance(reader, CheckpointReader) and "progress" in goal.parts else None
    is_found = run.folder is not None and (goal.path in ("auto", "last") or run.folder == versions.given)

    def entered() -> str | None:
        folder = run.folder
        if not is_found and continued is not None:
            folder = versions.folder_of(continued) or folder
        folder = folder or versions.claimed
        if folder is None:
            return versions.claim() if versions.are_needed else None
        if read_run_id(Path(folder)) is None:
            os.makedirs(folder, exist_ok=True)
            write_run_id(Path(folder))
        return folder

    return _agreed(run, versions, entered)


def record_of(folder: str | None, path: Place) -> dict[str, str] | None:
    """Returns the record of the run's folder for a checkpoint at this path; None if there is no such folder."""
    run = None if folder is None else read_run_id(Path(folder))
    if folder is None or run is None:
        return None
    home = os.path.realpath(folder)
    place = os.path.relpath(home, os.path.realpath(path.parent)) if isinstance(path, Path) else home
    return {"folder": place, "run": run}


def accepts(run: Run, goal: Goal, folder: str | None) -> Callable[[Place], bool] | None:
    """Returns a function that tells the checkpoints of this run from others; None if a folder decides.

    It is for a `dirpath` that several runs may use, beside checkpoints in the run's folder.
    """
    versions = Versions(run)
    if folder is None or not versions.place_checkpoints:
        return None
    identity, home = _wanted(run, goal), os.path.realpath(folder)

    def accepted(path: Place) -> bool:
        if isinstance(path, Path) and Path(os.path.realpath(path)).is_relative_to(home):
            return True
        with suppress(CheckpointError):
            reader = CheckpointReader(path)
            return _is_own(reader, identity) and versions.folder_of(reader) in (None, folder)
        return False

    return accepted


def _agreed(run: Run, versions: Versions, choice: Callable[[], str | None]) -> str | None:
    """Returns the folder that rank 0 chooses; on machines without a common folder, that of the same name here."""
    chosen, root = CheckpointRanks(run.strategy, versions.root).first(lambda: (choice(), versions.root))
    if chosen is None or not versions.are_on_each_node:
        return chosen
    return str(Path(versions.root, os.path.relpath(chosen, root)))


def _wanted(run: Run, goal: Goal) -> Identity | None:
    """Returns the identity that a checkpoint must have; None if any will do."""
    is_own = goal.path == "auto" and "progress" in goal.parts and not goal.same_run
    return Identity.of(run.module, run.datamodule) if is_own else None


class Versions:
    """The folders `version_N` of a Trainer's runs.

    Attributes:
        root: the folder that holds the versions: `default_root_dir`, or a folder in it with the logger's name.
        place_checkpoints: True if checkpoints go to the run's folder, and not only to folders that the user named.
    """

    def __init__(self, run: Run) -> None:
        self._arguments, self._callbacks = run.arguments, run.callbacks
        loggers = [logger for logger in loggers_of(run.callbacks) if logger.uses_run_folder]
        folders = (logger for logger in loggers if isinstance(logger, FolderLogger))
        self._lead: Logger | None = next(folders, next(iter(loggers), None))
        """The logger that names the run's folder: the first that writes to one, else the first."""
        self._saving = checkpoint_callbacks(run.callbacks)
        home = run.arguments.local_root
        self.root = home if self._lead is None else self._lead.runs_below(home)
        is_local = run.arguments.bucket is None
        self.place_checkpoints = is_local and (not self._saving or any(one.uses_run_folder for one in self._saving))

    @property
    def writes_nothing(self) -> bool:
        """True if no run of this Trainer writes to a folder."""
        arguments = self._arguments
        return bool(arguments.fast_dev_run) or arguments.barebones or replay_of(arguments) is not None

    @property
    def are_needed(self) -> bool:
        """True if a part of the run writes to its folder."""
        is_home = self._arguments.preemption is not None and not self._saving
        return is_home or any(callback.uses_run_folder for callback in self._callbacks)

    @property
    def are_on_each_node(self) -> bool:
        """True if every machine keeps its own checkpoints."""
        return are_on_each_node(self._callbacks)

    @property
    def given(self) -> str | None:
        """The folder that the user's `version` of the logger names; None without one."""
        lead = self._lead
        return lead.given_folder(self._arguments.local_root) if isinstance(lead, FolderLogger) else None

    @property
    def claimed(self) -> str | None:
        """The folder that the logger has claimed before the run; None if it has not."""
        lead = self._lead
        return lead.claimed_folder(self._arguments.local_root) if isinstance(lead, FolderLogger) else None

    def empty(self) -> str | None:
        """Returns the folder that the logger has claimed before the run, if it holds no checkpoint."""
        claimed = self.claimed
        return None if claimed is None or ordered(Path(claimed, CHECKPOINTS)) else claimed

    def former(self, folder: str | None) -> str | None:
        """Returns the folder of the Trainer's last fit, unless its loggers have changed since."""
        is_below = folder is not None and os.path.abspath(Path(folder).parent) == os.path.abspath(self.root)
        return folder if is_below else None

    def claim(self) -> str:
        """Makes the next version, and returns its folder."""
        folder = Path(self.root) / f"version_{claim_version(self.root)}"
        write_run_id(folder)
        return str(folder)

    def newest(self, identity: Identity | None, former: str | None) -> str | None:
        """Returns the newest version with a checkpoint of this training; any, without an identity.

        The folder of the Trainer's last fit, `former`, is looked at first.

        Raises:
            CheckpointError: if there is none, but a version whose checkpoints are all damaged.
        """
        depth = max((callback.depth for callback in self._saving if callback.uses_run_folder), default=0)
        elsewhere = {self.folder_of(reader) for reader in self._readers_elsewhere() if _is_own(reader, identity)}
        damaged: list[str] = []
        versions = _versions(self.root)
        for folder in [former, *(version for version in versions if version != former)] if former else versions:
            errors: list[CheckpointError] = []
            if folder in elsewhere or _holds_own(Path(folder, CHECKPOINTS), depth, identity, errors):
                for error in damaged:
                    warn(f"skipping a damaged checkpoint: {error}")
                return folder
            damaged += map(str, errors)
        if damaged:
            raise CheckpointError(
                self.root,
                "has versions whose checkpoints are all damaged, so that nothing tells which training saved them. "
                f"Remove them to start from scratch. {'; '.join(damaged)}",
            )
        old = Path(self._arguments.local_root, CHECKPOINTS)
        if identity is not None and _holds_own(old, depth, identity, []):
            warn(
                f"{old} holds checkpoints of this training by an earlier version of Leyden. 'auto' starts anew in a "
                "folder of its own. To continue them, pass one by name: "
                f"fit(ckpt_path={str(all_checkpoints(old)[-1])!r})."
            )
        return None

    def _readers_elsewhere(self) -> Iterator[CheckpointReader]:
        """Yields readers of the checkpoints in folders that the user named, and of their local copies."""
        for folder, depth in [*places_of(self._callbacks, None), *copies_of(self._callbacks)]:
            for path in all_checkpoints(folder, depth):
                with suppress(CheckpointError):
                    yield CheckpointReader(path)

    def folder_of(self, reader: CheckpointReader) -> str | None:
        """Returns the folder of the run that saved a checkpoint, if it still is one of these versions."""
        if reader.has(RECORD):
            found = reader.json(RECORD)
            place, saved = (found.get("folder"), found.get("run")) if isinstance(found, dict) else (None, None)
            if not isinstance(place, str) or not isinstance(saved, str) or "\0" in place:
                raise CheckpointError(reader.path / f"{RECORD}.json", "does not name the folder of a run.")
            if isinstance(reader.path, BucketPath) and not os.path.isabs(place):
                return None
            near = "" if isinstance(reader.path, BucketPath) else os.path.realpath(reader.path.parent)
            folder = Path(os.path.realpath(os.path.join(near, place)))
            name: int | str = folder.name if folder.parent == Path(os.path.realpath(self.root)) else ""
        else:
            state = self._logger_state(reader)
            version, saved = state.get("version"), state.get("run")
            name = f"version_{version}" if isinstance(version, int) else ""
        folder = Path(self.root, str(name))
        return str(folder) if name and saved is not None and read_run_id(folder) == saved else None

    def _logger_state(self, reader: CheckpointReader) -> dict[str, Any]:
        """Returns the state of the logger that names the run's folder, from a checkpoint of an earlier version."""
        if self._lead is None or not reader.has("callbacks"):
            return {}
        tree = reader.json("callbacks")
        states = tree.get("tree") if isinstance(tree, dict) else None
        state = states.get(self._lead.state_key) if isinstance(states, dict) else None
        return state if isinstance(state, dict) else {}


def _versions(root: str) -> list[str]:
    """Returns the folders `version_N` in a folder, the highest number first."""
    with suppress(OSError):
        numbers = [version_of(Path(root, name)) for name in os.listdir(root)]
        found = sorted((number for number in numbers if isinstance(number, int)), reverse=True)
        return [str(Path(root, f"version_{number}")) for number in found]
    return []


def _holds_own(folder: Path, depth: int, identity: Identity | None, errors: list[CheckpointError]) -> bool:
    """Returns True if the newest readable checkpoint in a folder is of this training; any, without an identity.

    `errors` gets the errors of the damaged checkpoints, if all are.
    """
    answer, found = None, []
    for path, manifest in reversed(ordered(folder, depth)):
        try:
            if isinstance(manifest, CheckpointError):
                raise manifest
            reader = CheckpointReader(path)
            answer = _is_own(reader, identity)
        except CheckpointError as error:
            found.append(error)
            continue
        # One of weights alone does not say whose it is.
        if reader.has("user"):
            return answer
    if answer is None:
        errors += found
    return bool(answer)


def _is_own(reader: CheckpointReader, identity: Identity | None) -> bool:
    if identity is None:
        return True
    before = Identity.read(reader)
    if before is None:
        return True
    with blame(reader.path / f"{IDENTITY}.json"):
        return not any(found.counts for found in identity.differences(before))
