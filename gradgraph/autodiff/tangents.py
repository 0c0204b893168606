"""Tangent rules for operators whose tangents have a simpler form than two vjps (see ``forward.py``).

An operator that is linear in an input is applied to the input's tangent. If the Jacobian is symmetric, as for every
elementwise function of one tensor, the gradient rule itself computes the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.path import carries
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.operator_table import OperatorTable
from gradgraph.graph.shape_inference import shape_of
from gradgraph.rules import containers, registry
from gradgraph.rules.activation import gelu_gradient, normal_cdf
from gradgraph.rules.elementwise import stepped_sign

Tangents = Sequence[Var | None]  # tangents of the inputs of a node, in order; None is zero
Push = Callable[[Builder, ir.Node, Tangents], Sequence[Var] | None]
# tangent rules ``push(op, node, tangents)``: one tangent per output, or None to compute the tangent by two vjps
PUSHES = OperatorTable[Push]()

Both = Callable[[Builder, ir.Node, Var], tuple[Var, Var] | None]
# rules ``both(op, node, tangent)``, which recompute the only output with its tangent, as both share most work; they
# return both, or None to use a tangent rule
TOGETHER = OperatorTable[Both]()


def known_dims(x: ir.Value | None) -> shapes.Shape | None:
    """Return the shape of a tensor if all sizes are numbers or names, else None."""
    dims = shape_of(x) if x is not None and isinstance(x.type, ir.TensorType) else None
    return None if dims is None or None in dims else dims


def _again(op: Builder, node: ir.Node, inputs: Mapping[int, Var | None]) -> list[Var]:
    """Emit ``node`` again with ``inputs`` (by index) replaced; return the outputs."""
    attrs: dict[str, Any] = dict(node.attributes)
    operands = [inputs[i] if i in inputs else op.wrap(x) for i, x in enumerate(node.inputs)]
    results = all_of(op.emit(node.op_type, *operands, outputs=len(node.outputs), **attrs))
    for result, y in zip(results, node.outputs, strict=True):
        result.value.type = y.type
    return results


def _widened(op: Builder, t: Var, y: ir.Value) -> Var:
    """Broadcast ``t`` to the shape of ``y``, unless it is known to have that shape."""
    known = known_dims(y)
    return t if known is not None and t.shape == known else op.Expand(t, op.shape(op.wrap(y)))


# --- linear in their inputs ----------------------------------------------------------------------------


_LINEAR = (
    "AveragePool Cast ConcatFromSequence CumSum DepthToSpace Expand Flatten Gather GatherElements GatherND "
    "GlobalAveragePool Identity ReduceMean ReduceSum Reshape SequenceAt SequenceErase "
    "Slice SpaceToDepth Split SplitToSequence Squeeze Tile Transpose Trilu Unsqueeze"
)


@PUSHES(*_LINEAR.split())
def _linear(op: Builder, node: ir.Node, ts: Tangents) -> list[Var]:
    """Return the operator applied to the tangent of its first input, in which it is linear."""
    return _again(op, node, {0: ts[0]})


@PUSHES("Optional", "OptionalGetElement")
def _content(op: Builder, node: ir.Node, ts: Tangents) -> list[Var] | None:
    """Return the tangent of an optional, which is its content's tangent; None if the content has none."""
    return None if ts[0] is None else [ts[0]]


@PUSHES("Einsum", "MatMul", "Mul")
def _multilinear(op: Builder, node: ir.Node, ts: Tangents) -> list[Var]:
    """Return the tangent by the product rule: the sum, over the inputs, of ``node`` with the tangent as that input."""
    return [op.sum_of([_again(op, node, {i: t})[0] for i, t in enumerate(ts) if t is not None])]


@PUSHES("Div")
def _quotient(op: Builder, node: ir.Node, ts: Tangents) -> list[Var]:
    """Return the tangent ``(dx - z·dy)/y`` of ``z = x/y``."""
    y, z = (op.wrap(v) for v in (node.inputs[1], node.outputs[0]) if v is not None)
    dx, dy = ts
    if dy is None:
        return [_again(op, node, {0: dx})[0]]
    down = z * dy
    return [-(down / y) if dx is None else (dx - down) / y]


@PUSHES("Conv", "ConvTranspose")
def _convolution(op: Builder, node: ir.Node, ts: Tangents) -> list[Var] | None:
    x, w, b = (*ts, None)[:3]
    if b is not None and w is None:
        return None
    terms = [_again(op, node, {0: x, 2: None})] if x is not None else []
    terms += [_again(op, node, {1: w, 2: b})] if w is not None else []
    return [op.sum_of([term[0] for term in terms])]


@PUSHES("Gemm")
def _gemm(op: Builder, node: ir.Node, ts: Tangents) -> list[Var] | None:
    """Return ``α·(tA·B + A·tB) + β·tC`` for the tangents tA, tB and tC of the inputs.

    If only one of the two products is nonzero, its Gemm adds ``tC`` as its third input. For two products, a separate
    Add is faster than a Gemm that copies ``tC`` first. None if only C has a tangent.
    """
    ta, tb, tc = (*ts, None)[:3]
    if ta is None and tb is None:
        return None
    if ta is None or tb is None:
        return _again(op, node, ({0: ta} if tb is None else {1: tb}) | {2: tc})
    total = op.Add(*(_again(op, node, moved | {2: None})[0] for moved in ({0: ta}, {1: tb})))
    if tc is None:
        return [total]
    beta = registry.attributes(node)["beta"]
    return [total + (tc if beta == 1.0 else tc * beta)]


@PUSHES("Add", "Sum")
def _sum(op: Builder, node: ir.Node, ts: Tangents) -> list[Var]:
    terms = [t for t in ts if t is not None]
    return [_widened(op, op.emit(node.op_type, *terms) if len(terms) > 1 else terms[0], node.outputs[0])]


@PUSHES("Sub")
def _difference(op: Builder, node: ir.Node, ts: Tangents) -> list[Var]:
    a, b = ts
    total = a if b is None else -b if a is None else a - b
    assert total is not None
    return [_widened(op, total, node.outputs[0])]


@PUSHES("Concat", "SequenceConstruct", "SequenceInsert", "Where")
def _zeros_elsewhere(op: Builder, node: ir.Node, ts: Tangents) -> list[Var]:
    floating = {i: x for i, x in enumerate(node.inputs) if x is not None and carries(x)}
    return _again(op, node, {i: ts[i] or containers.zeros(op, op.wrap(x)) for i, x in floating.items()})


# --- with a symmetric Jacobian -------------------------------------------------------------------------


@PUSHES("Abs")
def _abs(op: Builder, node: ir.Node, ts: Tangents) -> list[Var] | None:
    """Return the tangent times Sign(x), which lowering replaces with faster nodes; None if x has no tangent."""
    x, t = node.inputs[0], ts[0]
    if x is None or t is None:
        return None
    return [t * (op.Sign(op.wrap(x)) if op.named_operators else stepped_sign(op, op.wrap(x)))]


_SYMMETRIC = (
    "Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Log Mish Neg "
    "Reciprocal Relu Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh ThresholdedRelu"
)


@PUSHES(*_SYMMETRIC.split())
def _symmetric(op: Builder, node: ir.Node, ts: Tangents) -> list[Var] | None:
    """Return ``J·t`` as ``Jᵀ·t``, by the gradient rule; None if that rule returns no gradient.

    J is diagonal for elementwise functions, and ``diag(y) − y·yᵀ`` for Softmax.
    """
    product = registry.RULES["", node.op_type](op, node, ts)[0]
    return None if product is None else [product]


@TOGETHER("Gelu")
def _gelu(op: Builder, node: ir.Node, t: Var) -> tuple[Var, Var] | None:
    """Return the exact GELU as ``x·Φ(x)`` and its tangent, which needs Φ, too.

    None unless x is float32 and ``approximate`` is "none": in narrower types the operator is more accurate than its
    formula.
    """
    (x,) = (op.wrap(v) for v in node.inputs if v is not None)
    approximate = registry.attributes(node)["approximate"]
    if x.dtype != ir.DataType.FLOAT or approximate != "none":
        return None
    return x * normal_cdf(op, x), gelu_gradient(op, t, x, approximate=approximate)
