"""docs/reference/operators.md, made from the tables of rules and the page of conventions; run it to write it anew."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradgraph.verify.operator_status import STATUSES, operators
from tests.conformance.exceptions import NOT_CLEAN
from tests.conformance.node_cases import node_cases

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PAGE = DOCS / "operators.md"
HEAD = """# Operators

Every operator of ONNX and the state of its gradient, as `gradgraph ops` prints it. **Orders**: `all` where gradients of
gradients are right, too; `1` where the second derivative is not tried, with the reason. **Cases**: those beside the
rule, each tried in six ways, and ONNX's own node tests whose derivative can be measured (`tests/conformance`), each
tried with shapes known and unknown, in float64 and in onnxruntime. **At kinks**: from [conventions](conventions.md).

| status | meaning | operators |
|---|---|---|
"""
FOOT = "\nThis page is made from the tables themselves by `python -m tests.pages.operators_page`.\n"
TABLE = """
## {domain}

| operator | status | inputs with gradients | orders | cases | node tests | at kinks, ties and edges; remarks |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = operators()
    counts = {s: sum(r["status"] == s for r in rows) for s in STATUSES}
    parts = [HEAD, *(f"| {s} | {meaning} | {counts[s]} |\n" for s, meaning in STATUSES.items())]
    conventions, tests = _conventions(), _node_tests()
    for domain in sorted({r["domain"] for r in rows}):
        parts.append(TABLE.format(domain=domain))
        parts += [_line(r, conventions, tests) for r in rows if r["domain"] == domain]
    return "".join([*parts, FOOT])


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
    return f"| {' | '.join(cells)} |\n"


def _conventions() -> dict[str, list[str]]:
    """The choices by operator: the first column of the table of conventions names them."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / "conventions.md").read_text("utf-8").splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "where":
            for name in re.findall(r"\b[A-Z]\w+", cells[0]):
                found.setdefault(name, []).append(f"{cells[0]}: {cells[1]}")
    return found


def _node_tests() -> dict[str, int]:
    return {op: n for op, cases in node_cases().items() if (n := sum(c.name not in NOT_CLEAN for c in cases))}


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
