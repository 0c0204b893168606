"""The rules for sizes agree with the outputs of ONNX's node cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.backend.test.case.node import collect_testcases

from gradgraph.graph.shapes import recorded_shape
from gradgraph.graph.size_rules import Rules


@pytest.mark.sweep(0)
@pytest.mark.filterwarnings("ignore")  # of NumPy, about the overflows that the cases are about
@pytest.mark.parametrize("sizes", ["known", "each open", "open by value"])
def test_sizes_of_node_cases_are_those_of_their_outputs(sizes: str) -> None:
    """With all inputs fed, so that rules have no constants, and with equal names only for equal sizes."""
    wrong = []
    for case in collect_testcases(None):
        proto, (given, outputs) = onnx.ModelProto(), case.data_sets[0]
        proto.CopyFrom(case.model)
        named = _name_sizes(proto, given, sizes)
        try:
            model = ir.from_proto(proto)
        except NotImplementedError:  # a type that onnx-ir does not have
            continue
        for value in model.graph.outputs:
            value.shape = None
        Rules(model).infer_model(model, every=True)
        for value, expected in zip(model.graph.outputs, outputs, strict=True):
            if isinstance(expected, np.ndarray) and (dims := recorded_shape(value)) is not None:
                found = [b if d is None else named.get(d, b) if isinstance(d, str) else d
                         for d, b in zip(dims, expected.shape, strict=False)]  # fmt: skip
                if len(dims) != expected.ndim or tuple(found) != expected.shape:
                    wrong.append((case.name, dims, expected.shape))
    assert wrong == []


def _name_sizes(model: onnx.ModelProto, given: Sequence[Any], sizes: str) -> dict[str, int]:
    """Replace the sizes of the inputs by names, and return the size of each name."""
    named: dict[str, int] = {}
    for info, array in zip(model.graph.input, given, strict=False):
        if sizes == "known" or not isinstance(array, np.ndarray) or not info.type.HasField("tensor_type"):
            continue
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                dim.dim_param = f"{info.name}_{axis}" if sizes == "each open" else f"s{array.shape[axis]}"
                named[dim.dim_param] = array.shape[axis]
    return named
