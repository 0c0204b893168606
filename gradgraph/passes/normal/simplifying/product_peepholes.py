"""Peepholes around matrix products (rows of the table in ``peepholes.py``).

A *swap* is a Transpose of the last two axes. Directly before a product it is free, because runtimes read the factor
transposed. These peepholes therefore move swaps next to products:

1. Reshape to a batch of matrices, swap, Reshape back to the axes before → swap (PyTorch exports keys that way);
2. a swap times a scalar → the swap of the product;
3. the swap of a MatMul with a swapped factor and no other readers → the MatMul of the swapped factors, in reverse
   order: ``(Aᵀ B)ᵀ → Bᵀ A``.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import before_swap, inputs_of, made_by, read_once, source_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.simplifying.peepholes import operand_pairs, rewrites


def _swap(op: Builder, x: ir.Value, rank: int) -> Var:
    return op.Transpose(op.wrap(x), perm=[*range(rank - 2), rank - 1, rank - 2])


def _rank(value: ir.Value) -> int:
    return len(value.shape) if value.shape is not None else 0


@rewrites("Reshape")
def _swap_in_a_batch(op: Builder, node: ir.Node) -> Var | None:
    back = inputs_of(node)[0]
    batch = before_swap(back)
    x = source_of(batch, "Reshape")
    if x is None or not read_once(back, node):
        return None
    before, flat, after = shape_of(x), shape_of(batch), shape_of(node.outputs[0])
    if before is None or flat is None or after is None or len(before) < 3 or None in before:
        return None
    same_matrices = before[-2:] == flat[-2:] and len(flat) > 2
    return _swap(op, x, len(before)) if same_matrices and after == (*before[:-2], before[-1], before[-2]) else None


@rewrites("Mul")
def _number_times_swap(op: Builder, node: ir.Node) -> Var | None:
    for value, number in operand_pairs(node):
        if (x := before_swap(value)) is None:
            continue
        constant = shapes.small_constant(number)
        single = constant is not None and constant.size == 1 and constant.ndim <= _rank(value)
        if single and read_once(value, node):
            return _swap(op, (op.wrap(x) * op.wrap(number)).value, _rank(value))
    return None


@rewrites("Transpose")
def _swapped_product(op: Builder, node: ir.Node) -> Var | None:
    value = inputs_of(node)[0]
    product = made_by(value, "MatMul")
    if product is None or before_swap(node.outputs[0]) is None or not read_once(value, node):
        return None
    a, b = inputs_of(product)
    if min(_rank(a), _rank(b)) < 2 or not (before_swap(a) or before_swap(b)):
        return None
    left, right = (_unswapped(op, x) for x in (b, a))
    return left @ right


def _unswapped(op: Builder, x: ir.Value) -> Var:
    """Return ``x`` with the last two axes swapped, without a new node if ``x`` is itself swapped by a Transpose."""
    inner = before_swap(x)
    return _swap(op, x, _rank(x)) if inner is None else op.wrap(inner)
