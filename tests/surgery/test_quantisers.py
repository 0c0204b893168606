"""Quantisers compute what ONNX's operators do, and packed weights come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from gradgraph.graph.quantisers import INTEGER_RANGES, Quantiser
from gradgraph.surgery.matmul_nbits import Packing

RNG = np.random.default_rng(0)
FORMS = [
    ((), {}),
    ((7,), {"axis": 1}),
    ((5,), {"axis": 0}),
    ((5,), {"axis": -2}),
    ((5, 3), {"axis": 1, "block_size": 3}),
]


def reference(op_type: str, feeds: dict[str, Any], **attributes: int) -> np.ndarray:
    node = onnx.helper.make_node(op_type, list(feeds), ["y"], **attributes)
    types = {n: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in feeds.items()}
    inputs = [onnx.helper.make_tensor_value_info(n, types[n], x.shape) for n, x in feeds.items()]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UNDEFINED, None)
    graph = onnx.helper.make_graph([node], "one", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    return np.asarray(ReferenceEvaluator(model).run(None, feeds)[0])


@pytest.mark.parametrize("kind", ["INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4"])
@pytest.mark.parametrize(("sizes", "attributes"), FORMS)
def test_both_directions_are_those_of_onnx(kind: str, sizes: tuple[int, ...], attributes: dict[str, int]) -> None:
    dtype = ir.DataType[kind]
    low, high = INTEGER_RANGES[dtype]
    x = RNG.normal(size=(5, 7)).astype(np.float32)
    scales = RNG.uniform(0.01, 0.5, sizes).astype(np.float32)
    points = RNG.integers(low, high, sizes, endpoint=True).astype(dtype.numpy())
    own = Quantiser(scales, points, (low, high), attributes.get("axis", 1), attributes.get("block_size", 0))
    numbers = reference("QuantizeLinear", {"x": x, "s": scales, "z": points}, **attributes)
    np.testing.assert_array_equal(own.quantised(x), numbers.astype(np.int64))
    floats = reference("DequantizeLinear", {"x": numbers, "s": scales, "z": points}, **attributes)
    np.testing.assert_array_equal(own.dequantised(numbers), floats)


@pytest.mark.parametrize(("sizes", "attributes"), FORMS)
@pytest.mark.parametrize("middle", [None, 0])
def test_a_quantiser_is_fitted_to_other_floats(sizes: Any, attributes: dict[str, int], middle: int | None) -> None:
    x = RNG.normal(size=(5, 7)) * 40
    before = Quantiser(np.ones(sizes, np.float32), np.zeros(sizes, np.int8), (-128, 127), attributes.get("axis", 1),
                       attributes.get("block_size", 0))  # fmt: skip
    assert before.middle == 0
    after = before.fitted(x, middle)
    assert after.scales.shape == sizes or after.scales.size == 1
    steps = Quantiser(after.scales.reshape(sizes), None, (-1, 1), before.axis, before.block).dequantised(
        np.ones((5, 7))
    )
    off = after.dequantised(after.quantised(x)) - x
    assert (np.abs(off) <= steps * (0.501 if middle is not None else 1.01)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_numbers_come_back(bits: int) -> None:
    packing = Packing(K=40, N=3, bits=bits, block_size=16)
    assert packing.blocks == 3
    numbers = RNG.integers(0, 2**bits, (3, 48))
    like = np.zeros((3, 3, 16 * bits // 8), np.uint8)
    np.testing.assert_array_equal(packing.weight(packing.packed_weight(numbers, like)), numbers)
    points, packed = RNG.integers(0, 2**bits, (3, 3)), np.zeros(3 * -(-3 * bits // 8), np.uint8)
    np.testing.assert_array_equal(packing.points(packing.packed_points(points, packed)), points)
