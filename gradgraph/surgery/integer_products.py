"""Conversion of integer products to equivalent float products between QuantizeLinear and DequantizeLinear.

Integers have no gradient, but a pair of QuantizeLinear and DequantizeLinear has a straight-through gradient. After the
conversion, adapters and layers below can be trained:

1. ``QLinearMatMul``, ``QLinearConv``, ``QGemm``, and element-wise operators and pools between them become a
   DequantizeLinear of each operand, the float operator, and a QuantizeLinear. This is how ONNX defines them, but a sum
   halfway between two integers may be rounded differently.
2. ``MatMulInteger`` and ``ConvInteger`` after a DynamicQuantizeLinear, with the Cast and the Mul that convert their
   sums to floats, ``MatMulIntegerToFloat`` and ``DynamicQuantizeMatMul`` become the float product of dequantised
   weights and of data that are rounded in the same way.

Weights and biases stay integers, each followed by a DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.passes.normal.edit import Editor, attributes, discard, nodes_of
from gradgraph.passes.normal.opsets.opset import convert_below, convert_to_opset
from gradgraph.surgery.linear_layers import DOMAINS
from gradgraph.surgery.operation import numbers_of

_PAIR = ("QuantizeLinear", "DequantizeLinear")
PER_CHANNEL = 13  # the opset since which DequantizeLinear has an axis


def write_pairs(work: ir.Model) -> bool:
    """Convert all integer products of a model, in place; return whether it had any.

    Raises:
        BuildError: an integer product is not followed by nodes that convert it to floats.
    """
    fused = [node for node in nodes_of(work) if node.domain and node.op_type in _PAIR and node.domain in DOMAINS]
    if fused:
        convert_to_opset(work)
        for node in fused:
            node.domain = ""
    if not any(map(_is_form, work.graph)):
        return bool(fused)
    convert_below(work, PER_CHANNEL)
    editor = Editor(work)
    for node in [n for n in work.graph if _is_form(n)]:
        _FORMS[node.op_type](editor, node)
    for node in [n for n in work.graph if n.op_type == "DequantizeLinear" and _moves_integers(n)]:
        editor.replace(node, _dequantised(editor.op, *_inputs(editor, node, 3)))
    return True


def _is_form(node: ir.Node) -> bool:
    return node.op_type in _FORMS and node.domain in DOMAINS


def _moves_integers(node: ir.Node) -> bool:
    before = None if node.inputs[0] is None else node.inputs[0].producer()
    return before is not None and before.op_type in _MOVES


# --- integer operands and results ----------------------------------------------------------------------------------


_MOVES = ("Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def _dequantised(op: Builder, numbers: Var, scale: Var, zero: Var | None, axis: int = 0) -> Var:
    """Return integers dequantised by ``scale`` and ``zero``.

    The DequantizeLinear is written before any nodes that only move elements (``_MOVES``, such as a Reshape). So these
    nodes move floats, and gradients pass through them.
    """
    count = _count(scale)
    shape = [] if count == 1 else [count]
    scale = _shaped(op, scale, shape)
    if zero is not None and count > 1 and _count(zero) == 1:
        zero = op.Expand(_shaped(op, zero, []), shape)
    node = numbers.value.producer()
    if count == 1 and node is not None and node.op_type in _MOVES and not node.domain:
        moved, *others = [Var(op, v) for v in node.inputs if v is not None]
        x = _dequantised(op, moved, scale, zero, axis)
        floats: Var = op.emit(node.op_type, x, *others, outputs=1, **attributes(node))
        return floats
    options: dict[str, Any] = {"axis": axis} if shape else {}
    return op.DequantizeLinear(numbers, scale, None if zero is None else _shaped(op, zero, shape), **options)


def _count(scale: Var) -> int:
    held = numbers_of(scale.value)
    return 1 if held is None else int(held.size)


def _shaped(op: Builder, x: Var, shape: list[int]) -> Var:
    """Return ``x`` reshaped to ``shape``; equal stored results are one initializer.

    A Q/DQ pair is recognised by the scale that both nodes read.
    """
    if x.shape is not None and list(x.shape) == shape:
        return x
    numbers, graph = numbers_of(x.value), x.value.graph
    if numbers is None or not isinstance(graph, ir.Graph):
        return op.Reshape(x, op.const(shape, ir.DataType.INT64))
    return _stored(op, graph, f"{x.value.name}.{'row' if shape else 'number'}", numbers.numpy().reshape(shape))


def _stored(op: Builder, graph: ir.Graph, name: str, numbers: Any) -> Var:
    """Return an initializer with these values: an existing equal one, or a new one called ``name``."""
    while (held := graph.initializers.get(name)) is not None:
        tensor = numbers_of(held)
        if tensor is not None and tensor.shape.numpy() == numbers.shape and np.array_equal(tensor.numpy(), numbers):
            return Var(op, held)
        name += "_1"
    new = ir.tensor(numbers, name=name)
    value = ir.Value(name=name, const_value=new, type=ir.TensorType(new.dtype), shape=ir.Shape(numbers.shape))
    graph.register_initializer(value)
    return Var(op, value)


def _bias(op: Builder, bias: Var, x_scale: Var, w_scale: Var, factor: float = 1.0) -> Var:
    """Return an int32 bias as floats; its scale is ``x_scale`` times ``w_scale`` times ``factor``."""
    held, graph = [numbers_of(s.value) for s in (x_scale, w_scale)], bias.value.graph
    if factor != 1 or held[0] is None or held[1] is None or not isinstance(graph, ir.Graph):
        return op.cast(bias, ir.DataType.FLOAT) * op.Reshape(x_scale * w_scale * factor, [-1])
    scale = np.multiply(held[0].numpy().reshape(-1), held[1].numpy().reshape(-1))
    both = _stored(op, graph, f"{bias.value.name}_scale", scale if scale.size > 1 else scale.reshape(()))
    options: dict[str, Any] = {"axis": 0} if scale.size > 1 else {}
    return op.DequantizeLinear(bias, both, **options)


def _inputs(editor: Editor, node: ir.Node, count: int) -> list[Any]:
    """Return the first ``count`` inputs of a node; None for an omitted input."""
    given = [editor.op.wrap(v) for v in node.inputs]
    return [*given, *[None] * (count - len(given))]


def _rounded(op: Builder, y: Var, scale: Var, zero: Var | None) -> Var:
    return op.QuantizeLinear(y, _shaped(op, scale, []), None if zero is None else _shaped(op, zero, []))


def _linear_product(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = _inputs(editor, node, 8)
    columns = max(b.rank - 1, 0)
    y = _dequantised(op, a, a_scale, a_zero, a.rank - 2) @ _dequantised(op, b, b_scale, b_zero, columns)
    editor.replace(node, _rounded(op, y, y_scale, y_zero))


def _linear_conv(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = _inputs(editor, node, 9)
    operands = [_dequantised(op, x, x_scale, x_zero, 1), _dequantised(op, w, w_scale, w_zero, 0)]
    if bias is not None:
        operands.append(_bias(op, bias, x_scale, w_scale))
    editor.replace(node, _rounded(op, op.Conv(*operands, **attributes(node)), y_scale, y_zero))


def _gemm(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = _inputs(editor, node, 9)
    options = attributes(node)
    columns = 0 if options.get("transB") else 1
    operands = [_dequantised(op, a, a_scale, a_zero, 1), _dequantised(op, b, b_scale, b_zero, columns)]
    if c is not None:
        operands.append(_bias(op, c, a_scale, b_scale, options.get("alpha", 1.0)))
    y = op.Gemm(*operands, **options)
    editor.replace(node, y if y_scale is None else _rounded(op, y, y_scale, y_zero))


def _concat(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    y_scale, y_zero, *given = _inputs(editor, node, 2)
    floats = [_dequantised(op, *operand) for operand in zip(*[iter(given)] * 3, strict=True)]
    editor.replace(node, _rounded(op, op.Concat(*floats, **attributes(node)), y_scale, y_zero))


def _element_wise(op_type: str, operands: int) -> Callable[[Editor, ir.Node], None]:
    def form(editor: Editor, node: ir.Node) -> None:
        op, given = editor.op, _inputs(editor, node, 3 * operands + 2)
        floats = [_dequantised(op, *given[3 * i : 3 * i + 3]) for i in range(operands)]
        options = attributes(node)
        if options.pop("channels_last", 0):
            raise BuildError(
                f"'{shown(node.name)}' has its channels last, which no float operator supports; use the float model"
            )
        editor.replace(node, _rounded(op, op.emit(op_type, *floats, outputs=1, **options), *given[3 * operands :][:2]))

    return form


# --- conversion of sums to floats ----------------------------------------------------------------------------------


def _data(op: Builder, numbers: Var, scale: Var, zero: Var | None) -> Var:
    """Return dequantised data; if a DynamicQuantizeLinear wrote them, gradients pass straight through to its input."""
    x = op.DequantizeLinear(numbers, _shaped(op, scale, []), None if zero is None else _shaped(op, zero, []))
    source = numbers.value.producer()
    if source is not None and source.op_type == "DynamicQuantizeLinear" and source.inputs[0] is not None:
        own = Var(op, source.inputs[0])
        return own + op.detached(x - own)
    return x


def _integer_product(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, b, a_zero, b_zero = _inputs(editor, node, 4)
    cast, scaled, data_scale, weight_scale = _scales(node)
    axis = 0 if node.op_type == "ConvInteger" else b.rank - 1
    x = _data(op, a, Var(op, data_scale), a_zero)
    w = _dequantised(op, b, Var(op, weight_scale), b_zero, axis)
    y = op.Conv(x, w, **attributes(node)) if node.op_type == "ConvInteger" else x @ w
    editor.replace(scaled, y)
    discard(cast)
    discard(node)


def _scales(node: ir.Node) -> tuple[ir.Node, ir.Node, ir.Value, ir.Value]:
    """Return the Cast and Mul that convert an integer product's sums to floats, and the scales of input and weight."""
    cast = _only_reader(node.outputs[0], "Cast")
    scaled = None if cast is None else _only_reader(cast.outputs[0], "Mul")
    factor = None if scaled is None or cast is None else next(v for v in scaled.inputs if v is not cast.outputs[0])
    both = None if factor is None else factor.producer()
    if cast is None or scaled is None or both is None or both.op_type != "Mul":
        raise BuildError(
            f"'{shown(node.name or node.op_type)}' is {node.op_type} without a Cast and Mul that convert its sums to "
            "floats, so its float result is unknown; quantise the float model again in the QDQ format"
        )
    stored = [v for v in both.inputs if numbers_of(v) is not None]
    computed = [v for v in both.inputs if v is not None and numbers_of(v) is None]
    if len(stored) == 2:  # both scales are constant; the data's scale is the first
        computed = [v for v in stored if v is not None][:1]
    weight = next((v for v in stored if v is not None and v not in computed), None)
    if len(computed) != 1 or weight is None:
        raise BuildError(
            f"the scale of '{shown(node.name or node.op_type)}' is not the product of an input scale and a stored "
            "weight scale; quantise the float model again in the QDQ format"
        )
    return cast, scaled, computed[0], weight


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and uses[0].node.op_type == op_type and not value.is_graph_output() else None


def _dynamic_product(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, b, b_scale, b_zero, bias = _inputs(editor, node, 5)
    y = _data(op, *op.DynamicQuantizeLinear(a, outputs=3)) @ _dequantised(op, b, b_scale, b_zero, b.rank - 1)
    editor.replace(node, y if bias is None else y + bias)


def _product_to_float(editor: Editor, node: ir.Node) -> None:
    op = editor.op
    a, b, a_scale, b_scale, a_zero, b_zero, bias = _inputs(editor, node, 7)
    y = _data(op, a, a_scale, a_zero) @ _dequantised(op, b, b_scale, b_zero, b.rank - 1)
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
    "MatMulIntegerToFloat": _product_to_float,
}
