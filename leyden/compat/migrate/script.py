"""Rewrites the source of a script for `leyden migrate`. Only the words that change are replaced, so that comments and
layout stay as they are.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from leyden.compat.migrate.names import MEMBERS, Found, lookup
from leyden.compat.migrate.scopes import Import, Imported, Name, Scope, Scopes, Use
from leyden.trainer.starting.uncalled_hooks import FORMER

LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r|$)")
FROM = re.compile(r"from\s+([\w.]+)\s+import\b")
PATH = re.compile(r"(?:lightning\.pytorch|pytorch_lightning|accelerate)(?:\.\w+)+")
EVALUATIONS = ("test", "validate", "predict")


@dataclass(frozen=True, slots=True, order=True)
class Leftover:
    """A place that the user must change.

    Attributes:
        line: line number, from 1.
        name: the name or call at that place.
        why: the reason, and what to write instead.
        cell: cell number in a notebook, from 1. 0 in other files.
    """

    line: int
    name: str
    why: str
    cell: int = 0

    def __str__(self) -> str:
        return f"{f'cell {self.cell}:' if self.cell else ''}{self.line}: {self.name}: {self.why}"


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """A replacement of the characters from `start` to `end` of the source by a text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The new form of one imported name.

    Attributes:
        module: module to import it from. None if the import is dropped.
        text: the imported name, such as `TrainModule as Module`.
    """

    module: str | None
    text: str


def migrated(source: str, edits: list[Edit]) -> str:
    """Applies edits to a source."""
    for edit in sorted(edits, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


class Script:
    """The migration of one script.

    Args:
        source: the script's source.
        exports: True if other files import its names, which then keep their spelling.

    Attributes:
        edits: the changes.
        left: places without a counterpart or with a different behavior, by line.

    Raises:
        SyntaxError: if the source is not valid Python.

    Example:
        >>> script = Script("import lightning as L\\n\\nclass Net(L.LightningModule): ...\\n")
        >>> print(migrated(script.source, script.edits))
        import leyden as L
        <BLANKLINE>
        class Net(L.TrainModule): ...
        <BLANKLINE>
    """

    def __init__(self, source: str, exports: bool = False) -> None:
        self.source = source
        self.edits: list[Edit] = []
        self._left: set[Leftover] = set()
        self._exports = exports
        self._lines = LINE.findall(source)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._tree = ast.parse(source)
        self._scopes = Scopes(self._tree, self._lines)
        self._moved: dict[ast.alias, Moved] = {}
        self._kept: set[ast.alias] = set()
        self._added: dict[Import, list[str]] = {}
        self._rewrite()

    @property
    def left(self) -> list[Leftover]:
        return sorted(self._left)

    def _rewrite(self) -> None:
        names = [(scope, word, name) for scope in self._scopes.all for word, name in scope.names.items()]
        foreign = [(scope, word, name) for scope, word, name in names if name.imported]
        if not foreign and not self._scopes.stars:
            return
        for scope, word, name in foreign:
            self._name(scope, word, name)
        statements = {imported.statement for _, _, name in foreign for imported in name.imported}
        for statement in statements:
            if isinstance(statement, ast.Import):
                self._import(statement)
            else:
                self._import_from(statement)
        for star in self._scopes.stars:
            self._leave(star, f"from {star.module} import *", "write out the names that the script uses")
        if {"lightning", "pytorch_lightning"} & {i.path.partition(".")[0] for *_, n in foreign for i in n.imported}:
            self._members()
        self._strings()

    def _leave(self, node: ast.AST, name: str, why: str) -> None:
        self._left.add(Leftover(getattr(node, "lineno", 1), name, why))

    # Replacing names and their uses.

    def _name(self, scope: Scope, word: str, name: Name) -> None:
        first = name.imported[0]
        found = lookup(first.path)
        if len({(one.target, one.is_module) for one in map(lookup, (i.path for i in name.imported))}) > 1:
            self._leave(first.alias, word, "the script imports the name from several places")
            return
        if found.is_module:
            self._module(word, name, found)
        elif found.target is None:
            for imported in name.imported:
                self._leave(imported.alias, imported.path, found.why)
        else:
            self._object(scope, word, name, found)

    def _object(self, scope: Scope, word: str, name: Name, found: Found) -> None:
        """Replaces a class or function in its import, and in its uses if the new name does not clash."""
        assert found.target is not None
        ours = found.target.rpartition(".")[2]
        renamed = [imported for imported in name.imported if imported.alias.asname is None]
        if ours != word and renamed:
            taken = ours in self._scopes.bound | self._scopes.free
            public = scope.parent is None and (self._exports or word in _exported(self._tree))
            if not taken and not public and not name.is_bound_otherwise:
                for use in name.uses:
                    self._replace(use.root, ours)
                word = ours
        for imported in name.imported:
            local = imported.alias.asname or word
            self._moved[imported.alias] = Moved(found.module, ours if local == ours else f"{ours} as {local}")

    def _module(self, word: str, name: Name, found: Found) -> None:
        """Replaces a module if all its uses have counterparts. Otherwise the script imports both."""
        if name.is_bound_otherwise and not name.is_of_leyden:
            for imported in name.imported:
                self._leave(imported.alias, imported.path, f"the script binds {word!r} to something else too")
            return
        first = name.imported[0]
        base = first.path.split(".")
        uses = [(use, lookup(".".join([*base, *use.words]))) for use in name.uses]
        left = [(use, one) for use, one in uses if one.target is None]
        for use, one in left:
            self._leave(use.root, ".".join([word, *use.words[: one.used - len(base)]]), one.why)
        if found.target is None and not uses:
            for imported in name.imported:
                self._leave(imported.alias, imported.path, found.why)
        replaces = not left and (found.target is not None or bool(uses))
        local = self._module_imports(word, name, found) if replaces else None
        for use, one in uses:
            if one.target is not None:
                self._use(use, one, len(base), local, name.imported)

    def _module_imports(self, word: str, name: Name, found: Found) -> tuple[str, str] | None:
        """Replaces the imports of a module.

        Returns:
            The name by which the script reaches our module, and the module's path; None if it has none.
        """
        if found.target is None:
            for imported in name.imported:
                self._moved[imported.alias] = Moved(None, "")
            return None
        local = word
        for imported in name.imported:
            alias, target = imported.alias, lookup(imported.path).target or found.target
            if isinstance(imported.statement, ast.ImportFrom):
                parent, _, ours = target.rpartition(".")
                text = ours if ours == word else f"{ours} as {word}"
                if parent:
                    self._moved[alias] = Moved(parent, text)
                else:
                    self._moved[alias] = Moved(None, "")
                    self._add(imported, f"import {text}")
            elif alias.asname:
                self._moved[alias] = Moved(None, target if target == word else f"{target} as {word}")
            elif self._is_free("leyden"):
                local = "leyden"
                self._moved[alias] = Moved(None, lookup(alias.name).target or target)
            else:
                self._moved[alias] = Moved(None, f"leyden as {word}")
        return local, found.target

    def _use(self, use: Use, found: Found, base: int, local: tuple[str, str] | None, imports: list[Imported]) -> None:
        """Replaces a use of a module, and adds the import of Leyden's module that it needs."""
        assert found.target is not None
        consumed = found.used - base
        last: ast.expr = use.attributes[consumed - 1] if consumed > 0 else use.root
        if local is not None and (found.target == local[1] or found.target.startswith(f"{local[1]}.")):
            text = local[0] + found.target.removeprefix(local[1])
        elif self._is_free("leyden"):
            text = found.target
            for imported in imports:
                self._add(imported, "import leyden")
        else:
            self._leave(use.root, ".".join([use.root.id, *use.words]), "the script binds 'leyden' to something else")
            return
        is_here = local is not None and found.module == local[1]
        if found.module.startswith("leyden.trainer.") and not is_here and not self._imports(imports, found.module):
            for imported in imports:
                self._add(imported, f"import {found.module}")
        self._replace(use.root, text, last)

    def _imports(self, imports: list[Imported], module: str) -> bool:
        """Returns True if the rewritten imports load a module."""
        return any(self._moved.get(i.alias, Moved(None, "")).text.split(" as ")[0] == module for i in imports)

    def _is_free(self, word: str) -> bool:
        """Returns True if in every scope the name is either the package's import or unbound."""
        names = [scope.names[word] for scope in self._scopes.all if word in scope.names]
        return all(name.is_of_leyden and not name.imported for name in names)

    def _add(self, imported: Imported, line: str) -> None:
        lines = self._added.setdefault(imported.statement, [])
        if line == "import leyden" and any(other.startswith("import leyden.") for other in lines):
            return
        if line.startswith("import leyden.") and "import leyden" in lines:
            lines.remove("import leyden")
        if line not in lines:
            lines.append(line)

    # Imports.

    def _import(self, statement: ast.Import) -> None:
        gone = [alias for alias in statement.names if self._moved.get(alias) == Moved(None, "")]
        added = self._added.get(statement, [])
        if gone and len(gone) == len(statement.names):
            self._replace(statement, self._joined(statement, added))
            return
        texts = {alias: self._text_of(alias) for alias in statement.names if alias not in gone}
        if gone:
            self._replace(statement, f"import {', '.join(texts.values())}")
        else:
            for alias, text in texts.items():
                if alias in self._moved:
                    self._replace(alias, text)
        self._before(statement, [line for line in added if line.removeprefix("import ") not in texts.values()])

    def _import_from(self, statement: ast.ImportFrom) -> None:
        moved = {alias: self._moved[alias] for alias in statement.names if alias in self._moved}
        kept = [alias for alias in statement.names if alias not in moved]
        modules = Counter(one.module for one in moved.values() if one.module is not None)
        added = list(self._added.get(statement, []))
        if not kept and not modules:
            self._replace(statement, self._joined(statement, added))
            return
        # The statement becomes the import from the module that most names move to, unless one of them stays.
        main = None if kept else modules.most_common(1)[0][0]
        added += [_from(module, moved.values()) for module in modules if module != main]
        here = kept or [alias for alias, one in moved.items() if one.module == main]
        texts = {alias: self._text_of(alias) for alias in here}
        if len(here) < len(statement.names) and self._is_on_one_line(statement):
            module = main or "." * statement.level + (statement.module or "")
            self._replace(statement, f"from {module} import {', '.join(texts.values())}")
        else:
            self._edit_from(statement, main, texts)
        self._before(statement, added)

    def _text_of(self, alias: ast.alias) -> str:
        """Returns the text of the name in the import."""
        return self._moved[alias].text if alias in self._moved else _written(alias)

    def _is_on_one_line(self, statement: ast.ImportFrom) -> bool:
        """Returns True for an import that may be rewritten as a whole: it has no parentheses over several lines."""
        text = self.source[self._at(statement) : self._end(statement)]
        return "\n" not in text or "(" not in text

    def _edit_from(self, statement: ast.ImportFrom, main: str | None, stays: dict[ast.alias, str]) -> None:
        """Changes an import in place, with its lines and comments."""
        start = self._at(statement)
        head = FROM.match(self.source, start)
        if main is not None and head is not None:
            self.edits.append(Edit(head.start(1), head.end(1), main))
        for alias, text in stays.items():
            if text != _written(alias):
                self._replace(alias, text)
        self._remove(statement, [alias for alias in statement.names if alias not in stays])

    def _remove(self, statement: ast.ImportFrom, gone: list[ast.alias]) -> None:
        """Removes names from a multi-line import, along with lines that become empty."""
        for alias in gone:
            start, end = self._at(alias), self._end(alias)
            comma = re.compile(r"[ \t]*,[ \t]*").match(self.source, end)
            end = comma.end() if comma else end
            line = self.source.rfind("\n", 0, start) + 1
            rest = re.compile(r"\r?\n").match(self.source, end)
            if rest and not self.source[line:start].strip() and line > self._at(statement):
                start, end = line, rest.end()
            elif rest:
                start = len(self.source[:start].rstrip(" \t"))
            self.edits.append(Edit(start, end, ""))

    def _joined(self, statement: Import, lines: list[str]) -> str:
        """Replaces one statement by several."""
        start = self._at(statement)
        indent = self.source[self._starts[statement.lineno - 1] : start]
        return (f"{self._newline}{indent}" if not indent.strip() else "; ").join(lines)

    def _before(self, statement: Import, lines: list[str]) -> None:
        if lines:
            start = self._at(statement)
            self.edits.append(Edit(start, start, self._joined(statement, [*lines, ""])))

    @property
    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self._lines[0] else "\n"

    # Reporting without replacing.

    def _members(self) -> None:
        """Reports methods that Leyden's classes lack, hooks of Lightning 1, and calls with another meaning."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and node.attr in MEMBERS:
                self._leave(node, f".{node.attr}", MEMBERS[node.attr])
            elif isinstance(node, ast.ClassDef) and node.bases:
                for member in node.body:
                    if isinstance(member, ast.FunctionDef) and member.name in FORMER:
                        why = f"it was a hook of Lightning 1, and is never called: write {FORMER[member.name]}"
                        self._leave(member, member.name, why)
            elif isinstance(node, ast.Call) and _takes_the_best(node):
                assert isinstance(node.func, ast.Attribute)
                why = "Lightning loads the best checkpoint here, Leyden keeps the weights: give ckpt_path='best'"
                self._leave(node, f"trainer.{node.func.attr}()", why)

    def _strings(self) -> None:
        """Reports strings that hold import paths of Lightning or Accelerate."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value):
                found = lookup(node.value)
                why = f"strings stay as they are; the path is {found.target} here" if found.target else found.why
                self._leave(node, repr(node.value), why)

    # Positions in the source.

    def _offset(self, line: int, column: int) -> int:
        """Converts a line and a UTF-8 column to a character position."""
        text = self._lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def _at(self, node: ast.stmt | ast.expr | ast.alias) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.stmt | ast.expr | ast.alias) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _replace(
        self, node: ast.stmt | ast.expr | ast.alias, text: str, last: ast.stmt | ast.expr | ast.alias | None = None
    ) -> None:
        """Replaces a node, or everything from it to the end of another node, by a text."""
        start, end = self._at(node), self._end(last or node)
        if self.source[start:end] != text:
            self.edits.append(Edit(start, end, text))


def _written(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _from(module: str, moved: Iterable[Moved]) -> str:
    """Formats the import of names from their new module."""
    return f"from {module} import {', '.join(one.text for one in moved if one.module == module)}"


def _exported(tree: ast.Module) -> set[str]:
    """Returns the strings in a module's `__all__`."""
    found: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            found |= {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}  # type: ignore[misc]
    return found


def _takes_the_best(call: ast.Call) -> bool:
    """Returns True for `trainer.test()` without a model and a path."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in EVALUATIONS or call.args:
        return False
    owner = call.func.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    given = {keyword.arg for keyword in call.keywords}
    return name.lower().endswith("trainer") and not given & {"model", "ckpt_path", None}
