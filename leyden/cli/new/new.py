"""`leyden new` writes a small project that trains, as a start for one's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import keyword
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import click

from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path

TEMPLATE = Path(__file__).parent / "template"
PLACEHOLDER = "project_name"
NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?")
"""Names that are allowed for a package and for a distribution."""


@click.command("new")
@click.argument("folder")
def command(folder: str) -> None:
    """Write a project that trains to FOLDER, which is new or empty.

    It recognizes handwritten digits: a module, its data, a configuration, a test, a README and a pyproject.toml for pip
    and uv. The last part of FOLDER names the project and its package.
    """
    target = Path(local_path(folder, "FOLDER")).resolve()
    check(target)
    files = render(target.name, local_leyden())
    for name, text in files.items():
        path = target / name
        path.parent.mkdir(exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    click.echo(f"{target}:")
    click.echo("".join(f"  {name}\n" for name in sorted(files)))
    [commands] = re.findall(r"```bash\n(pip install .*?)```", files["README.md"], re.DOTALL)
    click.echo("\n".join(["Next:", f"  cd {shlex.quote(folder)}", *(f"  {line}" for line in commands.splitlines())]))


def check(target: Path) -> None:
    """Checks that a project can be written to a folder.

    Raises:
        ConfigurationError: if its parent is missing, if something is there already, or if its name is not one that a
            package can have.
    """
    if not target.parent.is_dir():
        raise ConfigurationError(f"There is no folder {target.parent}: create it first, or name another one.")
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: name a new folder.")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigurationError(f"{target} is not empty, and nothing is overwritten: name a new folder.")
    name = target.name
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigurationError(
            f"The folder's name {name!r} becomes the name of a package: use letters, digits and underscores, "
            "with a letter first, as in my_project."
        )
    found = importlib.util.find_spec(name)
    # Without an origin, it may be the empty folder itself.
    if name in ("logs", "tests") or (found is not None and found.origin is not None):
        raise ConfigurationError(f"A package named {name!r} would hide another one: give the folder another name.")


def render(name: str, local: tuple[str, bool] | None) -> dict[str, str]:
    """Returns the texts of a project's files, by their path in it.

    Args:
        name: the project's name.
        local: the installation that the project depends on, from `local_leyden()`.

    Example:
        >>> sorted(render("rain", None))[:3]
        ['.gitignore', 'README.md', 'config.yaml']
        >>> print(render("rain", ("/code/leyden", True))["pyproject.toml"].splitlines()[-1])
        leyden = { path = "/code/leyden", editable = true }
    """
    # pip compiles what it installs.
    paths = [path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = {path.relative_to(TEMPLATE).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    files = {path.replace(PLACEHOLDER, name): text.replace(PLACEHOLDER, name) for path, text in texts.items()}
    if local is None:
        released = f'"leyden[cli]>={sys.modules["leyden"].__version__}"'
        files["pyproject.toml"] = files["pyproject.toml"].replace('"leyden[cli]"', released)
        return files
    path, editable = local
    source = f"path = {json.dumps(path, ensure_ascii=False)}{', editable = true' if editable else ''}"
    files["pyproject.toml"] += f"\n[tool.uv.sources]\nleyden = {{ {source} }}\n"
    option = "-e " if editable else ""
    files["README.md"] = files["README.md"].replace("pip install", f"pip install {option}{shlex.quote(path)}")
    return files


def local_leyden() -> tuple[str, bool] | None:
    """Returns the path that Leyden was installed from, and whether it is editable; None if an index provided it."""
    try:
        record = importlib.metadata.distribution("leyden").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        # A checkout on PYTHONPATH.
        return str(Path(__file__).parents[3]), True
    origin = json.loads(record or "{}")
    url = urlparse(origin.get("url", ""))
    return (url2pathname(url.path), origin.get("dir_info", {}).get("editable", False)) if url.scheme == "file" else None
