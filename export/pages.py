"""Self-contained HTML pages with a common style, light or dark, wide or narrow."""

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
    """Return a page in the common style.

    Args:
        title: text.
        body: markup, with text from models and data already escaped.
        style: CSS of this page only.
    """
    whole = text_of("frame.html").replace("/* style */", text_of("look.css") + style).replace("<!-- body -->", body)
    return whole.replace("<!-- title -->", html.escape(f"{title} · gradgraph"))


def as_script_data(data: Mapping[str, Any]) -> str:
    """Return JSON for a ``script`` element, escaped so that no text ends the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
