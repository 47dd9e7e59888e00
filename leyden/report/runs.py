"""Finds the runs below a folder, and reads from each run's folder how it is doing.

Folders may be damaged, half-written or foreign: what cannot be read is None. No torch is imported, so that a listing
is quick.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.listing import ordered
from leyden.checkpoint.format.manifest import (
    LAYOUT,
    MANIFEST,
    MAX_PARTS,
    PROGRESS,
    ChunkHasher,
    Manifest,
    open_inside,
    parts_in,
)
from leyden.checkpoint.status import FILE, RUN_FILE, RunStatus, read_json

_MOST = 1 << 26
"""The largest size in bytes of the states of callbacks that are read."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run, as its folder describes it.

    Attributes:
        path: the run's folder.
        run: the run's identifier; None if `run.json` is damaged.
        state: "running", "finished", "failed", "interrupted" or "killed"; "unknown" if the folder does not say, or if
            the run was on another host or before a restart of this one.
        step: the global step at the end of its last fit, or else of its last checkpoint.
        metric: the name of the value that its ModelCheckpoint monitors.
        best: the best value of the metric.
        mode: "min" or "max": which values of the metric are better.
        started: the time at which its last fit began, in seconds since 1970.
        ended: the time at which its last fit ended.
        size: the bytes of the files in its folder.
        checkpoint: its newest checkpoint.
        host: the host of its last fit.
        pid: the process of its last fit, on rank 0.
    """

    path: Path
    run: str | None = None
    state: str = "unknown"
    step: int | None = None
    metric: str | None = None
    best: float | None = None
    mode: str | None = None
    started: float | None = None
    ended: float | None = None
    size: int = 0
    checkpoint: Path | None = None
    host: str | None = None
    pid: int | None = None

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        """Reads the folder of a run."""
        run, status = read_run_id(folder), RunStatus.read(folder)
        places = [("checkpoints", 0)] if status is None else status.places
        checkpoints = _own_checkpoints(folder, run, places)
        newest, manifest = checkpoints[0] if checkpoints else (None, None)
        step = None if manifest is None else _integer(manifest.progress.get("global_step"))
        rankings = (_ranking(path, manifest) for path, manifest in checkpoints)
        metric, best, mode = next((found for found in rankings if found is not None), (None, None, None))
        known = cls(
            path=folder, run=run, step=step, metric=metric, best=best, mode=mode, size=_size(folder), checkpoint=newest
        )
        if status is None:
            return replace(known, started=_made(folder))
        return replace(
            known,
            state=status.state,
            step=step if status.step is None else status.step,
            started=_seconds(status.started),
            ended=None if status.ended is None else _seconds(status.ended),
            host=status.owner.host,
            pid=status.owner.pid,
        )


def runs_below(folder: Path) -> tuple[list[RunSummary], list[OSError]]:
    """Returns the runs in a folder and below it, and the errors of folders that cannot be read.

    Links and hidden folders are not followed.

    Example:
        >>> runs_below(Path("no/such/folder"))
        ([], [FileNotFoundError(2, 'No such file or directory')])
    """
    found: list[RunSummary] = []
    errors: list[OSError] = []
    for path, folders, files in os.walk(folder, onerror=errors.append):
        place = Path(path)
        if not {MANIFEST, LAYOUT, PROGRESS}.isdisjoint(files):
            # A checkpoint, which has a record of its run under the same name.
            folders.clear()
        elif FILE in files or (RUN_FILE in files and read_run_id(place) is not None):
            found.append(RunSummary.read(place))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return found, errors


def read_run_id(folder: Path) -> str | None:
    """Returns the identifier of the run whose folder this is; None if it is no run's."""
    found = (read_json(folder / RUN_FILE) or {}).get("run")
    return found if isinstance(found, str) else None


def _own_checkpoints(folder: Path, run: str | None, places: Any) -> list[tuple[Path, Manifest]]:
    """Returns a run's checkpoints, newest first. A folder that the user named may hold those of other runs, too."""
    found: list[tuple[Path, Manifest]] = []
    for name, depth in places:
        # An unreadable folder, or a null byte in its name.
        with suppress(OSError, ValueError):
            place = Path(os.path.normpath(folder / name))
            for path, manifest in ordered(place, depth):
                if isinstance(manifest, Manifest) and (place.is_relative_to(folder) or _is_of(path, manifest, run)):
                    found.append((path, manifest))
    return sorted(found, key=lambda one: (one[1].saved_at, one[1].save_counter), reverse=True)


def _is_of(path: Path, manifest: Manifest, run: str | None) -> bool:
    """Returns True if a checkpoint records that this run saved it."""
    return run is not None and (_state(path, manifest, RUN_FILE) or {}).get("run") == run


def _ranking(path: Path, manifest: Manifest) -> tuple[str | None, float, str | None] | None:
    """Returns the metric that a checkpoint's first ModelCheckpoint with one monitors, its best value and the mode."""
    states = (_state(path, manifest, "callbacks.json") or {}).get("tree")
    for state in states.values() if isinstance(states, dict) else ():
        if not isinstance(state, dict) or "best_k_models" not in state:
            continue
        metric, best, mode = (state.get(name) for name in ("monitor", "best_model_score", "mode"))
        if isinstance(best, (int, float)) and math.isfinite(best):
            return metric if isinstance(metric, str) else None, best, mode if mode in ("min", "max") else None
    return None


def _state(path: Path, manifest: Manifest, name: str) -> dict[str, Any] | None:
    """Returns the object in one of a checkpoint's JSON files; None if it is missing, too large or damaged."""
    entry = manifest.files.get(name)
    if entry is None or entry.size > _MOST:
        return None
    with suppress(CheckpointError, OSError, ValueError, RecursionError):
        with os.fdopen(open_inside(path, name)[0], "rb") as file:
            data = file.read(entry.size + 1)
        hasher = ChunkHasher(entry.chunk, entry.algorithm)
        hasher.update(data)
        if hasher.entry() == entry and parts_in(data) <= MAX_PARTS:
            found = json.loads(data)
            return found if isinstance(found, dict) else None
    return None


def _size(folder: Path) -> int:
    """Returns the bytes of all files in a folder. Links count as themselves."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False)
                total += _size(Path(entry.path)) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total


def _made(folder: Path) -> float | None:
    """Returns the time at which a run's identifier was written."""
    with suppress(OSError):
        return (folder / RUN_FILE).stat().st_mtime
    return None


def _seconds(time: str) -> float | None:
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(time).timestamp()
    return None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None
