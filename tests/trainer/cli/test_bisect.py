"""`leyden bisect`, on real runs: two ranks, one of which has its gradient's sign flipped, and files that do not fit."""

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
from leyden.trainer.format.digests import Digest, DigestFile

FLIPPED = 137


class Net(Squares):
    """The loss of the second rank has the wrong sign, from one step on or in it alone."""

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
def test_the_step_of_a_flip_and_its_parameters_are_named(runs: Path, flip: str, here: Any) -> None:
    done = here("bisect", runs / "right-1", runs / f"{flip}-1")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"first difference: step {FLIPPED}; the runs agree after step {FLIPPED - 1}",
        *(f"  net.{number}.{kind}" for number in (0, 1) for kind in ("weight", "bias")),
    ]


@pytest.mark.parametrize("flip", ["persistent", "transient"])
def test_digests_of_some_steps_give_an_interval(runs: Path, flip: str, here: Any) -> None:
    done = here("bisect", runs / "right-10", runs / f"{flip}-10" / "digests.jsonl")
    assert done.returncode == 1
    assert done.stdout.startswith("first difference: one of the steps 131 to 140; the runs agree after step 130\n")
    # Of a run with more digests, the steps that both have are compared.
    assert here("bisect", runs / "right-1", runs / f"{flip}-10").stdout == done.stdout
    found = json.loads(here("bisect", "--json", runs / "right-10", runs / f"{flip}-10").stdout)
    assert (found["agrees_at"], found["differs_at"], found["tensors"][0]) == (130, 140, "net.0.weight")


def test_equal_runs_are_equal(runs: Path, here: Any) -> None:
    done = here("bisect", runs / "right-1", runs / "right-10")
    assert (done.returncode, done.stdout) == (0, "equal: 16 common steps, 0 to 150\n")
    found = json.loads(here("bisect", "--json", runs / "right-1", runs / "right-1").stdout)
    assert found == {"steps": 151, "first_step": 0, "agrees_at": 150, "differs_at": None, "tensors": []}


# made by hand ---------------------------------------------------------------------------------------------------------
def write(folder: Path, lines: dict[int, dict[str, str]], form: str = "float32 (2,)") -> Path:
    """A file with these values of tensors at these steps."""
    file = DigestFile.begin(folder)
    for step, values in lines.items():
        file.append(step, {name: Digest(form, value) for name, value in values.items()})
    file.close()
    return folder


def test_runs_that_begin_with_other_weights_are_told(tmp_path: Path, here: Any) -> None:
    one = write(tmp_path / "one", {0: {"b": "1", "a": "1"}, 1: {"b": "2", "a": "2"}})
    other = write(tmp_path / "other", {0: {"b": "1", "a": "9"}, 1: {"b": "3", "a": "9"}})
    done = here("bisect", one, other)
    assert done.returncode == 1
    assert done.stdout == "first difference: before the first step; the runs begin with other weights\n  a\n"


def test_a_difference_at_the_first_common_step_may_be_older(tmp_path: Path, here: Any) -> None:
    one = write(tmp_path / "one", {5: {"a": "1"}, 10: {"a": "2"}})
    other = write(tmp_path / "other", {10: {"a": "3"}, 20: {"a": "3"}})
    done = here("bisect", one, other)
    assert done.returncode == 1
    assert done.stdout.startswith("first difference: step 10 or before; it is the first that both runs recorded\n  a")


def test_a_long_list_of_tensors_is_cut(tmp_path: Path, here: Any) -> None:
    one, other = ({0: {f"w{number}": value for number in range(30)}} for value in ("1", "2"))
    done = here("bisect", write(tmp_path / "one", one), write(tmp_path / "other", other))
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
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, here: Any, lines: dict[int, dict[str, str]], form: str, words: str
) -> None:
    write(tmp_path / "one", {step: {"a": "1", "b": "1"} for step in (0, 4, 8, 12)})
    write(tmp_path / "other", lines, form)
    done = here("bisect", "one", "other")
    assert done.returncode == 2 and not done.stdout
    text = done.stderr.replace("one/digests.jsonl", "one").replace("other/digests.jsonl", "other")
    assert re.search(words, text)


def test_a_run_without_one_file_of_digests_is_refused(tmp_path: Path, here: Any) -> None:
    def said(*arguments: object) -> str:
        done = here("bisect", *arguments)
        assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
        return str(done.stderr)

    run = write(tmp_path / "logs" / "version_0", {0: {"a": "1"}})
    assert "nowhere: there is no such run" in said("nowhere", run)
    (tmp_path / "empty").mkdir()
    assert "empty has no digests. Train with Trainer(digest_every_n_steps=1)." in said(run, "empty")
    assert "logs has no digests. Did you mean one of logs/version_0?" in said("logs", run)
    write(run, {0: {"a": "1"}})
    assert "version_0 has the digests of 2 runs. Give one of the files" in said(run, run)
    assert here("bisect", run / "digests.jsonl", run / "digests-v1.jsonl").returncode == 0
    (run / "digests.jsonl").write_text("nothing\n")
    assert "digests.jsonl, line 1: is not a line of digests" in said(run / "digests.jsonl", run / "digests-v1.jsonl")
    assert "Missing argument 'RUN_B'" in here("bisect", run).stderr


def test_a_line_that_is_still_written_is_passed_over(tmp_path: Path, here: Any) -> None:
    one = write(tmp_path / "one", {0: {"a": "1"}, 1: {"a": "2"}})
    other = write(tmp_path / "other", {0: {"a": "1"}})
    with (other / "digests.jsonl").open("a") as file:
        file.write('{"step": 1, "digests": ["')
    assert here("bisect", one, other).stdout == "equal: 1 common step, 0 to 0\n"


def test_a_module_is_compared_in_its_own_order(tmp_path: Path, here: Any) -> None:
    folders = []
    for number in (0, 1):
        seed_everything(number)
        folders.append(tmp_path / str(number))
        Trainer(**QUIET, max_steps=1, default_root_dir=folders[-1], digest_every_n_steps=1).fit(Line(), numbered(4))
    assert here("bisect", *folders).stdout.splitlines()[1:] == ["  layer.weight", "  layer.bias"]
