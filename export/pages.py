"""Pages of one file each, which a browser opens without a network: all have one look, light or dark, wide or narrow."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "page"


def text_of(name: str) -> str:
    """A file of ``page/``."""
    return (PARTS / name).read_text("utf-8")


def whole_page(title: str, body: str, style: str = "") -> str:
    """A page with the look of all pages.

    Args:
        title: text.
        body: markup; whatever comes from a model or from data is escaped in it already.
        style: CSS of this page alone.
    """
    whole = text_of("frame.html").replace("/* style */", text_of("look.css") + style).replace("<!-- body -->", body)
    return whole.replace("<!-- title -->", html.escape(f"{title} · gradgraph"))


def as_script_data(data: Mapping[str, Any]) -> str:
    """JSON that stands in a ``script`` element: no text in it ends the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
