"""Progress bars and summaries as a saved notebook shows them, run with nbclient."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="pip install 'leyden[notebook]'")
nbformat = pytest.importorskip("nbformat", reason="pip install 'leyden[notebook]'")
# Not importorskip: a process that has imported ipykernel counts as a notebook in all other tests.
pytestmark = pytest.mark.skipif(find_spec("ipykernel") is None, reason="pip install 'leyden[notebook]'")

BEGIN = """
import sys, time
sys.path[:0] = {paths}
sys.modules["ipywidgets"] = None
from terminals import DATA, Net as Plain
from leyden import Trainer
from leyden.callbacks import RichProgressBar, TQDMProgressBar

class Net(Plain):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            print("printed")
        return super().training_step(batch, batch_idx)

class Logged(Plain):
    def __init__(self, fails_at=-1):
        super().__init__()
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.fails_at:
            raise RuntimeError
        self.log("acc", float(self.trainer.global_step), on_step=True, on_epoch=True)
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val <b>", 2.0 + self.trainer.global_step, batch_size=1)

def trainer(*callbacks, **arguments):
    options = dict(accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, default_root_dir={root})
    return Trainer(callbacks=list(callbacks), **{{**options, **arguments}})
"""
CELLS = {
    "tqdm": "trainer(enable_model_summary=True).fit(Net(), DATA, DATA)",
    "tqdm leave": "trainer(TQDMProgressBar(leave=True)).fit(Net(), DATA, DATA)",
    "tqdm test": "run = trainer(); run.test(Net(), DATA, verbose=False); _ = run.predict(Net(), DATA)",
    "rich": "trainer(RichProgressBar(), enable_model_summary=True).fit(Net(), DATA, DATA)",
    "rich leave": "trainer(RichProgressBar(leave=True)).fit(Net(), DATA, DATA)",
    "again": "trainer().fit(Net(), DATA)",
    "logged": "trainer(validate_at_start=True, check_val_every_n_epoch=2, max_epochs=4).fit(Logged(), DATA, DATA)",
    "failed": """
try:
    trainer().fit(Logged(fails_at=15), DATA, DATA)
except RuntimeError:
    pass
""",
    "hidden": "trainer(enable_progress_bar=False).fit(Net(), DATA)",
}
Shown = dict[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Returns the outputs of each cell in order, each as its source and its text without colors, or a table's HTML."""
    tests = Path(__file__).parents[1]
    begin = BEGIN.format(paths=[str(tests), str(tests.parent)], root=repr(str(tmp_path_factory.mktemp("runs"))))
    cells = [nbformat.v4.new_code_cell(text) for text in (begin, *CELLS.values())]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()

    def text(output: Any) -> tuple[str, str]:
        html = getattr(output, "data", {}).get("text/html", "")
        if html.startswith("<table><tr>"):
            return "table", html
        raw = output.text if output.output_type == "stream" else output.data["text/plain"]
        return getattr(output, "name", "display"), re.sub(r"\x1b\[[\d;]*m", "", raw)

    return {name: [text(one) for one in cell.outputs] for name, cell in zip(CELLS, notebook.cells[1:], strict=True)}


def displays(outputs: list[tuple[str, str]]) -> list[str]:
    return [text for source, text in outputs if source == "display"]


@pytest.mark.full
def test_a_tqdm_bar_is_saved_as_one_text_with_its_final_state(shown: Shown) -> None:
    bars = displays(shown["tqdm"])
    # The bars of validation and of the sanity check leave nothing.
    assert len(bars) == 3 and sorted(bars)[:2] == ["", ""]
    assert re.search(r"^Epoch 2/2: 100%\|█+\| 10/10 \[.*loss=-?[\d.]+, val=0.500\]$", max(bars)), bars
    assert shown["tqdm"][0][1].startswith("  | Name  | Type ")
    bars = displays(shown["tqdm leave"])
    assert [text[:9] for text in bars if text] == ["Epoch 0/2", "Epoch 1/2", "Epoch 2/2"]
    assert bars.count("") == 2
    assert [text.split(":")[0] for text in displays(shown["tqdm test"])] == ["Testing", "Predicting"]
    assert [text[:9] for text in displays(shown["again"])] == ["Epoch 2/2"]


@pytest.mark.full
def test_a_rich_bar_and_its_table_are_separate_displays(shown: Shown) -> None:
    table, totals, *bars = displays(shown["rich"])
    assert "┃ Name  ┃ Type" in table and "parameters in total" in totals
    assert bars[0] == "" and len(bars) == 2
    assert re.search(r"^Epoch 2/2 +━+ 10/10 .*val: 0.500", bars[1])
    assert [text[:9] for text in displays(shown["rich leave"]) if text] == ["Epoch 0/2", "Epoch 1/2", "Epoch 2/2"]


def tables(outputs: list[tuple[str, str]]) -> list[list[list[str]]]:
    """Returns the cells of each table, row by row."""
    return [
        [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
        for source, html in outputs
        if source == "table"
    ]


@pytest.mark.full
def test_a_table_has_a_row_for_each_epoch(shown: Shown) -> None:
    (table,) = tables(shown["logged"])
    header, *rows = table
    assert header == ["epoch", "val &lt;b&gt;", "acc_epoch", "time"]
    assert [row[:-1] for row in rows] == [
        ["start", "2.000", ""],
        ["0", "", "4.500"],
        ["1", "22.000", "14.500"],
        ["2", "", "24.500"],
        ["3", "42.000", "34.500"],
    ]
    assert all(re.fullmatch(r"\d+:\d\d", row[-1]) for row in rows)
    (failed,) = tables(shown["failed"])
    assert [row[0] for row in failed] == ["epoch", "0"]
    for name in ("tqdm", "tqdm leave", "rich", "rich leave"):
        (table,) = tables(shown[name])
        assert [row[0] for row in table] == ["epoch", "0", "1", "2"] and table[0] == [
            "epoch",
            "val",
            "loss",
            "quiet",
            "time",
        ]
    assert tables(shown["hidden"]) == tables(shown["tqdm test"]) == []


@pytest.mark.full
def test_outputs_contain_only_text(shown: Shown) -> None:
    for name, outputs in shown.items():
        assert {source for source, _ in outputs} <= {"display", "stdout", "table"}, (name, outputs)
        written = "".join(text for source, text in outputs if source == "stdout")
        assert "\r" not in written and "\x1b" not in written
        assert written.count("printed\n") == (0 if name in ("tqdm test", "logged", "failed") else 3)
