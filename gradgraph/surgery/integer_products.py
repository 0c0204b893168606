"""Products of integers, as the float products between Quantize- and DequantizeLinear that they stand for.

Integers have no gradient; a pair of QuantizeLinear and DequantizeLinear has one that passes it. So adapters, and what
lies below, can be trained:

1. ``QLinearMatMul``, ``QLinearConv`` and ``QGemm``, and element-wise operators and pools beside them: DequantizeLinear
   of each operand, the float operator, QuantizeLinear. That is their definition; a sum on a tie may round otherwise;
2. ``MatMulInteger`` and ``ConvInteger`` behind a DynamicQuantizeLinear, with the Cast and the Mul that make floats of
   their sums, and ``DynamicQuantizeMatMul``: the float product of data rounded likewise and dequantised weights.

Weights stay the integers that they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from gradgraph.builder import Builder, Var
from gradgraph.errors import BuildError, shown
from gradgraph.marks import mark_detached
from gradgraph.normal.edit import Editor, attributes, discard
from gradgraph.surgery.operated import numbers_of

_DOMAINS = ("", "com.microsoft")


def write_pairs(work: ir.Model) -> bool:
    """Write all of them so, in place; True if there were any.

    Raises:
        BuildError: an integer product is not followed by what makes floats of it.
    """
    editor = Editor(work)
    found = [node for node in work.graph if node.op_type in _FORMS and node.domain in _DOMAINS]
    for node in found:
        _FORMS[node.op_type](editor, node)
    for node in [n for n in work.graph if found and n.op_type == "DequantizeLinear" and _moves_integers(n)]:
        x, scale, zero = [*_vars(editor, node), None][:3]
        assert x is not None and scale is not None
        editor.replace(node, _dequantised(editor.op, x, scale, zero, 0))
    return bool(found)


def _moves_integers(node: ir.Node) -> bool:
    before = None if node.inputs[0] is None else node.inputs[0].producer()
    return before is not None and before.op_type in _MOVES


# --- operands and results that are integers ---------------------------------------------------------------------


_MOVES = ("Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def _dequantised(op: Builder, numbers: Var, scale: Var, zero: Var | None, axis: int) -> Var:
    """The floats that integers stand for; what only moved the integers moves the floats, so that gradients pass."""
    count = _count(scale)
    shape = [] if count == 1 else [count]
    scale = _shaped(op, scale, shape)
    if zero is not None and count > 1 and _count(zero) == 1:
        zero = op.Expand(_shaped(op, zero, []), shape)
    node = numbers.value.producer()
    if count == 1 and node is not None and node.op_type in _MOVES and not node.domain:
        moved, *others = [Var(op, v) for v in node.inputs if v is not None]
        floats: Var = op.emit(node.op_type, _dequantised(op, moved, scale, zero, axis), *others, **attributes(node))
        return floats
    options: dict[str, Any] = {"axis": axis} if shape else {}
    return op.DequantizeLinear(numbers, scale, None if zero is None else _shaped(op, zero, shape), **options)


def _count(scale: Var) -> int:
    held = numbers_of(scale.value)
    return 1 if held is None else int(held.size)


def _shaped(op: Builder, x: Var, shape: list[int]) -> Var:
    """Itself where it has this shape: pairs are known by reading one scale."""
    return x if x.shape is not None and list(x.shape) == shape else op.Reshape(x, op.const(shape, ir.DataType.INT64))


def _vars(editor: Editor, node: ir.Node) -> list[Var | None]:
    return [editor.var(v) for v in node.inputs]


def _rounded(op: Builder, y: Var, scale: Var | None, zero: Var | None) -> Var:
    assert scale is not None
    return op.QuantizeLinear(y, _shaped(op, scale, []), None if zero is None else _shaped(op, zero, []))


def _linear_product(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = _vars(editor, node)
    assert a is not None and b is not None and a_scale is not None and b_scale is not None
    columns = max(b.rank - 1, 0)
    y = _dequantised(op, a, a_scale, a_zero, a.rank - 2) @ _dequantised(op, b, b_scale, b_zero, columns)
    editor.replace(node, _rounded(op, y, y_scale, y_zero))


def _linear_conv(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, *bias = _vars(editor, node)
    assert x is not None and w is not None and x_scale is not None and w_scale is not None
    operands = [_dequantised(op, x, x_scale, x_zero, 1), _dequantised(op, w, w_scale, w_zero, 0)]
    if bias and bias[0] is not None:
        operands.append(op.cast(bias[0], ir.DataType.FLOAT) * op.Reshape(x_scale * w_scale, [-1]))
    editor.replace(node, _rounded(op, op.Conv(*operands, **attributes(node)), y_scale, y_zero))


def _gemm(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = [*_vars(editor, node), None, None, None][:9]
    assert a is not None and b is not None and a_scale is not None and b_scale is not None
    options = attributes(node)
    alpha = options.get("alpha", 1.0)
    operands = [
        _dequantised(op, a, a_scale, a_zero, 1),
        _dequantised(op, b, b_scale, b_zero, 0 if options.get("transB", 0) else 1),
    ]
    if c is not None:
        operands.append(op.cast(c, ir.DataType.FLOAT) * op.Reshape(a_scale * b_scale * alpha, [-1]))
    y = op.Gemm(*operands, **options)
    editor.replace(node, y if y_scale is None else _rounded(op, y, y_scale, y_zero))


def _concat(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    y_scale, y_zero, *given = _vars(editor, node)
    floats = [
        _dequantised(op, x, s, z, 0)
        for x, s, z in zip(*[iter(given)] * 3, strict=True)
        if x is not None and s is not None
    ]
    editor.replace(node, _rounded(op, op.Concat(*floats, **attributes(node)), y_scale, y_zero))


def _element_wise(op_type: str, operands: int) -> Callable[[Editor, ir.Node], None]:
    def form(editor: Editor, node: ir.Node) -> None:
        op, given = editor.op, _vars(editor, node)
        floats: list[Var] = []
        for numbers, scale, zero in zip(*[iter(given[: 3 * operands])] * 3, strict=True):
            assert numbers is not None and scale is not None
            floats.append(_dequantised(op, numbers, scale, zero, 0))
        options = attributes(node)
        if options.pop("channels_last", 0):
            raise BuildError(f"'{shown(node.name)}' has its channels last, which no float operator has")
        editor.replace(node, _rounded(op, op.emit(op_type, *floats, **options), *given[3 * operands :][:2]))

    return form


# --- sums that are made floats ----------------------------------------------------------------------------------


def _straight(op: Builder, x: Var, rounded: Var) -> Var:
    """``rounded``, with the gradient of ``x``."""
    difference = op.Identity(rounded - x)
    producer = difference.value.producer()
    assert producer is not None
    mark_detached(producer)
    return x + difference


def _integer_product(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, b, a_zero, b_zero = [*_vars(editor, node), None, None][:4]
    assert a is not None and b is not None
    scaled, data_scale, weight_scale = _scales(node)
    axis = 0 if node.op_type == "ConvInteger" else b.rank - 1
    x = op.DequantizeLinear(a, Var(op, data_scale), a_zero)
    source = a.value.producer()
    if source is not None and source.op_type == "DynamicQuantizeLinear" and source.inputs[0] is not None:
        x = _straight(op, Var(op, source.inputs[0]), x)
    w = _dequantised(op, b, Var(op, weight_scale), b_zero, axis)
    y = op.Conv(x, w, **attributes(node)) if node.op_type == "ConvInteger" else x @ w
    cast = scaled.inputs[0 if scaled.inputs[0] is not None and _is_cast_of(scaled.inputs[0], node) else 1]
    between = None if cast is None else cast.producer()
    editor.replace(scaled, y)
    for gone in (between, node):
        if gone is not None:
            discard(gone)


def _is_cast_of(value: ir.Value, node: ir.Node) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Cast" and producer.inputs[0] is node.outputs[0]


def _scales(node: ir.Node) -> tuple[ir.Node, ir.Value, ir.Value]:
    """The Mul that makes floats of the sums, and the scales of data and weight that it multiplies them by."""
    cast = _only_reader(node.outputs[0], "Cast")
    scaled = None if cast is None else _only_reader(cast.outputs[0], "Mul")
    factor = None if scaled is None or cast is None else next(v for v in scaled.inputs if v is not cast.outputs[0])
    both = None if factor is None else factor.producer()
    if scaled is None or both is None or both.op_type != "Mul":
        raise BuildError(
            f"'{shown(node.name or node.op_type)}' is {node.op_type}, and no Cast and Mul behind it make floats of its "
            "sums, so nothing says what its float result is"
        )
    stored = [v for v in both.inputs if numbers_of(v) is not None]
    computed = [v for v in both.inputs if v is not None and numbers_of(v) is None]
    if len(stored) == 2:  # fixed scales: that of the data is one number
        computed = [v for v in stored if v is not None][:1]
    weight = next((v for v in stored if v is not None and v not in computed), None)
    if len(computed) != 1 or weight is None:
        raise BuildError(
            f"the scale of '{shown(node.name or node.op_type)}' is no product of one of the data and a stored one"
        )
    return scaled, computed[0], weight


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and uses[0].node.op_type == op_type and not value.is_graph_output() else None


def _dynamic_product(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, b, b_scale, b_zero, bias = [*_vars(editor, node), None, None][:5]
    assert a is not None and b is not None and b_scale is not None
    numbers, scale, zero = op.DynamicQuantizeLinear(a, outputs=3)
    y = _straight(op, a, op.DequantizeLinear(numbers, scale, zero)) @ _dequantised(op, b, b_scale, b_zero, b.rank - 1)
    editor.replace(node, y if bias is None else y + bias)


_FORMS: dict[str, Any] = {
    "QLinearMatMul": _linear_product,
    "QLinearConv": _linear_conv,
    "QGemm": _gemm,
    "QLinearConcat": _concat,
    "QLinearAdd": _element_wise("Add", 2),
    "QLinearMul": _element_wise("Mul", 2),
    "QLinearSigmoid": _element_wise("Sigmoid", 1),
    "QLinearLeakyRelu": _element_wise("LeakyRelu", 1),
    "QLinearAveragePool": _element_wise("AveragePool", 1),
    "QLinearGlobalAveragePool": _element_wise("GlobalAveragePool", 1),
    "MatMulInteger": _integer_product,
    "ConvInteger": _integer_product,
    "DynamicQuantizeMatMul": _dynamic_product,
}
