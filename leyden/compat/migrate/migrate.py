"""`leyden migrate` rewrites scripts from Lightning and Accelerate to Leyden, and lists what it could not change."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import difflib
import io
import itertools
import json
import os
import re
import shutil
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from leyden.compat.migrate.names import lookup
from leyden.compat.migrate.script import Edit, Leftover, Script, migrated

SUFFIXES = (".py", ".ipynb", ".yaml", ".yml")
"""Suffixes of the files that are read in a folder."""
SKIPPED = ("__pycache__", "node_modules", "site-packages")
LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r|$)")
CLASS_PATH = re.compile(r"^[ \t-]*class_path:[ \t]*['\"]?((?:lightning|pytorch_lightning)\.[\w.]+)", re.MULTILINE)
MAGIC = re.compile(r"^[ \t]*(?:[%!?].*|[\w.]+\?{1,2}|\w[\w, ]*=[ \t]*[%!].*)$", re.MULTILINE)
"""Lines in IPython syntax."""
PYTHON = ("%%capture", "%%prun", "%%time")
"""Cell magics of Python cells. A cell with any other `%%` magic is in another language."""


class UnreadableError(Exception):
    """Raised for a file whose content does not match its name. The message has the line and the reason."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """A file before and after, with the places that the user must change."""

    path: Path
    before: str
    after: str
    left: list[Leftover] = field(default_factory=list)
    encoding: str = "utf-8"

    @property
    def diff(self) -> str:
        """The change as a unified diff."""
        before, after = (LINE.findall(text)[:-1] for text in (self.before, self.after))
        lines = [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, after, str(self.path), str(self.path))
        ]
        return "".join(lines)

    def write(self) -> None:
        """Replaces the file atomically, keeping its permissions."""
        path = self.path.resolve()
        beside = path.with_name(f".{path.name}.migrated-{os.getpid()}")
        try:
            beside.write_bytes(self.after.encode(self.encoding))
            shutil.copymode(path, beside)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


@click.command("migrate")
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option("--diff", "mode", flag_value="diff", default=True, help="Print the changes, and write nothing (default).")
@click.option("--write", "mode", flag_value="write", help="Write the changes.")
@click.option("--check", "mode", flag_value="check", help="Print the names of the files that would change.")
def command(files: tuple[str, ...], mode: str) -> int:
    """Rewrite imports and names of Lightning and Accelerate in scripts, and list what is left and why.

    FILE is a script, a notebook, a LightningCLI configuration, or a folder with any of these. Comments, layout, strings
    and names that a script defines itself stay as they are. A name without a counterpart keeps its import, and is
    listed with its line and a replacement.

    The exit status is 2 if a file cannot be read. With --check it is 1 if anything would change or is left.
    """
    found, failed = [], 0
    for path in _files(files):
        try:
            found.append(migrate_file(path))
        except (UnreadableError, OSError) as error:
            failed += 1
            click.echo(f"{path}{error if isinstance(error, UnreadableError) else f': {error.strerror}'}", err=True)
    changed = [one for one in found if one.after != one.before]
    for one in changed:
        if mode == "write":
            one.write()
        click.echo(one.diff if mode == "diff" else str(one.path), nl=mode != "diff")
    count = sum(len(one.left) for one in found)
    for one in found:
        for left in one.left:
            click.echo(f"{one.path}:{left}", err=True)
    click.echo(_summary(mode, len(found), len(changed), count, failed), err=True)
    return 2 if failed else int(mode == "check" and bool(changed or count))


def _summary(mode: str, read: int, changed: int, left: int, failed: int) -> str:
    verb = "changed" if mode == "write" else "to change (--write changes them)" if mode == "diff" else "to change"
    parts = [f"{read} file{'s'[: read != 1]} read", f"{changed} {verb}", f"{left} place{'s'[: left != 1]} left to you"]
    parts += [f"{failed} unreadable"] if failed else []
    return ", ".join(parts) + ("; docs/from-lightning.md lists what behaves differently" if changed else "")


def _files(names: tuple[str, ...]) -> Iterator[Path]:
    """Yields each file once: the given files, and those in given folders that may be scripts."""
    seen = set()
    for name in names:
        root = Path(name)
        for path in _inside(root) if root.is_dir() else [root]:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _inside(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        environments = [name for name in folders if (Path(folder) / name / "pyvenv.cfg").exists()]
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in (*SKIPPED, *environments))
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(SUFFIXES))


def migrate_file(path: Path) -> Migrated:
    """Rewrites the text of a file without writing it back.

    Raises:
        UnreadableError: if it is not valid Python, or not a notebook.
        OSError: if it cannot be read.
    """
    data = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0] if path.suffix == ".py" else "utf-8"
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UnreadableError(f": not a text in the encoding that it names ({error}).") from error
    if path.suffix == ".ipynb":
        after, left = _notebook(text)
    elif path.suffix in (".yaml", ".yml"):
        after, left = _configuration(text)
    else:
        script = _script(text, exports=path.name == "__init__.py")
        after, left = migrated(text, script.edits), script.left
    return Migrated(path, text, after, left, encoding)


def _script(text: str, exports: bool = False) -> Script:
    try:
        return Script(text, exports)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UnreadableError(f"{line}: not valid Python, and left as it is ({why}).") from error


def _configuration(text: str) -> tuple[str, list[Leftover]]:
    """Rewrites each `class_path` of a LightningCLI configuration."""
    edits, left = [], []
    for match in CLASS_PATH.finditer(text):
        found = lookup(match[1])
        if found.target is None:
            left.append(Leftover(text.count("\n", 0, match.start(1)) + 1, match[1], found.why))
        else:
            edits.append(Edit(match.start(1), match.end(1), found.target))
    return migrated(text, edits), left


def _notebook(text: str) -> tuple[str, list[Leftover]]:
    """Rewrites the cells of a notebook as one script, ignoring lines in IPython syntax."""
    try:
        notebook = json.loads(text)
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f": not a notebook ({type(error).__name__}: {error}).") from error
    script = _script("\n".join(map(_plain, sources)))
    ends = list(itertools.accumulate(source.count("\n") + 1 for source in sources))
    left = [_in_cell(one, [0, *ends]) for one in script.left]
    left += [
        Leftover(1, "cell", "not valid Python, and left as it is", n + 1) for n, s in enumerate(sources) if _is_odd(s)
    ]
    if not script.edits:
        return text, left
    start = 0
    for cell, source in zip(cells, sources, strict=True):
        end = start + len(source)
        inside = [edit for edit in script.edits if start <= edit.start and edit.end <= end]
        after = migrated(source, [Edit(edit.start - start, edit.end - start, edit.text) for edit in inside])
        if after != source:
            cell["source"] = after.splitlines(keepends=True) if isinstance(cell["source"], list) else after
        start = end + 1
    indent = re.search(r"^\{\n( +)", text)
    after = json.dumps(notebook, indent=len(indent[1]) if indent else None, ensure_ascii=False)
    return after + "\n" * text.endswith("\n"), left


def _in_cell(left: Leftover, ends: list[int]) -> Leftover:
    cell = bisect.bisect_left(ends, left.line)
    return dataclasses.replace(left, line=left.line - ends[cell - 1], cell=cell)


def _plain(source: str) -> str:
    """Returns a cell as Python of equal length: IPython lines become `pass`, and a cell that is not Python is blank."""
    if source.startswith("%%") and not source.startswith(PYTHON):
        return re.sub(r"[^\n]", " ", source)
    if not _parses(source):
        source = MAGIC.sub(_passed, source)
    return source if _parses(source) else re.sub(r"[^\n]", " ", source)


def _passed(line: re.Match[str]) -> str:
    indent, size = len(line[0]) - len(line[0].lstrip()), len(line[0])
    return (" " * indent + "pass").ljust(size) if size >= indent + 4 else "#" * size


def _is_odd(source: str) -> bool:
    return not source.startswith("%%") and bool(source.strip()) and not _plain(source).strip()


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
