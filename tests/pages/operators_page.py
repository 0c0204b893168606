"""The tables of docs/reference/operators.md, made from those of rules and the page of conventions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gradgraph.verify.operator_status import STATUSES, operators
from tests.conformance.exceptions import NOT_CLEAN
from tests.conformance.node_cases import node_cases
from tests.pages.marked import ROOT, Marked, table

CONVENTIONS = ROOT / "docs" / "reference" / "conventions.md"
COLUMNS = (
    "operator",
    "status",
    "inputs with gradients",
    "orders",
    "cases",
    "node tests",
    "at kinks, ties and edges; remarks",
)


def tables() -> str:
    """The statuses, and the operators of each domain."""
    rows = operators()
    counts = {s: sum(r["status"] == s for r in rows) for s in STATUSES}
    statuses = [f"| {s} | {meaning} | {counts[s]} |" for s, meaning in STATUSES.items()]
    parts = [table("status", "meaning", "operators", rows=statuses)]
    conventions, tests = _conventions(), _node_tests()
    for domain in sorted({r["domain"] for r in rows}):
        lines = [_line(r, conventions, tests) for r in rows if r["domain"] == domain]
        parts += ["", f"## {domain}", "", table(*COLUMNS, rows=lines)]
    return "\n".join(parts)


def names() -> str:
    """The operators by status."""
    rows = operators()
    by_status = {s: ", ".join(r["operator"] for r in rows if r["status"] == s) for s in STATUSES}
    lines = [f"| {s} | {meaning} | {by_status[s]} |" for s, meaning in STATUSES.items() if by_status[s]]
    more = "The site (`make docs`) has a row for each of them."
    return "\n".join([table("status", "meaning", "operators", rows=lines), "", more])


def _line(row: Mapping[str, Any], conventions: Mapping[str, list[str]], tests: Mapping[str, int]) -> str:
    name = row["operator"].removeprefix(f"{row['domain']}.")
    own = row["domain"] == "ai.onnx" and row["differentiable"]
    remarks = [row["remark"], *(conventions.get(name, []) if own else [])]
    cells = [
        name,
        row["status"],
        ", ".join(row["inputs"]),
        row["order"],
        str(row["cases"] or ""),
        str(tests.get(name, "") if own else ""),
        "; ".join(filter(None, remarks)),
    ]
    return f"| {' | '.join(cells)} |"


def _conventions() -> dict[str, list[str]]:
    """The choices by operator: the first column of the table of conventions names them."""
    found: dict[str, list[str]] = {}
    for line in CONVENTIONS.read_text("utf-8").splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "where":
            for name in re.findall(r"\b[A-Z]\w+", cells[0]):
                found.setdefault(name, []).append(f"{cells[0]}: {cells[1]}")
    return found


def _node_tests() -> dict[str, int]:
    return {op: n for op, cases in node_cases().items() if (n := sum(c.name not in NOT_CLEAN for c in cases))}


MARKED = [Marked("docs/reference/operators.md", "operators", tables, names)]
