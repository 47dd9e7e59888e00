"""Rewrites the source of a script for `leyden migrate`. LibCST resolves its names. Only the words that change are
replaced, so that comments and layout stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from leyden.compat.migrate.names import MEMBERS, ROOTS, Found, lookup
from leyden.core.errors import needs
from leyden.trainer.starting.uncalled_hooks import FORMER

with needs("libcst", "migrate", "leyden migrate"):
    import libcst as cst
    from libcst import metadata
    from libcst.helpers import get_full_name_for_node

Import = cst.Import | cst.ImportFrom
PATH = re.compile(r"(?:lightning\.pytorch|pytorch_lightning|accelerate)(?:\.\w+)+")
DOTTED = re.compile(r"(?<![\w.])([A-Za-z_]\w*)((?:\.\w+)*)")
EVALUATIONS = ("test", "validate", "predict")
PROVIDERS = (
    metadata.ByteSpanPositionProvider,
    metadata.ParentNodeProvider,
    metadata.PositionProvider,
    metadata.ScopeProvider,
)


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
    """The new form of one imported name."""

    module: str | None
    """The module to import it from; None for another form of import, or for none."""
    text: str
    """The imported name, such as `TrainModule as Module`; "" for none."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A name that a statement imports from Lightning or Accelerate.

    Attributes:
        statement: the import statement.
        alias: the part of the statement that binds the name.
        path: full path of the imported object, such as `lightning.pytorch.callbacks`.
    """

    statement: Import
    alias: cst.ImportAlias
    path: str


@dataclass(frozen=True, slots=True)
class Use:
    """A read of a name, with the attributes that follow it.

    Attributes:
        node: the name, or the string that holds it.
        start: where the name starts in the source.
        words: the attributes.
        ends: where the name ends in the source, and where each attribute does.
    """

    node: cst.CSTNode
    start: int
    words: tuple[str, ...]
    ends: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Name:
    """A name in a scope.

    Attributes:
        imported: the imports from Lightning or Accelerate that bind it.
        is_bound_otherwise: True if something else binds it too, except for an assignment of None.
        is_of_leyden: True if an import of Leyden binds it.
        uses: the places that read it.
    """

    imported: list[Imported] = field(default_factory=list)
    is_bound_otherwise: bool = False
    is_of_leyden: bool = False
    uses: dict[int, Use] = field(default_factory=dict)


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
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        except cst.ParserSyntaxError as error:
            raise SyntaxError(error.message, ("", error.raw_line, error.raw_column, None)) from error
        self._bytes = None if source.isascii() else source.encode()
        found: Any = wrapper.resolve_many(PROVIDERS)
        self._spans, self._parents, self._places, self._scopes = (found[provider] for provider in PROVIDERS)
        self._names: dict[tuple[Any, str], Name] = {}
        for scope in {scope for scope in self._scopes.values() if scope is not None}:
            for assignment in scope.assignments:
                self._collect(assignment)
        self._strings_of_types()
        self._moved: dict[cst.ImportAlias, Moved] = {}
        self._added: dict[Import, list[str]] = {}
        self._rewrite()

    @property
    def left(self) -> list[Leftover]:
        return sorted(self._left)

    # Names and where they are used.

    def _collect(self, assignment: Any) -> None:
        word = assignment.name.partition(".")[0]
        name = self._names.setdefault((assignment.scope, word), Name())
        if isinstance(assignment, metadata.ImportAssignment):
            statement: Any = assignment.node
            [alias] = [
                one for one in statement.names if assignment.as_name in (one.name, getattr(one.asname, "name", None))
            ]
            path = alias.evaluated_name if alias.asname else word
            if isinstance(statement, cst.ImportFrom):
                path = f"{_module_of(statement)}.{alias.evaluated_name}"
            root = path.partition(".")[0]
            if root in ROOTS:
                if all(one.alias is not alias for one in name.imported):
                    name.imported.append(Imported(statement, alias, path))
            else:
                name.is_bound_otherwise, name.is_of_leyden = True, name.is_of_leyden or root == "leyden"
        elif not self._is_none(assignment):
            name.is_bound_otherwise = True
        for access in assignment.references:
            node = access.node
            while isinstance(node, cst.Attribute):
                node = node.value
            if isinstance(node, cst.Name) and node in self._spans:
                self._use_of(name, node)

    def _is_none(self, assignment: Any) -> bool:
        """Returns True for `pl = None` under `except ImportError:`, which does not make `pl.Trainer` something else."""
        target = self._parents.get(getattr(assignment, "node", None))
        whole = self._parents.get(target) if isinstance(target, cst.AssignTarget) else None
        return isinstance(whole, cst.Assign) and isinstance(whole.value, cst.Name) and whole.value.value == "None"

    def _use_of(self, name: Name, node: cst.CSTNode) -> None:
        words, ends, inner = [], [self._end(node)], node
        while isinstance(outer := self._parents[inner], cst.Attribute) and outer.value is inner:
            words.append(outer.attr.value)
            ends.append(self._end(outer))
            inner = outer
        start = self._at(node)
        name.uses[start] = Use(node, start, tuple(words), tuple(ends))

    def _strings_of_types(self) -> None:
        """Reads annotations written as a string in simple quotes without escapes."""
        for node in self._nodes(cst.SimpleString):
            if len(node.quote) > 1 or node.prefix or "\\" in node.value or not self._is_type(node):
                continue
            for match in DOTTED.finditer(node.raw_value):
                start, words = self._at(node) + 1 + match.start(), match[2].split(".")[1:]
                ends = [start + len(match[1])]
                for word in words:
                    ends.append(ends[-1] + 1 + len(word))
                for assignment in self._scopes[node][match[1]]:
                    name = self._names.get((assignment.scope, match[1]))
                    if name is not None:
                        name.uses[start] = Use(node, start, tuple(words), tuple(ends))

    def _is_type(self, node: cst.CSTNode) -> bool:
        while not isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement, cst.Module)):
            if isinstance(node, cst.Subscript) and (get_full_name_for_node(node) or "").endswith("Literal"):
                return False
            if isinstance(node, cst.Annotation):
                return True
            node = self._parents[node]
        return False

    def _nodes(self, kind: type[Any]) -> list[Any]:
        return [node for node in self._places if isinstance(node, kind)]

    def _rewrite(self) -> None:
        foreign = [(scope, word, name) for (scope, word), name in self._names.items() if name.imported]
        foreign.sort(key=lambda one: min(self._at(imported.alias) for imported in one[2].imported))
        stars = [one for one in self._nodes(cst.ImportFrom) if isinstance(one.names, cst.ImportStar)]
        stars = [one for one in stars if _module_of(one).partition(".")[0] in ROOTS]
        if not foreign and not stars:
            return
        for scope, word, name in foreign:
            self._name(scope, word, name)
        for statement in {imported.statement: None for *_, name in foreign for imported in name.imported}:
            self._import(statement)
        for star in stars:
            self._leave(star, f"from {_module_of(star)} import *", "write out the names that the script uses")
        if {"lightning", "pytorch_lightning"} & {i.path.partition(".")[0] for *_, n in foreign for i in n.imported}:
            self._members()
        self._strings()

    def _leave(self, node: cst.CSTNode, name: str, why: str) -> None:
        self._left.add(Leftover(self._places[node].start.line, name, why))

    # Replacing names and their uses.

    def _name(self, scope: Any, word: str, name: Name) -> None:
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

    def _object(self, scope: Any, word: str, name: Name, found: Found) -> None:
        """Replaces a class or function in its import, and in its uses if the new name does not clash."""
        assert found.target is not None
        ours = found.target.rpartition(".")[2]
        renamed = [imported for imported in name.imported if imported.alias.asname is None]
        if ours != word and renamed:
            taken = any(node.value == ours for node in self._nodes(cst.Name))
            public = isinstance(scope, metadata.GlobalScope) and (self._exports or word in self._exported())
            if not taken and not public and not name.is_bound_otherwise:
                for use in name.uses.values():
                    self._edit(use.start, use.ends[0], ours)
                word = ours
        for imported in name.imported:
            local = imported.alias.evaluated_alias or word
            self._moved[imported.alias] = Moved(found.module, ours if local == ours else f"{ours} as {local}")

    def _module(self, word: str, name: Name, found: Found) -> None:
        """Replaces a module if all its uses have counterparts. Otherwise the script imports both."""
        if name.is_bound_otherwise and not name.is_of_leyden:
            for imported in name.imported:
                self._leave(imported.alias, imported.path, f"the script binds {word!r} to something else too")
            return
        first = name.imported[0]
        base = first.path.split(".")
        uses = [(use, lookup(".".join([*base, *use.words]))) for _, use in sorted(name.uses.items())]
        left = [(use, one) for use, one in uses if one.target is None]
        for use, one in left:
            self._leave(use.node, ".".join([word, *use.words[: one.used - len(base)]]), one.why)
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
            if isinstance(imported.statement, cst.ImportFrom):
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
                self._moved[alias] = Moved(None, lookup(alias.evaluated_name).target or target)
            else:
                self._moved[alias] = Moved(None, f"leyden as {word}")
        return local, found.target

    def _use(self, use: Use, found: Found, base: int, local: tuple[str, str] | None, imports: list[Imported]) -> None:
        """Replaces a use of a module, and adds the import of Leyden's module that it needs."""
        assert found.target is not None
        if local is not None and (found.target == local[1] or found.target.startswith(f"{local[1]}.")):
            text = local[0] + found.target.removeprefix(local[1])
        elif self._is_free("leyden"):
            text = found.target
            for imported in imports:
                self._add(imported, "import leyden")
        else:
            self._leave(use.node, self.source[use.start : use.ends[-1]], "the script binds 'leyden' to something else")
            return
        is_here = local is not None and found.module == local[1]
        if found.module.startswith("leyden.trainer.") and not is_here and not self._imports(imports, found.module):
            for imported in imports:
                self._add(imported, f"import {found.module}")
        self._edit(use.start, use.ends[max(found.used - base, 0)], text)

    def _imports(self, imports: list[Imported], module: str) -> bool:
        """Returns True if the rewritten imports load a module."""
        return any(self._moved.get(i.alias, Moved(None, "")).text.split(" as ")[0] == module for i in imports)

    def _is_free(self, word: str) -> bool:
        """Returns True if in every scope the name is either the package's import or unbound."""
        names = [name for (_, bound), name in self._names.items() if bound == word]
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

    def _import(self, statement: Import) -> None:
        """Rewrites an import. It becomes the one from the module that most names move to, unless one of them stays."""
        names: list[cst.ImportAlias] = list(statement.names)  # type: ignore[arg-type]
        moved = {alias: self._moved[alias] for alias in names if alias in self._moved}
        modules = Counter(one.module for one in moved.values() if one.module is not None)
        main = modules.most_common(1)[0][0] if modules and len(moved) == len(names) else None
        here = [alias for alias in names if alias not in moved or (moved[alias].text and moved[alias].module == main)]
        lines = [
            line
            for line in self._added.get(statement, [])
            if line not in {f"import {one.text}" for one in moved.values()}
        ]
        lines += [_from(module, moved.values()) for module in modules if module != main]
        if here:
            changed = [alias.with_changes(**_parsed(moved[alias].text)) if alias in moved else alias for alias in here]
            changed[-1] = changed[-1].with_changes(comma=names[-1].comma)
            whole = statement.with_changes(names=changed, semicolon=cst.MaybeSentinel.DEFAULT)
            if main is not None:
                whole = whole.with_changes(module=cst.parse_expression(main))
            lines.append(cst.Module([]).code_for_node(whole))
        self._replace(statement, self._joined(statement, lines))

    def _joined(self, statement: Import, lines: list[str]) -> str:
        """Replaces one statement by several."""
        start = self._at(statement)
        indent = self.source[self.source.rfind("\n", 0, start) + 1 : start]
        newline = "\r\n" if "\r\n" in self.source else "\n"
        return (f"{newline}{indent}" if not indent.strip() else "; ").join(lines)

    # Reporting without replacing.

    def _members(self) -> None:
        """Reports methods that Leyden's classes lack, hooks of Lightning 1, and calls with another meaning."""
        for node in self._nodes(cst.Attribute):
            if node.attr.value in MEMBERS:
                self._leave(node, f".{node.attr.value}", MEMBERS[node.attr.value])
        for node in self._nodes(cst.ClassDef):
            for member in node.body.body if node.bases else ():
                if isinstance(member, cst.FunctionDef) and member.name.value in FORMER:
                    why = f"it was a hook of Lightning 1, and is never called: write {FORMER[member.name.value]}"
                    self._leave(member.name, member.name.value, why)
        for node in self._nodes(cst.Call):
            if _takes_the_best(node):
                why = "Lightning loads the best checkpoint here, Leyden keeps the weights: give ckpt_path='best'"
                self._leave(node, f"trainer.{node.func.attr.value}()", why)

    def _strings(self) -> None:
        """Reports strings that hold import paths of Lightning or Accelerate."""
        for node in self._nodes(cst.SimpleString):
            if isinstance(value := node.evaluated_value, str) and PATH.fullmatch(value):
                found = lookup(value)
                why = f"strings stay as they are; the path is {found.target} here" if found.target else found.why
                self._leave(node, repr(value), why)

    def _exported(self) -> set[str]:
        """Returns the strings in the script's `__all__`."""
        owners = [self._parents[node] for node in self._nodes(cst.Name) if node.value == "__all__"]
        owners = [self._parents[one] if isinstance(one, cst.AssignTarget) else one for one in owners]
        spans = [(self._at(one), self._end(one)) for one in owners]
        strings = self._nodes(cst.SimpleString)
        return {one.raw_value for one in strings if any(start <= self._at(one) < end for start, end in spans)}

    # Positions in the source.

    def _at(self, node: cst.CSTNode) -> int:
        return self._character(self._spans[node].start)

    def _end(self, node: cst.CSTNode) -> int:
        span = self._spans[node]
        return self._character(span.start + span.length)

    def _character(self, byte: int) -> int:
        return byte if self._bytes is None else len(self._bytes[:byte].decode())

    def _replace(self, node: cst.CSTNode, text: str) -> None:
        self._edit(self._at(node), self._end(node), text)

    def _edit(self, start: int, end: int, text: str) -> None:
        if self.source[start:end] != text:
            self.edits.append(Edit(start, end, text))


def _module_of(statement: cst.ImportFrom) -> str:
    name = get_full_name_for_node(statement.module) if statement.module is not None else None
    return "." * len(statement.relative) + (name or "")


def _parsed(text: str) -> dict[str, Any]:
    """Returns the parts of an imported name, such as `TrainModule as Module`."""
    statement: Any = cst.parse_statement(f"import {text}")
    [alias] = statement.body[0].names
    return {"name": alias.name, "asname": alias.asname}


def _from(module: str, moved: Iterable[Moved]) -> str:
    """Formats the import of names from their new module."""
    return f"from {module} import {', '.join(one.text for one in moved if one.module == module)}"


def _takes_the_best(call: cst.Call) -> bool:
    """Returns True for `trainer.test()` without a model and a path."""
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in EVALUATIONS:
        return False
    owner = get_full_name_for_node(call.func.value) or ""
    given = {argument.keyword.value if argument.keyword else None for argument in call.args}
    return owner.lower().endswith("trainer") and not given & {"model", "ckpt_path", None}
