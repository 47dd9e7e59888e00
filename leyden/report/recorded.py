"""What the files of a run's folder tell of it: its starts, phases, curves, pictures, checkpoints and its end."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.listing import ordered
from leyden.core.errors import LeydenError
from leyden.report.curves import MAX_STEP, Curves, read_csv, read_events
from leyden.report.runs import RunSummary

FILE = "report.jsonl"
"""The lines that a ReportLogger appends to, in the run's folder."""
IMAGES = "report"
"""The folder of its pictures, in the run's folder."""
PAGE = "report.html"
"""The report, in the run's folder."""
CHECKPOINTS = "checkpoints"
MAX_TABLES = 12
MAX_ROWS = 100
MAX_PICTURES = 24
MAX_PICTURE = 150_000
MAX_PICTURES_BYTES = 500_000
"""Bytes of all pictures of a run that a report holds, the newest first."""


@dataclass
class Picture:
    """A PNG that was logged, the last one of its name. `data` is empty if it is too large for a report."""

    name: str
    step: int
    data: bytes
    captions: list[str] = field(default_factory=list)


@dataclass
class Table:
    """A table or text that was logged, the last one of its name."""

    name: str
    step: int
    columns: list[str]
    rows: list[list[str]]
    left_out: int = 0


@dataclass
class Saved:
    """A checkpoint that is still on disk.

    Attributes:
        path: its folder.
        step, epoch: its position.
        scores: the monitored value of each ModelCheckpoint that ranks it, by the monitor's name.
        size: bytes of all its files; 0 if it is damaged.
        command: how to continue from it, for a terminal or in the script.
    """

    path: Path
    step: int
    epoch: int
    scores: dict[str, float]
    size: int
    command: str


@dataclass
class Recorded:
    """A run, as its folder shows it. A part that nobody recorded is empty.

    Attributes:
        folder: the run's folder.
        name: a short name, unlike those of the other runs of a report.
        summary: how the run is doing, as `leyden runs` lists it.
        starts: the records of its starts, as loggers write them to `starts/`.
        lines: the lines of its ReportLogger, by kind.
        hparams: its hyperparameters.
        curves: everything that it logged as a number.
        pictures, tables: what else it logged.
        checkpoints: those still on disk, the oldest first.
    """

    folder: Path
    name: str
    summary: RunSummary
    starts: list[dict[str, Any]] = field(default_factory=list)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    hparams: dict[str, Any] = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    checkpoints: list[Saved] = field(default_factory=list)

    @property
    def end(self) -> dict[str, Any]:
        """The end of its last fit; empty if it goes on, was killed, or nobody recorded it."""
        last = max(self.lines.get("start", []), key=_time, default={})
        ends = [line for line in self.lines.get("end", []) if _time(line) >= _time(last)]
        return ends[-1] if ends else {}

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each phase, summed over the starts of the run."""
        total: dict[str, float] = {}
        latest: dict[str, float] = {}
        marks = [line for kind in ("start", "times", "end") for line in self.lines.get(kind, [])]
        for line in [*sorted(marks, key=_time), {"kind": "start"}]:
            if line["kind"] == "start":
                for name, seconds in latest.items():
                    total[name] = total.get(name, 0.0) + seconds
                latest = {}
            else:
                latest = {str(name): float(seconds) for name, seconds in line.get("seconds", {}).items()}
        return total

    @property
    def marks(self) -> list[tuple[int, str]]:
        """The steps at which the run was resumed or rolled back, each with a text."""
        found = [(int(line["step"]), "resumed") for line in self.lines.get("start", []) if line.get("resumed")]
        if not self.lines.get("start"):
            steps = [start.get("step") for start in self.starts]
            found = [(step, "resumed") for step in steps if isinstance(step, int) and step]
        for line in self.lines.get("rollback", []):
            found.append((int(line["to"]), f"rolled back from step {line['step']}"))
        return sorted(found)


def read_run(folder: Path, name: str) -> Recorded:
    """Reads a run's folder. Damaged or missing files leave their part empty.

    Raises:
        LeydenError: if the folder does not exist, or holds nothing of a run.
    """
    if not folder.is_dir():
        raise LeydenError(f"there is no folder {folder}. Pass the folder of a run, such as logs/version_0.")
    run = Recorded(folder, name, RunSummary.read(folder))
    run.starts = [record for path in sorted(folder.glob("starts/*/run.json")) if (record := _json(path))]
    for line in _lines(folder / FILE):
        run.lines.setdefault(line["kind"], []).append(line)
    run.hparams = _json(folder / "hparams.json")
    run.checkpoints = list(_checkpoints(folder, run.starts))
    _read_curves(run)
    if not (run.starts or run.lines or run.curves.by_name or run.checkpoints):
        raise LeydenError(
            f"{folder} holds no run: no metrics.csv, no event files of TensorBoard, no {FILE}, no checkpoints. Pass "
            "the folder of a run, such as logs/version_0."
        )
    return run


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a record that have a kind, a time and what the kind needs."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for text in file:
            # A run that was killed leaves its last line incomplete.
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and _is_whole(line):
                    yield line


NUMBERS = ("time", "step", "epoch", "to", "samples", "memory")
NEEDED = {
    "start": {"step"},
    "row": {"step"},
    "rollback": {"step", "to"},
    "image": {"key", "step", "file", "captions"},
    "table": {"key", "step", "rows"},
    "end": {"status"},
}
"""What a line of each kind must have, beside its kind and time."""


def _is_whole(line: Mapping[str, Any]) -> bool:
    kinds = {"rows": list, "captions": list, "key": str, "values": dict, "seconds": dict, "kind": str}
    if not all(isinstance(line[name], kind) for name, kind in kinds.items() if name in line):
        return False
    numbers = [value for name, value in line.items() if name in NUMBERS and not isinstance(value, list)]
    numbers += line.get("seconds", {}).values()
    are_finite = all(isinstance(value, int | float) and abs(value) < MAX_STEP for value in numbers)
    return are_finite and {"kind", "time", *NEEDED.get(line.get("kind", ""), ())} <= line.keys()


def _time(line: Mapping[str, Any]) -> float:
    return float(line.get("time", -math.inf))


def _read_curves(run: Recorded) -> None:
    """Reads the curves, pictures and tables. Numbers come from the first source that has a metric: CSV is the quickest.

    The times of steps come from the record, which knows when the run stood still, or else from the event files.
    """
    curves, folder = run.curves, run.folder
    rows = sorted(run.lines.pop("row", []) + run.lines.get("start", []), key=_time)
    passed, before = 0.0, math.nan
    for line in rows:
        if line["kind"] == "row":
            passed += max(0.0, _time(line) - before)
            curves.add_time(line["step"], passed)
            if "epoch" in line:
                curves.add("epoch", line["step"], float(line["epoch"]))
            for name in ("samples", "memory"):
                if line.get(name):
                    run.lines.setdefault(name, []).append({"step": line["step"], "seconds": passed, name: line[name]})
        before = _time(line)
    if (folder / "metrics.csv").is_file():
        read_csv(folder / "metrics.csv", curves)
    known = frozenset(curves.by_name)
    has_times = bool(curves.times.x)
    own = Curves() if has_times else curves
    _take_media(run, read_events(_event_files(folder), own, known))
    if has_times:
        curves.by_name |= own.by_name
        curves.epochs = curves.epochs if curves.epochs.x else own.epochs
    if not curves.by_name:
        for line in rows:
            for name, value in line.get("values", {}).items() if line["kind"] == "row" else ():
                with suppress(TypeError, ValueError):
                    curves.add(str(name), line["step"], float(value))
    curves.by_name = {name: curve for name, curve in sorted(curves.by_name.items()) if name != "hp_metric"}


def _event_files(folder: Path) -> list[Path]:
    """Returns the event files of a run, the oldest first: those in its folder, or else in the folders below it."""
    pattern = "events.out.tfevents.*"
    found = list(folder.glob(pattern)) or list(folder.glob(f"*/{pattern}"))
    return sorted((path for path in found if path.is_file()), key=lambda path: path.name)


def _take_media(run: Recorded, events: Iterator[tuple[str, int, Any]]) -> None:
    """Keeps the last picture and the last text of each name, from event files and the record."""
    pictures: dict[str, Picture] = {}
    tables: dict[str, Table] = {}
    for tag, step, value in events:
        kind = value.WhichOneof("value")
        if kind == "image":
            pictures[tag] = Picture(tag, step, value.image.encoded_image_string)
        elif kind == "tensor" and value.metadata.plugin_data.plugin_name == "text":
            texts = [part.decode("utf-8", "replace") for part in value.tensor.string_val]
            name = tag.removesuffix("/text_summary")
            tables[name] = _parsed(name, step, "\n".join(texts))
    for line in run.lines.pop("image", []):
        path = run.folder / IMAGES / Path(str(line["file"])).name
        data = path.read_bytes() if path.is_file() else b""
        pictures[line["key"]] = Picture(str(line["key"]), int(line["step"]), data, list(line.get("captions", [])))
    for line in run.lines.pop("table", []):
        rows, columns = line["rows"], line.get("columns") or []
        left_out = max(len(rows) - MAX_ROWS, 0)
        tables[line["key"]] = Table(str(line["key"]), int(line["step"]), columns, rows[:MAX_ROWS], left_out)
    run.tables = list(tables.values())[-MAX_TABLES:]
    run.pictures = list(pictures.values())[-MAX_PICTURES:]
    room = MAX_PICTURES_BYTES
    for picture in reversed(run.pictures):
        if len(picture.data) > min(MAX_PICTURE, room):
            picture.data = b""
        room -= len(picture.data)


def _parsed(name: str, step: int, text: str) -> Table:
    """Returns a text; its lines as rows and columns if it is a table in Markdown, as TensorBoardLogger writes one."""
    lines = text.strip().splitlines()
    is_table = len(lines) > 1 and all(line.startswith("|") for line in lines) and set(lines[1]) <= set("|- :")
    if not is_table:
        return Table(name, step, [], [[text[:20_000]]])
    cells = [_cells(line) for line in lines]
    return Table(name, step, cells[0], cells[2:][:MAX_ROWS], max(len(cells) - 2 - MAX_ROWS, 0))


def _cells(line: str) -> list[str]:
    bare = line.strip().strip("|").replace("\\|", "\0")
    return [cell.strip().replace("\0", "|").replace("<br>", "\n") for cell in bare.split("|")]


def _checkpoints(folder: Path, starts: Sequence[Mapping[str, Any]]) -> Iterator[Saved]:
    found = ordered(folder / CHECKPOINTS, 1)
    scores: dict[str, dict[str, float]] = {}
    for path, _ in found:
        for monitor, ranked in _rankings(_json(path / "callbacks.json")):
            for name, score in ranked.items():
                scores.setdefault(name, {})[monitor] = score
    arguments = starts[-1].get("arguments") if starts else None
    resumes_itself = isinstance(arguments, dict) and arguments.get("resume") == "auto"
    newest = next((path for path, manifest in reversed(found) if not isinstance(manifest, CheckpointError)), None)
    for path, manifest in found:
        if isinstance(manifest, CheckpointError):
            yield Saved(path, 0, 0, {}, 0, f"damaged: {manifest}")
            continue
        step, epoch = manifest.progress.get("global_step", 0), manifest.progress.get("epoch", 0)
        size = sum(entry.size for entry in manifest.files.values())
        command = _command(path, resumes_itself and path == newest)
        yield Saved(path, step, epoch, scores.get(path.name, {}), size, command)


def _rankings(callbacks: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the monitor and the ranked checkpoints of each ModelCheckpoint, from the state that a checkpoint holds."""
    tree = callbacks.get("tree")
    for state in tree.values() if isinstance(tree, dict) else ():
        ranked = state.get("best_k_models") if isinstance(state, dict) else None
        monitor = state.get("monitor") if isinstance(ranked, dict) else None
        if isinstance(ranked, dict) and isinstance(monitor, str):
            numbers = {str(Path(name).name): score for name, score in ranked.items() if isinstance(score, int | float)}
            yield monitor, {name: float(score) for name, score in numbers.items()}


def _command(path: Path, is_next: bool) -> str:
    """Returns how to continue from a checkpoint: a command for a terminal, or what to pass to fit.

    Args:
        path: the checkpoint.
        is_next: True if the run's own command continues from it, as with `Trainer(resume="auto")`.
    """
    saved = _json(path / "command.json")
    words, folder = saved.get("words"), saved.get("folder")
    argument = f'trainer.fit(module, ckpt_path="{path.resolve()}")'
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or not isinstance(folder, str):
        return argument
    is_cli = any(Path(word).name == "leyden" for word in words[:3]) and "fit" in words[:5]
    if is_cli and "--ckpt_path" not in words:
        words = [*words, "--ckpt_path", str(path.resolve())]
        is_next = True
    command = f"cd {shlex.quote(folder)} && {shlex.join(words)}"
    return command if is_next else f"{command}   # with {argument}"
