"""docs/reference/shipped-models.md, from what was kept of each file."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.shipped.explained_files import FLIPPED, NEAR
from tests.shipped.judged import SLOPE, kept, reason, verdict
from tests.shipped.packages import PACKAGES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "shipped-models.md"
HEAD = """# Models tested

Do real models train? {files} `.onnx` files from {packages} packages of the public Python index, written by {exporters}
exporters: {trains} train. Each is checked with `gradgraph check`, trained with Adam on a small batch with random
targets, and built for every runtime, in a process of its own.

- *gradients*: how many of the sampled tensors agree with finite differences, in float64 unless noted; in parentheses
  those with a gradient too small to tell. Then the relative error of the slope of the loss along the whole gradient, in
  onnxruntime in float32, where more than {slope:.0%} would be wrong.
- *loss*: at the first and the last step, 20 unless steps are slow.
- *runtimes*: {asked}; those that do not support the step are listed with the [reason](#why-a-runtime-refuses).
"""
TABLE = """
| package | file | exporter | nodes | weights | gradients, slope | loss | runtimes |
|---|---|---|---|---|---|---|---|
"""
EXPLAINED = """
## Explanations

Methods of [`gg.explain`](../how-to/explain.md) on {files} of these files: the score of the most active element of an
output, beside loops in NumPy that run the file in onnxruntime. Gradients agree with differences of the score. The error
is the largest difference as a part of the largest attribution, at most {near:.0e}; for `pgd`, fewer than {flipped:.0%}
of the elements differ. The last column lists methods without such a loop, whose results are finite.

| package | file | as the loop | error | finite |
|---|---|---|---|---|
"""
FOOT = """
`python -m tests.shipped --write` downloads the packages, runs everything and writes this page; `make shipped-packages`
runs five, as continuous integration does.
"""


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    rows = [(p, file, found[key]) for p in PACKAGES for file in p.files if (key := f"{p.name} {file}") in found]
    makers = {_maker(one) for *_, one in rows} - {""}
    trains = sum(verdict(one) == "trains" for *_, one in rows)
    asked = sorted({backend for *_, one in rows for backend in one.get("taken", {}).get("said", {})})
    notes: dict[str, int] = {}
    table = [_row(p.name, p.version, file, one, notes) for p, file, one in rows if verdict(one) == "trains"]
    head = HEAD.format(files=len(rows), packages=len({p.name for p, *_ in rows}), exporters=len(makers), trains=trains,
                       slope=SLOPE, asked=", ".join(f"`{b}`" for b in asked))  # fmt: skip
    return "".join([head, TABLE, *table, *_refused(rows), *_explained(rows), *_noted(notes), FOOT])


def write() -> None:
    PAGE.write_text(page(kept()), "utf-8")


def _row(package: str, version: str, file: str, found: Mapping[str, Any], notes: dict[str, int]) -> str:
    shown, trained = found.get("described", {}), found.get("trained", {})
    cells = [
        f"{package} {version}",
        f"`{file.rpartition('/')[2]}`",
        shown.get("exporter") or "—",
        str(shown.get("nodes", "")),
        _short(shown["weights"]) if shown else "",
        _gradients(found),
        f"{trained['first']:.3g} → {trained['last']:.3g}" if "last" in trained else "",
        _runtimes(found.get("taken", {}).get("said"), notes),
    ]
    return f"| {' | '.join(c.replace('|', chr(92) + '|') for c in cells)} |\n"


def _maker(found: Mapping[str, Any]) -> str:
    return found.get("described", {}).get("exporter", "").partition(" ")[0]


def _short(count: int) -> str:
    return f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count / 1e3:.3g} k" if count >= 1e3 else str(count)


def _gradients(found: Mapping[str, Any]) -> str:
    checked, sloped = found.get("checked", {}), found.get("sloped", {})
    parts = []
    if "counts" in checked:
        counts = checked["counts"]
        right, small = counts.get("right", 0), counts.get("too small to tell", 0)
        of = f"{right} of {right + counts.get('wrong', 0)}{f' ({small})' if small else ''}"
        parts.append(of + (", float32" if checked["precision"] == "float32" else ""))
    elif "late" in found.get("ended", {}):
        parts.append("not in time")
    if "error" in sloped:
        parts.append(f"{sloped['error']:.0e}")
    return "; ".join(parts)


def _runtimes(said: Mapping[str, str] | None, notes: dict[str, int]) -> str:
    if said is None:
        return ""
    refused = [f"{b} ({notes.setdefault(_why(words), len(notes) + 1)})" for b, words in said.items() if words]
    return "all" if not refused else f"all but {', '.join(refused)}"


def _why(words: str) -> str:
    """The sentence of a refusal without the node that it names first, and without the advice."""
    words = re.sub(r"^(?:\w+\.onnx: )?node '.*?' \(([\w.]+)\)", r"\1", words)
    return re.sub(r" \(and [\d,]+ more such nodes?\)", "", words).partition(";")[0]


def _refused(rows: list[tuple[Any, str, Mapping[str, Any]]]) -> Iterator[str]:
    files: dict[str, list[str]] = defaultdict(list)
    for package, file, found in rows:
        if verdict(found) != "trains":
            files[f"{verdict(found)}: {reason(found) or 'the loss did not fall'}"].append(f"{package.name} `{file}`")
    if files:
        yield "\n## What does not train, and why\n\n"
    for said, own in files.items():
        yield f"- {', '.join(own)}: {said}\n"


def _explained(rows: list[tuple[Any, str, Mapping[str, Any]]]) -> Iterator[str]:
    """The section about explanations, of files that have a floating-point input and an output with a row per sample."""
    found = [(p, file, one["explained"]) for p, file, one in rows if "errors" in one.get("explained", {})]
    if found:
        yield EXPLAINED.format(files=len(found), near=NEAR, flipped=FLIPPED)
    for package, file, one in found:
        errors = {name: error for name, error in one["errors"].items() if error is not None}
        agree, others = (
            ", ".join(f"`{n}`" for n in names) for names in (errors, sorted(one["errors"].keys() - errors))
        )
        largest = max((error for name, error in errors.items() if name != "pgd"), default=0)
        name = file.rpartition("/")[2]
        yield f"| {package.name} | `{name}` | {agree} | {largest:.0e} | {others} |\n"


def _noted(notes: Mapping[str, int]) -> Iterator[str]:
    if notes:
        yield "\n## Why a runtime refuses\n\n"
    for words, number in notes.items():
        yield f"{number}. {words}\n"
