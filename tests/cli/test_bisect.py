"""`leyden bisect` on real runs of two ranks, one of which flips a gradient's sign, and on handwritten files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from models import QUIET, Line, Squares
from ranks.world import run_world
from samples import numbered, pairs
from torch import nn
from torch.utils.data import DataLoader

from leyden import Trainer, seed_everything
from leyden.checkpoint.format.digests import Digest, DigestFile

FLIPPED = 137


class Net(Squares):
    """Negates the loss of the second rank at the given steps."""

    def __init__(self, flipped: range) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        self.flipped = flipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        wrong = self.trainer.global_rank == 1 and self.trainer.global_step + 1 in self.flipped
        return -loss if wrong else loss


RUNS = {"right": range(0), "persistent": range(FLIPPED, 1000), "transient": range(FLIPPED, FLIPPED + 1)}


def train_all(root: str) -> None:
    for name, flipped in RUNS.items():
        for every in (1, 10):
            seed_everything(0)
            arguments = {**QUIET, "strategy": "ddp", "max_steps": 150, "default_root_dir": f"{root}/{name}-{every}"}
            trainer = Trainer(**arguments, digest_every_n_steps=every)
            trainer.fit(Net(flipped), DataLoader(pairs(600, inputs=2), batch_size=2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    run_world(2, train_all, str(root))
    return root


@pytest.mark.parametrize("flip", ["persistent", "transient"])
def test_bisect_names_the_step_and_parameters_of_a_flip(runs: Path, flip: str, invoke: Any) -> None:
    done = invoke("bisect", runs / "right-1" / "version_0", runs / f"{flip}-1" / "version_0")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"first difference: step {FLIPPED}; the runs agree after step {FLIPPED - 1}",
        *(f"  net.{number}.{kind}" for number in (0, 1) for kind in ("weight", "bias")),
    ]


@pytest.mark.parametrize("flip", ["persistent", "transient"])
def test_sparse_digests_give_an_interval_of_steps(runs: Path, flip: str, invoke: Any) -> None:
    done = invoke("bisect", runs / "right-10" / "version_0", runs / f"{flip}-10" / "version_0" / "digests.jsonl")
    assert done.returncode == 1
    assert done.stdout.startswith("first difference: one of the steps 131 to 140; the runs agree after step 130\n")
    # Only steps that both runs recorded are compared.
    assert invoke("bisect", runs / "right-1" / "version_0", runs / f"{flip}-10" / "version_0").stdout == done.stdout
    found = json.loads(
        invoke("bisect", "--json", runs / "right-10" / "version_0", runs / f"{flip}-10" / "version_0").stdout
    )
    assert (found["agrees_at"], found["differs_at"], found["tensors"][0]) == (130, 140, "net.0.weight")


def test_equal_runs_are_reported_as_equal(runs: Path, invoke: Any) -> None:
    done = invoke("bisect", runs / "right-1" / "version_0", runs / "right-10" / "version_0")
    assert (done.returncode, done.stdout) == (0, "equal: 16 common steps, 0 to 150\n")
    found = json.loads(
        invoke("bisect", "--json", runs / "right-1" / "version_0", runs / "right-1" / "version_0").stdout
    )
    assert found == {"steps": 151, "first_step": 0, "agrees_at": 150, "differs_at": None, "tensors": []}


# handwritten digest files ---------------------------------------------------------------------------------------------
def write_digests(folder: Path, lines: dict[int, dict[str, str]], form: str = "float32 (2,)") -> Path:
    """Writes a digest file of the given values of tensors at the given steps; returns its folder."""
    file = DigestFile.begin(folder)
    for step, values in lines.items():
        file.append(step, {name: Digest(form, value) for name, value in values.items()})
    file.close()
    return folder


def test_different_initial_weights_are_reported(tmp_path: Path, invoke: Any) -> None:
    one = write_digests(tmp_path / "one", {0: {"b": "1", "a": "1"}, 1: {"b": "2", "a": "2"}})
    other = write_digests(tmp_path / "other", {0: {"b": "1", "a": "9"}, 1: {"b": "3", "a": "9"}})
    done = invoke("bisect", one, other)
    assert done.returncode == 1
    assert done.stdout == "first difference: before the first step; the runs begin with other weights\n  a\n"


def test_a_difference_at_the_first_common_step_is_reported_as_possibly_earlier(tmp_path: Path, invoke: Any) -> None:
    one = write_digests(tmp_path / "one", {5: {"a": "1"}, 10: {"a": "2"}})
    other = write_digests(tmp_path / "other", {10: {"a": "3"}, 20: {"a": "3"}})
    done = invoke("bisect", one, other)
    assert done.returncode == 1
    assert done.stdout.startswith("first difference: step 10 or before; it is the first that both runs recorded\n  a")


def test_a_long_list_of_tensors_is_truncated(tmp_path: Path, invoke: Any) -> None:
    one, other = ({0: {f"w{number}": value for number in range(30)}} for value in ("1", "2"))
    done = invoke("bisect", write_digests(tmp_path / "one", one), write_digests(tmp_path / "other", other))
    assert done.stdout.splitlines()[-2:] == ["  w9", "  and 20 more (--json lists all)"]


@pytest.mark.parametrize(
    ("lines", "form", "words"),
    [
        ({3: {"a": "1", "b": "1"}, 9: {"a": "1", "b": "1"}}, "float32 (2,)", "have no step in common"),
        ({}, "float32 (2,)", "one has 0, 4, …, 12; other has none"),
        ({0: {"a": "1", "c": "1"}}, "float32 (2,)", r"only in one: b; only in other: c\."),
        ({0: {"a": "1", "b": "1"}}, "float32 (4,)", r"a is float32 \(2,\) in one and float32 \(4,\) in other"),
        ({0: {"a": "1", "b": "1"}}, "float32 (2,) in 2 shards (ab)", "the same layout of ranks"),
    ],
)
def test_incomparable_runs_are_refused(
    tmp_path: Path, invoke: Any, lines: dict[int, dict[str, str]], form: str, words: str
) -> None:
    write_digests(tmp_path / "one", {step: {"a": "1", "b": "1"} for step in (0, 4, 8, 12)})
    write_digests(tmp_path / "other", lines, form)
    done = invoke("bisect", "one", "other")
    assert done.returncode == 2 and not done.stdout
    text = done.stderr.replace("one/digests.jsonl", "one").replace("other/digests.jsonl", "other")
    assert re.search(words, text)


def test_a_run_without_exactly_one_digest_file_is_refused(tmp_path: Path, invoke: Any) -> None:
    def error_of(*arguments: object) -> str:
        done = invoke("bisect", *arguments)
        assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
        return str(done.stderr)

    run = write_digests(tmp_path / "logs" / "version_0", {0: {"a": "1"}})
    assert "nowhere: there is no such run" in error_of("nowhere", run)
    (tmp_path / "empty").mkdir()
    assert "empty has no digests. Train with Trainer(digest_every_n_steps=1)." in error_of(run, "empty")
    assert "logs has no digests. Did you mean one of logs/version_0?" in error_of("logs", run)
    write_digests(run, {0: {"a": "1"}})
    assert "version_0 has the digests of 2 runs. Give one of the files" in error_of(run, run)
    assert invoke("bisect", run / "digests.jsonl", run / "digests-v1.jsonl").returncode == 0
    (run / "digests.jsonl").write_text("nothing\n")
    assert "digests.jsonl, line 1: is not a line of digests" in error_of(
        run / "digests.jsonl", run / "digests-v1.jsonl"
    )
    assert "Missing argument 'RUN_B'" in invoke("bisect", run).stderr


def test_an_incomplete_last_line_is_ignored(tmp_path: Path, invoke: Any) -> None:
    one = write_digests(tmp_path / "one", {0: {"a": "1"}, 1: {"a": "2"}})
    other = write_digests(tmp_path / "other", {0: {"a": "1"}})
    with (other / "digests.jsonl").open("a") as file:
        file.write('{"step": 1, "digests": ["')
    assert invoke("bisect", one, other).stdout == "equal: 1 common step, 0 to 0\n"


def test_tensors_are_listed_in_the_modules_order(tmp_path: Path, invoke: Any) -> None:
    folders = []
    for number in (0, 1):
        seed_everything(number)
        folders.append(tmp_path / str(number) / "version_0")
        Trainer(**QUIET, max_steps=1, default_root_dir=folders[-1].parent, digest_every_n_steps=1).fit(
            Line(), numbered(4)
        )
    assert invoke("bisect", *folders).stdout.splitlines()[1:] == ["  layer.weight", "  layer.bias"]
