"""Core ML, on iPhones and Macs: the nodes that onnxruntime's CoreML provider takes as an ML Program, by its own table.

We had no Apple machine to run it on. onnxruntime computes nodes that the provider does not take on the CPU, so a file
for this backend runs everywhere. Each change of side costs a copy; the forms below avoid some. Core ML wants some
inputs as constants (the second factor of a Gemm, a bias of a Conv), and in a step of training weights are inputs: such
nodes are written as operators that take any tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.backend import Backend
from gradgraph.backends.forms import Forms
from gradgraph.builder import Builder, Var
from gradgraph.registry import attributes, case, real
from gradgraph.shapes import constant_of, shape_of

Complaint = Callable[[ir.Node], str]  # why Core ML does not take this node; empty if it does
FORMS = Forms()
form = FORMS.add


def _anything(node: ir.Node) -> str:
    return ""


def _of_rank(*ranks: int) -> Complaint:
    """Inputs of so many axes."""

    def complaint(node: ir.Node) -> str:
        dims = None if node.inputs[0] is None else shape_of(node.inputs[0])
        return "" if dims is not None and len(dims) in ranks else f"its input should have {_either(ranks)} axes"

    return complaint


def _with_constants(*positions: int) -> Complaint:
    """Inputs that must be known when the model is compiled."""

    def complaint(node: ir.Node) -> str:
        open_ = [i for i in positions if i < len(node.inputs) and _is_computed(node.inputs[i])]
        return f"its input {open_[0]} is computed or fed, and Core ML wants a constant" if open_ else ""

    return complaint


def _is_computed(value: ir.Value | None) -> bool:
    return value is not None and constant_of(value) is None and not value.is_initializer()


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def _all(*complaints: Complaint) -> Complaint:
    return lambda node: next(filter(None, (c(node) for c in complaints)), "")


def _without_batch_axes(node: ir.Node) -> str:
    return "it has batch_dims" if attributes(node).get("batch_dims") else ""


def _of_float32(node: ir.Node) -> str:
    wrong = [v for v in node.inputs if v is not None and v.dtype != ir.DataType.FLOAT]
    return "its inputs should both be float32" if wrong else ""


def _of_one_output(node: ir.Node) -> str:
    return "Core ML gives no positions of the maxima" if any(y.uses() for y in node.outputs[1:]) else ""


# coreml_supported_mlprogram_ops.md of onnxruntime, as of 1.24: operator -> what else must hold
ACCEPTED: dict[str, Complaint] = {
    **dict.fromkeys(
        (
            *("Add", "ArgMax", "Cast", "Ceil", "Clip", "Concat", "Cos", "DepthToSpace", "Div", "Elu", "Erf", "Exp"),
            *("Gelu", "GridSample", "GroupNormalization", "HardSigmoid", "Identity", "InstanceNormalization"),
            *("LayerNormalization", "LeakyRelu", "MatMul", "Max", "Mul", "PRelu", "Range", "Reciprocal", "ReduceMax"),
            *("ReduceMean", "ReduceSum", "Relu", "Reshape", "Resize", "Round", "Shape", "Sigmoid", "Sin", "Softmax"),
            *("Softplus", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "Transpose", "Unsqueeze"),
        ),
        _anything,
    ),
    "AveragePool": _of_rank(4),
    "Conv": _all(_of_rank(3, 4), _with_constants(2)),
    "ConvTranspose": _with_constants(1, 2),
    "GatherND": _without_batch_axes,
    "Gemm": _with_constants(1),
    "GlobalAveragePool": _of_rank(4),
    "GlobalMaxPool": _of_rank(4),
    "MaxPool": _all(_of_rank(4), _of_one_output),
    "Pow": _of_float32,
    "Slice": _with_constants(1, 2, 3, 4),
    "Split": _with_constants(1),
}


def refuses(node: ir.Node) -> str:
    """Why Core ML does not take ``node``; empty if it does."""
    if node.domain != "" or node.op_type not in ACCEPTED:
        return f"it has no operator {node.op_type}"
    return ACCEPTED[node.op_type](node)


# --- forms --------------------------------------------------------------------------------------------------


@form("Neg", case(real(3, 4)), domain="")
def times_minus_one(op: Builder, x: Var) -> Var | None:
    """Core ML has no Neg."""
    return x * op.const(np.asarray(-1, x.dtype.numpy())) if x.dtype.is_floating_point() else None


@form(
    "Gemm",
    case(real(3, 4), real(4, 5), real(5)),
    case(real(4, 3), real(5, 4), real(3, 5), transA=1, transB=1, alpha=0.5, beta=2.0),
    case(real(3, 4), real(4, 5), alpha=3.0),
    domain="",
    when=lambda call: _is_computed(call.node.inputs[1]),
)
def product_and_sum(
    op: Builder,
    a: Var,
    b: Var,
    c: Var | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Var:
    """A weight that is trained is an input, and Gemm's second factor must be a constant; MatMul's need not be."""
    left, right = (op.Transpose(v, perm=[1, 0]) if turned else v for v, turned in ((a, transA), (b, transB)))
    product = _scaled(op.MatMul(left, right), alpha)
    return product if c is None else product + _scaled(c, beta)


def _scaled(x: Var, factor: float) -> Var:
    return x if factor == 1.0 else x * factor


@form(
    "Conv",
    case(real(2, 3, 5, 5), real(4, 3, 3, 3), real(4), pads=[1, 1, 1, 1]),
    case(real(2, 4, 6), real(4, 2, 3), real(4), group=2),
    domain="",
    when=lambda call: len(call.inputs) > 2 and _is_computed(call.node.inputs[2]),
)
def bias_apart(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Var | None:
    """A bias that is trained is an input, and Conv's must be a constant."""
    if b is None or x.shape is None:
        return None
    column = op.Reshape(b, [1, -1, *[1] * (x.rank - 2)])
    return op.Conv(x, w, **attrs) + column


COREML = Backend(
    name="coreml",
    about="standard nodes in the forms that onnxruntime's CoreML provider takes (from its table; not run by us)",
    provider="CoreMLExecutionProvider",
    forms=FORMS,
    refuses=refuses,
)
