"""docs/reference/backends.md, made from the registry of backends; run it to write the page anew."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from gradgraph.backends import BACKENDS
from gradgraph.backends.backend import Backend
from gradgraph.backends.capability import ALWAYS, Condition, Table
from gradgraph.passes.rewrites import Rewrite

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"
HEAD = """# Backends

A backend is the runtime that a step or a transformed model is written for: `gg.build(model, backend="…")`,
`gg.jvp(model, backend="…")`, `gradgraph build --backend …`. Without one, a step is written for `auto` and a transformed
model for `portable`. How lowering works: [lowering](../how-it-works/lowering.md).

| backend | what it is | extends | onnxruntime's provider | steps | forms |
|---|---|---|---|---|---|
"""
TABLES = """
## What runtimes can do

For these there is a table, `gradgraph/backends/tables/<backend>.toml`: by operator the types that are right, and
conditions under which it is refused, or *wrong*: other numbers come out and nothing is said. `gradgraph check --backend
B FILE`, or `gg.check_backend(file, "B")`, holds a model or a step folder against it, node by node, and runs nothing.
Building for such a backend refuses by name what would be refused or wrong there, and logs what nobody has tried and
what onnxruntime would compute on the CPU. `portable` is held against all that were tested, and only tells what some of
them lack.

Tables of tested runtimes are written by `python -m tests.runtimes.probe RUNTIME`: it runs models of one
operator, the cases of gradient rules among them, with all types, with sizes fixed and open, one at a time and all, with
inputs constant, computed and *derived* (computed, but from constants and known sizes alone), and finds the facts that
tell failures from the rest. Conditions are what these models showed, no more; what is seen to fail for no reason that
facts tell is a remark in the file. Integers of 64 bits are right below the power of two that `exact` names, where there
is one. With `--kept FILE`, a run that was ended goes on where it was. Of onnxruntime several versions were measured,
and the rows of the installed one are taken, or of the newest before it; this page has those of the version that it was
made with.

| backend | table of | tested | opsets | IR versions | functions | operators | what it lacks |
|---|---|---|---|---|---|---|---|
"""
OPSETS = """
## Older opsets

Files are written at opset 21, IR version 10. For a runtime that ends earlier, `gg.build(model, opset=17)`,
`gg.jvp(model, opset=18)` and `--opset` write them at any opset from 17 on, with the IR version of that opset's time (8
for 17 and 18, 9 for 19 and 20). Operators that came later are written as the functions that ONNX defines them by, where
they have one. A node that needs more is refused by name: `BitwiseXor`, or a reduction over computed axes, at opset 17,
for example. A Trainer takes such a step like any other.
"""
RULES = """
## What is done, in order

This is the order for each backend that rewrites whole graphs. *Forms* stands for single nodes: each is written in the
best form that serves it.
"""
FOOT = "\nThis page is made from the registry by `python -m tests.pages.backends_page`.\n"


def page() -> str:
    """The whole page."""
    rows = "".join(map(_row, BACKENDS.values()))
    tables = {name: b.table for name, b in BACKENDS.items() if b.table is not None and b.extends is None}
    told = [*(_table_row(name, t) for name, t in tables.items()), *(_limits(name, t) for name, t in tables.items())]
    orders = (_order(b) for b in BACKENDS.values() if b.lowering.before or b.lowering.after)
    return "".join([HEAD, rows, TABLES, *told, OPSETS, RULES, *orders, FOOT])


def _table_row(name: str, t: Table) -> str:
    tested = f"yes: {t.source}" if t.tested else f"no: from {t.source}"
    ranges = (f"{first} to {last}" for first, last in (t.opsets, t.ir_versions))
    taken = sum(not _whole(row.refused) and not _whole(row.wrong) for row in t.rows.values())
    lacks = "is computed on the CPU" if t.falls_back else "is refused"
    cells = (f"`{name}`", t.title, tested, *ranges, "yes" if t.functions else "no", str(taken), lacks)
    return f"| {' | '.join(cells)} |\n"


def _limits(name: str, t: Table) -> str:
    """What the table says against operators: what it lacks in one line, conditions by operator."""
    lacking = [f"`{op}`" for op, row in t.rows.items() if _whole(row.refused)]
    lines = [f"- It has no {', '.join(lacking)}."] if lacking else []
    elsewhere = "on the CPU" if t.falls_back else "refused"
    for kind, verb in (("wrong", "wrong"), ("fatal", "refused"), ("refused", elsewhere)):
        for op, row in t.rows.items():
            said = [c.why or f"with {c.in_words()}" for c in getattr(row, kind) if c.in_words()]
            if _whole(getattr(row, kind)):
                said = [] if kind == "refused" else ["always"]
            lines += [f"- `{op}`, {verb}: {'; '.join(said)}."] if said else []
    return f"\n### What {t.title} does not take\n\n" + "".join(f"{line}\n" for line in lines) if lines else ""


def _whole(conditions: Iterable[Condition]) -> bool:
    return any(c.terms == (ALWAYS,) for c in conditions)


def _row(b: Backend) -> str:
    extends = f"`{b.extends.name}`" if b.extends else ""
    provider = f"{b.provider}{', nowhere else' if b.only_there else ''}" if b.provider else ""
    cells = (f"`{b.name}`", b.about, extends, provider, "yes" if b.for_steps else "no", len(list(b.lowering.forms)))
    return f"| {' | '.join(map(str, cells))} |\n"


def _order(b: Backend) -> str:
    lowering = b.lowering
    lines = [*_lines(lowering.before)]
    for layout in lowering.layouts:
        lines += ["*forms* of nodes that no layout may take", *_lines(layout.rewrites)]
    lines += [
        "*forms* of all other nodes",
        *_lines(lowering.after),
        "*clean-up*: unread nodes go, equal ones merge",
        *_lines(lowering.last),
    ]
    return f"\n### {b.name}\n\n" + "".join(f"{i}. {line}\n" for i, line in enumerate(lines, 1))


def _lines(rewrites: Iterable[Rewrite]) -> list[str]:
    return [f"`{_name(r)}`: {r.reason}" for r in rewrites]


def _name(rewrite: Rewrite) -> str:
    function = rewrite.apply.func if isinstance(rewrite.apply, partial) else rewrite.apply
    return str(getattr(function, "__name__", function))


if __name__ == "__main__":
    PAGE.write_text(page())
