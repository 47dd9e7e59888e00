"""TQDMProgressBar on a pseudo-terminal, and without a terminal."""

from __future__ import annotations

import io
import logging
import pickle
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from samples import Stream
from terminals import DATA, Net, Terminal, trainer
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from leyden.callbacks import CSVLogger, ProgressBar, RichProgressBar, TQDMProgressBar
from leyden.callbacks.bars import paced_bar
from leyden.callbacks.bars.progress_bar import format_number
from leyden.callbacks.bars.tqdm_bar import draw, is_interactive
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer

STREAM = Stream([torch.ones(2)] * 6)


def numbers(lines: list[str], title: str) -> list[str]:
    """Returns the counts drawn under that title, such as "3/10", without repeats."""
    found = [match[1] for line in lines if (match := re.search(rf"^{title}: .* (\d+/[\d?]+) \[", line))]
    return [text for index, text in enumerate(found) if index == 0 or found[index - 1] != text]


def test_the_first_log_line_is_printed_sooner_than_later_ones(tmp_path: Path) -> None:
    lines = TQDMProgressBar()
    first = lines._line_interval()
    lines._has_written = True
    assert first < 10 < lines._line_interval()


def test_every_stage_draws_a_bar(tmp_path: Path, every_batch: None) -> None:
    run = trainer(tmp_path)
    with Terminal() as terminal:
        run.fit(Net(), DATA, [DataLoader(torch.ones(size, 2), batch_size=2) for size in (6, 8)])
        run.test(Net(), DATA[:5], verbose=False)
        run.predict(Net(), DATA[:6])
    lines = terminal.drawn()
    assert numbers(lines, "Sanity Checking") == [f"{done}/4" for done in range(5)]
    for epoch in ("Epoch 0/1", "Epoch 1/1"):
        assert numbers(lines, epoch) == [f"{done}/10" for done in range(11)]
    assert numbers(lines, "Validation")[:8] == [f"{done}/7" for done in range(8)]
    assert numbers(lines, "Testing") == [f"{done}/5" for done in range(6)]
    assert numbers(lines, "Predicting") == [f"{done}/6" for done in range(7)]
    last = [line for line in lines if line.startswith("Epoch 1/1")][-1]
    assert re.search(r"100%\|█+\| 10/10 \[.*it/s, loss=-?\d\.\d+, val=0\.500\]$", last), last
    assert not any("quiet" in line for line in lines)


class Wordy(Net):
    """Logs metrics that take 59 columns in the bar."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log_dict({"accuracy": 0.5, "learning_rate": 1e-3}, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("columns", [40, 64, 80, 140])
@pytest.mark.parametrize("leave", [False, True])
def test_on_a_narrow_terminal_the_bar_keeps_ten_cells_above_its_metrics(
    columns: int, leave: bool, tmp_path: Path, every_batch: None
) -> None:
    with Terminal(columns=columns) as terminal:
        trainer(tmp_path, TQDMProgressBar(leave=leave)).fit(Wordy(), DATA, DATA)
    bars = [line for line in terminal.drawn() if "10/10" in line and "Epoch" in line]
    assert all(len(line.split("|")[1]) >= 10 and len(line) <= columns for line in bars)
    assert ("it/s" in bars[-1]) == (columns > 40)
    last = [line for line in terminal.screen() if line]
    assert len(last) == (1 + leave) * (1 if columns == 140 else 2)
    metrics = "accuracy=0.500, learning_rate=0.001, l"
    assert all((metrics in line) == (columns == 140) for line in last if "Epoch" in line)
    assert columns == 140 or all(len(line) <= columns and line.startswith(metrics) for line in last[1::2])


def test_refresh_rate_spaces_the_updates(tmp_path: Path, every_batch: None) -> None:
    with Terminal() as terminal:
        trainer(tmp_path, TQDMProgressBar(refresh_rate=4), max_epochs=1).fit(Net(), DATA)
    assert numbers(terminal.drawn(), "Epoch 0/0") == ["0/10", "4/10", "8/10", "10/10"]


def test_a_loader_without_a_length_shows_a_count(tmp_path: Path, every_batch: None) -> None:
    with Terminal() as terminal:
        trainer(tmp_path, max_epochs=1).fit(Net(), DataLoader(STREAM, batch_size=2))
    lines = terminal.drawn()
    assert any(re.search(r"^Epoch 0/0: 3it \[", line) for line in lines)


@pytest.mark.parametrize("loader", [DATA, DataLoader(STREAM, batch_size=1)], ids=["list", "stream"])
def test_max_steps_alone_is_the_total_of_the_epoch_that_it_ends(loader: Any, tmp_path: Path, every_batch: None) -> None:
    class Totals(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            totals.append(self.total_train_batches)

    totals: list[float] = []
    with Terminal() as terminal:
        trainer(tmp_path, Totals(), max_epochs=-1, max_steps=2, accumulate_grad_batches=2).fit(Net(), loader)
    assert totals == [4] * 4
    assert numbers(terminal.drawn(), "Epoch 0") == [f"{done}/4" for done in range(5)]


class ReadCounter(TQDMProgressBar):
    reads = 0

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        self.reads += 1
        return super().get_metrics(trainer, module) | {"mine": 1}


def test_the_bar_reads_and_draws_at_most_ten_times_a_second(tmp_path: Path) -> None:
    bar = ReadCounter()
    with Terminal() as terminal:
        start = time.perf_counter()
        trainer(tmp_path, bar, max_epochs=3).fit(Net(), DATA * 100, DATA)
        seconds = time.perf_counter() - start
    # Reads: one at each epoch's end, one after each validation or epoch start, and ten a second.
    assert 3 <= bar.reads <= 10 * seconds + 3 * 3
    drawn = [line for line in terminal.drawn() if line.startswith("Epoch")]
    assert len(drawn) <= 10 * seconds + 3 * 8
    assert any("mine=1" in line for line in drawn)


def test_a_slow_terminal_is_drawn_less_often() -> None:
    class Slow:
        n = 0

        def update(self, done: int) -> None:
            until = time.perf_counter() + 0.02
            while time.perf_counter() < until:
                pass

    start = time.perf_counter()
    assert paced_bar.draw_timed(draw, Slow(), 1) >= start + 0.02 + 0.02 * paced_bar.DRAW_SHARE


def test_a_bar_resumes_mid_epoch(tmp_path: Path, every_batch: None) -> None:
    run, net = trainer(tmp_path), Net()
    with Terminal() as terminal:
        run.fit(net, DATA, max_steps=6, max_epochs=1)
        run.fit(net, DATA, max_steps=-1, max_epochs=1, ckpt_path="current")
    shown = numbers(terminal.drawn(), "Epoch 0/0")
    assert shown[:7] == [f"{done}/10" for done in range(7)]
    assert shown[-5:] == [f"{done}/10" for done in range(6, 11)]


def test_leave_keeps_each_epochs_bar(tmp_path: Path) -> None:
    made: list[Any] = []

    class BarRecorder(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            made.append(super().init_train_tqdm())
            return made[-1]

    for leave, bars in ((True, 3), (False, 1)):
        made.clear()
        with Terminal():
            trainer(tmp_path, BarRecorder(leave=leave), max_epochs=3).fit(Net(), DATA)
        assert len(made) == bars


def test_a_bar_written_for_lightning_runs(tmp_path: Path, every_batch: None) -> None:
    seen: list[Any] = []

    class LightningBar(TQDMProgressBar):
        """Overrides from Lightning's documentation, and members that its users read."""

        def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            items = super().get_metrics(*args, **kwargs)
            assert "v_num" in items
            items.pop("v_num", None)
            return items

        def init_validation_tqdm(self) -> Any:
            bar = super().init_validation_tqdm()
            bar.set_description("running validation...")
            return bar

        def init_predict_tqdm(self) -> Any:
            # A plain tqdm bar draws at tqdm's pace, and must still end with the last batch.
            return tqdm(desc="mine", position=2 * self.process_position, disable=self.is_disabled, leave=True)

        @property
        def test_description(self) -> str:
            return "on trial"

        def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_epoch_start(trainer, *args)
            self.train_progress_bar.set_description(f"round {trainer.current_epoch}")

        def on_validation_batch_start(
            self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            super().on_validation_batch_start(trainer, module, batch, batch_idx, dataloader_idx)
            if self.has_dataloader_changed(dataloader_idx):
                total = self.total_val_batches_current_dataloader
                seen.append((trainer.sanity_checking, dataloader_idx, total, self.val_progress_bar.total))

        def on_test_batch_start(self, *args: Any) -> None:
            seen.append((self.total_test_batches_current_dataloader, self.test_progress_bar.total))

        def on_predict_batch_start(self, *args: Any) -> None:
            seen.append((self.total_predict_batches_current_dataloader, self.predict_progress_bar.total))

    bar, loaders = LightningBar(), [DataLoader(torch.ones(size, 2), batch_size=2) for size in (6, 8)]
    run = trainer(tmp_path, bar, logger=CSVLogger(tmp_path), max_epochs=1, num_sanity_val_steps=2)
    with Terminal() as terminal:
        run.fit(Net(), DATA, loaders)
        assert bar.trainer is run and (bar.total_train_batches, bar.total_val_batches) == (10, 7)
        run.test(Net(), DATA[:1], verbose=False)
        run.predict(Net(), DATA[:3])
    assert seen == [
        *[(True, 0, 2, 4), (True, 1, 2, 4), (False, 0, 3, 7), (False, 1, 4, 7)],
        *[(1, 1), (3, 3), (3, 3), (3, 3)],
    ]
    lines = terminal.drawn()
    assert numbers(lines, r"running validation\.\.\.")[-1] == "7/7" and numbers(lines, "on trial")[-1] == "1/1"
    assert numbers(lines, "round 0")[-1] == "10/10" and numbers(lines, "mine")[-1] == "3/3"
    assert any("loss=" in line for line in lines) and not any("v_num" in line for line in lines)


def test_a_bar_reset_for_each_loader_counts_that_loaders_batches(tmp_path: Path, every_batch: None) -> None:
    class ResetsForEachLoader(TQDMProgressBar):
        def on_validation_batch_start(
            self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            if self.has_dataloader_changed(dataloader_idx):
                self.val_progress_bar.reset(self.total_val_batches_current_dataloader)
                self.val_progress_bar.initial = 0
                self.val_progress_bar.set_description(f"DL {dataloader_idx}")

    loaders = [DataLoader(torch.ones(size, 2), batch_size=2) for size in (6, 10)]
    with Terminal() as terminal:
        trainer(tmp_path, ResetsForEachLoader()).validate(Net(), loaders, verbose=False)
    lines = terminal.drawn()
    # The bar is reset to the next loader's batches before its description changes.
    assert numbers(lines, "DL 0")[-2:] == ["3/3", "0/5"] and numbers(lines, "DL 1")[-1] == "5/5"
    assert not any("it [" in line for line in lines)


def test_a_customized_bar_runs_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class LightningBar(TQDMProgressBar):
        def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_epoch_start(trainer, *args)
            self.train_progress_bar.set_description("unseen")
            self.train_progress_bar.set_postfix(unseen=1)

        def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_validation_batch_end(*args, **kwargs)
            self.val_progress_bar.update(1)

    trainer(tmp_path, LightningBar(), logger=CSVLogger(tmp_path), max_epochs=1).fit(Net(), DATA, DATA)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("Epoch 0/0  batch 10/10  step 10") and line.endswith(", v_num=0")


def test_a_custom_bar_replaces_the_default_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Percent(ProgressBar):
        """The example from Lightning's documentation, which shadows `enable`."""

        def __init__(self) -> None:
            super().__init__()
            self.enable = True  # type: ignore[assignment, method-assign]

        def disable(self) -> None:
            self.enable = False  # type: ignore[assignment, method-assign]

        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            percent = (batch_idx / self.total_train_batches) * 100
            sys.stdout.write(f"{percent:.01f} percent complete \r")

    bar = Percent()
    run = trainer(tmp_path, bar, max_epochs=1)
    run.fit(Net(), DATA)
    assert run.progress_bar_callback is bar
    out = capsys.readouterr()
    assert "90.0 percent complete \r" in out.out and "Epoch" not in out.err
    copy = pickle.loads(pickle.dumps(TQDMProgressBar(refresh_rate=3)))
    assert copy.refresh_rate == 3 and copy.train_progress_bar.disable
    with pytest.raises(ConfigurationError, match="trainer is not set before the first run"):
        copy.trainer  # noqa: B018
    with pytest.raises(ConfigurationError, match=r"enable_progress_bar=False, but callbacks holds a TQDMProgressBar"):
        trainer(tmp_path, TQDMProgressBar(), enable_progress_bar=False)


def test_logs_and_warnings_appear_above_the_bars(
    tmp_path: Path, every_batch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("tests.bar")

    class PrintingNet(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            log.warning("logged %d", batch_idx)
            print("printed", batch_idx, file=sys.stderr)

        def on_validation_batch_end(self, *args: Any) -> None:
            log.warning("validated")

    with Terminal() as terminal:
        handler = logging.StreamHandler()
        monkeypatch.setattr(log, "handlers", [handler])
        monkeypatch.setattr(log, "propagate", False)
        before = sys.stderr
        trainer(tmp_path, max_epochs=1, num_sanity_val_steps=1).fit(PrintingNet(), DATA, DATA[:2])
        assert sys.stderr is before and handler.stream is before
    lines = terminal.drawn()
    # Lines appear whole, and the bar is drawn again after each.
    assert {f"{word} {batch}" for word in ("logged", "printed") for batch in range(10)} <= set(lines)
    assert lines.count("validated") == 3
    after = [lines[index + 1] for index, line in enumerate(lines) if line.startswith("logged")]
    assert len(after) == 10 and all(line.startswith("Epoch 0/0:") for line in after)


def test_an_error_closes_the_bars(tmp_path: Path) -> None:
    class Fails(Net):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            raise RuntimeError("in validation")

    bar = TQDMProgressBar()
    with Terminal(), pytest.raises(RuntimeError, match="in validation"):
        trainer(tmp_path, bar, num_sanity_val_steps=0).fit(Fails(), DATA, DATA)
    assert not bar._bars


def test_printing_does_not_break_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = TQDMProgressBar()

    class PrintingNet(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                bar.print("hello", 5, sep="-")

    with Terminal() as terminal:
        monkeypatch.setattr(sys, "stdout", sys.stderr)
        trainer(tmp_path, bar, max_epochs=1).fit(PrintingNet(), DATA)
        monkeypatch.undo()
    lines = terminal.drawn()
    assert "hello-5" in lines
    assert lines.index("hello-5") < len(lines) - 1


def test_builtin_print_does_not_break_the_bars(
    tmp_path: Path, every_batch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PrintingNet(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            print("trained", batch_idx, end="")
            print(" of", 10)

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            print(f"first {batch_idx}\nsecond {batch_idx}")
            sys.stdout.writelines(["third", f" {batch_idx}\n"])

    with Terminal() as terminal:
        monkeypatch.setattr(sys, "stdout", sys.stderr)
        trainer(tmp_path, TQDMProgressBar(), max_epochs=1, num_sanity_val_steps=1).fit(PrintingNet(), DATA, DATA)
        assert sys.stdout is sys.stderr
        monkeypatch.undo()
    lines = terminal.drawn()
    for batch in range(10):
        assert {f"trained {batch} of 10", f"first {batch}", f"second {batch}", f"third {batch}"} <= set(lines)
    assert numbers(lines, "Epoch 0/0")[-1] == "10/10"


class PartialLinesNet(Net):
    """Prints lines in parts."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(".", end="", flush=True)
        if batch_idx == 4:
            print()
            print("[/x] [bold]loss", end="", flush=True)
            print(" is", end=" ")
            print("low")
            print("part 1", end="\r", flush=True)
            print("part 2", end="\r", flush=True)
            print("part 3")

    def on_train_end(self) -> None:
        print("[/tail", end="")


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_line_can_be_written_in_parts(
    tmp_path: Path, every_batch: None, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    with Terminal("stdout", "stderr") as terminal:
        trainer(tmp_path, kind(), max_epochs=1).fit(PartialLinesNet(), DATA)
        print("after the fit")
    lines = [line for line in terminal.screen() if line]
    printed_lines = [line for line in lines[lines.index(".....") :] if not line.startswith("Epoch 0/0")]
    assert printed_lines[:3] == [".....", "[/x] [bold]loss is low", "part 3"]
    assert any(re.match(r"\.{5}(\[/tail)?$", line) for line in printed_lines[1:]), lines
    assert "[/tail" in "".join(lines) and "after the fit" in lines[-1]
    assert sum(line.startswith("Epoch 0/0") for line in lines) == 1


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_line_in_parts_goes_on_below_a_bar_that_is_left(
    tmp_path: Path, every_batch: None, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    class PrintsDots(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            print(".", end="", flush=True)

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    with Terminal("stdout", "stderr") as terminal:
        trainer(tmp_path, kind(leave=True)).fit(PrintsDots(), DATA)
    lines = [line for line in terminal.screen() if line.startswith(("...", "Ep"))]
    assert [line[:9] for line in lines] == ["." * 9, "Epoch 0/1", "." * 9, "Epoch 1/1"]


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_handler_created_during_the_run_works_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    log = logging.getLogger("tests.bar.late")
    monkeypatch.setattr(log, "handlers", [])

    class Configures(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                log.addHandler(logging.StreamHandler())

    with Terminal("stdout", "stderr"):
        trainer(tmp_path, kind(), max_epochs=1).fit(Configures(), DATA[:2])
        assert log.handlers[0].stream is sys.stderr  # type: ignore[attr-defined]


def test_a_stream_replaced_by_other_code_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = io.StringIO()

    class Redirects(Net):
        def on_train_start(self) -> None:
            sys.stdout = other

        def on_train_epoch_start(self) -> None:
            sys.stdout = other

    with Terminal():
        monkeypatch.setattr(sys, "stdout", sys.stderr)
        trainer(tmp_path, TQDMProgressBar(), max_epochs=1).fit(Redirects(), DATA)
        assert sys.stdout is other
        monkeypatch.undo()


@pytest.mark.parametrize("enabled", [True, False])
def test_printing_to_a_file_writes_only_to_that_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], enabled: bool
) -> None:
    file = io.StringIO()

    class PrintingNet(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.print("hello", batch_idx, sep="-", end=";", file=file)
            self.trainer.print("seen", file=sys.stderr, flush=True)

    with Terminal() as terminal:
        trainer(tmp_path, TQDMProgressBar(refresh_rate=int(enabled)), max_epochs=1).fit(PrintingNet(), DATA)
    assert file.getvalue() == "".join(f"hello-{number};" for number in range(10))
    drawn = terminal.drawn()
    assert drawn.count("seen") == 10 and not any("hello" in line for line in drawn)


def test_without_a_terminal_each_epoch_prints_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, max_epochs=2)
    run.fit(Net(), DATA, DATA)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    for epoch, line in enumerate(lines):
        found = re.fullmatch(r"Epoch (\d)/1  batch 10/10  step (\d+)  [\d.]+ it/s  (.*)", line)
        assert found, line
        assert (int(found[1]), int(found[2])) == (epoch, 10 * (epoch + 1))
        assert sorted(part.split("=")[0] for part in found[3].split(", ")) == ["loss", "val"]
    run.validate(Net(), DATA, verbose=False)
    assert re.fullmatch(r"Validation  batch 10/10  [\d.]+ it/s\n", capfd.readouterr().err)


def test_without_a_length_lines_are_printed_within_the_epoch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], every_batch: None
) -> None:
    trainer(tmp_path, max_epochs=1).fit(Net(), DataLoader(STREAM, batch_size=2))
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("  ")[:3] for line in lines[:3]] == [["Epoch 0/0", f"batch {n}", f"step {n}"] for n in (1, 2, 3)]


def test_a_disabled_bar_shows_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    off = TQDMProgressBar()
    off.disable()
    for bar in (off, TQDMProgressBar(refresh_rate=0)):
        run = trainer(tmp_path, bar)
        run.fit(Net(), DATA, DATA)
        run.test(Net(), DATA, verbose=False)
        assert bar.is_disabled
    other = TQDMProgressBar()
    other.setup(SimpleNamespace(is_global_zero=False), None, "fit")  # type: ignore[arg-type]
    assert other.is_disabled
    assert capfd.readouterr().err == ""


def test_a_notebook_counts_as_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not is_interactive()
    ipython = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    for config, expected in (({"IPKernelApp": {}}, True), ({}, False)):
        ipython.get_ipython = lambda config=config: SimpleNamespace(config=config)  # type: ignore[attr-defined]
        assert is_interactive() is expected
    monkeypatch.setattr(sys, "stderr", None)
    assert not is_interactive()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (-1.5, "-1.500"),
        (999.9999, "1000.000"),
        (12345.678, "12345.7"),
        (1e6, "1.00e+06"),
        (9.9e-4, "9.90e-04"),
        (float("nan"), "nan"),
        (-float("inf"), "-inf"),
        (7, "7"),
        ("text", "text"),
    ],
)
def test_metrics_are_formatted_compactly(value: Any, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    "arguments", [{"refresh_rate": -1}, {"refresh_rate": 0.5}, {"process_position": -1}, {"refresh_rate": True}]
)
def test_invalid_arguments_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="give a whole number from 0"):
        TQDMProgressBar(**arguments)
