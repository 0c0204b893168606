"""Products with weights of 4 or 8 bits in blocks: one node that reads the bits, where a step writes the weight first.

A step has DequantizeLinear, Transpose and MatMul, which every runtime knows. onnxruntime's own MatMulNBits gives the
same numbers without the float weight: with 128 rows it takes half of the time, and less memory. The gradient of what
is multiplied has no such node; its DequantizeLinear stays.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_operators import CONTRIB, kernel
from gradgraph.builder import Var
from gradgraph.normal.dialects.packed_weights import seen_as
from gradgraph.normal.edit import Editor
from gradgraph.registry import attributes
from gradgraph.shapes import shape_of

_BITS = {ir.DataType.UINT4: 4, ir.DataType.UINT8: 8}
_BLOCKS = (16, 32, 64, 128, 256)


def multiply_packed(model: ir.Model) -> None:
    """Apply the pass to the main graph, in place."""
    editor = Editor(model)
    known: dict[ir.Value, ir.Value] = {}
    with editor.replacing_many():
        for node in [n for n in model.graph if n.op_type == "MatMul" and n.domain == ""]:
            if (made := _dequantized(node.inputs[1])) is not None and (product := _product(editor, node, made, known)):
                editor.replace(node, product)


def _dequantized(weight: ir.Value | None) -> ir.Node | None:
    """The node that makes ``weight``, if that is a stored matrix with a scale for each block of a row, turned."""
    turned = None if weight is None else weight.producer()
    if turned is None or turned.op_type != "Transpose" or attributes(turned).get("perm") not in ([1, 0], (1, 0)):
        return None
    source = turned.inputs[0]
    node = None if source is None else source.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.domain:
        return None
    attrs, (numbers, scales, *_) = attributes(node), node.inputs
    if numbers is None or scales is None or not numbers.is_initializer() or numbers.dtype not in _BITS:
        return None
    sizes = shape_of(numbers)
    fits = sizes is not None and len(sizes) == 2 and attrs.get("axis", 1) in (1, -1)
    fits = fits and attrs.get("block_size", 0) in _BLOCKS and scales.dtype == ir.DataType.FLOAT
    return node if fits and sizes is not None and int(sizes[1] or 0) % attrs["block_size"] == 0 else None


def _product(editor: Editor, node: ir.Node, made: ir.Node, known: dict[ir.Value, ir.Value]) -> Var | None:
    numbers, scales, *rest = made.inputs
    assert numbers is not None and numbers.const_value is not None and scales is not None
    bits, block = _BITS[numbers.const_value.dtype], attributes(made)["block_size"]
    rows, columns = (int(d) for d in numbers.const_value.shape.numpy())
    points = _points(rest[0] if rest else None, (rows, columns // block), bits)
    a = editor.var(node.inputs[0])
    if points is None or a is None or a.dtype != ir.DataType.FLOAT or a.rank is None or a.rank < 2:
        return None
    if numbers not in known:
        known[numbers] = _as_bytes(editor, numbers, (rows, columns // block, block * bits // 8))
    op, shape = editor.op, (*(a.shape or ())[:-1], rows)
    op.scope = node.name or ""
    inputs = [a, op.wrap(known[numbers]), editor.var(scales), *([op.const(points)] if points.size else [])]
    return kernel(op, "MatMulNBits", CONTRIB, inputs, shape, K=columns, N=rows, bits=bits, block_size=block)


def _as_bytes(editor: Editor, numbers: ir.Value, sizes: tuple[int, int, int]) -> ir.Value:
    """Another initializer of the same bytes."""
    tensor = numbers.const_value
    assert tensor is not None
    shape = ir.Shape(sizes)
    if isinstance(tensor, ir.ExternalTensor):
        other = seen_as(tensor, ir.DataType.UINT8, shape)
    else:
        other = ir.tensor(np.frombuffer(tensor.tobytes(), np.uint8).reshape(sizes))
    other.name = editor.op.fresh(f"{numbers.name}/bytes")
    value = ir.Value(name=other.name, type=ir.TensorType(ir.DataType.UINT8), shape=shape, const_value=other)
    editor.op.constants.append(value)
    return value


def _points(value: ir.Value | None, sizes: tuple[int, int], bits: int) -> np.ndarray | None:
    """The zero points as MatMulNBits takes them; empty where they are what it assumes, None where it cannot."""
    if value is None:
        return np.zeros(sizes[0] * -(-sizes[1] * bits // 8), np.uint8)
    tensor = value.const_value
    if tensor is None:
        return None
    if (tensor.numpy().astype(np.uint8) == 2 ** (bits - 1)).all():
        return np.zeros(0, np.uint8)
    return None if bits == 4 and sizes[1] % 2 else np.frombuffer(tensor.tobytes(), np.uint8)
