"""Find int8 weights that can saturate on x86 processors without VNNI, where onnxruntime multiplies them by 8-bit data.

These processors add products of unsigned data and signed weights in pairs, and each sum saturates at 16 bits. Weights
of 7 bits (``gradgraph.graph.quantisers.SEVEN_BITS``) are safe, and so are unsigned weights, which another kernel reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from gradgraph.graph.nodes import input_at
from gradgraph.graph.quantisers import SEVEN_BITS, within
from gradgraph.graph.shapes import constant_of

_DOMAINS = ("", "com.microsoft")
_PRODUCTS = ("Conv", "Gemm", "MatMul")  # float operators after DequantizeLinear
_INTEGER_PRODUCTS = {"DynamicQuantizeMatMul": 1, "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "QGemm": 3,
                     "QLinearConv": 3, "QLinearMatMul": 3}  # fmt: skip  # the place of the weight
_MOVES = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


def find_saturating(graph: Iterable[ir.Node]) -> list[ir.Value]:
    """Return the weights that can saturate: stored integers, or the floats that a QuantizeLinear rounds to integers."""
    return list(dict.fromkeys(v for node in graph if node.domain in _DOMAINS for v in _of_product(node)))


def _of_product(node: ir.Node) -> Iterator[ir.Value]:
    whole: ir.Value | None = None
    if node.op_type in _INTEGER_PRODUCTS:
        whole = input_at(node, _INTEGER_PRODUCTS[node.op_type])
    elif node.op_type in _PRODUCTS and _integers(input_at(node, 0)) is not None:
        whole = _integers(input_at(node, 1))
    stored = None if whole is None or whole.dtype != ir.DataType.INT8 else _too_wide(whole)
    if stored is not None:
        yield stored


def _integers(value: ir.Value | None) -> ir.Value | None:
    """Return the 8-bit integers that ``value`` is dequantised from, or None if no DequantizeLinear computes it.

    Between the DequantizeLinear and ``value``, there may be nodes that only move data.
    """
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _MOVES:
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.op_type != "DequantizeLinear" or node.domain not in _DOMAINS:
        return None
    return node.inputs[0] if node.inputs[0] is not None and node.inputs[0].dtype in _BYTES else None


def _too_wide(whole: ir.Value) -> ir.Value | None:
    """Return the stored weight of ``whole``, integers or rounded floats, if it may exceed 7 bits; else None."""
    numbers, node = constant_of(whole), whole.producer()
    if numbers is not None:
        return whole if numbers.size and not within(SEVEN_BITS, (numbers.min(), numbers.max())) else None
    if node is not None and node.op_type == "Clip":
        low, high = (constant_of(v) if v is not None else None for v in [*node.inputs, None, None][1:3])
        if low is not None and high is not None and within(SEVEN_BITS, (int(low), int(high))):
            return None
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    source = node.inputs[0] if node is not None and node.op_type == "QuantizeLinear" else None
    return source if source is not None and source.is_initializer() else None
