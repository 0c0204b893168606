"""docs/rooms.svg: the rooms of the package, drawn from its imports.

Floors are the layers of the contract in pyproject.toml; an arrow leads from a room to one that it imports.
Of arrows that others imply (a to c, where a leads to b and b to c) none is drawn.
"""

from __future__ import annotations

import ast
import functools
import html
import re
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWING = ROOT / "docs" / "rooms.svg"
WIDTH, MARGIN, FLOOR, HEIGHT, GAP = 1140, 80, 88, 58, 60  # of the drawing, at its sides, a floor, a box, between boxes

Arrows = dict[str, set[str]]


def floors() -> list[list[str]]:
    """The names of the rooms, floor by floor, as the contract lists them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = re.search(r'name = "rooms import only from rooms below".*?layers = \[(.*?)\]', text, re.DOTALL)
    assert contract is not None
    return [line.replace("gradgraph.", "").split(" | ") for line in re.findall(r'"(.*?)"', contract[1])]


def files_of(room: str) -> list[Path]:
    """The Python files of a room: a folder, or one file."""
    for place in (ROOT / room, ROOT / "gradgraph" / room):
        if place.is_dir() and not place.is_symlink():
            return sorted(place.rglob("*.py"))
    return [ROOT / "gradgraph" / f"{room}.py"]


def imported(source: str, rooms: set[str]) -> set[str]:
    """The rooms that a file imports anything of, within functions as well."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "gradgraph":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradgraph."):
            names.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gradgraph.")}
    return names & rooms


@functools.cache
def arrows() -> Arrows:
    """For each room, the others that it imports."""
    rooms = {room for floor in floors() for room in floor}
    return {
        room: {name for file in files_of(room) for name in imported(file.read_text(encoding="utf-8"), rooms)} - {room}
        for room in rooms
    }


def not_implied(given: Arrows) -> Arrows:
    """The arrows that follow from no others: the transitive reduction of an acyclic graph."""
    reach: Arrows = {}

    def reachable(room: str) -> set[str]:
        if room not in reach:
            reach[room] = given[room].union(*(reachable(below) for below in given[room]))
        return reach[room]

    return {
        room: {b for b in below if not any(b in reachable(other) for other in below - {b})}
        for room, below in given.items()
    }


def knows(room: str, width: float) -> list[str]:
    """The first sentence of a room's docstring, in two lines that fit into a box."""
    text = ast.get_docstring(ast.parse(files_of(room)[0].read_text(encoding="utf-8"))) or ""
    sentence = re.sub(r"\.$", "", " ".join(text.split("\n\n")[0].split()).replace("``", ""))
    return textwrap.wrap(sentence, int(width / 6.4), max_lines=2, placeholder=" …")


Box = tuple[float, float, float]  # its left and upper edge, and its width


def boxes() -> dict[str, Box]:
    """Where each room is drawn."""
    found: dict[str, Box] = {}
    for level, floor in enumerate(floors()):
        width = min(460.0, (WIDTH - 2 * MARGIN - GAP * (len(floor) - 1)) / len(floor))
        left = (WIDTH - width * len(floor) - GAP * (len(floor) - 1)) / 2
        found.update({room: (left + i * (width + GAP), 12 + level * FLOOR, width) for i, room in enumerate(floor)})
    return found


def drawing() -> str:
    """The picture, as SVG; light or dark as the reader's screen is."""
    places = boxes()
    lanes: dict[tuple[str, int], int] = defaultdict(int)
    parts = [
        _arrow(places[room], places[other], lanes)
        for room, below in sorted(not_implied(arrows()).items(), key=lambda pair: (places[pair[0]][1], pair[0]))
        for other in sorted(below)
    ]
    for room, (x, y, width) in places.items():
        is_file = files_of(room)[0].stem == room
        words = "".join(
            f'<text class="small" x="{x + width / 2:.0f}" y="{y + 36 + 14 * i}">{html.escape(line)}</text>'
            for i, line in enumerate(knows(room, width))
        )
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HEIGHT}" rx="7"/>'
            f'<text x="{x + width / 2:.0f}" y="{y + 19}">{room}{".py" if is_file else "/"}</text>{words}'
        )
    height = 12 + FLOOR * (len(floors()) - 1) + HEIGHT + 12
    return _HEAD.format(width=WIDTH, height=height) + "\n".join(parts) + "\n</svg>\n"


def _arrow(start: Box, end: Box, lanes: dict[tuple[str, int], int]) -> str:
    """A curve from the lower edge of a box to the upper edge of another; a long one runs in a lane at the side."""
    (x, y, width), (to_x, to_y, to_width) = start, end
    a, b, top, bottom = x + width / 2, to_x + to_width / 2, y + HEIGHT, to_y - 3
    if to_y - y <= FLOOR:
        return f'<path d="M{a:.0f} {top} C{a:.0f} {top + 16} {b:.0f} {bottom - 16} {b:.0f} {bottom}"/>'
    out = _lane(range(_level(y) + 1, _level(to_y)), -1 if a + b < WIDTH else 1, lanes)
    return (
        f'<path d="M{a:.0f} {top} C{a:.0f} {top + 26} {out:.0f} {top + 4} {out:.0f} {top + 46} '
        f'L{out:.0f} {bottom - 46} C{out:.0f} {bottom - 4} {b:.0f} {bottom - 26} {b:.0f} {bottom}"/>'
    )


def _level(y: float) -> int:
    return round((y - 12) / FLOOR)


def _lane(between: range, side: int, lanes: dict[tuple[str, int], int]) -> float:
    """An x that no box on the floors between covers: beside a single box, between two, or at the edge."""
    counts = {len(floor) for floor in floors()[between.start : between.stop]}
    kind = "beside" if counts == {1} else "middle" if counts == {2} else "edge"
    lanes[kind, side] += 1
    step = lanes[kind, side]
    if kind == "middle":
        return WIDTH / 2 + side * (6 * step - 3)
    return WIDTH / 2 + side * (260 + 14 * step if kind == "beside" else WIDTH / 2 - 10 * step)


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The rooms of gradgraph: each imports only from rooms below it</title>
<style>
rect {{ fill: #eef3f8; stroke: #5b7a99; }}
text {{ font: 15px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; fill: #1d2b38; }}
.small {{ font: 11px system-ui, sans-serif; fill: #5b6b7a; }}
path {{ fill: none; stroke: #9db1c4; stroke-width: 1.3; marker-end: url(#head); }}
marker path {{ fill: #9db1c4; stroke: none; }}
@media (prefers-color-scheme: dark) {{
  rect {{ fill: #1f2d3a; stroke: #7f9cb8; }}
  text {{ fill: #e6edf3; }}
  .small {{ fill: #a9b8c6; }}
  path {{ stroke: #5d7388; }}
  marker path {{ fill: #5d7388; }}
}}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z"/></marker></defs>
"""
