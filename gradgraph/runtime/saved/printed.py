"""Tables as text and as HTML for notebooks, and durations as text."""

from __future__ import annotations

import base64
import html
from collections.abc import Collection, Iterable, Sequence


class Markup(str):
    """A table cell whose text is HTML, so :func:`html_table` does not escape it."""


def image_markup(png: bytes) -> Markup:
    """Return a PNG as an HTML image; "" for an empty PNG."""
    content = base64.b64encode(png).decode()
    return Markup(f'<img src="data:image/png;base64,{content}" alt="">' if content else "")


def text_table(rows: Sequence[Sequence[str]], texts: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a text table; columns with an index in ``texts`` are left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if i in texts else str.rjust for i in range(len(widths))]
    return ["  ".join(map(lambda side, cell, w: side(cell, w), sides, row, widths)).rstrip() for row in rows]


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]], bold: int | None = None) -> str:
    """Return an HTML table, with the row of index ``bold`` in bold."""
    lines = []
    for i, row in enumerate(rows):
        style = ' style="font-weight: bold"' if i == bold else ""
        cells = (cell if isinstance(cell, Markup) else html.escape(cell) for cell in row)
        lines.append(f"<tr{style}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def clock(seconds: float) -> str:
    """Format seconds: ``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
