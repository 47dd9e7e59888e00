"""prepare_data: one rank of each machine, or of all machines, prepares the data while the others wait."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from ranks.world import run_world
from samples import numbered
from torch.utils.data import DataLoader

from leyden import DataModule, Trainer


class Downloads(DataModule):
    """Writes a line for each download, and draws random numbers in it."""

    def __init__(self, folder: Path, per_node: bool) -> None:
        super().__init__()
        self.folder, self.prepare_data_per_node = folder, per_node

    def prepare_data(self) -> None:
        torch.rand(3)
        with (self.folder / "data").open("a") as file:
            file.write(f"{os.environ['RANK']}\n")

    def setup(self, stage: str) -> None:
        self.found = (self.folder / "data").read_text().split()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(8.0)[:, None], 2, shuffle=True)  # type: ignore[arg-type]


class Prepared(Line):
    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self.folder = folder

    def prepare_data(self) -> None:
        # Runs after the DataModule's prepare_data.
        assert (self.folder / "data").exists()
        (self.folder / "module").touch()


def fitted(folder: str, per_node: bool) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    data = Downloads(Path(folder), per_node)
    module = Prepared(Path(folder))
    Trainer(**QUIET, strategy="ddp", max_epochs=1).fit(module, datamodule=data)
    assert (Path(folder) / "module").exists()
    return data.found, torch.rand(2).tolist()


@pytest.mark.parametrize(
    ("per_node", "machines", "expected"),
    [(True, 1, ["0"]), (False, 1, ["0"]), (True, 2, ["0", "1"]), (False, 2, ["0"])],
)
def test_data_is_prepared_before_any_rank_is_set_up(
    per_node: bool, machines: int, expected: list[str], tmp_path: Path
) -> None:
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if machines == 2 else {}
    (first, drawn), (second, others) = run_world(2, fitted, str(tmp_path), per_node, environ=environ)
    assert sorted(first) == sorted(second) == expected
    # Although only some ranks drew random numbers in prepare_data.
    assert drawn == others


def fail_to_prepare() -> None:
    class FailingModule(Line):
        def prepare_data(self) -> None:
            raise OSError("the disk is full")

    Trainer(**QUIET, strategy="ddp", max_epochs=1).fit(FailingModule(1), numbered(4))


def test_an_error_in_prepare_data_ends_the_waiting_ranks() -> None:
    first, _ = run_world(2, fail_to_prepare, may_fail=True)
    assert str(first).startswith("OSError: the disk is full")
