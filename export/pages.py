"""Self-contained HTML pages with a common style, which adapts to dark mode and to the width of the window."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def as_script_data(data: Mapping[str, Any]) -> str:
    """Return ``data`` as JSON for a ``script`` element, with "<" escaped so that no text in it can end the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
