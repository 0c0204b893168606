"""The table that ``benchmarks.run`` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.results import Result
from benchmarks.roster import OURS

LEFT, WIDTH = 44, 10

COLUMNS: dict[str, Callable[[Result], str]] = {
    "x torch": lambda r: number(r.ratio(r.torch)),
    "x ort training": lambda r: number(r.ratio(r.step("ort-training"))),
    "x floor": lambda r: number(r.ratio(r.floor)),
    "MB": lambda r: number(r.memory(OURS), 0),
    "torch MB": lambda r: number(r.torch_memory, 0),
    "build s": lambda r: number(r.rows.get(OURS, {}).get("build")),
    "session s": lambda r: number(r.session(OURS)),
}


def header(peers: list[str]) -> str:
    """Return two lines: median milliseconds per library, then the columns derived for gradgraph."""
    titles = [title.replace("-", " ").rsplit(" ", 1) for title in (*peers, *COLUMNS)]
    upper = "".join(f"{words[0] if words[1:] else '':>{WIDTH}}" for words in titles)
    return f"{'':{LEFT}}{upper}\n{'ms a step':{LEFT}}" + "".join(f"{words[-1]:>{WIDTH}}" for words in titles)


def line(result: Result, peers: list[str]) -> str:
    cells = [*(milliseconds(result, name) for name in peers), *(figure(result) for figure in COLUMNS.values())]
    return f"{result.title:{LEFT}}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)


def lines(result: Result, peers: list[str]) -> str:
    """Return the row of a result, followed by the reasons why libraries cannot train the workload."""
    return "\n".join([line(result, peers), *(f"  {peer} cannot: {why}" for peer, why in reasons(result).items())])


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def milliseconds(result: Result, peer: str) -> str:
    """Return the step time in ms, "cannot", or "" if the library was not measured."""
    seconds = result.step(peer)
    if seconds is None:
        return "cannot" if peer in result.rows else ""
    return number(seconds * 1e3)


def reasons(result: Result) -> dict[str, str]:
    """Return why libraries cannot train the workload, by library."""
    return {name: row["cannot"] for name, row in result.rows.items() if "cannot" in row}


def grid(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned."""
    titles = list(head)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
