"""Keep operators between DequantizeLinear and QuantizeLinear as they are: onnxruntime computes them in integers.

A model quantised in the QDQ format computes a convolution as ``DequantizeLinear → Conv → QuantizeLinear``.
onnxruntime's optimizer fuses such a group into one integer kernel (QLinearConv), but only if the operator in the middle
is a standard one. Forms and layouts would replace it first, so that it would be computed in floats. Lowering therefore
begins by moving these operators to a domain that no form or rewrite knows, and ends by moving them back. The fused
kernels, and thus the numbers, are those of an inference session of the same file.

No gradient passes through a QuantizeLinear, so these groups are in the forward pass of frozen layers. In layers that
are trained with quantisation (``gradgraph.surgery.qat``), the pairs are arithmetic by now.

A group is kept if

1. the data, and the weight of a product, are dequantised from 8 bits by constant scales and zero points, not in blocks;
2. a QuantizeLinear to 8 bits is the only reader of the result, possibly after a Relu or Clip. MatMul and Gemm may also
   return floats;
3. the integer kernel computes the same function: it reads no scale for a bias, but assumes that it is the product of
   the scales of data and weight (onnxruntime rounds a bias of floats accordingly); and a Gemm with a bias has no
   factors. onnxruntime also fuses a Gemm whose bias has another scale, which is therefore added separately. The
   integer kernel of Softmax overflows for outputs of a small scale, so such a Softmax is written as Exp(LogSoftmax);
4. its sums are exact on this processor (see ``gradgraph.graph.quantisers.SEVEN_BITS``).

On x86, onnxruntime computes int8 data as uint8. Its optimizer does not convert data with several readers, such as the
input of a residual block, and fuses no group of both types. All data are therefore converted first. This changes no
number, but a session of the original file computes such groups in floats, which may round a few results differently.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from gradgraph.graph.checks import DRAWING, has_bodies
from gradgraph.graph.nodes import input_at, inputs_of, is_standard, made_by, only_reader
from gradgraph.graph.shapes import constant_of
from gradgraph.machine.hardware import is_x86, saturates
from gradgraph.passes.normal.edit import Editor
from gradgraph.passes.normal.simplifying.fragile_quantization import write_unsigned
from gradgraph.passes.normal.weights.saturating import find_saturating
from gradgraph.rules.registry import attributes

LEAST_SOFTMAX_SCALE = 1 / 300  # with 1/446, onnxruntime's QLinearSoftmax returns 0 for some of the largest numbers
_DOMAIN = "gradgraph.integers"
_PRODUCTS = ("Conv", "Gemm", "MatMul")
_RETURN_FLOATS = ("Gemm", "MatMul")
_OTHERS = (
    *("Add", "AveragePool", "Concat", "Flatten", "GlobalAveragePool", "LeakyRelu", "MaxPool", "Mul", "Reshape"),
    *("Sigmoid", "Softmax", "Squeeze", "Transpose", "Unsqueeze"),
)
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


def hide_integer_groups(model: ir.Model) -> None:
    """Move the operators that onnxruntime computes in integers to a domain of their own, in place."""
    if is_x86():
        write_unsigned(model, everywhere=True)
    groups = _Groups(model.graph)
    groups.separate_biases(Editor(model))
    groups.split_small_softmaxes(Editor(model))
    for node in [n for middle in model.graph for n in groups.of(middle)]:
        node.domain = _DOMAIN


def show_integer_groups(model: ir.Model) -> None:
    """Move hidden operators back to ONNX's domain, in place."""
    for node in model.graph:
        if node.domain == _DOMAIN:
            node.domain = ""
    model.opset_imports.pop(_DOMAIN, None)


class _Groups:
    """The groups of a graph without QuantizeLinear and DequantizeLinear: an operator, and an activation after it."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._constants = _constants(graph) if any(is_standard(n, "DequantizeLinear") for n in graph) else set()

    def of(self, node: ir.Node) -> Iterator[ir.Node]:
        """Yield ``node``, and the activation after it, if onnxruntime computes them in integers."""
        if is_standard(node, *_PRODUCTS):
            fits = self._is_exact_product(node)
        else:
            floats = [v for v in inputs_of(node) if v.dtype is None or v.dtype.is_floating_point()]
            fits = is_standard(node, *_OTHERS) and bool(floats) and all(map(self._is_of_bytes, floats))
        if not fits:
            return
        applied = _activation_after(node)
        if self._is_quantised((applied or node).outputs[0]):
            yield from filter(None, (node, applied))
        elif is_standard(node, *_RETURN_FLOATS):
            yield node

    def separate_biases(self, editor: Editor) -> None:
        """Add the bias of each Gemm by an Add, if it is dequantised by another scale than its integer kernel's."""
        op = editor.op
        for node in [n for n in self._graph if is_standard(n, "Gemm") and len(inputs_of(n)) == 3]:
            x, w, bias = inputs_of(node)
            if made_by(bias, "DequantizeLinear") is not None and not self._has_scale_of_product(bias, node):
                options = attributes(node)
                beta, summand = options.pop("beta", 1.0), op.wrap(bias)
                product = op.Gemm(op.wrap(x), op.wrap(w), **options)
                editor.replace(node, product + (summand if beta == 1.0 else summand * beta))

    def split_small_softmaxes(self, editor: Editor) -> None:
        """Write each Softmax whose integer kernel may overflow as Exp(LogSoftmax), which onnxruntime does not fuse."""
        op = editor.op
        for node in [n for n in self._graph if is_standard(n, "Softmax") and self._is_quantised(n.outputs[0])]:
            reader = next(iter(node.outputs[0].uses())).node
            scale = _numbers(reader.inputs[1])
            if self._is_of_bytes(node.inputs[0]) and (scale is None or (scale < LEAST_SOFTMAX_SCALE).any()):
                editor.replace(node, op.Exp(op.LogSoftmax(op.wrap(inputs_of(node)[0]), **attributes(node))))

    def _is_of_bytes(self, value: ir.Value | None) -> bool:
        """Whether ``value`` is dequantised from 8 bits, by a constant scale and zero point."""
        node = made_by(value, "DequantizeLinear")
        return node is not None and _kind(node.inputs[0]) in _BYTES and self._is_fixed(node)

    def _is_fixed(self, pair: ir.Node) -> bool:
        """Whether the scale and zero point of a QuantizeLinear or DequantizeLinear are constant, and not in blocks."""
        return self._constants.issuperset(inputs_of(pair)[1:]) and not pair.attributes.get_int("block_size", 0)

    def _is_quantised(self, value: ir.Value) -> bool:
        """Whether the only reader of ``value`` is a QuantizeLinear to 8 bits."""
        reader = only_reader(value, "QuantizeLinear")
        if reader is None or reader.inputs[0] is not value:
            return False
        return _kind(reader.outputs[0]) in _BYTES and self._is_fixed(reader)

    def _is_exact_product(self, node: ir.Node) -> bool:
        """Whether the integer kernel of a product computes the same function as the float operator."""
        weight, attrs, bias = made_by(node.inputs[1], "DequantizeLinear"), attributes(node), input_at(node, 2)
        if weight is None or weight.inputs[0] not in self._constants:
            return False
        has_factors = bias is not None and (attrs.get("alpha", 1), attrs.get("beta", 1)) != (1, 1)
        if has_factors or not all(map(self._is_of_bytes, node.inputs[:2])):
            return False
        fits = bias is None or bias in self._constants or self._has_scale_of_product(bias, node)
        return fits and not (saturates() and _may_saturate(node, weight))

    def _has_scale_of_product(self, bias: ir.Value, node: ir.Node) -> bool:
        """Whether ``bias`` is dequantised from int32 by the product of the scales of data and weight."""
        made = [made_by(v, "DequantizeLinear") for v in (*node.inputs[:2], bias)]
        scales = [_numbers(one.inputs[1]) for one in made if one is not None]
        read = made[2]
        if read is None or len(scales) < 3 or _kind(read.inputs[0]) != ir.DataType.INT32 or not self._is_fixed(read):
            return False
        points = _numbers(input_at(read, 2)) if input_at(read, 2) is not None else np.zeros(1)
        if points is None or points.any():
            return False
        x, w, b = (np.array([np.nan]) if scale is None else np.ravel(scale) for scale in scales)
        return bool(np.allclose(x * w, b, rtol=1e-5, atol=0))


def _constants(graph: ir.Graph) -> set[ir.Value]:
    """Return the stored values of ``graph``, and all that onnxruntime computes from them when it opens a session."""
    found = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for node in graph:
        is_folded = node.op_type not in (*DRAWING, "DequantizeLinear") and not has_bodies(node)
        if is_folded and found.issuperset(inputs_of(node)):
            found.update(node.outputs)
    return found


def _kind(value: ir.Value | None) -> ir.DataType | None:
    return None if value is None else value.dtype


def _activation_after(node: ir.Node) -> ir.Node | None:
    """Return the Relu or Clip that is the only reader of ``node``, or None."""
    reader = only_reader(node.outputs[0], "Clip", "Relu")
    return reader if reader is not None and reader.inputs[0] is node.outputs[0] else None


def _numbers(value: ir.Value | None) -> np.ndarray | None:
    """Return a stored constant; None if it is computed, or in another file, which lowering does not read."""
    external = value is not None and isinstance(value.const_value, ir.ExternalTensor)
    return None if external else constant_of(value)


def _may_saturate(node: ir.Node, weight: ir.Node) -> bool:
    whole = weight.inputs[0]
    return whole is None or isinstance(whole.const_value, ir.ExternalTensor) or bool(find_saturating([node]))
