"""The page of an explanation: predictions and attributions of all samples, and the sanity checks; one HTML file."""

from __future__ import annotations

import html
from pathlib import Path

from gradgraph.attributions.attribution_markup import drawn
from gradgraph.attributions.explained import Explained, Sample
from gradgraph.attributions.sanity import POINTS, Checks
from gradgraph.errors import shown
from gradgraph.export.pages import escaped, heading, table, text_of, whole_page
from gradgraph.runtime.saved.curves import Curve, Panel, svg


def page(title: str, found: Explained, facts: dict[str, str]) -> str:
    """Return the HTML of the page.

    Args:
        title: the title.
        found: the samples and their attributions.
        facts: further facts for its head, such as the path of the model.
    """
    every = {**facts, "method": found.method, "output": found.output, "samples": str(len(found.samples))}
    if found.others:
        every["inputs without attributions"] = ", ".join(found.others)
    parts = [
        heading(title, every),
        '<p class="hint"><b class="plus">Orange</b> raises the score of the explained class, '
        '<b class="minus">blue</b> lowers it.</p>',
        "".join(f'<p class="warning" role="note">{html.escape(warning)}</p>' for warning in found.warnings),
        f'<div class="samples">{"".join(_article(found, row) for row in range(len(found.samples)))}</div>',
        "" if found.checks is None else _checks(found.checks),
    ]
    return whole_page(shown(title), "\n".join(parts), text_of("runs.css") + text_of("why.css"))


def _article(found: Explained, row: int) -> str:
    one = found.samples[row]
    name = Path(one.file).name if one.file else f"sample {one.index:,}"
    inputs = "".join(
        (f"<h3>{escaped(name)}</h3>" if len(found.units) > 1 else "") + drawn(found, name, row) for name in found.units
    )
    return f'<article><h2 title="{escaped(one.file or name)}">{escaped(name)}: {said(one)}</h2>{inputs}</article>'


def said(one: Sample) -> str:
    """Return the markup of a prediction: the predicted class, and the class that is explained if it differs."""
    sure = "" if one.probability is None else f" {one.probability:.1%}"
    if one.target in ("", one.called):
        return f"<b>{escaped(one.called)}</b>{sure}"
    return f"<b>{escaped(one.called)}</b>, explained: <b>{escaped(one.target)}</b>{sure}"


def _checks(checks: Checks) -> str:
    rows = [(one.layers, one.layer, _number(one.correlation)) for one in checks.randomised]
    shuffled = (
        "<h3>Shuffled weights, from the last layer to the first: attributions of a model that has learned nothing "
        f"should differ</h3>{table(('layers', 'from', 'rank correlation'), rows, texts=(1,))}"
    )
    shares = [i / POINTS for i in range(POINTS + 1)]
    panels = [
        Panel(name.capitalize(), "share of units", "score", [
            Curve(f"by attribution (area {one.areas[0]:.3g})", shares, one.by_attribution),
            Curve(f"in random order (area {one.areas[1]:.3g})", shares, one.at_random),
        ])
        for name, one in checks.curves.items()
    ]  # fmt: skip
    curves = "".join(svg([panel]) for panel in panels)
    complete = "" if checks.incompleteness is None else (
        f"<h3>Completeness: the attributions miss {checks.incompleteness:.2%} of the change of the score from the "
        "baseline</h3>"
    )  # fmt: skip
    return (
        f'<h2>Sanity checks</h2><p class="hint">On {checks.samples} samples.</p>{complete}{shuffled if rows else ""}'
        "<h3>Score as units are deleted (should fall fast) or inserted (should rise fast), from the largest "
        f'attribution to the smallest</h3><div class="curves">{curves}</div>'
    )


def _number(value: float) -> str:
    return "undefined" if value != value else f"{value:.3f}"
