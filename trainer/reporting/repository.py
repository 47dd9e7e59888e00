"""The state of a run's code in git: its commit and its uncommitted changes."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from leyden.checkpoint.format.secrets import masked_lines

SECONDS = 5.0
"""Time limit for all calls of git together. The other ranks wait for them."""
MOST_BYTES = 2_000_000
"""Size limit of a diff. A single file may take a tenth of it."""
MOST_NAMES = 100
PRIVATE = re.compile(
    r"(^|/)(\.env(?!\.(example|sample|template|dist)$)[^/]*|[^/]+\.env|[_.]netrc|\.npmrc|\.pypirc|\.htpasswd|\.pgpass"
    r"|\.git-credentials|\.dockercfg|\.s3cfg|\.boto|kubeconfig|kaggle\.json|service[_-]?account[^/]*\.json|id_[a-z0-9]+"
    r"|\.?(secrets?|credentials?)|[^/]+\.(pem|key|p8|p12|pfx|ppk|jks|keystore|kdbx)"
    r"|[^/]*(secret|credential)[^/]*\.(ya?ml|json|toml|ini|cfg|txt|csv))$",
    re.IGNORECASE,
)
"""Matches the names of files that usually hold secrets. If one has changed, other files may hold its secret too."""
CODE = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
    *(".js", ".ts", ".rs", ".go"),
)
"""Suffixes of files in which string values are quoted."""
_PART = re.compile(r"^(@@ [^@]+ @@).*", re.DOTALL)
OWN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Variables that git sets for its hooks. They would redirect our calls to another repository."""


@dataclass(slots=True)
class Repository:
    """The state of a git repository at the start of a run.

    Attributes:
        folder: the top-level folder.
        commit: the full hash; None before the first commit.
        branch: the current branch; None if HEAD is detached.
        dirty: True if tracked files have uncommitted changes; None if git did not answer in time.
        untracked: untracked files and folders that are not ignored, at most 100 of them.
        diff: the uncommitted changes, for `git apply`; None if not requested, or if git did not answer in time.
        left_out: changed files that the diff leaves out: binary files, large ones, and those that hold secrets.
        private: changed files that usually hold secrets. If there are any, there is no diff, unless it was requested.
        masked: the number of diff lines in which a secret is masked. `git apply` may reject them.
    """

    folder: str
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    untracked: list[str] = field(default_factory=list)
    diff: str | None = None
    left_out: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    masked: int = 0

    @classmethod
    def of(cls, folder: Path, with_diff: bool = True, beside_secrets: bool = False) -> Repository | None:
        """Returns the repository that contains a folder; None if there is none, or if git is not installed.

        `with_diff` reads the diff too; `beside_secrets` that of other files even if a file of secrets has changed.
        """
        git = partial(_git, folder, time.monotonic() + SECONDS)
        top = git("rev-parse", "--show-toplevel").rstrip("\r\n")
        if not top:
            return None
        found = cls(top)
        # In a call of its own, because it is fast however large the repository is.
        commit, _, branch = git("rev-parse", "HEAD", "--abbrev-ref", "HEAD").rstrip("\r\n").partition("\n")
        found.commit, found.branch = commit or None, None if branch in ("", "HEAD") else branch
        status = ("--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal")
        changed = found._read_status(git("status", *status))
        if with_diff and changed:
            plain: tuple[str, ...] = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-relative")
            plain += ("--src-prefix=a/", "--dst-prefix=b/")
            found._read_diff(git("diff", *plain, found.commit or "--cached"), changed, beside_secrets)
        elif with_diff and found.dirty is False:
            found.diff = ""
        return found

    def _read_status(self, status: str) -> list[str]:
        """Parses the output of `git status`, and returns the changed files."""
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

    def _read_diff(self, diff: str, changed: list[str], beside_secrets: bool) -> None:
        """Parses the output of `git diff`, leaving out files that are binary, too large, or private."""
        parts = list(_by_file(diff))
        with_keys = {name for name, text in parts if "PRIVATE KEY-----" in text}
        self.private = [name for name in changed if PRIVATE.search(name) or name in with_keys][:MOST_NAMES]
        if self.private and not beside_secrets:
            self.left_out = changed[:MOST_NAMES]
            return
        kept: list[str] = []
        taken = set()
        for name, text in parts:
            is_small = len(text) <= MOST_BYTES // 10 and sum(map(len, kept)) + len(text) <= MOST_BYTES
            is_text = "\nBinary files " not in text and "\ufffd" not in text
            if is_small and is_text and name not in with_keys and not PRIVATE.search(name):
                masked = _masked(text, Path(name).suffix.lower() in CODE)
                before = (_PART.sub(r"\1", line) for line in text.split("\n"))
                self.masked += sum(one != other for one, other in zip(before, masked, strict=True))
                kept.append("\n".join(masked))
                taken.add(name)
        self.diff = "".join(kept) if diff else None
        self.left_out = [name for name in changed if name not in taken][:MOST_NAMES]


def _git(folder: Path, deadline: float, *words: str) -> str:
    """Returns the output of a git command; empty on failure, or after a deadline on the monotonic clock."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        return ""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN}
    # git must not lock the index, which another git may be using, nor prompt the user.
    environ = {**inherited, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.quotePath=false", "-C", str(folder), *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, env=environ, **pipes)  # type: ignore[call-overload]
    except OSError:
        return ""
    timer = threading.Timer(remaining, process.kill)
    timer.daemon = True
    timer.start()
    try:
        with process:
            answer: bytes = process.stdout.read(2 * MOST_BYTES)
            if len(answer) == 2 * MOST_BYTES:
                # The part read so far is still useful. Its last file is truncated, and too large to be kept.
                process.kill()
                return answer.decode("utf-8", "replace")
        return answer.decode("utf-8", "replace") if process.returncode == 0 else ""
    finally:
        timer.cancel()


def _by_file(diff: str) -> Iterator[tuple[str, str]]:
    """Splits a diff by file: yields the name of each file and its part of the diff."""
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        header = part.partition("\n")[0].removeprefix("diff --git ").rstrip("\r")
        # The header repeats the name, "a/… b/…", each in quotes if it contains control characters.
        name = header[: (len(header) - 1) // 2].removeprefix('"').removesuffix('"').removeprefix("a/")
        if part.startswith("diff --git "):
            yield name, part


def _masked(text: str, quoted: bool) -> list[str]:
    """Returns the lines of a file's diff with secrets masked. Lines of git itself are unchanged."""
    lines = text.split("\n")
    first = next((number for number, line in enumerate(lines) if line.startswith("@@")), len(lines))
    # After the line numbers, a hunk header quotes a line of the file for orientation, which could hold a secret.
    body = [_PART.sub(r"\1", line) for line in lines[first:]]
    of_file = ["" if line.startswith(("@@", "-Subproject", "+Subproject")) else line[1:] for line in body]
    masked = masked_lines(of_file, quoted)
    return lines[:first] + [
        line[:1] + hidden if own else line for line, own, hidden in zip(body, of_file, masked, strict=True)
    ]
