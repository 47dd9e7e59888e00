"""Forged state in checkpoints with valid checksums: each owner rejects and names entries it cannot have saved."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from forged import forge_json
from models import Squares
from torch.utils.data import DataLoader, TensorDataset

from leyden import Accelerator, CheckpointError, Trainer
from leyden.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint
from leyden.callbacks.checkpointing.saved_ranking import read_ranking
from leyden.checkpoint.format.manifest import MANIFEST, read_manifest
from leyden.cli.main import main
from leyden.core.errors import ConfigurationError, LeydenError


class Module(Squares):
    """Logs per step and per epoch, and has two schedulers."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        return [optimizer], [step, plateau]


def trainer(folder: Path) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=CSVLogger(),
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(monitor="loss_step", every_n_train_steps=3, save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=99),
        ],
        default_root_dir=folder,
        log_every_n_steps=1,
    )


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.ones(16, 3))
    return DataLoader(data, 4, shuffle=True, generator=generator), DataLoader(data, 8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a real run that saved its last checkpoint in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    trainer(folder).fit(Module(), *loaders())
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def saved(folder: Path) -> Path:
    return folder / "logs" / "version_0" / "checkpoints" / "epoch=1-step=6"


def resume(folder: Path) -> None:
    trainer(folder).fit(Module(), *loaders(), ckpt_path=saved(folder))


def ranking_of(tree: Any) -> Any:
    return next(state for key, state in tree["tree"].items() if key.startswith("ModelCheckpoint"))


def logger_state_of(tree: Any) -> Any:
    return next(state for key, state in tree["tree"].items() if key.startswith("CSVLogger"))


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# paths from a checkpoint ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("entry", ["recent", "doomed", "best_k_models", "last_model_path"])
@pytest.mark.parametrize("kind", ["absolute", "upwards", "link"])
def test_a_forged_ranking_deletes_nothing_outside_its_folder(folder: Path, entry: str, kind: str) -> None:
    """The forged entry offers another run's checkpoint for deletion."""
    other = folder.parent / "other" / "precious"
    shutil.copytree(saved(folder), other)
    manifest = read_manifest(other)
    (folder / "logs" / "version_0" / "checkpoints" / "away").symlink_to(other.parent)
    name = {"absolute": str(other), "upwards": "../../other/precious", "link": "away/precious"}[kind]

    def change(tree: Any) -> None:
        identity = f"{manifest.save_counter} {manifest.saved_at}"
        value: Any = {"recent": [name], "doomed": {name: identity}, "best_k_models": {name: 1e9}}.get(entry, name)
        ranking_of(tree)[entry] = value

    forge_json(saved(folder), "callbacks.json", change)
    before = contents_of(other)
    with pytest.raises(CheckpointError, match=rf"callbacks\.json: .*ModelCheckpoint.*{entry} names a path outside"):
        resume(folder)
    assert contents_of(other) == before


def test_absolute_paths_in_older_checkpoints_resolve_to_the_current_folder(tmp_path: Path) -> None:
    here = str(tmp_path / "now")
    names = {"best_model_path": "a", "last_model_path": "b", "recent": ["a"], "best_k_models": {"b": 1.0}, "doomed": {}}
    before = {"dirpath": str(tmp_path / "then"), **names}
    absolute = {
        **before,
        "best_model_path": f"{tmp_path}/then/a",
        "last_model_path": f"{tmp_path}/then/b",
        "recent": [f"{here}/a"],
        "best_k_models": {f"{tmp_path}/then/b": 1.0},
    }
    assert read_ranking(absolute, here) == read_ranking(before, here)
    assert read_ranking(before, here).recent == (f"{here}/a",)
    # Earlier versions kept the best checkpoint of another folder; it is dropped.
    assert read_ranking({**before, "best_model_path": f"{tmp_path}/elsewhere/a"}, here).best_model_path == ""


@pytest.mark.parametrize("version", ["../../../other", "/{}/other", "..", -1])
def test_a_forged_version_cannot_move_a_logger_out_of_its_folder(folder: Path, version: Any) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder / "logs" / "version_0", other)
    version = version.format(other.parent) if isinstance(version, str) else version
    forge_json(saved(folder), "callbacks.json", lambda tree: logger_state_of(tree).update(version=version, rows=0))
    before = contents_of(other)
    with pytest.raises(CheckpointError, match=r"callbacks\.json: .*CSVLogger.*version"):
        resume(folder)
    assert contents_of(other) == before


# checks by each owner -------------------------------------------------------------------------------------------------
def state_of_callback(kind: str, key: str, value: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        next(state for name, state in tree["tree"].items() if name.startswith(kind))[key] = value

    return change


def at(*path: Any, value: Any) -> Callable[[Any], None]:
    """Returns a change that sets one entry of a JSON file; the value `...` deletes it."""

    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        if value is ...:
            del tree[path[-1]]
        else:
            tree[path[-1]] = value

    return change


def items_of(tagged: dict[str, Any]) -> list[Any]:
    """Returns the items of a tuple in its JSON form."""
    return next(value for value in tagged.values() if isinstance(value, list))


def option(key: str, value: Any) -> Callable[[Any], None]:
    """Returns a change that sets one option of the optimizer, or the first item of a tuple."""

    def change(tree: Any) -> None:
        group = tree["optimizers"][0]["tree"]["param_groups"][0]
        if isinstance(group[key], dict):
            items_of(group[key])[0] = value
        else:
            group[key] = value

    return change


RANK = ("tree",)
FORGERIES: list[tuple[str, Callable[[Any], None], str]] = [
    ("progress.json", at("global_step", value=...), "global_step is missing"),
    ("progress.json", at("phase", value="bogus"), "phase is 'bogus', and must be one of epoch_start"),
    ("progress.json", at("batch", value=-3), "batch is -3, and must be at least 0"),
    ("progress.json", at("batch", value=1), "loader.place.batches is 2, but progress.json has 1"),
    ("progress.json", at("seconds", value="x"), "seconds is 'x', and must be a number"),
    ("progress.json", at("exact", value=1), "exact is 1, and must be true or false"),
    ("rank-0.json", at(*RANK, "rng", "numpy", "state", "pos", value=10**8), "rng.numpy.state.pos is 100000000"),
    ("rank-0.json", at(*RANK, "rng", "torch", value=[1]), "rng.torch is a list, and must be a tensor of bytes"),
    ("rank-0.json", at(*RANK, "rng", "python", value=...), "rng.python is missing"),
    ("rank-0.json", at(*RANK, "loader", "place", value=None), "loader.place is missing"),
    ("rank-0.json", at(*RANK, "loader", "place", "source", "batches", value="x"), "source.batches is 'x'"),
    ("rank-0.json", at(*RANK, "loader", "place", "source", "drawn", value=None), "source.drawn is None"),
    ("rank-0.json", at(*RANK, "logs", "entries", 0, "weight", value=-1.0), "entries\\[0\\].weight is -1.0"),
    ("rank-0.json", at(*RANK, "logs", "entries", 0, "event", value="on_nothing"), "entries\\[0\\].event is invalid"),
    ("rank-0.json", at(*RANK, "metrics", value=3), "metrics is 3, and must be a dict"),
    ("schedulers.json", at(*RANK, "schedulers", 0, "step_size", value=0), "schedulers\\[0\\].step_size is 0"),
    ("schedulers.json", at(*RANK, "schedulers", 0, "last_epoch", value=...), "schedulers\\[0\\].last_epoch is missing"),
    ("schedulers.json", at(*RANK, "schedulers", 1, "best", value="x"), "schedulers\\[1\\].best is 'x'"),
    (
        "schedulers.json",
        at(*RANK, "schedulers", 0, "get_lr", value=1),
        "schedulers\\[0\\].get_lr is no state of StepLR",
    ),
    (
        "optimizer.json",
        at("optimizers", 0, "tree", "param_groups", 0, "lr", value="x"),
        "param_groups\\[0\\].lr is 'x'",
    ),
    ("optimizer.json", at("optimizers", 0, "tree", "state", "net.bias", "exp_avg", value=...), "exp_avg is missing"),
    ("optimizer.json", option("betas", 1.5), "param_groups\\[0\\].betas cannot be: Invalid beta parameter"),
    ("optimizer.json", option("betas", 1e30), "param_groups\\[0\\].betas cannot be: Invalid beta parameter"),
    ("optimizer.json", option("lr", 1e300), "param_groups\\[0\\].lr is 1e\\+300, which float32 cannot hold"),
    ("optimizer.json", option("eps", -1.0), "param_groups\\[0\\].eps cannot be: Invalid epsilon"),
    ("callbacks.json", state_of_callback("EarlyStopping", "wait_count", -1), "EarlyStopping.*wait_count is -1"),
    ("callbacks.json", state_of_callback("ModelCheckpoint", "best_k_models", 3), "best_k_models is 3"),
    ("callbacks.json", state_of_callback("CSVLogger", "rows", "x"), "CSVLogger.*rows is 'x'"),
    ("user.json", at(*RANK, "checkpoint", value=None), "checkpoint is None, and must be a dict"),
]


@pytest.mark.parametrize(("name", "change", "message"), FORGERIES, ids=[message for *_, message in FORGERIES])
def test_each_owner_rejects_state_it_cannot_have_saved(
    folder: Path, name: str, change: Callable[[Any], None], message: str
) -> None:
    """The error names file and entry; the weights change only if the entry is restored after them."""
    forge_json(saved(folder), name, change)
    module = Module()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(saved(folder)))}/[\w-]+\.json: .*{message}"):
        trainer(folder).fit(module, *loaders(), ckpt_path=saved(folder))
    if name not in ("schedulers.json", "optimizer.json"):
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def rename_parameter(tree: Any) -> None:
    tree["optimizers"][0]["tree"]["param_groups"][0]["params"][0] = "net.other"


def rename_weight(tree: Any) -> None:
    tree["tensors"]["net.other"] = tree["tensors"].pop("net.weight")


@pytest.mark.parametrize(("name", "change"), [("optimizer.json", rename_parameter), ("layout.json", rename_weight)])
def test_the_error_for_mismatched_state_names_its_file(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    forge_json(saved(folder), name, change)
    with pytest.raises(ConfigurationError, match=rf"{re.escape(str(saved(folder) / name))}: .*net\.other"):
        resume(folder)


def log_option(place: int, value: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        items_of(tree["tree"]["logs"]["entries"][0]["options"])[place] = value

    return change


def test_impossible_log_options_are_blamed_on_the_checkpoint(folder: Path) -> None:
    def neither(tree: Any) -> None:
        log_option(2, False)(tree)
        log_option(3, False)(tree)

    forge_json(saved(folder), "rank-0.json", neither)
    with pytest.raises(CheckpointError, match=r"rank-0\.json: logs\.entries\[0\]\.options is invalid"):
        resume(folder)


def test_forged_log_options_that_differ_from_the_modules_raise(folder: Path) -> None:
    forge_json(saved(folder), "rank-0.json", log_option(0, True))
    with pytest.raises(
        ConfigurationError, match=r"different arguments in the run of this checkpoint.*rank-….json has \(True, None"
    ):
        resume(folder)


def entries_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all entries of a JSON file, for lists only of the first three items."""
    if path:
        yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from entries_of(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree[:3]):
            yield from entries_of(value, (*path, number))


VALUES = [..., None, "bogus", -3, 0, 10**8, 2**40, 1.5, True, [], [1, [2]], {"a": {"b": 1}}, "/tmp/../x"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 16))])
def test_forged_entries_raise_only_clear_errors(folder: Path, seed: int) -> None:
    """Whatever an entry of a JSON file is changed to, fit and the command line succeed or report what is wrong."""
    random = Random(seed)
    files = sorted(path.name for path in saved(folder).glob("*.json") if path.name != MANIFEST)
    good = folder.parent / "good"
    shutil.copytree(saved(folder), good)
    for _ in range(25):
        # With a forged ranking, the run may have deleted this checkpoint as the worst.
        shutil.rmtree(saved(folder), ignore_errors=True)
        shutil.copytree(good, saved(folder))
        name = random.choice(files)
        path, value = random.choice(list(entries_of(json.loads((good / name).read_text())))), random.choice(VALUES)
        forge_json(saved(folder), name, at(*path, value=value))
        try:
            resume(folder)
        except LeydenError:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {path} = {value!r} raises {type(error).__name__}") from error
        for command in (["checkpoint", "show", "--tensors"], ["merge"]):
            words = [*command, str(saved(folder)), *([str(folder / "out.safetensors")] if command == ["merge"] else [])]
            try:
                main(words)
            except Exception as error:
                raise AssertionError(f"{words[0]}: {name}: {path} = {value!r}") from error


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rank-0.json", at(*RANK, "rng", "python", "version", value=9), "rank-0.json: rng.python.version is 9"),
        ("rank-0.json", at(*RANK, "loaders", 0, "iteration", value=-1), r"loaders\[0\]: iteration is -1"),
        (
            "schedulers.json",
            at(*RANK, "schedulers", 0, "last_epoch", value="x"),
            r"schedulers\[0\].last_epoch is 'x'",
        ),
        ("user.json", at(*RANK, "steps", value=...), "user.json: steps is missing"),
        ("optimizer.json", at("optimizers", 0, "tree", "param_groups", 0, "lr", value="x"), "lr is 'x'"),
    ],
)
def test_an_accelerator_rejects_forged_state(
    tmp_path: Path, name: str, change: Callable[[Any], None], message: str
) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    accelerator.prepare(model, optimizer, scheduler, loaders()[0])
    accelerator.save_state(str(tmp_path / "one"))
    forge_json(tmp_path / "one", name, change)
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state(str(tmp_path / "one"))
