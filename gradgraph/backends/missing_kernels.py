"""Replacements for operators that onnxruntime's CPU provider cannot compute, or computes wrongly.

It has no float64 kernel for some. A transformed model may contain one of them although the original runs: only its
gradient may use the operator, or the original has an old opset, where onnxruntime expands the operator into its
function body, unlike at opset 21.

It fuses a Transpose into a MatMul, and if such a stack of products has the inner size 0, leaves its output unwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from gradgraph.backends.shared_forms import scattered_winners
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import inputs_of, made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, calls_of


def _elu(op: Builder, x: Var, alpha: float = 1.0) -> Var:
    below = op.Exp(op.Where(x > 0.0, 0.0, x)) - 1.0
    return op.Where(x > 0.0, x, below * alpha)


def _selu(op: Builder, x: Var, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Var:
    return _elu(op, x, alpha) * gamma


def _hard_sigmoid(op: Builder, x: Var, alpha: float = 0.2, beta: float = 0.5) -> Var:
    line = x * alpha + beta
    return op.Where(line <= 0.0, 0.0, op.Where(line >= 1.0, 1.0, line))


def _softplus(op: Builder, x: Var) -> Var:
    return op.Max(x, 0.0) + op.Log(op.Exp(-op.Abs(x)) + 1.0)  # never overflows


FLOAT64: dict[str, Callable[..., Var | None]] = {
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda op, x, alpha=0.01: op.Where(x > 0.0, x, x * alpha),
    "MaxUnpool": scattered_winners,
    "Mish": lambda op, x: x * op.Tanh(_softplus(op, x)),
    "PRelu": lambda op, x, slope: op.Where(x > 0.0, x, x * slope),
    "Selu": _selu,
    "Softplus": _softplus,
    "Softsign": lambda op, x: x / (op.Abs(x) + 1.0),
    "ThresholdedRelu": lambda op, x, alpha=1.0: op.Where(x > alpha, x, 0.0),
}


def write_missing_kernels(model: ir.Model) -> ir.Model:
    """Replace nodes that onnxruntime cannot compute with equivalent nodes, in place; return ``model``."""
    editor = Editor(model)
    for op_type, write in FLOAT64.items():
        for node in calls_of(model, op_type):
            first = node.inputs[0]
            if first is None or first.dtype != ir.DataType.DOUBLE:
                continue
            attributes: dict[str, Any] = {a.name: a.value for a in node.attributes.values()}
            written = write(editor.op, *map(editor.op.wrap, node.inputs), **attributes)
            if written is not None:
                editor.replace(node, written)
    for node in filter(_may_stay_unwritten, calls_of(model, "MatMul")):
        a, b = map(editor.op.wrap, inputs_of(node))
        editor.replace(node, editor.op.Where(editor.op.Equal(editor.op.dim(a, -1), 0), 0.0, a @ b))
    return model


def _may_stay_unwritten(product: ir.Node) -> bool:
    """Return whether a stack of products with a transposed factor may have the inner size 0, but elements.

    Axes of unknown size may all have the inner size, as in attention, and the output would be empty, too.
    """
    factors, sizes = inputs_of(product), shape_of(product.outputs[0])
    inner = (shape_of(factors[0]) or (1,))[-1]
    if sizes is None or len(sizes) < 3 or not any(made_by(x, "Transpose") for x in factors):
        return False
    return (inner == 0 or not isinstance(inner, int)) and inner not in sizes and None not in sizes
