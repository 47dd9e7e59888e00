"""Drawings in SVG: a chart that needs no script, for print and mail, and the layout of a run's ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product

from leyden.report.curves import Curve

COLORS = ("#3b76d6", "#d97a1f", "#2a9568", "#b0469b", "#c8463c", "#7767e8", "#7d8a1f", "#1899a8")
WIDTH, HEIGHT = 560, 200
LEFT, BOTTOM, TOP, RIGHT = 58, 20, 8, 8
MAX_RANKS = 256
"""Ranks of a layout that is drawn."""


def static_chart(curves: Sequence[tuple[str, Curve]], points: int) -> str:
    """Returns a chart of curves, each with its color and at most this many points, over steps."""
    bins = [curve.bins for _, curve in curves if curve.bins.x]
    if not bins:
        return "<p class='soft'>No finite value.</p>"
    left, right = min(one.x[0] for one in bins), max(one.x[-1] for one in bins)
    low, high = min(min(one.low) for one in bins), max(max(one.high) for one in bins)
    if not math.isfinite(high - low):
        return "<p class='soft'>The values are too far apart to be drawn.</p>"
    if low == high:
        low, high = low - abs(low or 1) * 0.1, high + abs(high or 1) * 0.1
    across = (WIDTH - LEFT - RIGHT) / ((right - left) or 1)
    up = (HEIGHT - TOP - BOTTOM) / (high - low)

    def point(x: float, y: float) -> str:
        return f"{LEFT + (x - left) * across:.1f},{HEIGHT - BOTTOM - (y - low) * up:.1f}"

    parts = []
    for y in _ticks(low, high, 4):
        height = f"{HEIGHT - BOTTOM - (y - low) * up:.1f}"
        parts.append(f"<path d='M{LEFT} {height}H{WIDTH - RIGHT}' stroke='#8884' fill='none'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{height}' dy='4' text-anchor='end'>{y:.4g}</text>")
    for tick in _ticks(left, right, 6):
        place = f"{LEFT + (tick - left) * across:.1f}"
        parts.append(f"<text x='{place}' y='{HEIGHT - 4}' text-anchor='middle'>{tick:g}</text>")
    for color, curve in curves:
        one = curve.bins.merged(points)
        if one.low != one.high:
            outline = [*zip(one.x, one.high, strict=True), *zip(one.x[::-1], one.low[::-1], strict=True)]
            corners = " ".join(point(x, y) for x, y in outline)
            parts.append(f"<polygon points='{corners}' fill='{color}' fill-opacity='.25'/>")
        line = " ".join(point(x, y) for x, y in zip(one.x, one.mean, strict=True))
        if len(one.x) == 1:
            right_of, below = line.split(",")
            parts.append(f"<circle cx='{right_of}' cy='{below}' r='3' fill='{color}'/>")
        else:
            parts.append(f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='1.5'/>")
    names = escape(", ".join(curve.name for _, curve in curves))
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{names}'>{''.join(parts)}</svg>"


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers from low to high.

    Example:
        >>> _ticks(0, 470, 6)
        [0.0, 100.0, 200.0, 300.0, 400.0]
    """
    raw = (high - low) / count
    if raw < sys.float_info.min:
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    step = next((size * factor for factor in (1, 2, 5) if size * factor >= raw), size * 10)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def layout_drawing(mesh: Mapping[str, int], hosts: Sequence[str]) -> str:
    """Returns a drawing of the ranks in their mesh: the last dimension runs to the right, the others downwards.

    Args:
        mesh: the sizes of the dimensions by name, from the outermost; rank numbers vary fastest along the last one.
        hosts: the machine of each rank. Those of one machine have one color.
    """
    named = " × ".join(f"{name} {size}" for name, size in mesh.items())
    if math.prod(mesh.values()) != len(hosts) or len(hosts) > MAX_RANKS:
        return f"<p>{len(hosts)} ranks{f': {escape(named)}' if named else ''}</p>"
    *outer, (last, columns) = mesh.items()
    if not outer:
        # One dimension alone needs no row for each rank.
        columns = min(columns, 16)
    rows = [
        ", ".join(f"{name} {at}" for (name, _), at in zip(outer, place, strict=True))
        for place in product(*(range(size) for _, size in outer))
    ]
    indent = 12 + max(map(len, rows)) * 6.5
    colors = {host: COLORS[index % len(COLORS)] for index, host in enumerate(dict.fromkeys(hosts))}
    parts = []
    for rank, host in enumerate(hosts):
        x, y = indent + rank % columns * 52, 20 + rank // columns * 34
        parts.append(
            f"<rect x='{x}' y='{y}' width='46' height='28' rx='5' fill='{colors[host]}' fill-opacity='.22' "
            f"stroke='{colors[host]}'><title>{escape(host)}</title></rect>"
            f"<text x='{x + 23}' y='{y + 18}' text-anchor='middle'>{rank}</text>"
        )
    if outer:
        parts += [f"<text x='0' y='{38 + row * 34}'>{escape(text)}</text>" for row, text in enumerate(rows)]
        parts += [
            f"<text x='{indent + at * 52 + 23}' y='12' text-anchor='middle'>{escape(last)} {at}</text>"
            for at in range(columns)
        ]
    width, height = indent + columns * 52, 24 + math.ceil(len(hosts) / columns) * 34
    keys = "".join(
        f"<span class='key' style='background:{color}'></span><small>{escape(host)}</small>"
        for host, color in colors.items()
    )
    picture = "".join(parts)
    return (
        f"<p>{escape(named)}{keys}</p><svg viewBox='0 0 {width:.0f} {height}' style='max-width:{width:.0f}px' "
        f"role='img' aria-label='{escape(named)}'>{picture}</svg>"
    )
