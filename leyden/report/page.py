"""The page of a report: HTML with its style, script and data inside. All that was logged enters it as text."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

from leyden.checkpoint.status import ENDINGS
from leyden.core.text import size_of
from leyden.report.curves import MAX_BINS, MAX_STEP, Bins, Curve
from leyden.report.drawings import COLORS, layout_drawing, static_chart
from leyden.report.recorded import Recorded

ASSETS = ("uPlot.min.css", "report.css", "uPlot.iife.min.js", "report.js")
"""The files of `assets` that every page holds. uPlot 1.6.32 has the MIT licence, in `uPlot.LICENSE`."""
ALL_BINS, MIN_BINS = 24_000, 100
"""Bins of all curves of a page, and of one curve at least."""
MAX_TEXT = 4_000
"""Characters of a text that a page shows."""
MAX_PIECES = 10
"""Undone pieces of a curve that are drawn, the last ones."""
MIN_STRETCH = 0.25
"""Seconds of the shortest stretch whose samples per second are shown."""
DASHES = (None, [7, 4], [2, 3], [10, 3, 2, 3])
PHASES = ("training", "waiting for data", "validation", "saving", "sanity check", "setup")
TOOLS = """<div class="bar"><label>over <select id="axis"><option value="step">steps</option>
<option value="epoch">epochs</option><option value="time">time</option></select></label>
<label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0"></label>
<label><input type="checkbox" id="log"> log scale</label>
<span class="soft">drag to zoom, double click to zoom out, click a name to hide its curve</span></div>"""
NOTHING = "<p class='soft'>Nothing was logged as a number.</p>"


@dataclass
class Drawn:
    """A curve in a chart: its run's number, its label and color."""

    run: int
    label: str
    color: str
    dash: list[int] | None
    curve: Curve


def page_of(runs: Sequence[Recorded]) -> str:
    """Returns the HTML of a report on these runs."""
    curves, system = _charts(runs), _system_charts(runs)
    total = sum(len(drawn) for _, drawn in [*curves, *system])
    bins = min(MAX_BINS, max(MIN_BINS, ALL_BINS // max(total, 1) // 2 * 2))
    named = len(runs) > 1

    def drawn(draw: Callable[..., str], *args: Any) -> str:
        try:
            return draw(*args)
        except Exception as error:
            # A record that is damaged or foreign must not take the other parts with it.
            return f"<p class='soft'>A part of the report could not be drawn: {escape(type(error).__name__)}.</p>"

    sections = [
        drawn(_header, runs),
        drawn(_errors, runs),
        f"<h2>Curves</h2>{TOOLS if curves else NOTHING}{drawn(_cards, curves, 0, bins)}",
        *(drawn(_times, run, named) for run in runs),
        f"<h2>Throughput and memory</h2>{drawn(_cards, system, len(curves), bins)}" if system else "",
        *(drawn(section, run, named) for section in (_ranks, _media, _checkpoints, _start, _warnings) for run in runs),
    ]
    title = escape(", ".join(run.name for run in runs))
    assets = resources.files("leyden.report").joinpath("assets")
    read = {name: assets.joinpath(name).read_text(encoding="utf-8") for name in ASSETS}
    data = _data(runs, [*curves, *system], bins)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{title}</title>
<style>{read["uPlot.min.css"]}{read["report.css"]}</style>
</head>
<body>
{"".join(sections)}
<script type="application/json" id="data">{data}</script>
<script>{read["uPlot.iife.min.js"]}</script>
<script>{read["report.js"]}</script>
</body>
</html>
"""


# the head -------------------------------------------------------------------------------------------------------------
def _header(runs: Sequence[Recorded]) -> str:
    if len(runs) == 1:
        run = runs[0]
        return (
            f"<header><h1>{escape(run.name)}</h1><p class='soft'>{escape(str(run.folder.resolve()))}</p>{_facts(run)}"
            "</header>"
        )
    rows = [
        [f"<span class='key' style='background:{_color(index)}'></span>{escape(run.name)}", *_brief(run)]
        for index, run in enumerate(runs)
    ]
    return f"<header><h1>{len(runs)} runs</h1></header>{_table(['run', 'state', 'steps', 'time', 'best'], rows)}"


def _facts(run: Recorded) -> str:
    state, steps, took, best = _brief(run)
    start = run.starts[-1] if run.starts else {}
    begun = run.starts[0].get("started") if run.starts else None
    facts = [("state", state), ("steps", steps), ("time", took), ("best", best)]
    facts.append(("started", escape(_date(begun))))
    facts.append(("devices", escape(f"{start.get('world_size', '?')} × {start.get('device', '?')}") if start else ""))
    facts += [
        (name, escape(str(line.get(name, ""))))
        for line in run.lines.get("start", [])[-1:]
        for name in ("strategy", "precision")
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts if value)
    return f"<dl class='facts'>{shown}</dl>"


def _brief(run: Recorded) -> list[str]:
    """Returns the state, steps, time and best score of a run, as HTML."""
    summary, reached = run.summary, run.curves.times.x[-1:]
    step = max([summary.step or 0, int(run.end.get("step", 0)), *map(int, reached)])
    best = "" if summary.best is None else f"{escape(str(summary.metric or ''))} {_number(summary.best)}"
    seconds = sum(run.seconds.values()) or (run.curves.times.low[-1] if reached else 0.0)
    return [_state(run), f"{step:,}", _duration(seconds) if seconds else "", best]


def _state(run: Recorded) -> str:
    """Returns the state of a run, as HTML. While its own process draws it, the end is only in the record."""
    end = run.end
    state = ENDINGS.get(str(end.get("status")), run.summary.state)
    good = {"finished": "good", "running": "good", "unknown": "soft"}.get(state, "bad")
    return f"<span class='{good}'>{state}</span> <span class='soft'>{escape(str(end.get('reason', '')))}</span>"


def _errors(runs: Sequence[Recorded]) -> str:
    found = [(run, run.end) for run in runs if run.end.get("error")]
    parts = (
        f"<p class='bad'>{escape(run.name)}: {escape(str(end.get('what', '')))}</p>"
        f"<details><summary>the traceback</summary><pre>{escape(str(end['error']))}</pre></details>"
        for run, end in found
    )
    return f"<h2>Why it ended</h2>{''.join(parts)}" if found else ""


# charts ---------------------------------------------------------------------------------------------------------------
def _charts(runs: Sequence[Recorded]) -> list[tuple[str, list[Drawn]]]:
    """Returns the charts, each with its curves: `train_loss` and `val_loss` share one, and so do the runs."""
    charts: dict[str, list[tuple[int, Curve]]] = {}
    for index, run in enumerate(runs):
        for name, curve in run.curves.by_name.items():
            charts.setdefault(_subject(name), []).append((index, curve))
    order = sorted(charts, key=lambda name: ("loss" not in name, name.startswith(("lr-", "lr_")), name))
    return [(name, _drawn(runs, charts[name])) for name in order]


def _subject(name: str) -> str:
    """Returns what a metric measures, without the stage that it was measured in.

    Example:
        >>> [_subject(name) for name in ("train_loss", "val/loss", "loss_step", "val_acc/dataloader_idx_1", "lr-SGD")]
        ['loss', 'loss', 'loss', 'acc', 'lr-SGD']
    """
    bare = re.sub(r"/dataloader_idx_\d+$", "", name)
    bare = re.sub(r"_(step|epoch)$", "", bare)
    return re.sub(r"^(train|training|val|valid|validation|test)[_/-](?=.)", "", bare)


def _drawn(runs: Sequence[Recorded], curves: Iterable[tuple[int, Curve]]) -> list[Drawn]:
    found: list[Drawn] = []
    counts: dict[int, int] = {}
    for index, curve in curves:
        number = counts[index] = counts.get(index, -1) + 1
        if len(runs) == 1:
            found.append(Drawn(index, curve.name, _color(number), None, curve))
        else:
            label = f"{curve.name} · {runs[index].name}"
            found.append(Drawn(index, label, _color(index), DASHES[number % len(DASHES)], curve))
    return found


def _system_charts(runs: Sequence[Recorded]) -> list[tuple[str, list[Drawn]]]:
    charts = []
    for title, kind, points in (
        ("samples per second", "samples", _rates),
        ("peak memory of rank 0 (GB)", "memory", _gigabytes),
    ):
        curves = []
        for index, run in enumerate(runs):
            curve = Curve(title)
            for step, value in points(run.lines.get(kind, [])):
                curve.add(step, value)
            curve.undone.clear()
            if curve.count:
                curves.append((index, curve))
        if curves:
            charts.append((title, _drawn(runs, curves)))
    return charts


def _rates(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Yields the samples per second, over stretches that the clock measures well."""
    if not lines:
        return
    before = lines[0]
    stretch = max(MIN_STRETCH, (lines[-1]["seconds"] - before["seconds"]) / 200)
    for line in lines:
        seconds, samples = line["seconds"] - before["seconds"], line["samples"] - before["samples"]
        if line["step"] < before["step"]:
            before = line
        elif seconds >= stretch and samples > 0:
            yield line["step"], samples / seconds
            before = line


def _gigabytes(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    return ((line["step"], line["memory"] / 1e9) for line in lines)


def _cards(charts: Sequence[tuple[str, list[Drawn]]], first: int, bins: int) -> str:
    """Returns the cards of charts, the first of which has this number in the data."""
    cards = []
    for index, (name, drawn) in enumerate(charts, first):
        static = static_chart([(one.color, one.curve) for one in drawn], bins // 6)
        cards.append(
            f"<div class='card'><h3>{escape(name)}</h3><div class='chart' data-chart='{index}'></div>"
            f"<div class='static'>{static}{_legend(drawn)}</div>{_values(drawn)}</div>"
        )
    return f"<div class='cards'>{''.join(cards)}</div>"


def _legend(drawn: Sequence[Drawn]) -> str:
    return "".join(
        f"<span class='key' style='background:{one.color}'></span><small>{escape(one.label)}</small>" for one in drawn
    )


def _values(drawn: Sequence[Drawn]) -> str:
    rows = []
    for one in drawn:
        curve = one.curve
        odd = "" if curve.odd is None else f"{curve.odd[0]}, first at step {curve.odd[1]:g}"
        extremes = [
            f"{_number(value)} <span class='soft'>at {x:g}</span>" if math.isfinite(value) else ""
            for value, x in (curve.least, curve.most)
        ]
        rows.append([escape(one.label), f"{curve.count:,}", _number(curve.first), _number(curve.last), *extremes, odd])
    names = ["metric", "values", "first", "last", "smallest", "largest", "nan or infinite"]
    return f"<details><summary>values</summary>{_table(names, rows)}</details>"


def _data(runs: Sequence[Recorded], charts: Sequence[tuple[str, list[Drawn]]], limit: int) -> str:
    """Returns the curves as JSON that is safe inside a script element. Curves with the same xs share them."""
    shared: dict[tuple[float, ...], int] = {}

    def series(one: Drawn) -> dict[str, Any]:
        bins = one.curve.bins.merged(limit)
        found: dict[str, Any] = {"run": one.run, "label": one.label, "color": one.color, "dash": one.dash}
        found["x"] = shared.setdefault(tuple(bins.x), len(shared))
        found["low"] = _rounded(bins.low)
        if bins.width > 1:
            found |= {"high": _rounded(bins.high), "mean": _rounded(bins.mean)}
        pieces = []
        for piece in one.curve.undone[-MAX_PIECES:]:
            bins = Bins(max(limit // MAX_PIECES // 2 * 2, 2))
            for x, y in piece:
                bins.add(x, y)
            pieces.append([_rounded(bins.x), _rounded(bins.mean)])
        return {**found, "undone": pieces} if pieces else found

    drawn = [{"series": [series(one) for one in chart]} for _, chart in charts]
    about = [{"marks": run.marks, "time": _axis(run.curves.times), "epoch": _axis(run.curves.epochs)} for run in runs]
    content = {"runs": about, "charts": drawn, "xs": [_rounded(xs) for xs in shared]}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _axis(bins: Bins) -> list[list[float]] | None:
    return [_rounded(bins.x), _rounded(bins.low)] if bins.x else None


def _rounded(values: Iterable[float]) -> list[float]:
    """Returns numbers with the digits that a chart shows. Steps stay whole."""
    return [int(value) if value.is_integer() and abs(value) < MAX_STEP else float(f"{value:.5g}") for value in values]


# time, memory, ranks --------------------------------------------------------------------------------------------------
def _times(run: Recorded, named: bool) -> str:
    seconds, total = run.seconds, sum(run.seconds.values())
    if not total:
        return ""
    shown = [(name, seconds[name]) for name in PHASES if seconds.get(name, 0.0) > 0]
    bar = "".join(
        f"<span style='flex:{part / total:.5f};background:{_color(index)}' title='{escape(name)}'></span>"
        for index, (name, part) in enumerate(shown)
    )
    rows = [
        [f"<span class='key' style='background:{_color(index)}'></span>{name}", _duration(part), f"{part / total:.1%}"]
        for index, (name, part) in enumerate(shown)
    ]
    return f"{_title('Time', run, named)}<div class='phases'>{bar}</div>{_table(['phase', 'time', 'share'], rows)}"


def _ranks(run: Recorded, named: bool) -> str:
    starts = run.lines.get("start", [])
    if not starts:
        return ""
    places, mesh = starts[-1].get("places") or [], starts[-1].get("mesh") or {}
    memory = run.end.get("memory") or []
    rows = [
        [str(rank), escape(str(host)), escape(str(device)), size_of(memory[rank]) if rank < len(memory) else ""]
        for rank, (host, device) in enumerate(places)
    ]
    picture = layout_drawing(mesh, [str(host) for host, _ in places]) if len(places) > 1 else ""
    table = _table(["rank", "host", "device", "peak memory"], rows)
    table = f"<details><summary>{len(rows)} ranks</summary>{table}</details>" if len(rows) > 8 else table
    return f"{_title('Ranks', run, named)}<div class='layout'>{picture}</div>{table}"


# what else was logged -------------------------------------------------------------------------------------------------
def _media(run: Recorded, named: bool) -> str:
    parts = []
    for picture in run.pictures:
        where = f"<h3>{escape(picture.name)} <span class='soft'>step {picture.step}</span></h3>"
        if picture.data:
            kind = "png" if picture.data.startswith(b"\x89PNG") else "jpeg"
            source = f"data:image/{kind};base64,{base64.b64encode(picture.data).decode()}"
            body = f"<img alt='{escape(picture.name)}' src='{source}'>"
        else:
            body = "<p class='soft'>Too large for this page, or its file is gone.</p>"
        captions = "".join(f"<small class='soft'>{escape(_cut(str(caption)))} </small>" for caption in picture.captions)
        parts.append(f"<div class='card'>{where}{body}{captions}</div>")
    shown = f"<div class='cards'>{''.join(parts)}</div>" if parts else ""
    for table in run.tables:
        rows = [[escape(_cut(str(cell))) for cell in row] for row in table.rows]
        more = f"<p class='soft'>{table.left_out} more rows</p>" if table.left_out else ""
        heads = [escape(str(name)) for name in table.columns]
        shown += f"<h3>{escape(table.name)} <span class='soft'>step {table.step}</span></h3>"
        shown += f"<div class='text'>{_table(heads, rows)}</div>{more}"
    return f"{_title('Samples', run, named)}{shown}" if shown else ""


def _checkpoints(run: Recorded, named: bool) -> str:
    if not run.checkpoints:
        return ""
    monitors = sorted({name for saved in run.checkpoints for name in saved.scores})
    rows = []
    for saved in reversed(run.checkpoints):
        scores = [_number(saved.scores[name]) if name in saved.scores else "" for name in monitors]
        path = escape(str(saved.path.relative_to(run.folder)))
        rows.append([path, f"{saved.step:,}", escape(str(saved.epoch)), *scores, size_of(saved.size)])
        rows.append([f"<pre>{escape(saved.command)}</pre>"])
    heads = ["checkpoint", "step", "epoch", *map(escape, monitors), "size"]
    return f"{_title('Checkpoints', run, named)}{_table(heads, rows)}"


def _start(run: Recorded, named: bool) -> str:
    if not run.starts and not run.hparams:
        return ""
    start = run.starts[-1] if run.starts else {}
    parts = []
    if start:
        git = start.get("git") or {}
        code = (
            f"{git.get('commit', '')} {git.get('branch') or ''}{', with uncommitted changes' * bool(git.get('dirty'))}"
        )
        facts = [("command", start.get("command")), ("folder", start.get("folder")), ("host", start.get("host"))]
        facts += [("device", start.get("device_name")), ("system", start.get("system")), ("code", code.strip())]
        rows = [[name, f"<code>{escape(str(value))}</code>"] for name, value in facts if value]
        parts.append(_table([], rows))
        arguments = dict(start.get("arguments") or {})
        changed = {name: arguments[name] for name in start.get("changed", ()) if name in arguments}
        parts.append(f"<h3>Arguments that differ from the defaults</h3>{_values_of(changed)}" if changed else "")
        parts.append(f"<details><summary>all arguments</summary>{_values_of(arguments)}</details>")
    parts.append(f"<h3>Hyperparameters</h3>{_values_of(run.hparams)}" if run.hparams else "")
    versions = [[escape(name), escape(str(version))] for name, version in (start.get("versions") or {}).items()]
    parts.append(f"<details><summary>versions</summary>{_table([], versions)}</details>" if versions else "")
    others = "".join(
        f"<li>{escape(_date(one.get('started')))} at step {escape(str(one.get('step')))}"
        f"{' from ' + escape(str(one['ckpt_path'])) if one.get('ckpt_path') else ''}</li>"
        for one in run.starts
    )
    parts.append(f"<h3>Starts</h3><ul>{others}</ul>" if len(run.starts) > 1 else "")
    return f"{_title('How it was started', run, named)}{''.join(parts)}"


def _warnings(run: Recorded, named: bool) -> str:
    lines = run.lines.get("warning", [])
    items = (
        f"<li>{escape(_cut(str(line.get('text'))))} <span class='soft'>{escape(str(line.get('category')))}, "
        f"{escape(str(line.get('file')))}:{escape(str(line.get('line')))}</span></li>"
        for line in lines
    )
    return f"{_title('Warnings', run, named)}<ul>{''.join(items)}</ul>" if lines else ""


# parts ----------------------------------------------------------------------------------------------------------------
def _title(text: str, run: Recorded, named: bool) -> str:
    return f"<h2>{text}{f' <span class=soft>{escape(run.name)}</span>' if named else ''}</h2>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of HTML cells. A row of a single cell in a table of several columns spans them all."""
    width = max([len(heads), *map(len, rows)])
    top = "".join(f"<th scope='col'>{head}</th>" for head in heads)
    head = f"<thead><tr>{top}</tr></thead>" if heads else ""
    body = ""
    for row in rows:
        span = f" colspan='{width}'" if len(row) == 1 < width else ""
        body += f"<tr>{''.join(f'<td{span}>{cell}</td>' for cell in row)}</tr>"
    return f"<div class='wide'><table>{head}<tbody>{body}</tbody></table></div>"


def _values_of(names: Mapping[str, Any]) -> str:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in names.items()
    }
    return _table([], [[escape(name), f"<code>{escape(_cut(text))}</code>"] for name, text in texts.items()])


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text):,} characters)"


def _number(value: float) -> str:
    return f"{value:.5g}"


def _duration(seconds: float) -> str:
    """Returns a duration in two units at most.

    Example:
        >>> [_duration(seconds) for seconds in (0.25, 59.96, 61, 7322, 90061)]
        ['0.2 s', '60.0 s', '1 min 1 s', '2 h 2 min', '1 d 1 h']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, large, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part} {small}"
    return f"{whole} s"


def _date(text: Any) -> str:
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return ""
