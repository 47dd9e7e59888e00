"""Where each name of a script is bound and used, for `leyden migrate`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from leyden.compat.migrate.names import ROOTS

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True, slots=True)
class Imported:
    """A name that a statement imports from Lightning or Accelerate.

    Attributes:
        statement: the import statement.
        alias: the part of the statement that binds the name.
        path: full path of the imported object, such as `lightning.pytorch.callbacks`.
    """

    statement: Import
    alias: ast.alias
    path: str


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
    uses: list[Use] = field(default_factory=list)

    def bind(self, by_leyden: bool = False) -> None:
        """Records that something other than Lightning or Accelerate binds the name."""
        self.is_bound_otherwise = True
        self.is_of_leyden |= by_leyden


@dataclass(eq=False, slots=True)
class Scope:
    """A module, class, function or comprehension."""

    kind: str
    parent: Scope | None = None
    names: dict[str, Name] = field(default_factory=dict)
    outer: dict[str, Scope] = field(default_factory=dict)

    def name(self, name: str) -> Name:
        """Returns a name that this scope binds."""
        home = self.outer.get(name, self)
        return home.names.setdefault(name, Name())

    def find(self, name: str) -> Name | None:
        """Resolves a name that is read in this scope. None if nothing in the file binds it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names and (scope is self or scope.kind != "class"):
                return scope.names[name]
            if name in scope.outer:
                return scope.outer[name].names.get(name)
            scope = scope.parent
        return None


@dataclass(frozen=True, slots=True)
class Use:
    """A read of a name, with the attributes that follow it.

    Attributes:
        root: the name.
        attributes: the nodes of `name.a`, `name.a.b`, …
    """

    root: ast.Name
    attributes: tuple[ast.Attribute, ...]

    @property
    def words(self) -> list[str]:
        return [attribute.attr for attribute in self.attributes]


class Scopes(ast.NodeVisitor):
    """Collects the scopes of a script, with their names and uses.

    Args:
        tree: the parsed script.
        lines: lines of its source, needed for annotations that are written as strings.

    Attributes:
        all: every scope.
        free: names that are read but not bound in the file, such as builtins.
        stars: the `from … import *` statements of Lightning or Accelerate.
    """

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self._lines = lines
        self._here = Scope("module")
        self._in_annotation = False
        self._used: list[tuple[Scope, Use]] = []
        self.all = [self._here]
        self.free: set[str] = set()
        self.stars: list[ast.ImportFrom] = []
        self.visit(tree)
        for scope, use in self._used:
            name = scope.find(use.root.id)
            if name is None:
                self.free.add(use.root.id)
            else:
                name.uses.append(use)

    @property
    def bound(self) -> set[str]:
        """All names that the file binds."""
        return {name for scope in self.all for name in scope.names}

    @contextmanager
    def _inside(self, kind: str) -> Iterator[Scope]:
        outer = self._here
        self._here = Scope(kind, outer)
        self.all.append(self._here)
        yield self._here
        self._here = outer

    def _bind(self, name: str) -> None:
        self._here.name(name).bind()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.partition(".")[0]
            self._import(node, alias, alias.asname or root, alias.name if alias.asname else root)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name != "*":
                self._import(node, alias, alias.asname or alias.name, f"{module}.{alias.name}")
            elif module.partition(".")[0] in ROOTS:
                self.stars.append(node)

    def _import(self, node: Import, alias: ast.alias, name: str, path: str) -> None:
        root = path.partition(".")[0]
        if root in ROOTS:
            self._here.name(name).imported.append(Imported(node, alias, path))
        else:
            self._here.name(name).bind(by_leyden=root == "leyden")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        # `except ImportError: pl = None` does not make `pl.Trainer` something else.
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        for target in node.targets:
            if is_none and isinstance(target, ast.Name):
                self._here.name(target.id)
            else:
                self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        for part in (node.value, node.target):
            if part is not None:
                self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._used.append((self._here, Use(node, ())))
        else:
            self._bind(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain, base = [node], node.value
        while isinstance(base, ast.Attribute):
            chain.append(base)
            base = base.value
        if isinstance(base, ast.Name):
            self._used.append((self._here, Use(base, tuple(reversed(chain)))))
        else:
            self.visit(base)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        scope = self._here
        while scope.kind == "comprehension" and scope.parent is not None:
            scope = scope.parent
        scope.name(node.target.id).bind()

    def visit_Global(self, node: ast.Global) -> None:
        self._here.outer.update(dict.fromkeys(node.names, self.all[0]))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        scope = self._here.parent
        for name in node.names:
            home = scope
            while home is not None and (home.kind == "class" or name not in home.names):
                home = home.parent
            if home is not None:
                self._here.outer[name] = home

    def _clause(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name:
            self._bind(name)
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = visit_MatchMapping = _clause

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name)
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._annotation(node.returns)
        with self._arguments(node.args):
            for statement in node.body:
                self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        with self._arguments(node.args):
            self.visit(node.body)

    @contextmanager
    def _arguments(self, arguments: ast.arguments) -> Iterator[None]:
        """Enters the scope of a function, after its defaults and annotations, which belong to the outer scope."""
        own = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.visit(default)
        for argument in own:
            self._annotation(argument.annotation if argument is not None else None)
        with self._inside("function"):
            for argument in own:
                if argument is not None:
                    self._bind(argument.arg)
            yield

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        with self._inside("class"):
            for statement in node.body:
                self.visit(statement)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        with self._inside("comprehension"):
            for number, generator in enumerate(node.generators):
                parts = [generator.target, *([generator.iter] if number else []), *generator.ifs]
                for part in parts:
                    self.visit(part)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self.visit(part)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def _annotation(self, node: ast.expr | None) -> None:
        if node is not None:
            before, self._in_annotation = self._in_annotation, True
            self.visit(node)
            self._in_annotation = before

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        literal = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        before = self._in_annotation
        self._in_annotation = before and literal != "Literal"
        self.visit(node.slice)
        self._in_annotation = before

    def visit_Constant(self, node: ast.Constant) -> None:
        """Reads an annotation written as a single-line string without escapes."""
        if not self._in_annotation or not isinstance(node.value, str) or node.lineno != node.end_lineno:
            return
        written = self._lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
        if written not in (f'"{node.value}"', f"'{node.value}'"):
            return
        try:
            inside = ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return
        for part in ast.walk(inside):
            if isinstance(part, ast.expr) and part.end_col_offset is not None:
                part.lineno = part.end_lineno = node.lineno
                part.col_offset += node.col_offset + 1
                part.end_col_offset += node.col_offset + 1
        self.visit(inside)
