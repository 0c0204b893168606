"""Frozen weights of 8 and 4 bits as C, beside onnxruntime: they stay in flash, and never become arrays in RAM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import gradgraph as gg
from gradgraph.errors import BuildError
from tests.kit.compiled_c import NEEDS_COMPILER, Program
from tests.kit.trained_c import train_beside

RNG = np.random.default_rng(0)
RANGES = {"INT8": (-128, 127), "UINT8": (0, 255), "INT4": (-8, 7), "UINT4": (0, 15)}


def integers(name: str, kind: str, shape: Sequence[int]) -> onnx.TensorProto:
    low, high = RANGES[kind]
    values = RNG.integers(low, high + 1, tuple(shape))
    return helper.make_tensor(name, getattr(TensorProto, kind), tuple(shape), values.ravel().tolist())


def model_of(
    kind: str, shape: Sequence[int], scales: Sequence[int], node: Any, x: Sequence[int], *,
    transposed: bool = False, points: bool = True, dtype: int = TensorProto.FLOAT, **attributes: Any,
) -> onnx.ModelProto:  # fmt: skip
    """Return a model that computes ``node`` of ``x`` and the weight ``w``, stored as integers with these scales."""
    low, high = RANGES[kind]
    nodes = [helper.make_node("DequantizeLinear", ["q", "s", "z"] if points else ["q", "s"], ["v"], **attributes)]
    nodes.append(helper.make_node("Transpose" if transposed else "Identity", ["v"], ["w"]))
    nodes += [node] if isinstance(node, onnx.NodeProto) else node
    known = [
        integers("q", kind, shape),
        numpy_helper.from_array(RNG.uniform(0.5, 1.5, tuple(scales)).astype(np.float32) / (high - low), "s"),
        *([integers("z", kind, scales)] if points else []),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", dtype, tuple(x))],
        [helper.make_empty_tensor_value_info("y")], known,
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


MATMUL = helper.make_node("MatMul", ["x", "w"], ["y"])
LAYOUTS: dict[str, Any] = {
    "per tensor": ((16, 12), (), MATMUL, (3, 16), {}),
    "per row": ((16, 12), (16,), MATMUL, (3, 16), {"axis": 0}),
    "per column": ((16, 12), (12,), MATMUL, (3, 16), {"axis": 1}),
    "blocks of rows": ((16, 12), (4, 12), MATMUL, (3, 16), {"axis": 0, "block_size": 4}),
    "transposed, in blocks": ((12, 16), (12, 2), MATMUL, (1, 16), {"axis": 1, "block_size": 8, "transposed": True}),
    "blocks along the result": ((16, 12), (16, 3), MATMUL, (3, 16), {"axis": 1, "block_size": 4}),
    "a vector": ((16, 12), (12,), MATMUL, (16,), {"axis": 1}),
    "on the left": ((16, 12), (12,), helper.make_node("MatMul", ["w", "x"], ["y"]), (5, 12, 2), {"axis": 1}),
    "an odd size": ((5, 3), (3,), MATMUL, (2, 5), {"axis": 1}),
    "convolution": ((6, 2, 3, 3), (6,), helper.make_node("Conv", ["x", "w"], ["y"], group=2, strides=[2, 1],
                    pads=[1, 0, 1, 2]), (2, 4, 7, 5), {"axis": 0}),
    "pointwise convolution": ((6, 4, 1, 1), (6,), helper.make_node("Conv", ["x", "w"], ["y"]), (2, 4, 3, 5),
                              {"axis": 0}),
    "convolution per tensor": ((6, 4, 3), (), helper.make_node("Conv", ["x", "w"], ["y"]), (2, 4, 7), {}),
    "transposed convolution": ((4, 3, 3, 3), (), helper.make_node("ConvTranspose", ["x", "w"], ["y"]), (2, 4, 3, 5),
                               {}),
}  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_integer_weights_stay_in_flash(layout: str, kind: str, points: bool, tmp_path: Path) -> None:
    shape, scales, node, x, options = LAYOUTS[layout]
    model = model_of(kind, shape, scales, node, x, points=points, **options)
    value = RNG.normal(size=x).astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": value})[0]  # onnxruntime's MatMulNBits rounds activations
    made = gg.export.c(model, tmp_path / "c")
    found = np.zeros(expected.shape, np.float32)
    assert Program(tmp_path / "c", "model").call("run", value, found) == 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)
    assert made.arena <= expected.nbytes * (2 if "convolution" in layout else 1) + 8
    count, bits = int(np.prod(shape)), 4 if "4" in kind else 8
    assert made.constants <= -(-count * bits // 8) + 8 * int(np.prod(scales)) + 200


TABLE = (9, 6)
TABLES: dict[str, Any] = {
    "per tensor": ((), {}),
    "per row": ((9,), {"axis": 0}),
    "per column": ((6,), {"axis": 1}),
    "blocks of columns": ((9, 2), {"axis": 1, "block_size": 3}),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("layout", TABLES)
def test_only_gathered_rows_become_floats(layout: str, kind: str, points: bool, tmp_path: Path) -> None:
    scales, options = TABLES[layout]
    node = helper.make_node("Gather", ["w", "x"], ["y"])
    model = model_of(kind, TABLE, scales, node, (2, 2), points=points, dtype=TensorProto.INT64, **options)
    rows = np.array([[8, -9], [3, 3]])
    expected = ReferenceEvaluator(model).run(None, {"x": rows})[0]
    made = gg.export.c(model, tmp_path / "c")
    program, found = Program(tmp_path / "c", "model"), np.zeros(expected.shape, np.float32)
    assert program.call("run", rows, found) == 0
    np.testing.assert_array_equal(found, expected)
    few = sum(len(rows.ravel()) * 4 * (2 if "blocks" in layout else 1) for _ in range(1 + points))
    assert made.arena <= expected.nbytes + (few if options.get("axis") == 0 or "blocks" in layout else 0) + 16
    assert program.call("run", np.array([[0, 1], [9, 0]]), found) == 1


def test_a_row_that_is_known_is_not_a_whole_table(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["at"], value_int=-2),
        helper.make_node("Gather", ["w", "at"], ["row"]),
        helper.make_node("Mul", ["row", "x"], ["y"]),
    ]
    model = model_of("INT8", TABLE, (9,), nodes, (6,), axis=0)
    x = RNG.normal(size=6).astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    made = gg.export.c(model, tmp_path / "c")
    found = np.zeros_like(expected)
    assert Program(tmp_path / "c", "model").call("run", x, found) == 0
    np.testing.assert_array_equal(found, expected)
    assert made.arena <= 2 * expected.nbytes + 16


@NEEDS_COMPILER
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_train_on_integer_weights(bits: int, tmp_path: Path) -> None:
    """The backward pass reads the integers, too."""
    kind = f"INT{bits}"
    first = model_of(kind, (16, 24), (24,), MATMUL, (3, 16), axis=1, points=False)
    nodes = list(first.graph.node)
    nodes[-1].output[0] = "h"
    nodes += [
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("DequantizeLinear", ["q2", "s2"], ["w2"], axis=0, block_size=8),
        helper.make_node("MatMul", ["t", "w2"], ["p"]),
        helper.make_node("Add", ["p", "bias"], ["y"]),
    ]
    known = [
        *first.graph.initializer, integers("q2", kind, (24, 6)),
        numpy_helper.from_array(np.full((3, 6), 0.5 / 2 ** (bits - 1), np.float32), "s2"),
        numpy_helper.from_array(np.zeros(6, np.float32), "bias"),
    ]  # fmt: skip
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", (3, 16)), ("y", (3, 6)))]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, known), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    step = gg.build(gg.lora(model, "*", rank=2), "mse", gg.optim.sgd(0.05))
    made = gg.export.c(step, tmp_path / "c")
    assert train_beside(step, Program(tmp_path / "c"), 10, True) < 1e-5
    assert made.arena < 16 * 24 * 4  # less than one weight as floats


def test_results_of_four_bits_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("QuantizeLinear", ["x", "s"], ["q"], name="only", output_dtype=TensorProto.INT4),
             helper.make_node("DequantizeLinear", ["q", "s"], ["y"])]  # fmt: skip
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, (4,))] for n in "xy"]
    graph = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(np.float32(0.1), "s")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(BuildError, match=r"node 'only' \(QuantizeLinear\) cannot be exported as C code"):
        gg.export.c(model, tmp_path / "c")
