"""The chart ``step-time.svg`` of the README: training step times relative to PyTorch, one bar per network.

The SVG is written as text, without matplotlib, so that its colours follow the reader's light or dark theme and its text
is legible at the width of a phone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from benchmarks.results import Result
from benchmarks.roster import NATIVE

WIDTH, ROW, TOP, BOTTOM = 640, 36, 64, 34
LEFT, UNIT = 212, 370  # pixels: width of the names, and length of PyTorch's bar
STYLE = """
text { font: 20px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
.small { font-size: 17px; fill: #59636e }
.bar { fill: #b3261e }
.value { fill: #ffffff }
.torch { stroke: #59636e; stroke-width: 2; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .small { fill: #9198a1 }
  .bar { fill: #f47067 }
  .value { fill: #0d1117 }
  .torch { stroke: #9198a1 }
}"""


def step_time_chart(results: list[Result]) -> str:
    """Return the SVG for the results of one machine.

    Bars are step times with native kernels over the faster of PyTorch eager and compiled, for plain SGD with static
    shapes, so that each network appears once.
    """
    ratios = {r.title.replace(",", " ").split()[0]: ratio for r in results if (ratio := _ratio(r)) is not None}
    if not ratios:
        raise ValueError("no result of this machine has both native kernels and PyTorch")
    rows = [_row(TOP + ROW * i, name, ratio) for i, (name, ratio) in enumerate(ratios.items())]
    end, height = TOP + ROW * len(rows), TOP + ROW * len(rows) + BOTTOM
    size = f'width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>Time of a training step relative to PyTorch: {_summary(ratios)}</title>",
        f"<style>{STYLE}</style>",
        '<text x="0" y="22">Time of one training step (lower is better)</text>',
        f'<text class="small" x="{LEFT + UNIT}" y="48" text-anchor="middle">PyTorch = 1</text>',
        *rows,
        f'<line class="torch" x1="{LEFT + UNIT}" y1="{TOP - 8}" x2="{LEFT + UNIT}" y2="{end}"/>',
        f'<text class="small" x="0" y="{height - 8}">{escape(results[0].setup["machine"])}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def draw(results: list[Result], path: Path) -> None:
    path.write_text(step_time_chart(results), encoding="utf-8")


def _ratio(result: Result) -> float | None:
    seconds = result.step(NATIVE)
    if result.setup["optimizer"] != "sgd" or result.setup["dynamic"] or seconds is None or result.torch is None:
        return None
    return seconds / result.torch


def _row(top: int, name: str, ratio: float) -> str:
    bar = f'<rect class="bar" x="{LEFT}" y="{top}" width="{UNIT * ratio:.0f}" height="{ROW - 10}" rx="3"/>'
    value = f'<text class="value" x="{LEFT + UNIT * ratio - 8:.0f}" y="{top + 20}" text-anchor="end">{ratio:.2f}</text>'
    return f'<text x="{LEFT - 10}" y="{top + 20}" text-anchor="end">{escape(name)}</text>{bar}{value}'


def _summary(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
