"""Tangents of matrix products: each product adds up what there is so far (``Gemm``'s third input), a bias included.

A separate addition would pass over the result once more, which is what makes a linear layer dearer than three times
its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph import registry
from gradgraph.builder import Builder, Var


def gemm(op: Builder, node: ir.Node, ts: Sequence[Var | None]) -> list[Var] | None:
    """``α·(tA·B + A·tB) + β·tC``."""
    factors, total = ts[:2], (*ts, None)[2]
    if factors[0] is None and factors[1] is None:
        return None
    attrs = registry.attributes(node)
    for left, right in ((factors[0], node.inputs[1]), (node.inputs[0], factors[1])):
        if left is not None and right is not None:
            total = op.Gemm(_var(op, left), _var(op, right), total, **attrs)
            attrs["beta"] = 1.0
    return None if total is None else [total]


def _var(op: Builder, x: ir.Value | Var) -> Var:
    return x if isinstance(x, Var) else op.wrap(x)


def linear(op: Builder, node: ir.Node, ts: Sequence[Var | None]) -> Var | None:
    """``tx·w + x·tw`` for ``x·w`` with a moving matrix ``w``, over all rows of ``x`` at once.

    Returns:
        ``None`` where this is no such product.
    """
    x, w = (op.wrap(v) for v in node.inputs if v is not None)
    dx, dw = ts
    if dw is None or x.shape is None or w.shape is None or x.rank < 2 or w.rank != 2:
        return None
    flat = x.rank > 2
    total = None if dx is None else op.Gemm(op.Flatten(dx, axis=-1) if flat else dx, w)
    result: Var = op.Gemm(op.Flatten(x, axis=-1) if flat else x, dw, total)
    return op.Reshape(result, op.shape(op.wrap(node.outputs[0])), allowzero=1) if flat else result


def biased(op: Builder, z: ir.Value, dz: Var, db: Var) -> Var | None:
    """``dz + db`` where ``dz``, the tangent of ``z``, was written by ``linear``: its products once more.

    Those without bias are left for pruning; so nobody else may read ``z``.

    Returns:
        ``None`` where the sum is best an addition.
    """
    producer = z.producer()
    readers = [node for node, _ in z.uses() if node.graph is not None]  # what is not in the model yet reads shapes
    if producer is None or producer.op_type != "MatMul" or len(readers) != 1 or z.is_graph_output():
        return None
    last = dz.value.producer()
    shape = last.inputs[1] if last is not None and last.op_type == "Reshape" else None
    products = _products(dz.value if shape is None or last is None else last.inputs[0])
    if not products or not _fits(db, z, flat=shape is not None):
        return None
    total = db
    for node in reversed(products):
        x, w = (op.wrap(v) for v in node.inputs[:2] if v is not None)
        total = op.Gemm(x, w, total)
    return total if shape is None else op.Reshape(total, op.wrap(shape), allowzero=1)


def _products(value: ir.Value | None) -> list[ir.Node]:
    """The Gemms that add up to ``value``, the last one first."""
    found: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None and node.op_type == "Gemm":
        found.append(node)
        value = node.inputs[2] if len(node.inputs) > 2 else None
    return found


def _fits(bias: Var, z: ir.Value, flat: bool) -> bool:
    """Does ``bias`` broadcast to ``z``, known to, also where the rows of ``z`` are in one axis?"""
    if bias.shape is None or z.shape is None or bias.rank > (1 if flat else len(z.shape)):
        return False
    dims = bias.op.wrap(z).shape or ()
    return all(b == 1 or (b is not None and b == d) for b, d in zip(reversed(bias.shape), reversed(dims), strict=False))
