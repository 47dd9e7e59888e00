"""Owner: the process that holds a folder, or that runs a fit, and how other processes tell whether it is alive."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import platform
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

from leyden.launch.processes import place, started


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a folder.

    Attributes:
        token: a random string that is unique to each acquisition.
        pid: the process ID.
        start: the start time of the process, which tells a reused process ID apart.
        place: an identifier of the booted host or the container, within which the process ID is unique.
        host: the host's name.
        user: the user's name.
        script: the script that the process runs.
        job: the process's SLURM job ID; "" outside of SLURM.
        since: the time at which it took the folder.
    """

    token: str = ""
    pid: int = 0
    start: str = ""
    place: str = ""
    host: str = "?"
    user: str = "?"
    script: str = "?"
    job: str = ""
    since: str = "?"

    @classmethod
    def here(cls) -> Owner:
        """Returns an owner for this process, with a new token."""
        pid, user = os.getpid(), "?"
        with contextlib.suppress(KeyError, OSError):
            # In a container, the user ID may have no name.
            user = getpass.getuser()
        script, job = os.path.basename(sys.argv[0]) or "python", os.environ.get("SLURM_JOB_ID", "")
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(secrets.token_hex(8), pid, started(pid), place(), platform.node(), user, script, job, since)

    @classmethod
    def read(cls, content: bytes) -> Owner:
        """Returns the owner that wrote a lock file. Partial or foreign content returns an owner without a place."""
        try:
            return cls.from_dict(json.loads(content))
        except ValueError:
            return cls()

    @classmethod
    def from_dict(cls, found: Any) -> Owner:
        """Returns the owner with these values, as `dataclasses.asdict` gives them; one without a place if some miss."""
        try:
            values = {field.name: found[field.name] for field in dataclasses.fields(cls)}
        except (KeyError, TypeError):
            return cls()
        is_valid = all(isinstance(value, int if name == "pid" else str) for name, value in values.items())
        return cls(**values) if is_valid else cls()

    @property
    def is_here(self) -> bool:
        """True if this process can check whether the owner is running."""
        return self.place == place()

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} of {self.user} on {self.host} ({self.script}{job}), since {self.since}"
