"""What git knows of the code of a run: its commit, and the changes that are not committed."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from leyden.trainer.format.secrets import masked_lines

SECONDS = 5.0
"""All that git may take together: the other ranks wait."""
MOST_BYTES = 2_000_000
"""Of a diff; of one file a tenth of that."""
MOST_NAMES = 100
PRIVATE = re.compile(
    r"(^|/)(\.env[^/]*|[^/]+\.env|\.?[_.]?netrc|\.npmrc|\.pypirc|\.htpasswd|\.git-credentials|kaggle\.json|id_[a-z0-9]+"
    r"|[^/]+\.(pem|key|p12|pfx|jks|keystore|kdbx)|[^/]*(secret|credential)[^/]*\.(ya?ml|json|toml|ini|cfg|txt|csv)"
    r"|\.?(secrets?|credentials?))$",
    re.IGNORECASE,
)
"""Files that hold secrets."""
CODE = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
    *(".js", ".ts", ".rs", ".go"),
)
"""Endings of files in which a text stands in quotes."""
_PART = re.compile(r"^(@@ [^@]+ @@).*", re.DOTALL)
OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Variables that git sets for its hooks, and that would point it to another repository."""


@dataclass(slots=True)
class Repository:
    """A git repository as it was when a run began.

    Attributes:
        folder: its top.
        commit: the full hash; None before the first commit.
        branch: None where none is checked out.
        dirty: tracked files have changes that are not committed; None if git did not say so in time.
        untracked: files and folders that git neither has nor ignores, at most 100 of them.
        diff: the changes, for `git apply`; None if it was not asked for, or git did not give it in time.
        left_out: changed files that the diff leaves out: binary or large ones, and those that hold secrets.
        masked: lines of the diff in which a secret is masked, to which `git apply` does not take.
    """

    folder: str
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    untracked: list[str] = field(default_factory=list)
    diff: str | None = None
    left_out: list[str] = field(default_factory=list)
    masked: int = 0

    @classmethod
    def of(cls, folder: Path, with_diff: bool = True) -> Repository | None:
        """The repository that holds a folder; None without one, or without git.

        Args:
            folder: within it.
            with_diff: read the changes, too.
        """
        git = _Git(folder, time.monotonic() + SECONDS)
        top = git.text("rev-parse", "--show-toplevel").rstrip("\r\n")
        if not top:
            return None
        found = cls(top)
        # By themselves, since they come at once, however large the repository is.
        commit, _, branch = git.text("rev-parse", "HEAD", "--abbrev-ref", "HEAD").rstrip("\r\n").partition("\n")
        found.commit, found.branch = commit or None, None if branch in ("", "HEAD") else branch
        status = ("--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal")
        changed = found._read_status(git.text("status", *status))
        if with_diff and changed:
            plain: tuple[str, ...] = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-relative")
            plain += ("--src-prefix=a/", "--dst-prefix=b/")
            found._read_diff(git.text("diff", *plain, found.commit or "--cached"), changed)
        elif with_diff and found.dirty is False:
            found.diff = ""
        return found

    def _read_status(self, status: str) -> list[str]:
        """Takes what `git status` said; returns the changed files."""
        changed = []
        for entry in status.split("\0"):
            kind, _, rest = entry.partition(" ")
            if kind == "?":
                self.untracked.append(rest)
            elif kind in ("1", "u"):
                changed.append(rest.split(" ", 7 if kind == "1" else 9)[-1])
        self.dirty = bool(changed) if status else None
        del self.untracked[MOST_NAMES:]
        return changed

    def _read_diff(self, diff: str, changed: list[str]) -> None:
        """Takes what `git diff` said, but for files that are no text, too large, or private."""
        kept: list[str] = []
        taken = set()
        for name, text in _by_file(diff):
            is_small = len(text) <= MOST_BYTES // 10 and sum(map(len, kept)) + len(text) <= MOST_BYTES
            is_text = "\nBinary files " not in text and "\ufffd" not in text
            if is_small and is_text and not PRIVATE.search(name) and "PRIVATE KEY-----" not in text:
                masked = _masked(text, Path(name).suffix.lower() in CODE)
                before = (_PART.sub(r"\1", line) for line in text.split("\n"))
                self.masked += sum(one != other for one, other in zip(before, masked, strict=True))
                kept.append("\n".join(masked))
                taken.add(name)
        self.diff = "".join(kept) if diff else None
        self.left_out = [name for name in changed if name not in taken][:MOST_NAMES]


class _Git:
    """Calls git, as long as there is time. Whatever fails is an empty answer.

    Args:
        folder: where it looks.
        deadline: of all calls together, on the monotonic clock.
    """

    def __init__(self, folder: Path, deadline: float) -> None:
        self._folder, self._deadline = folder, deadline

    def text(self, *words: str) -> str:
        """What git prints."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return ""
        # Neither the lock of the index, which another git may want, nor a question to the user.
        own = {name: value for name, value in os.environ.items() if name not in OWN}
        environ = {**own, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        command = ["git", "-c", "core.quotePath=false", "-C", str(self._folder), *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            process = subprocess.Popen(command, env=environ, **pipes)  # type: ignore[call-overload]
        except OSError:
            return ""
        timer = threading.Timer(left, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with process:
                answer: bytes = process.stdout.read(2 * MOST_BYTES)
                if len(answer) == 2 * MOST_BYTES:
                    # What has come so far is worth having; its last file is cut, and too large to be taken.
                    process.kill()
                    return answer.decode("utf-8", "replace")
            return answer.decode("utf-8", "replace") if process.returncode == 0 else ""
        finally:
            timer.cancel()


def _by_file(diff: str) -> Iterator[tuple[str, str]]:
    """The parts of a diff, each with the name of its file."""
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        header = part.partition("\n")[0].removeprefix("diff --git ").rstrip("\r")
        # Twice the same name, "a/… b/…", each in quotes if it has characters of control.
        name = header[: (len(header) - 1) // 2].removeprefix('"').removesuffix('"').removeprefix("a/")
        if part.startswith("diff --git "):
            yield name, part


def _masked(text: str, quoted: bool) -> list[str]:
    """The lines of a file's diff with their secrets masked; those of git itself stay."""
    lines = text.split("\n")
    first = next((number for number, line in enumerate(lines) if line.startswith("@@")), len(lines))
    # Behind its numbers a part quotes a line of the file, for people.
    body = [_PART.sub(r"\1", line) for line in lines[first:]]
    of_file = ["" if line.startswith(("@@", "-Subproject", "+Subproject")) else line[1:] for line in body]
    masked = masked_lines(of_file, quoted)
    return lines[:first] + [
        line[:1] + hidden if own else line for line, own, hidden in zip(body, of_file, masked, strict=True)
    ]
