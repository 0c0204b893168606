"""Results as the table that ``benchmarks.run`` prints."""

from __future__ import annotations

from benchmarks.results import Result
from benchmarks.roster import OURS, PEERS
from benchmarks.workloads import WORKLOADS

LEFT, WIDTH = 36, 13

COLUMNS = {  # title: figure of a result
    "x torch": lambda r: number(r.ratio(r.torch)),
    "aim": lambda r: number(r.aim),
    "x ort-training": lambda r: number(r.ratio(r.step("ort-training"))),
    "x floor": lambda r: number(r.ratio(r.floor)),
    "MB": lambda r: number(r.memory(OURS), 0),
    "torch MB": lambda r: number(r.torch_memory, 0),
    "build s": lambda r: number(r.rows[OURS].get("build")),
    "session s": lambda r: number(r.session(OURS)),
}


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def header(peers: list[str]) -> str:
    """The medians of the peers in ms, then what follows from them for gradgraph."""
    names = "".join(f"{name:>{WIDTH}}" for name in (*peers, *COLUMNS))
    return f"{'ms a step':{LEFT}}{names}"


def line(result: Result, peers: list[str]) -> str:
    """A row of the table."""
    times = (milliseconds(result, name) for name in peers)
    figures = (figure(result) if OURS in result.rows else "-" for figure in COLUMNS.values())
    return f"{WORKLOADS[result.workload].title:{LEFT}}" + "".join(f"{cell:>{WIDTH}}" for cell in (*times, *figures))


def milliseconds(result: Result, peer: str) -> str:
    seconds = result.step(peer)
    return "cannot" if seconds is None else number(seconds * 1e3)


def reasons(result: Result) -> list[str]:
    """Why peers cannot, a line each."""
    return [
        f"  {name} cannot: {result.rows[name]['cannot']}" for name in PEERS if "cannot" in result.rows.get(name, {})
    ]
