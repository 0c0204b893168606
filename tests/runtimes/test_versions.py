"""The table of onnxruntime's CPU provider holds for the installed version, whichever of those measured that is."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import pytest

from gradgraph.backends import capability
from gradgraph.backends.capability import TABLES, Table, holding, row_at, table_of, tomllib
from tests.runtimes.condensed import with_version
from tests.runtimes.outcomes import Kept, outcomes_of
from tests.runtimes.probe_cases import FEW, trials

FILE = TABLES / "ort-cpu.toml"


def of_this_version() -> Table:
    table = table_of("ort-cpu")
    assert table is not None
    if table.version != ort.__version__:
        pytest.skip(f"the rows were measured in onnxruntime {table.version}, and not in {ort.__version__}")
    return table


@pytest.mark.sweep(0.018)
@pytest.mark.parametrize("operator", [op for op in tomllib.loads(FILE.read_text())["operators"] if "." not in op])
def test_what_the_table_says_of_an_operator_is_so_in_the_installed_version(operator: str) -> None:
    table = of_this_version()
    remarks = FILE.read_text()
    outcomes = outcomes_of("onnxruntime", list(trials(FEW, [operator], "oracle")), Kept(None, ""))
    for o in (o for o in outcomes if not o.magnitude):  # numbers that are too large are told beside the row
        verdict = table.verdict(ir.Node("", operator, []), o.facts)
        if o.kind == "right":
            assert not verdict.fails, (o, verdict)
        else:
            assert verdict.kind != "right" or f"# {table.version} {operator} {o.label}:" in remarks, (o, verdict)


ROWS = [{"since": "1.23.2", "T": "float32"}, {"since": "1.31.1", "T": "float32 float64"}]


@pytest.mark.parametrize(
    ("version", "types"),
    [("1.9.0", None), ("1.23.2", 1), ("1.30.9", 1), ("1.31.1", 2), ("1.31.10", 2), ("1.100.0", 2), ("2.0.0+cpu", 2)],
)
def test_the_newest_row_counts_that_is_no_newer_than_the_version(version: str, types: int | None) -> None:
    row = row_at(ROWS, version)
    assert (row and len(row["T"].split())) == types
    assert row is None or "since" not in row
    assert holding([{"version": row["since"]} for row in ROWS], version)["version"] in ("1.23.2", "1.31.1")


@pytest.mark.parametrize("measured", tomllib.loads(FILE.read_text())["measured"], ids=lambda m: str(m["version"]))
def test_the_table_is_that_of_the_installed_version(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "installed", lambda: measured["version"])
    table = table_of.__wrapped__("ort-cpu")
    assert table is not None
    assert (table.version, list(table.opsets)) == (measured["version"], measured["opsets"])
    verdict = table.verdict(ir.Node("", "Cos", []), frozenset({"T float64"}))
    assert verdict.fails == (measured["version"] < "1.31")  # as of then there is a kernel


def test_rows_of_a_version_come_beside_those_of_others() -> None:
    table: dict[str, Any] = {"measured": [{"version": "1.31.1"}], "operators": {"A": {"T": "x"}, "B": {"T": "x"}}}
    table = with_version(table, {"version": "1.9.0"}, {"A": {"T": "x"}, "C": {"T": "x"}})
    assert [m["version"] for m in table["measured"]] == ["1.9.0", "1.31.1"]
    expected = {
        "A": {"T": "x"},
        "B": [{"since": "1.31.1", "T": "x"}],
        "C": [{"since": "1.9.0", "T": "x"}, {"since": "1.31.1", "refused": ["*"]}],
    }
    assert table["operators"] == expected
    again = with_version(table, {"version": "1.31.1"}, {"A": {"T": "x"}, "B": {"T": "x"}, "C": {"T": "x"}})
    assert again["operators"] == expected | {"C": {"T": "x"}}
