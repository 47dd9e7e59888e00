"""Reports of runs: what a ReportLogger records, what is read from a run's folder, and the page in a real browser."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET
from ranks.world import run_world
from torch import Tensor, nn

from leyden import Trainer, TrainModule
from leyden.callbacks import CSVLogger, ModelCheckpoint, NonFiniteGuard, ReportLogger, TensorBoardLogger
from leyden.cli.main import main
from leyden.core.errors import LeydenError
from leyden.report import write_report
from leyden.report.curves import MAX_BINS, Curve, Curves, read_csv
from leyden.report.recorded import FILE, PAGE, Recorded, read_run

HOSTILE = "<script>document.title='taken'</script>"


class Digits(TrainModule):
    """Learns the sign of a sum; logs its loss and what a report can show."""

    def __init__(self, fails_at: int = -1, shows: bool = False, name: str = "val_loss") -> None:
        super().__init__()
        self.save_hyperparameters("name")
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.fails_at, self.shows, self.name = fails_at, shows, name

    def loss(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), (x.sum(1) > 0).long())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fails_at:
            raise ValueError(f"a bad step: {HOSTILE}")
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.shows and not self.trainer.sanity_checking:
            warnings.warn(f"look {HOSTILE}", stacklevel=1)
            for logger in self.loggers:
                if isinstance(logger, ReportLogger | TensorBoardLogger):
                    logger.log_table(f"table {HOSTILE}", ["in", "out"], [[HOSTILE, "a | b"], ["x", 2]])
                    logger.log_image("picture", [torch.rand(3, 8, 8), torch.rand(1, 8, 8)], caption=["one", HOSTILE])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(batches: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator) for _ in range(batches)]


def fit(folder: Path, module: Digits | None = None, **arguments: Any) -> Trainer:
    settings = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "report": True, "default_root_dir": folder}
    trainer = Trainer(**{**settings, **arguments})
    trainer.fit(Digits() if module is None else module, data(), data(2))
    return trainer


def values_of(run: Recorded, name: str) -> tuple[list[float], list[float]]:
    bins = run.curves.by_name[name].bins
    return bins.x, bins.low


class Content(HTMLParser):
    """The visible text of a page, its scripts, and what it would load from elsewhere."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.text, self.scripts, self.loads = "", 0, []
        self.data: Any = None
        self._within = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within = tag
        self.scripts += tag == "script"
        if ("id", "data") in attrs:
            self._within = "data"
        found = [value for name, value in attrs if name in ("src", "href") and value]
        self.loads += [value for value in found if not value.startswith("data:")]

    def handle_data(self, data: str) -> None:
        if self._within == "data":
            self.data = json.loads(data)
            self._within = ""
        elif self._within not in ("script", "style"):
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


# curves ---------------------------------------------------------------------------------------------------------------
def test_a_spike_of_one_step_stays_among_a_million() -> None:
    curve = Curve("loss")
    for x in range(1_000_000):
        curve.add(x, 50.0 if x == 123_457 else 1.0)
    assert len(curve.bins.x) <= MAX_BINS and curve.bins.x == sorted(curve.bins.x)
    assert max(curve.bins.high) == 50 and sum(high > 1 for high in curve.bins.high) == 1
    assert curve.most == (50.0, 123_457) and curve.count == 1_000_000


def test_bins_hold_the_least_the_largest_and_the_mean_of_their_points() -> None:
    curve, generator = Curve("loss"), random.Random(0)
    points = [generator.gauss(0, 1) for _ in range(10_000)]
    for x, y in enumerate(points):
        curve.add(x, y)
    bins = curve.bins
    for index, (x, low, high, mean) in enumerate(zip(bins.x, bins.low, bins.high, bins.mean, strict=True)):
        within = points[int(x) : int(bins.x[index + 1]) if index + 1 < len(bins.x) else None]
        assert low == min(within) and high == max(within)
        assert mean == pytest.approx(sum(within) / len(within))


def test_a_curve_that_goes_back_keeps_what_was_undone_apart() -> None:
    curve = Curve("loss")
    for x, y in [(0, 5.0), (1, 4.0), (2, 90.0), (3, 95.0), (2, 3.0), (3, 2.0)]:
        curve.add(x, y)
    assert (curve.bins.x, curve.bins.low) == ([0, 1, 2, 3], [5, 4, 3, 2])
    assert curve.undone == [[(2, 90), (3, 95)]] and curve.last == 2


def test_nan_and_infinite_values_are_counted_and_not_drawn(tmp_path: Path) -> None:
    curve = Curve("loss")
    for x, y in enumerate([1.0, math.nan, math.inf, 2.0]):
        curve.add(x, y)
    assert curve.odd == (2, 1) and curve.bins.low == [1, 2]


def test_an_incomplete_last_row_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,accuracy\n1,0.5,\n2,0.4,0.9\n3,0.")
    curves = Curves()
    read_csv(path, curves)
    assert curves.by_name["loss"].bins.low == [0.5, 0.4] and curves.by_name["accuracy"].bins.x == [2]


# what a run records ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["csv", "tensorboard", "none"])
def test_all_values_are_in_the_report_whatever_the_logger(tmp_path: Path, kind: str) -> None:
    logger = {"csv": CSVLogger(), "tensorboard": TensorBoardLogger(), "none": False}[kind]
    trainer = fit(tmp_path, logger=logger)
    assert trainer.run_folder is not None
    folder = Path(trainer.run_folder)
    run = read_run(folder, "run")
    steps, losses = values_of(run, "train_loss")
    assert steps == list(range(1, 13)) and all(map(math.isfinite, losses))
    assert values_of(run, "val_loss")[0] == [6, 12]
    assert run.curves.times.x and run.curves.times.low == sorted(run.curves.times.low)
    assert run.end["status"] == "success" and "max_epochs=2" in run.end["reason"] and run.end["step"] == 12
    assert {"setup", "sanity check", "validation", "training"} <= run.seconds.keys()
    assert run.end["memory"][0] > 1e6
    assert run.starts[0]["changed"].count("max_epochs") == 1 and "verbose" not in run.starts[0]["changed"]
    content = Content(folder / PAGE)
    assert content.scripts == 3 and content.loads == []
    assert "finished" in content.text and "train_loss" in content.text
    [losses_drawn] = [chart for chart in content.data["charts"] if chart["series"][0]["label"].endswith("loss")]
    assert [series["label"] for series in losses_drawn["series"]] == ["train_loss", "val_loss"]


def test_a_run_without_a_record_is_drawn_from_its_other_files(tmp_path: Path) -> None:
    trainer = fit(tmp_path, logger=CSVLogger(), report=False, enable_checkpointing=True)
    folder = Path(str(trainer.run_folder))
    assert not (folder / FILE).exists() and not (folder / PAGE).exists()
    content = Content(write_report([folder], tmp_path / "own.html"))
    assert "finished" in content.text and "epoch=1-step=12" in content.text
    assert content.data["runs"][0]["time"] is None


def test_an_error_is_recorded_with_its_traceback_and_stays_the_error_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Digits(fails_at=7), logger=CSVLogger())
    folder = tmp_path / "logs" / "version_0"
    end = read_run(folder, "run").end
    assert end["status"] == "failed" and end["step"] == 7 and "training_step" in end["error"]
    content = Content(folder / PAGE)
    assert "failed" in content.text and HOSTILE in content.text and content.scripts == 3


def test_a_run_may_be_recorded_and_drawn_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(tmp_path, logger=[CSVLogger(), ReportLogger(draw=False)])
    folder = Path(str(trainer.run_folder))
    assert (folder / FILE).exists() and not (folder / PAGE).exists()
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger, ReportLogger]
    assert main(["report", str(folder)]) == 0 and "finished" in Content(folder / PAGE).text


def test_an_error_of_the_drawing_is_only_warned_of(tmp_path: Path) -> None:
    class Blocks(ReportLogger):
        def save(self) -> None:
            super().save()
            if self.log_dir is not None:
                # A folder of this name cannot be replaced by a file.
                Path(self.log_dir, PAGE, "inside").mkdir(parents=True, exist_ok=True)

    with pytest.warns(UserWarning, match="the report could not be drawn.*leyden report"):
        trainer = fit(tmp_path, logger=Blocks())
    assert trainer.global_step == 12


def test_what_was_logged_stays_text(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="look"):
        trainer = fit(tmp_path, Digits(shows=True, name=f"val_{HOSTILE}"), logger=False)
    content = Content(Path(str(trainer.run_folder), PAGE))
    assert content.scripts == 3
    for shown in (f"table {HOSTILE}", f"look {HOSTILE}", f"val_{HOSTILE}", "a | b", "one"):
        assert shown in content.text, shown


def test_pictures_and_tables_of_tensorboard_are_shown(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="look"):
        trainer = fit(tmp_path, Digits(shows=True), logger=TensorBoardLogger())
    folder = Path(str(trainer.run_folder))
    (folder / FILE).unlink()
    run = read_run(folder, "run")
    tables = {table.name: table for table in run.tables}
    assert tables[f"table {HOSTILE}"].rows == [[HOSTILE, "a | b"], ["x", "2"]]
    assert run.pictures[0].name.startswith("picture")
    assert run.pictures[0].data.startswith(b"\x89PNG")


def test_metrics_that_are_no_number_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import torchmetrics

    class Classifier(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.confusion = torchmetrics.ConfusionMatrix(task="binary")
            self.accuracy = torchmetrics.Accuracy(task="binary")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.confusion.update(self.net(batch).argmax(1), (batch.sum(1) > 0).long())
            self.accuracy(self.net(batch).argmax(1), (batch.sum(1) > 0).long())
            self.log("accuracy", self.accuracy)

        def on_validation_epoch_end(self) -> None:
            assert int(self.confusion.compute().sum()) == 8
            self.confusion.reset()

    trainer = fit(tmp_path, Classifier(), logger=False)
    run = read_run(Path(str(trainer.run_folder)), "run")
    assert [picture.name for picture in run.pictures] == ["confusion"]
    assert run.pictures[0].step == 12


def test_a_rollback_is_marked_and_its_values_stay_apart(tmp_path: Path) -> None:
    class Diverges(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            progress = self.trainer.progress
            return loss * math.nan if progress.batches == 5 and not progress.passed_over else loss

    callbacks = [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), NonFiniteGuard("rollback", patience=1)]
    with pytest.warns(UserWarning):
        trainer = fit(tmp_path, Diverges(), logger=False, callbacks=callbacks, enable_checkpointing=True)
    run = read_run(Path(str(trainer.run_folder)), "run")
    [(step, text)] = run.marks
    assert step == 4 and "rolled back from step" in text
    steps, _ = values_of(run, "train_loss")
    assert steps == sorted(steps)


# resumes --------------------------------------------------------------------------------------------------------------
def test_a_resume_cuts_the_record_to_its_checkpoint(tmp_path: Path) -> None:
    def resumed(module: Digits) -> None:
        checkpoints = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        fit(tmp_path, module, logger=False, callbacks=[checkpoints], enable_checkpointing=True, resume="auto")

    folder = tmp_path / "version_0"
    with pytest.raises(ValueError, match="a bad step"):
        resumed(Digits(fails_at=7))
    assert values_of(read_run(folder, "run"), "train_loss")[0][-1] == 7
    resumed(Digits())
    run = read_run(folder, "run")
    steps, losses = values_of(run, "train_loss")
    assert steps == list(range(1, 13)) and run.curves.by_name["train_loss"].undone == []
    assert (4, "resumed") in run.marks and run.end["status"] == "success" and len(run.starts) == 2
    straight = fit(tmp_path / "straight", logger=False)
    assert values_of(read_run(Path(str(straight.run_folder)), "run"), "train_loss")[1] == losses


def test_of_two_fits_in_one_folder_the_last_counts(tmp_path: Path) -> None:
    trainer = fit(tmp_path, logger=CSVLogger())
    first = values_of(read_run(Path(str(trainer.run_folder)), "run"), "train_loss")
    trainer.fit(trainer.module, data(), data(2), max_epochs=1)
    run = read_run(Path(str(trainer.run_folder)), "run")
    assert len(run.lines["start"]) == len(run.lines["end"]) == 2 and run.end["step"] == 6
    steps, losses = values_of(run, "train_loss")
    assert steps == list(range(1, 7)) and losses != first[1][:6]
    assert [y for piece in run.curves.by_name["train_loss"].undone for _, y in piece] == first[1]


def test_the_record_survives_damage(tmp_path: Path) -> None:
    folder = Path(str(fit(tmp_path, logger=CSVLogger(), enable_checkpointing=True).run_folder))
    path = folder / FILE
    lines = path.read_bytes().splitlines()
    broken = [
        b"\xff\xfe",
        b"[]",
        b'{"kind": 3, "time": 1}',
        b'{"kind": "start", "time": "x"}',
        b'{"kind": "table"}',
        b"{",
    ]
    path.write_bytes(b"\n".join([*broken, *lines, b'{"kind":"end","time":9e9,"sta']))
    (folder / "hparams.json").write_text("{")
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / "manifest.json").write_bytes(b"\0")
    run = read_run(folder, "run")
    assert run.end["status"] == "success"
    assert "damaged" in Content(write_report([folder], tmp_path / "page.html")).text


def test_a_damaged_checkpoint_does_not_hide_from_which_one_the_run_continues(tmp_path: Path) -> None:
    saves = ModelCheckpoint(every_n_train_steps=6, save_top_k=-1)
    trainer = fit(tmp_path, logger=False, callbacks=[saves], enable_checkpointing=True, resume="auto")
    folder = Path(str(trainer.run_folder))
    (folder / "checkpoints" / "epoch=0-step=6" / "manifest.json").write_bytes(b"\0")
    newest, damaged = read_run(folder, "run").checkpoints
    assert newest.command.startswith("cd ") and "# with" not in newest.command
    assert damaged.command.startswith("damaged")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (FILE, '{"kind":"row","time":1,"step":"x"}'),
        (FILE, '{"kind":"row","time":1e999,"step":1}'),
        (FILE, '{"kind":"row","time":1,"step":1,"values":[1]}'),
        (FILE, '{"kind":"table","time":1,"key":["a"],"step":1,"rows":1}'),
        (FILE, '{"kind":"table","time":1,"key":"\\udcff","step":1,"rows":[["\\ud800"], 1]}'),
        (FILE, '{"kind":"image","time":1,"key":"a","step":1,"file":"x","captions":null}'),
        (FILE, '{"kind":"start","time":1,"step":0,"places":[1],"mesh":3}'),
        (FILE, '{"kind":"end","time":1,"status":"failed","error":1,"memory":["a"],"seconds":null}'),
        ("starts/x/run.json", '{"arguments":[1],"git":"x","changed":5,"versions":[1],"step":"a"}'),
        ("hparams.json", '{"a":"\\ud800"}'),
        ("metrics.csv", "step,a\n1e400,1\n2,1e308\n3,-1e308\n4,5e-324\n"),
        ("metrics.csv", 'step,a\n1,"' + "x" * 200_000),
    ],
)
def test_a_damaged_file_costs_only_its_own_part(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / FILE).write_text('{"kind":"row","time":1,"step":1,"values":{"loss":0.25}}\n')
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    with (tmp_path / name).open("a") as file:
        file.write(text)
    assert Content(write_report([tmp_path], tmp_path / PAGE)).scripts == 3
    run = read_run(tmp_path, "run")
    assert name == "metrics.csv" or "loss" in run.curves.by_name


def test_a_folder_that_vanishes_costs_the_report_and_not_the_run(tmp_path: Path) -> None:
    class Vanishes(Digits):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                shutil.rmtree(str(self.trainer.run_folder))
                Path(str(self.trainer.run_folder)).touch()

    with pytest.warns(UserWarning, match="could not be written"):
        trainer = fit(tmp_path, Vanishes(), logger=False)
    assert trainer.global_step == 12


def test_a_run_computes_the_same_numbers_with_and_without_a_report(tmp_path: Path) -> None:
    import torchmetrics

    class Draws(torchmetrics.Metric):
        """A metric that draws random numbers, and cannot be computed at every time."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", torch.zeros(2))

        def update(self, batch: Tensor) -> None:
            self.seen += 1

        def compute(self) -> Tensor:
            torch.randperm(8)
            raise RuntimeError("more samples are required")

    class Random(Digits):
        def __init__(self) -> None:
            super().__init__()
            self.metric = Draws()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric.update(batch)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch + torch.rand(4), batch_idx)

    found = []
    for report in (False, True):
        torch.manual_seed(3)
        module = Random()
        torch.manual_seed(4)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the report shows no plot of metric: RuntimeError")
            fit(tmp_path, module, logger=False, report=report)
        # What is drawn after the fit is the same, too.
        found.append(torch.cat([module.net.weight.detach().flatten(), torch.rand(4)]))
    assert torch.equal(*found)


def test_saves_within_a_validation_count_once(tmp_path: Path) -> None:
    class Saves(Digits):
        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.trainer.save_checkpoint(Path(str(self.trainer.run_folder), "own"))

    run = read_run(Path(str(fit(tmp_path, Saves(), logger=False).run_folder)), "run")
    assert run.seconds["saving"] > 0 and min(run.seconds.values()) >= 0


def fit_on_two_ranks(folder: str) -> str:
    trainer = fit(Path(folder), strategy="fsdp", logger=False)
    return str(trainer.run_folder)


def test_two_ranks_have_one_report_with_their_layout(tmp_path: Path) -> None:
    folder, same = run_world(2, fit_on_two_ranks, str(tmp_path))
    assert folder == same
    run = read_run(Path(folder), "run")
    assert len(run.lines["start"][0]["places"]) == 2 and math.prod(run.lines["start"][0]["mesh"].values()) == 2
    assert len(run.end["memory"]) == 2 and min(run.end["memory"]) > 1e6
    assert "Ranks" in Content(Path(folder, PAGE)).text


# the command ----------------------------------------------------------------------------------------------------------
def test_several_runs_share_the_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = fit(tmp_path / "a", logger=CSVLogger()).run_folder
    second = fit(tmp_path / "b", logger=TensorBoardLogger(), max_epochs=3).run_folder
    capsys.readouterr()
    assert main(["report", str(first), str(second), "-o", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "both.html")
    content = Content(tmp_path / "both.html")
    assert "a/logs/version_0" in content.text and "b/logs/version_0" in content.text
    loss = next(chart for chart in content.data["charts"] if "train_loss" in chart["series"][0]["label"])
    assert len(loss["series"]) == 4 and len({series["color"] for series in loss["series"]}) == 2


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeydenError, match="holds no run"):
        write_report([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no folder" in capsys.readouterr().err


def test_a_place_that_cannot_hold_the_file_is_named(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "missing" / "page.html", "there is no folder")):
        with pytest.raises(LeydenError, match=message):
            write_report([tmp_path], path)


@pytest.mark.parametrize(("curves", "steps"), [(20, 4_000), (20, 20_000), (200, 500)])
def test_many_curves_fit_in_a_megabyte_and_a_half(tmp_path: Path, curves: int, steps: int) -> None:
    generator = random.Random(0)
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "epoch", *(f"metric_{index}" for index in range(curves))])
        for step in range(steps):
            rows.writerow([step, step // 100, *(f"{generator.gauss(0, 1e-4):.9g}" for _ in range(curves))])
    assert write_report([tmp_path], tmp_path / "page.html").stat().st_size < 1.5e6


def test_the_vendored_script_is_the_released_one() -> None:
    folder = Path(__file__).parents[2] / "leyden" / "report" / "assets"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert set(listed) == {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"}
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert "v1.6.32" in (folder / "uPlot.iife.min.js").read_text()[:80]


# the page in a browser ------------------------------------------------------------------------------------------------
@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


def test_a_browser_draws_every_chart_and_runs_nothing_that_was_logged(tmp_path: Path, browser: Any) -> None:
    with pytest.warns(UserWarning, match="look"):
        folder = fit(tmp_path, Digits(shows=True, name=f"val_{HOSTILE}"), logger=False).run_folder
    problems: list[str] = []
    for width, scheme in ((1400, "light"), (400, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.append(request.url) if "://" in request.url[5:] else None)
        page.goto(Path(str(folder), PAGE).resolve().as_uri())
        charts = page.locator("[data-chart]")
        for index in range(charts.count()):
            charts.nth(index).scroll_into_view_if_needed()
            charts.nth(index).locator("canvas").wait_for()
        for axis in ("epoch", "time", "step"):
            page.select_option("#axis", axis)
        page.check("#log")
        page.fill("#smoothing", "0.9")
        assert page.title() != "taken" and page.locator("script").count() == 3
        assert HOSTILE in page.locator(".u-legend").all_inner_texts().__str__()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.emulate_media(media="print")
        assert page.locator(".static svg").first.is_visible() and not page.locator("[data-chart]").first.is_visible()
        page.close()
    assert problems == []


def test_a_run_that_logged_nothing_is_drawn_too(tmp_path: Path, browser: Any) -> None:
    (tmp_path / FILE).write_text('{"kind":"start","time":1.0,"step":0,"places":[["host","cpu"]],"mesh":{"dp":1}}\n')
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(write_report([tmp_path], tmp_path / "page.html").resolve().as_uri())
    assert "Nothing was logged" in page.inner_text("body") and problems == []
    assert re.search(r"\bhost\b", page.inner_text("body"))
    assert os.path.getsize(tmp_path / "page.html") < 100_000
