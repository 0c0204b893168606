"""Self-contained HTML pages with a common style, which adapts to dark mode and to the width of the window."""

from __future__ import annotations

import html
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradgraph.errors import shown

PARTS = Path(__file__).parent / "page"


def text_of(name: str) -> str:
    """Return the text of a file in ``page/``."""
    return (PARTS / name).read_text("utf-8")


def whole_page(title: str, body: str, style: str = "") -> str:
    """Return the HTML of a page in the common style.

    Args:
        title: the title, as plain text.
        body: the markup of the body, in which text from models and data is already escaped.
        style: further CSS.
    """
    whole = text_of("frame.html").replace("/* style */", text_of("look.css") + style).replace("<!-- body -->", body)
    return whole.replace("<!-- title -->", html.escape(f"{title} · gradgraph"))


def escaped(value: object) -> str:
    """Return text from a model or from data, for HTML."""
    return html.escape(shown(str(value)))


def heading(title: str, facts: Mapping[str, object]) -> str:
    """Return the title of a page, with facts by name below it."""
    rows = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in facts.items())
    return f'<h1>{escaped(title)}</h1><dl class="facts">{rows}</dl>'


def table(head: Sequence[object], rows: Iterable[Sequence[object]], texts: Collection[int] = (0,)) -> str:
    """Return a table that scrolls if it is too wide; columns are numbers, except those with an index in ``texts``."""

    def cells(row: Sequence[object], tag: str, more: str = "") -> str:
        kinds = ["" if i in texts else ' class="number"' for i in range(len(row))]
        return "".join(f"<{tag}{kind}{more}>{escaped(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    names = cells(head, "th", ' scope="col"')
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def as_script_data(data: Mapping[str, Any]) -> str:
    """Return ``data`` as JSON for a ``script`` element, with "<" escaped so that no text in it can end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
