"""The kernels in use are those that ``docs/how-it-works/native.json`` shows to be faster than onnxruntime's."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

import gradgraph.backends.ort_native.native_lowering  # noqa: F401  (fills the table of forms)
from gradgraph.backends.forms import Call
from gradgraph.backends.ort_native.native_table import FORMS
from gradgraph.backends.ort_native.native_transposes import is_faster
from gradgraph.backends.ort_native.strided import Strided
from gradgraph.graph.builder import Builder
from gradgraph.graph.schemas import attributes_without_schema
from gradgraph.machine.hardware import levels_in_use

# kernels that fuse with each other, so that they are used together or not at all
FAMILIES = {
    "batch normalization": ("batch_norm", "batch_norm_backwards", "unscaled_batch_norm_backwards"),
    "depthwise convolution": ("depthwise", "depthwise_dx", "depthwise_dw"),
}
FAMILY_OF = {form: family for family, forms in FAMILIES.items() for form in forms}
SLACK = 1.05  # repeated measurements differ by this factor
MEASURED = Path(__file__).parents[3] / "docs" / "how-it-works" / "native.json"
ROWS: list[dict[str, Any]] = json.loads(MEASURED.read_text())


def test_used_kernels_are_not_slower() -> None:
    """Summed over the nodes of a network's step, the kernels of a family take at most onnxruntime's time."""
    native, stock = defaultdict(float), defaultdict(float)
    for row in (row for row in ROWS if row["used"]):
        key = row["level"], row["threads"], row["workload"], FAMILY_OF.get(row["form"], row["form"])
        native[key] += row["native"]
        stock[key] += row["stock"]
    slower = {key: native[key] / stock[key] for key in native if native[key] > SLACK * stock[key]}
    assert native and not slower


def test_decisions_are_those_that_were_measured() -> None:
    """A changed condition of a form on this level of processors needs a new measurement."""
    here = [row for row in ROWS if row["level"] == (levels_in_use() or [""])[-1]]
    if not here:
        pytest.skip("nothing was measured on this level of processors")
    changed = [(row["form"], row["sizes"]) for row in here if _is_used(row) != row["used"]]
    assert not changed


def _is_used(row: dict[str, Any]) -> bool:
    if row["operator"] == "Transpose":
        return is_faster(Strided.whole(tuple(row["sizes"][0])).transposed(row["attributes"]["perm"]))
    inputs = [
        None if sizes is None else ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(sizes))
        for i, sizes in enumerate(row["sizes"])
    ]
    node = ir.Node(row["domain"], row["operator"], inputs, attributes_without_schema(row["attributes"]))
    call = Call.of(Builder(), node)
    return any(form.name == row["form"] and form.when(call) for form in FORMS.of(node))
