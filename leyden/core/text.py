"""Formats text for people: aligned columns, lists, sizes in bytes, and text from files."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], gap: str = "  ", right: Collection[int] = ()) -> list[str]:
    """Returns a line for each row, with every column as wide as its longest cell.

    Args:
        rows: the cells. Each row has the same number of cells.
        gap: the text between two columns.
        right: the indices of the right-aligned columns.

    Example:
        >>> aligned([("calls", "total s"), ("9", "0.25")], right=[1])
        ['calls  total s', '9         0.25']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def html_table(rows: Sequence[Sequence[object]]) -> str:
    """Returns an HTML table, with every cell escaped. The first row is the header.

    Example:
        >>> html_table([("name", "value"), ("<b>", 1)])
        '<table><tr><th>name</th><th>value</th></tr><tr><td>&lt;b&gt;</td><td>1</td></tr></table>'
    """

    def line(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{''.join(line(row, 'td' if number else 'th') for number, row in enumerate(rows))}</table>"


def listed(values: Sequence[object], most: int = 16) -> str:
    """Lists values in one line; at most the first `most`.

    Example:
        >>> listed([4, 0]), listed(range(5), most=3)
        ('4, 0', '0, 1, 2 and 2 more')
    """
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def size_of(count: float) -> str:
    """Formats a number of bytes with a suitable unit.

    Example:
        >>> size_of(1536), size_of(3)
        ('1.5 KiB', '3 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def printable(text: str) -> str:
    r"""Escapes control characters, which could make a terminal hide parts of a text from a file.

    Example:
        >>> printable("rm -r x\x1b[2K")
        'rm -r x\\x1b[2K'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
