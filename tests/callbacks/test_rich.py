"""RichProgressBar and RichModelSummary on a pseudo-terminal, and without a terminal."""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from terminals import DATA, Net, Terminal, trainer
from torch.utils.data import DataLoader

from leyden import ConfigurationError, Trainer
from leyden.callbacks import CSVLogger, ModelSummary, RichModelSummary, RichProgressBar, RichProgressBarTheme
from leyden.core.errors import MissingExtraError

NO_THEME: Any = {"time": "red"}


@pytest.fixture(autouse=True)
def color_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    # Rich would read the width from the file descriptors 0 to 2, which are pytest's.
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def done(lines: list[str], name: str) -> list[str]:
    """Returns the counts drawn by a bar, such as "3/10", without repeats."""
    found = [match[1] for line in lines if (match := re.match(rf"{name} +[━╸╺]+ +(\d+/(\d+|\?)) ", line))]
    return [text for index, text in enumerate(found) if index == 0 or found[index - 1] != text]


def test_every_stage_draws_a_bar_below_printed_lines(
    tmp_path: Path, every_batch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("tests.rich")

    class PrintingNet(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            print("builtin", batch_idx)
            log.warning("logged %d", batch_idx)
            self.print("printed", batch_idx)

    run = trainer(tmp_path, RichProgressBar(), logger=CSVLogger(tmp_path), max_epochs=2)
    loaders = [DataLoader(torch.ones(size, 2), batch_size=2) for size in (6, 8)]
    with Terminal("stdout", "stderr") as terminal:
        handler = logging.StreamHandler()
        monkeypatch.setattr(log, "handlers", [handler])
        monkeypatch.setattr(log, "propagate", False)
        run.fit(PrintingNet(), DATA, loaders)
        assert handler.stream is sys.stderr
        run.test(Net(), DATA[:5], verbose=False)
        run.predict(Net(), DATA[:6])
    lines = terminal.drawn()
    assert done(lines, "Sanity Checking") == [f"{n}/4" for n in range(5)]
    for epoch in ("Epoch 0/1", "Epoch 1/1"):
        assert done(lines, epoch) == [f"{n}/10" for n in range(11)]
    assert done(lines, "Validation")[:8] == [f"{n}/7" for n in range(8)]
    assert done(lines, "Testing")[-1] == "5/5" and done(lines, "Predicting")[-1] == "6/6"
    for batch in range(10):
        assert {f"builtin {batch}", f"logged {batch}", f"printed {batch}"} <= set(lines)
    last = [line for line in lines if line.startswith("Epoch 1/1")][-1]
    assert re.search(r"it/s loss: -?\d+\.\d+ v_num: 0 val: 0\.500$", last), last
    # The cursor is visible again after each stage.
    assert terminal.bytes.count(b"\x1b[?25l") == terminal.bytes.count(b"\x1b[?25h") == 4


def test_an_error_restores_the_terminal(tmp_path: Path) -> None:
    class Fails(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            raise KeyboardInterrupt if batch_idx else RuntimeError("in validation")

    bar = RichProgressBar()
    with Terminal("stdout", "stderr") as terminal:
        with pytest.raises(RuntimeError, match="in validation"):
            trainer(tmp_path, bar, num_sanity_val_steps=0).fit(Fails(), DATA, DATA)
        assert sys.stdout is sys.stderr is terminal.writing
    assert terminal.bytes.rstrip().endswith(b"\x1b[?25h")


@pytest.mark.parametrize("columns", [40, 64, 80, 140])
def test_on_a_narrow_terminal_the_bar_keeps_ten_cells_above_its_metrics(columns: int, tmp_path: Path) -> None:
    class Wordy(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict({"accuracy": 0.5, "learning_rate": 1e-3}, prog_bar=True)
            return super().training_step(batch, batch_idx)

    with Terminal("stdout") as terminal:
        trainer(tmp_path, RichProgressBar(console_kwargs={"width": columns})).fit(Wordy(), DATA, DATA)
    bars = [line for line in terminal.drawn() if line.startswith("Epoch 1/1")]
    assert bars and all(len(re.findall("[━╸╺]", line)) >= 10 and len(line) <= columns for line in bars)
    assert ("accuracy" in bars[-1]) == (columns == 140) and ("0:00:00" in bars[-1]) == (columns > 40)
    assert columns == 140 or any(line.startswith("accuracy: 0.500 learning_rate: 0.001") for line in terminal.drawn())


def test_long_metrics_move_below_the_bar_and_leave_keeps_epochs(tmp_path: Path) -> None:
    class LongMetrics(RichProgressBar):
        def get_metrics(self, *args: Any) -> dict[str, Any]:
            return {"a": 0.12345, **{f"a_long_metric_{number}": 1e-5 for number in range(8)}}

    theme = RichProgressBarTheme(metrics_text_delimiter=", ", metrics_format=".1e", progress_bar="green")
    with Terminal("stdout") as terminal:
        trainer(tmp_path, LongMetrics(leave=True, theme=theme), max_epochs=2).fit(Net(), DATA)
    lines = terminal.drawn()
    assert any(line.startswith("a: 1.2e-01, a_long_metric_0: 1.0e-05, ") for line in lines)
    assert [len(re.findall(rf"Epoch {epoch}/1 .*10/10.*\r?\n".encode(), terminal.bytes)) > 0 for epoch in (0, 1)]
    assert terminal.bytes.count(b"\x1b[?25l") == 2


def test_without_a_terminal_the_lines_are_those_of_the_tqdm_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some build servers set this.
    monkeypatch.setenv("FORCE_COLOR", "1")

    class CustomBar(RichProgressBar):
        def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_epoch_start(trainer, *args)
            self.progress.update(self.train_progress_bar_id, description="unseen")
            assert self.train_progress_bar.description == "unseen"

    run = trainer(tmp_path, CustomBar(), enable_model_summary=True)
    run.fit(Net(), DATA, DATA)
    run.validate(Net(), DATA, verbose=False)
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err and "unseen" not in out + err
    assert [line[:29] for line in err.splitlines()[:2]] == [
        "Epoch 0/1  batch 10/10  step ",
        "Epoch 1/1  batch 10/10  step ",
    ]
    assert err.splitlines()[2].startswith("Validation  batch 10/10") and "| Name  | Type" in out


def test_custom_columns_and_tasks_are_drawn(tmp_path: Path, every_batch: None) -> None:
    class CustomBar(RichProgressBar):
        def configure_columns(self, trainer: Trainer) -> list[Any]:
            from rich.progress import MofNCompleteColumn

            return [*super().configure_columns(trainer), MofNCompleteColumn(separator=" of ")]

        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            super().on_train_start(trainer, module)
            self.mine = self.progress.add_task("mine", total=10)

        def on_train_batch_end(self, *args: Any) -> None:
            self.progress.advance(self.mine)
            super().on_train_batch_end(*args)
            assert self.train_progress_bar.completed == args[-1] + 1

    with Terminal("stdout") as terminal:
        trainer(tmp_path, CustomBar(), max_epochs=1).fit(Net(), DATA)
    lines = terminal.drawn()
    assert any("10 of 10" in line for line in lines if line.startswith("Epoch 0/0"))
    assert any("10 of 10" in line for line in lines if line.startswith("mine"))


def test_the_speed_and_the_time_of_training_do_not_include_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from leyden.callbacks.bars.rich_screen import RichScreen, speed_of

    screen = RichScreen(Console(file=io.StringIO()), [], "", is_transient=False)
    screen.add_task("train", visible=False)
    [task] = screen.tasks
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    screen.show_task(task.id, "resumed", 5, 10)
    assert (speed_of(task), task.time_remaining) == ("", None)
    now = 2.0
    screen.update(task.id, completed=7)
    screen.stop_task(task.id)
    now = 100.0
    assert task.elapsed == 2.0
    screen.resume_task(task.id, 98.0)
    now = 102.0
    screen.update(task.id, completed=9)
    assert (speed_of(task), task.elapsed, task.time_remaining) == ("1.00it/s", 4.0, 1.0)


def test_the_summary_is_a_table_on_a_terminal(tmp_path: Path) -> None:
    run = trainer(tmp_path, RichProgressBar(refresh_rate=0), enable_model_summary=True, max_steps=1)
    [summary] = [callback for callback in run.callbacks if isinstance(callback, ModelSummary)]
    assert type(summary) is RichModelSummary
    module = Net()
    module.example_input_array = torch.ones(3, 2)
    with Terminal("stdout") as terminal:
        run.fit(module, DATA)
        trainer(tmp_path, RichModelSummary(max_depth=0, header_style="bold green"), max_steps=1).fit(module, DATA)
    lines = terminal.drawn()
    assert any(re.match(r"│ 0 │ \w+ +│ Linear │ +\d+ │ +\d+ │ train │ \[3, 2\] ", line) for line in lines), lines
    assert sum(line.endswith("parameters in total") for line in lines) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RichProgressBar(-1), "refresh_rate=-1.*whole number"),
        (lambda: RichProgressBar(theme=NO_THEME), r"use a RichProgressBarTheme\(…\), not a dict"),
        (lambda: RichProgressBar(theme=RichProgressBarTheme(time="redd")), r"RichProgressBarTheme\(time='redd'\)"),
        (lambda: RichProgressBar(theme=RichProgressBarTheme(metrics_format="q")), "metrics_format='q'"),
        (lambda: RichProgressBar(console_kwargs={"colour": 1}), "rich.console.Console raised: .*colour"),
        (lambda: RichModelSummary(-2), "max_depth=-2"),
        (lambda: RichModelSummary(colour="red"), "rich.table.Table rejects this .*colour"),
        (lambda: RichModelSummary(header_style="redd"), "redd"),
    ],
)
def test_invalid_arguments_raise(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_missing_rich_raises_with_the_extra_and_bars_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = pickle.loads(pickle.dumps(RichProgressBar(refresh_rate=3)))
    assert bar.refresh_rate == 3 and bar.progress.disable
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    for kind in (RichProgressBar, RichModelSummary):
        with pytest.raises(MissingExtraError, match=rf"{kind.__name__} needs .*'rich': pip install 'leyden\[rich\]'"):
            kind()
