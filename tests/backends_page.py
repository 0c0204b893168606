"""docs/backends.md, made from the registry of backends; run it to write the page anew."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from gradgraph.backends import BACKENDS
from gradgraph.backends.backend import Backend
from gradgraph.rewrites import Rewrite

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
HEAD = """# Backends

A backend is the runtime that a step or a transformed model is written for: `gg.build(model, backend="…")`,
`gg.jvp(model, backend="…")`, `gradgraph build --backend …`. Without one, a step is written for `auto` and a transformed
model for `portable`. How lowering works: [lowering](lowering.md).

| backend | what it is | extends | onnxruntime's provider | steps | forms |
|---|---|---|---|---|---|
"""
RULES = """
## What is done, in order

This is the order for each backend that rewrites whole graphs. *Forms* stands for single nodes: each is written in the
best form that serves it.
"""
FOOT = "\nThis page is made from the registry by `python tests/backends_page.py`.\n"


def page() -> str:
    """The whole page."""
    rows = "".join(map(_row, BACKENDS.values()))
    return "".join([HEAD, rows, RULES, *(_order(b) for b in BACKENDS.values() if b.before or b.after), FOOT])


def _row(b: Backend) -> str:
    extends = f"`{b.extends.name}`" if b.extends else ""
    provider = f"{b.provider}{', nowhere else' if b.only_there else ''}" if b.provider else ""
    cells = (f"`{b.name}`", b.about, extends, provider, "yes" if b.for_steps else "no", len(list(b.forms)))
    return f"| {' | '.join(map(str, cells))} |\n"


def _order(b: Backend) -> str:
    lines = [*_lines(b.before)]
    for layout in b.layouts:
        lines += ["*forms* of nodes that no layout may take", *_lines(layout.rewrites)]
    lines += [
        "*forms* of all other nodes",
        *_lines(b.after),
        "*clean-up*: unread nodes go, equal ones merge",
        *_lines(b.last),
    ]
    return f"\n### {b.name}\n\n" + "".join(f"{i}. {line}\n" for i, line in enumerate(lines, 1))


def _lines(rewrites: Iterable[Rewrite]) -> list[str]:
    return [f"`{_name(r)}`: {r.reason}" for r in rewrites]


def _name(rewrite: Rewrite) -> str:
    function = rewrite.apply.func if isinstance(rewrite.apply, partial) else rewrite.apply
    return str(getattr(function, "__name__", function))


if __name__ == "__main__":
    PAGE.write_text(page())
