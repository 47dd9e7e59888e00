"""The status of a run, in its folder: the process that runs a fit, how the fit ended, and where its checkpoints are.

A process that is killed ends without a word, so the file names the process: as long as it lives, the fit goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from leyden.checkpoint.format import staging
from leyden.checkpoint.format.bucket import BucketPath, Place
from leyden.core.paths import opener
from leyden.core.saved_state import SavedState
from leyden.launch.owner import Owner
from leyden.launch.processes import runs

RUN_FILE = "run.json"
"""The file with a run's identifier, in its folder."""
FILE = "status.json"
ENDINGS = {"success": "finished", "failed": "failed", "interrupted": "interrupted"}
"""How a fit ended, by the status that loggers are closed with."""
_MOST = 1 << 20
"""The largest size in bytes of a file that is read."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The content of `status.json`, which rank 0 writes at the start and at the end of a fit.

    Attributes:
        owner: the process of rank 0.
        started: the time at which the fit began, in UTC, ISO 8601.
        places: the folders of its checkpoints, relative to the run's folder or as URLs, each with the number of
            subfolder levels.
        ending: one of the values of ENDINGS; None until the fit has ended.
        ended: the time at which the fit ended; None until then.
        step: the global step at its end; None until then.
    """

    owner: Owner
    started: str
    places: Sequence[tuple[str, int]] = field(default=())
    ending: str | None = None
    ended: str | None = None
    step: int | None = None

    @classmethod
    def begin(cls, folder: Path, places: Sequence[tuple[Place, int]]) -> RunStatus:
        """Records in a run's folder that this process begins a fit, and where its checkpoints are, with the depth."""
        home = os.path.realpath(folder)
        named = [
            (str(place) if isinstance(place, BucketPath) else os.path.relpath(os.path.realpath(place), home), depth)
            for place, depth in places
        ]
        status = cls(owner=Owner.here(), started=_now(), places=named)
        status._write(folder)
        return status

    def end(self, folder: Path, ending: str, step: int) -> None:
        """Records how the fit ended, unless another process has begun one in this folder since."""
        found = RunStatus.read(folder)
        if found is None or found.owner.token == self.owner.token:
            dataclasses.replace(self, ending=ending, ended=_now(), step=step)._write(folder)

    def _write(self, folder: Path) -> None:
        with staging.replacing(folder / FILE) as temporary:
            temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> RunStatus | None:
        """Returns the status in a run's folder; None without a valid one."""
        found = read_json(folder / FILE)
        if found is None:
            return None
        with suppress(ValueError, TypeError):
            saved = SavedState(found)
            places = [(str(place), int(depth)) for place, depth in saved.items("places")]
            return cls(
                owner=Owner.from_dict(found["owner"]) if "owner" in found else Owner(),
                started=saved.text("started"),
                places=places,
                ending=None if saved.is_none("ending") else saved.text("ending", among=[*ENDINGS.values()]),
                ended=None if saved.is_none("ended") else saved.text("ended"),
                step=None if saved.is_none("step") else saved.integer("step", least=0),
            )
        return None

    @property
    def state(self) -> str:
        """The ending; "running" or "killed" before it, "unknown" if this host cannot tell whether the process lives."""
        if self.ending is not None:
            return self.ending
        if not self.owner.is_here:
            return "unknown"
        return "running" if runs(self.owner.pid, self.owner.start) else "killed"


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a small JSON file; None if it is missing, damaged, unreadable or no plain file."""
    # RuntimeError: the errors of `opener`. Deep nesting raises RecursionError, one of its subclasses.
    with suppress(OSError, ValueError, RuntimeError), open(path, "rb", opener=opener) as file:
        found = json.loads(file.read(_MOST))
        return found if isinstance(found, dict) else None
    return None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
