"""Distributions: the wheel and the source distribution hold every module, and an installed wheel works."""

from __future__ import annotations

import ast
import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("trainer", "callbacks", "strategies")
TEMPLATE = ROOT / "leyden" / "cli" / "new" / "template"


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Runs a command that must succeed; returns its output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel built from it."""
    checkout, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    # A copy, since a build leaves build/ and *.egg-info behind.
    names = ("leyden", *ROOMS, "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    run("cp", "--archive", *(ROOT / name for name in names), checkout, cwd=ROOT)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    return out


def modules() -> set[str]:
    """Returns the files that every distribution must hold, by their path in the package."""
    inside = {f"leyden/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "leyden").rglob("*.py") if path.resolve() == path}
    assets = {str(path.relative_to(ROOT)) for path in (ROOT / "leyden" / "report" / "assets").iterdir()}
    template = {str(path.relative_to(ROOT)) for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert f"{TEMPLATE.relative_to(ROOT)}/.gitignore" in template
    return {*inside, *own, *assets, *template, "leyden/py.typed"}


def test_the_wheel_holds_every_module_and_nothing_else(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == modules()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_source_distribution_holds_every_module_as_a_file(dist: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        entries = {member.name.partition("/")[2]: member for member in tar.getmembers()}
        missing = modules() - {name for name, member in entries.items() if member.isfile()}
        assert not missing
        assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= set(entries)
        # An archive with links could not be unpacked where links cannot be created.
        assert not [name for name, member in entries.items() if member.issym() or member.islnk()]


def test_the_metadata_of_the_wheel_is_complete(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    tree = ast.parse((ROOT / "leyden" / "__init__.py").read_text())
    [version] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert metadata["Name"] == "leyden"
    assert metadata["Version"] == version
    assert metadata["Requires-Python"] == ">=3.10"
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    required = {re.split(r"[ ;<>=!~\[]", line)[0]: line for line in lines}
    assert required["torch"].replace(" ", "") == "torch>=2.9"
    assert {"torchmetrics", "tensorboard", "wandb", "tqdm", "safetensors", "numpy"} <= set(required)
    assert {"test", "examples"} <= set(metadata.get_all("Provides-Extra", []))


def test_an_installed_wheel_works(dist: Path, tmp_path: Path) -> None:
    """Even next to a user's own trainer.py and callbacks.py, outside the checkout."""
    [wheel] = dist.glob("*.whl")
    home = tmp_path / "venv"
    venv.create(home, system_site_packages=True, with_pip=True)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    # The tests may run in a virtual environment, whose packages the new one does not see: a path file adds them.
    [site] = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).splitlines()
    [ours] = run(
        sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    ).splitlines()
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", "--quiet", wheel, cwd=tmp_path)
    Path(site, "zz_packages_of_tests.pth").write_text(ours)
    work = tmp_path / "work"
    work.mkdir()
    for name in ROOMS:
        (work / f"{name}.py").write_text("raise RuntimeError('Leyden imported a file of the user')")
    program = """
import leyden
from leyden import Trainer, TrainModule
from leyden.callbacks import ModelCheckpoint
import torch
class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
Trainer(max_epochs=1, logger=False, enable_progress_bar=False, accelerator="cpu").fit(Net(), [torch.ones(2, 2)] * 3)
print(leyden.__file__)
"""
    (work / "train.py").write_text(program)
    printed = run(python, "train.py", cwd=work).splitlines()
    assert Path(printed[-1]) == Path(site, "leyden", "__init__.py")
    assert (work / "version_0" / "checkpoints" / "epoch=0-step=3" / "manifest.json").is_file()
    # A new project depends on the wheel that was installed, or on a version that an index has.
    run(python, "-m", "leyden", "new", "rain", cwd=work)
    assert f'leyden = {{ path = "{wheel}" }}' in (work / "rain" / "pyproject.toml").read_text()
    index = ("--no-deps", "--no-index", "--find-links", dist, "--force-reinstall", "--quiet")
    run(python, "-m", "pip", "install", *index, "leyden", cwd=tmp_path)
    run(python, "-m", "leyden", "new", "snow", cwd=work)
    settings = (work / "snow" / "pyproject.toml").read_text()
    assert re.search(r'"leyden\[cli\]>=\d', settings) and "uv.sources" not in settings


@pytest.mark.full
def test_uv_runs_an_example_from_its_header_and_the_wheel(dist: Path, tmp_path: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv: pip install uv")
    # `uv run` reads constraints only from a script's header; with an unpinned torch it might download another one.
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    lines = [f"# constraint-dependencies = {json.dumps(pins)}\n", "# ///\n"]
    text = (ROOT / "examples" / "digits.py").read_text()
    (tmp_path / "digits.py").write_text(text.replace("# ///\n", "# [tool.uv]\n" + "".join(lines), 1))
    folders = [str(dist), *os.environ.get("PIP_FIND_LINKS", "").split()]
    links = [word for folder in folders for word in ("--find-links", folder)]
    # The header's source is the checkout; without it, Leyden is the wheel.
    options = ("run", "--no-sources", "--python", sys.executable, *links)
    output = run(uv, *options, "digits.py", "--epochs", "2", cwd=tmp_path, OMP_NUM_THREADS="1")
    accuracy = re.search(r"test accuracy (\d\.\d+)", output)
    assert accuracy is not None and float(accuracy[1]) > 0.8


def test_constraints_pin_every_requirement() -> None:
    """torch comes first."""
    pins = [
        line.split(";")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line[:1] not in "# "
    ]
    assert pins[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[A-Za-z0-9_.\-]+==[\w.]+", pin) for pin in pins)
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [
        setup["options"]["install_requires"],
        setup["options.extras_require"]["test"],
        setup["options.extras_require"]["examples"],
    ]
    names = {re.split(r"[<>=[]", line)[0] for text in wanted for line in text.split()}
    assert names <= pinned
