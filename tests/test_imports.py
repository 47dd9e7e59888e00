"""The structure of the package: which rooms may import which, which packages load lazily, how long files may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import leyden

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("trainer", "callbacks", "strategies")
MACHINERY = (
    *("core", "launch", "data", "checkpoint", "report", "accelerator", "hf", "integrations", "compat", "cli", "optim"),
)

# The rooms, from the ground up. A module belongs to the room with the longest matching prefix, and imports from its own
# room and from those below.
FLOORS: tuple[tuple[str, ...], ...] = (
    # The base class of callbacks imports nothing. It is on the ground floor because `events` calls its hooks.
    ("leyden.core", "leyden.callbacks.base"),
    ("leyden.launch",),
    ("leyden.strategies",),
    ("leyden.optim",),
    ("leyden.checkpoint.format",),
    ("leyden.data",),
    ("leyden.trainer.events",),
    ("leyden.trainer.logging",),
    ("leyden.trainer.engine",),
    ("leyden.checkpoint",),
    # Below the callbacks, since a logger draws the report of its run. It reads files, and knows no Trainer.
    ("leyden.report",),
    ("leyden.trainer.module", "leyden.trainer.datamodule", "leyden.trainer.hparams", "leyden.trainer.exporting"),
    ("leyden.trainer.tuning",),
    ("leyden.callbacks",),
    ("leyden.trainer.arguments", "leyden.trainer.launched", "leyden.trainer.plugins", "leyden.trainer.profilers"),
    tuple(f"leyden.trainer.{room}" for room in ("run", "starting", "saved", "reporting", "ending")),
    ("leyden.trainer.loops",),
    ("leyden.accelerator.settings", "leyden.accelerator.ranks"),
    ("leyden.accelerator.loop", "leyden.accelerator.prepared"),
    # The Accelerator, and its rooms `records` and `standalone`.
    ("leyden.trainer.trainer", "leyden.accelerator"),
    ("leyden.hf", "leyden.integrations"),
    ("leyden.compat",),
    ("leyden.cli.settings", "leyden.cli.models"),
    tuple(f"leyden.cli.{room}" for room in ("checkpoint", "configuration", "estimate")),
    ("leyden.cli.launch",),
    ("leyden.cli",),
)
# Guests live in compat, above the rooms. These alone open the door to one, when its file or its name comes up.
DOORS = {
    ("leyden.trainer.saved.restoring", "leyden.compat.lightning.run"),
    ("leyden.accelerator", "leyden.compat.accelerate.absent"),
    ("leyden.accelerator.records.saving", "leyden.compat.accelerate.folder"),
}
# Names of packages and of former places of modules, which only re-export.
REEXPORTS = {
    *("leyden", "leyden.trainer", "leyden.trainer.cli", "leyden.trainer.checkpoint"),
    "leyden.trainer.checkpoint.merge",
}
# Base classes of user code and arguments of hooks, which annotations may name anywhere.
NAMED_ANYWHERE = {"TrainModule", "DataModule", "Callback", "Trainer"}
# `import leyden` must load nothing beyond torch: these are imported where they are used.
LAZY = {
    *(
        "numpy",
        "safetensors",
        "tqdm",
        "rich",
        "tensorboard",
        "torchmetrics",
        "wandb",
        "sklearn",
        "yaml",
        "packaging",
        "click",
    ),
    *(
        *("aim", "clearml", "dvclive", "swanlab", "trackio"),
        "comet_ml",
        "datasets",
        "jsonargparse",
        "libcst",
        "mlflow",
        "deepspeed",
        "torch_xla",
        "ray",
        "pyarrow",
        "obstore",
        "boto3",
        "submitit",
        "torchao",
        "transformers",
        "peft",
        "huggingface_hub",
        "torch.utils.tensorboard",
        "torch.distributed.checkpoint",
    ),
}
# Modules that are imported only when a command runs, layers are converted or a bar is drawn, so their library may load
# with them.
OWNERS = {
    "leyden.cli": "click",
    "leyden.compat.migrate": "click",
    "leyden.compat.migrate.script": "libcst",
    "leyden.cli.configuration.argument_parser": "jsonargparse",
    "leyden.strategies.precision.float8_linear": "torchao",
    "leyden.callbacks.bars.rich_screen": "rich",
}
# Loading their files can run code. Checkpoints of other trainers are pickles, and need `trust=True`.
PICKLES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
MAY_UNPICKLE = {"leyden.checkpoint.foreign"}
# One public class is one file, whatever its length up to here: a lower cap once led to classes cut in two and to code
# packed to fit.
MAX_LINES = 1200
# Modules named as in Accelerate, which only re-export.
THIN = {name: ROOT / "leyden" / name.replace(".", "/") for name in leyden._MODULES}
THIN = {name: path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for name, path in THIN.items()}

# A project that `leyden new` copies, not a part of the package.
TEMPLATE = ROOT / "leyden" / "cli" / "new" / "template"
FOLDERS = [*(ROOT / room for room in ROOMS), *(ROOT / "leyden" / room for room in MACHINERY)]


def sources() -> dict[str, Path]:
    """Returns the file of every module of the package, by the name it is imported as."""
    found = {"leyden": ROOT / "leyden" / "__init__.py"}
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            if path.is_relative_to(TEMPLATE):
                continue
            parts = ("leyden", *path.relative_to(folder.parent).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


def imports(tree: ast.AST, deep: bool, typing: bool, package: str = "") -> Iterator[tuple[str, int]]:
    """Yields the names that a module imports, with their lines.

    Args:
        deep: include imports inside functions.
        typing: include imports under TYPE_CHECKING, except those of `NAMED_ANYWHERE`.
        package: the module's package, for relative imports.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            free = [
                n for n in node.body if isinstance(n, ast.ImportFrom) and {a.name for a in n.names} <= NAMED_ANYWHERE
            ]
            body = [n for n in node.body if n not in free] if typing else []
            yield from imports(ast.Module([*body, *node.orelse], []), deep, typing, package)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in SOURCES else base), node.lineno
        elif deep or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, deep, typing, package)


def imports_of(module: str, deep: bool = True, typing: bool = False) -> list[tuple[str, int]]:
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports(ast.parse(path.read_text(), str(path)), deep, typing, package))


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def floor(module: str) -> int:
    fits = [
        (len(prefix), number) for number, prefixes in enumerate(FLOORS) for prefix in prefixes if within(module, prefix)
    ]
    assert fits, f"{module} is in no room of FLOORS"
    return max(fits)[1]


def test_every_module_is_found() -> None:
    assert {"leyden.trainer.trainer", "leyden.callbacks.base", "leyden.strategies.base", "leyden.trainer"} <= set(
        SOURCES
    )


def test_rooms_import_only_from_rooms_below() -> None:
    """Annotations included, so rooms have no import cycles."""
    wrong = [
        f"{module}, line {line}: {name}"
        for module in SOURCES
        if module not in REEXPORTS
        for name, line in imports_of(module, typing=True)
        if name == "leyden" or (name in SOURCES and floor(name) > floor(module) and (module, name) not in DOORS)
    ]
    assert not wrong


def test_the_package_imports_itself_only_as_leyden() -> None:
    """`from trainer.x import y` would create a second copy of every class."""
    wrong = [
        f"{module}, line {line}: {name}"
        for module in SOURCES
        for name, line in imports_of(module)
        if name.partition(".")[0] in ROOMS
    ]
    assert not wrong


def test_modules_have_no_import_cycles() -> None:
    graph = {
        module: {name for name, _ in imports_of(module, deep=False) if name in SOURCES and name != module}
        for module in SOURCES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' → '.join(reversed(error.args[1]))}")


def test_optional_packages_are_imported_lazily() -> None:
    wrong = [
        f"{module}, line {line}: {name}"
        for module in SOURCES
        for name, line in imports_of(module, deep=False)
        if any(within(name, package) for package in LAZY)
        and not any(within(module, room) and within(name, package) for room, package in OWNERS.items())
    ]
    assert not wrong


def test_only_foreign_checkpoints_are_unpickled() -> None:
    wrong = [
        f"{module}, line {line}: {name}"
        for module in SOURCES
        for name, line in imports_of(module)
        if name.partition(".")[0] in PICKLES and module not in MAY_UNPICKLE
    ]
    assert not wrong


def test_files_are_short_documented_and_clearly_named() -> None:
    for path in SOURCES.values():
        text, name = path.read_text(), path.relative_to(ROOT)
        assert text.count("\n") <= MAX_LINES, f"{name} is too long: split it by subject"
        assert ast.get_docstring(ast.parse(text)), f"{name} has no module docstring"
        assert path.stem not in ("utils", "helpers", "manager", "common", "misc"), (
            f"{name}: choose a name that says what is in the file"
        )


def test_public_class_names_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCES.values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_line_is_too_long() -> None:
    """ruff does not count a trailing comment such as `# type: ignore`."""
    folders = (*ROOMS, "leyden", "tests", "examples", "benchmarks", "scripts")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert not wrong


def test_the_package_folder_holds_only_links_to_rooms_and_thin_modules() -> None:
    package = ROOT / "leyden"
    folders = ("utils", "test_utils")
    inside = [package, *(package / name for name in folders)]
    found = {path for folder in inside for path in folder.iterdir() if path.name != "__pycache__"}
    own = {package / name for name in ("__init__.py", "__main__.py", "py.typed", *folders, *ROOMS, *MACHINERY)}
    assert found == own | {path for path in THIN.values() if path.parent.name not in MACHINERY}
    for room in ROOMS:
        link = package / room
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / room


@pytest.mark.parametrize("name", [name for name in THIN if name not in MACHINERY])
def test_modules_named_as_in_accelerate_only_re_export(name: str) -> None:
    tree = ast.parse(THIN[name].read_text())
    assert {type(node) for node in tree.body} <= {ast.Expr, ast.ImportFrom, ast.Assign}
    assigned = [ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assert assigned in (["__getattr__"], ["__all__", "__getattr__"])


def test_modules_named_as_in_accelerate_load_no_optional_package() -> None:
    loaded = run(
        "import importlib, sys, torch; before = set(sys.modules); "
        f"[importlib.import_module('leyden.' + name) for name in {list(THIN)!r}]; "
        "print(*(name for name in sys.modules if name not in before))"
    ).split()
    assert {f"leyden.{name}" for name in THIN} <= set(loaded)
    assert not {name for name in loaded if any(within(name, package) for package in LAZY)}


def run(program: str) -> str:
    """Runs a program in a new process, in the checkout."""
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_the_trainer_loads_only_leyden_and_the_standard_library() -> None:
    """Nor any part of torch that `import torch` leaves out; some take half a second."""
    loaded = run(
        "import sys, torch; before = set(sys.modules); from leyden import Trainer, TrainModule; "
        "print(*(name for name in sys.modules if name not in before))"
    ).split()
    assert "leyden.trainer.trainer" in loaded
    packages = {name.partition(".")[0] for name in loaded}
    assert packages - sys.stdlib_module_names == {"leyden"}
    rooms = ("leyden.accelerator", "leyden.cli", "leyden.compat", "leyden.trainer.tuning")
    assert not {name for name in loaded if any(within(name, room) for room in rooms)}
    # What only a run needs is imported when it starts, since a slow disk takes a millisecond per module.
    assert sum(name.startswith("leyden.") for name in loaded) <= 90


def test_import_leyden_loads_neither_torch_nor_the_trainer() -> None:
    loaded = run("import sys, leyden; print(*sys.modules)").split()
    assert "leyden" in loaded
    assert {name for name in loaded if name.startswith("leyden.")} == {"leyden.core", "leyden.core.lazy"}
    assert "torch" not in loaded


def test_a_rank_of_a_launch_leaves_the_import_of_torch_to_the_script() -> None:
    assert "torch" not in run("import sys, leyden.cli.launch.rank; print(*sys.modules)").split()


def test_importing_strategies_loads_no_multi_rank_strategy() -> None:
    loaded = run("import sys; from leyden.strategies import Strategy, MixedPrecision; print(*sys.modules)").split()
    late = ("ddp", "fsdp", "deepspeed", "xla", "process_group")
    assert [name for name in late if f"leyden.strategies.{name}" in loaded] == []


@pytest.mark.parametrize("package", ["leyden", "leyden.callbacks"])
def test_every_public_name_can_be_imported(package: str) -> None:
    missing = run(
        f"import importlib; p = importlib.import_module({package!r}); "
        "print(*(name for name in p.__all__ if getattr(p, name, None) is None))"
    )
    assert missing == ""


@pytest.mark.parametrize(
    ("room", "name"),
    [("callbacks", "ModelCheckpoint"), ("strategies", "Strategy"), ("trainer.starting.build", "Callback")],
)
def test_a_room_imported_by_its_folder_gives_the_same_classes(room: str, name: str) -> None:
    """In a checkout, a room can be imported as a top-level package, but its modules import each other as `leyden.…`."""
    assert run(f"from {room} import {name} as a; from leyden.{room} import {name} as b; print(a is b)") == "True"
