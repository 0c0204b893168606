"""Curves of a history, grouped into panels by kind, and drawn as SVG without dependencies."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradgraph.errors import DataError
from gradgraph.runtime.saved.monitor import Monitor

INDEX = ("epoch", "step")  # index columns of a history
Place = Callable[[float, float], tuple[float, float]]
_FAR = 50  # times as large as the total: a loss with its own panel
COLOURS = ("#0b62c4", "#c4470b", "#1a7f37", "#8250df", "#b3261e", "#8a5a00", "#0e7c86", "#59636e")


@dataclass(frozen=True)
class Curve:
    """A line through points; non-finite points leave gaps.

    Attributes:
        name: name in the legend.
        x, y: coordinates of the points.
        kept: x of the epoch (or step) whose weights were kept, which is circled; None if it is the last.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kept: float | None = None


@dataclass(frozen=True)
class Panel:
    """A diagram of curves on shared axes, with its title and axis labels."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]


def panels_of(history: Mapping[str, Sequence[float]], kept: int | None = None, over: str | None = None) -> list[Panel]:
    """Return panels of a history's columns: losses, metrics from 0 to 1, learning rates, and one per other column.

    ``kept`` is the index of the row whose weights were kept, None if it is the last. ``over`` is the column of the x
    axis, by default "epoch", or "step" if an epoch has several rows.
    """
    over = over or axis_of(history)
    x = list(history.get(over, ()))
    kinds: dict[str, list[Curve]] = {}
    for name, column in history.items():
        if name not in INDEX:
            curve = Curve(name, x, column, None if kept is None else x[kept])
            kinds.setdefault(_kind(name, column, history.get("loss", ())), []).append(curve)
    titles = {"loss": "Losses", "share": "Metrics from 0 to 1", "learning rate": "Learning rates"}
    order = [*titles, *(kind for kind in kinds if kind not in titles)]
    return [Panel(titles.get(k, k), over, k, kinds[k]) for k in order if k in kinds]


def axis_of(history: Mapping[str, Sequence[float]]) -> str:
    """Return the column of the x axis: "epoch", or "step" if an epoch has several rows."""
    return "epoch" if all(a < b for a, b in itertools.pairwise(history.get("epoch", ()))) else "step"


def _kind(name: str, column: Sequence[float], loss: Sequence[float]) -> str:
    """Return the y-axis label of a history column, by which columns are grouped into panels.

    Metrics from 0 to 1 have the label "share". Losses have "loss", except terms that are far larger or smaller than
    ``loss``, the total. Other columns have their own name.
    """
    last = name.rpartition(".")[2].removeprefix("val_")
    if last == "loss" or (last.endswith("loss") and _is_near(column, loss)):
        return "loss"
    if last == "learning_rate":
        return "learning rate"
    finite = [value for value in column if math.isfinite(value)]
    return "share" if finite and min(finite) >= 0 and max(finite) <= 1 and not _is_error(last) else last


def _is_near(column: Sequence[float], total: Sequence[float]) -> bool:
    """Return whether the largest magnitudes of two columns differ by at most the factor ``_FAR``."""
    a, b = (max((abs(v) for v in values if math.isfinite(v)), default=0.0) for values in (column, total))
    return not (a and b) or max(a, b) <= _FAR * min(a, b)


def _is_error(name: str) -> bool:
    try:
        return Monitor(name).sign > 0
    except DataError:  # the name does not imply a direction
        return False


# --- SVG ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 420, 280  # size of a panel in pixels
GRID = "#d1d9e0"
ACROSS = 3  # panels in a row
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 34, 52
LINE, LETTERS = 15, 52  # legend: line height in pixels, and characters per line


def svg(panels: Sequence[Panel]) -> str:
    """Draw the panels, three in a row; return the text of an SVG file."""
    across = min(ACROSS, max(1, len(panels)))
    rows = [panels[i : i + across] for i in range(0, len(panels), across)]
    parts, top = list[str](), 0
    for row in rows:
        parts += [f'<g transform="translate({i * WIDTH} {top})">{_panel(panel)}</g>' for i, panel in enumerate(row)]
        top += HEIGHT + LINE * max(len(panel.curves) for panel in row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across * WIDTH} {top}" width="{across * WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _panel(panel: Panel) -> str:
    points = [(x, y) for curve in panel.curves for x, y in _finite(curve)]
    x_ticks, y_ticks = ticks([x for x, _ in points]), ticks([y for _, y in points])
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + across * _share(x, x_ticks), TOP + down * (1 - _share(y, y_ticks))

    parts = [_text(WIDTH / 2, 18, panel.title, 'text-anchor="middle" font-size="13" font-weight="600"')]
    for x in x_ticks:
        at = place(x, y_ticks[0])
        parts += [_line(at, place(x, y_ticks[-1]), GRID), _text(at[0], at[1] + 15, _said(x, x_ticks), _MIDDLE)]
    for y in y_ticks:
        at = place(x_ticks[0], y)
        parts += [_line(at, place(x_ticks[-1], y), GRID), _text(at[0] - 6, at[1] + 4, _said(y, y_ticks), _END)]
    parts += [_text(LEFT + across / 2, HEIGHT - 20, panel.x_label, _MIDDLE)]
    middle = TOP + down / 2
    parts += [_text(14, middle, panel.y_label, f'{_MIDDLE} transform="rotate(-90 14 {middle:g})"')]
    for i, curve in enumerate(panel.curves):
        parts += _drawn(curve, COLOURS[i % len(COLOURS)], place, HEIGHT + LINE * i)
    return "".join(parts)


def _drawn(curve: Curve, colour: str, place: Place, legend: float) -> list[str]:
    """Return the SVG elements of a curve, a ring around its ``kept`` point, and its legend entry at y = ``legend``.

    ``place`` converts data coordinates to SVG coordinates.
    """
    run, found = list[str](), list[str]()
    for x, y in [*zip(curve.x, curve.y, strict=True), (math.nan, math.nan)]:
        if math.isfinite(x) and math.isfinite(y):
            run.append("{:.1f},{:.1f}".format(*place(x, y)))
        elif run:
            line = f'<polyline points="{" ".join(run)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            found, run = [*found, line if len(run) > 1 else _dot(run[0], colour)], []
    said = curve.name
    for x, y in _finite(curve):
        if x == curve.kept:
            found.append(_dot("{:.1f},{:.1f}".format(*place(x, y)), colour, 'fill="#fff" stroke-width="2"'))
            said += f" (kept: {y:.4g} at {x:g})"
    said = said if len(said) <= LETTERS else f"{said[: LETTERS - 1]}…"
    return [*found, _line((LEFT, legend - 4), (LEFT + 18, legend - 4), colour, 2), _text(LEFT + 24, legend, said)]


def ticks(values: Iterable[float], about: int = 5) -> list[float]:
    """Return about ``about`` equally spaced round numbers, at least two, that enclose all ``values``."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    span = high - low or abs(low) or 1.0
    raw = span / about
    unit = 10.0 ** math.floor(math.log10(raw))
    apart = unit * next(m for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [i * apart for i in range(first, max(last, first + 1) + 1)]


def _said(tick: float, ticks: Sequence[float]) -> str:
    """Return the label of a tick, with enough digits to distinguish it from the other ``ticks``."""
    largest, apart = max(map(abs, ticks)), ticks[1] - ticks[0]
    return f"{tick:.{max(4, math.ceil(math.log10(largest / apart)) + 1)}g}"


def _share(value: float, between: Sequence[float]) -> float:
    return (value - between[0]) / (between[-1] - between[0])


def _finite(curve: Curve) -> list[tuple[float, float]]:
    both = zip(curve.x, curve.y, strict=True)
    return [(x, y) for x, y in both if math.isfinite(x) and math.isfinite(y)]


_MIDDLE, _END = 'text-anchor="middle"', 'text-anchor="end"'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#1b1f24" {more}>{html.escape(text)}</text>'


def _line(a: tuple[float, float], b: tuple[float, float], colour: str, width: float = 1) -> str:
    ends = "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*a, *b)
    kind = ' class="grid"' if colour == GRID else ""
    return f'<path{kind} d="{ends}" stroke="{colour}" stroke-width="{width:g}"/>'


def _dot(at: str, colour: str, more: str = "") -> str:
    x, y = at.split(",")
    return f'<circle cx="{x}" cy="{y}" r="3.5" stroke="{colour}" {more or f"""fill="{colour}" """}/>'
