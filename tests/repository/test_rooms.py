"""The folder tree is the architecture: rooms, a drawing made from their imports, and where modules may lie."""

from __future__ import annotations

import ast

import pytest

from tests.pages import rooms_page
from tests.pages.rooms_page import ROOT

# doors that users open, and what all rooms stand on; anything else belongs into a room
AT_THE_ROOT = {"__init__", "__main__", "arguments", "errors", "extend", "losses", "metrics", "transforms"}
ROOMS = [room for floor in rooms_page.floors() for room in floor]


@pytest.mark.sweep(0)
def test_the_drawing_is_fresh() -> None:
    assert rooms_page.DRAWING.read_text(encoding="utf-8") == rooms_page.drawing(), "run: make pages"


def test_every_arrow_leads_down() -> None:
    level = {room: i for i, floor in enumerate(rooms_page.floors()) for room in floor}
    arrows = rooms_page.arrows()
    assert len(arrows) > 20 and sum(map(len, arrows.values())) > 100
    assert [(a, b) for a, below in arrows.items() for b in below if level[a] >= level[b]] == []


def test_a_module_with_no_room_is_in_the_wrong_place() -> None:
    assert {p.stem for p in (ROOT / "gradgraph").glob("*.py")} == AT_THE_ROOT
    folders = {p.parent.name for p in (ROOT / "gradgraph").glob("*/__init__.py")}
    assert {"frontend", "export", "cli"} | folders == set(ROOMS) - AT_THE_ROOT


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in AT_THE_ROOT])
def test_a_room_says_what_it_knows(room: str) -> None:
    """In five lines: who opens it for the first time reads no more."""
    source = rooms_page.files_of(room)[0].read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source))
    assert text is not None and len(text.splitlines()) <= 5
