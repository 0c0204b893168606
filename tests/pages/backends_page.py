"""The tables of docs/reference/backends.md, made from the registry of backends."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from gradgraph.backends import BACKENDS
from gradgraph.backends.backend import Backend
from gradgraph.backends.capability import ALWAYS, Condition, Table
from gradgraph.passes.rewrites import Rewrite
from tests.pages.marked import Marked, listed, table

ELSEWHERE = "The site (`make docs`) lists them here."


def backends() -> str:
    """The backends."""
    columns = ("backend", "what it is", "extends", "onnxruntime's provider", "steps", "forms")
    return table(*columns, rows=map(_row, BACKENDS.values()))


def tables() -> str:
    """What is known of runtimes, and what they do not support."""
    known = _known()
    columns = ("backend", "table of", "tested", "opsets", "IR versions", "functions", "operators", "what it lacks")
    rows = [_table_row(name, t) for name, t in known.items()]
    return "\n".join([table(*columns, rows=rows), *(_limits(t) for t in known.values())]).rstrip()


def rewrites() -> str:
    """What is done, in order, by backend."""
    return "\n".join(_order(b) for b in BACKENDS.values() if b.lowering.before or b.lowering.after).strip()


def _known() -> dict[str, Table]:
    return {name: b.table for name, b in BACKENDS.items() if b.table is not None and b.extends is None}


def _table_row(name: str, t: Table) -> str:
    tested = f"yes: {t.source}" if t.tested else f"no: from {t.source}"
    ranges = (f"{first} to {last}" for first, last in (t.opsets, t.ir_versions))
    taken = sum(not _whole(row.refused) and not _whole(row.wrong) for row in t.rows.values())
    lacks = "is computed on the CPU" if t.falls_back else "is refused"
    cells = (f"`{name}`", t.title, tested, *ranges, "yes" if t.functions else "no", str(taken), lacks)
    return f"| {' | '.join(cells)} |"


def _limits(t: Table) -> str:
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
    return f"\n### What {t.title} does not support\n\n" + "".join(f"{line}\n" for line in lines) if lines else ""


def _whole(conditions: Iterable[Condition]) -> bool:
    return any(c.terms == (ALWAYS,) for c in conditions)


def _row(b: Backend) -> str:
    extends = f"`{b.extends.name}`" if b.extends else ""
    provider = f"{b.provider}{', nowhere else' if b.only_there else ''}" if b.provider else ""
    cells = (f"`{b.name}`", b.about, extends, provider, "yes" if b.for_steps else "no", len(list(b.lowering.forms)))
    return f"| {' | '.join(map(str, cells))} |"


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


PAGE = "docs/reference/backends.md"
MARKED = [
    Marked(PAGE, "backends", backends, lambda: listed(BACKENDS, "The site (`make docs`) has a table of them.")),
    Marked(PAGE, "tables", tables, lambda: listed(_known(), ELSEWHERE)),
    Marked(PAGE, "rewrites", rewrites, lambda: ELSEWHERE),
]
