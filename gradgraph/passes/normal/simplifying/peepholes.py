"""Peephole optimisation: a table of small patterns and shorter replacements.

1. powers with a small constant exponent: ``x**2 → x·x``, ``x**3 → x·x·x``, ``x**1 → x``, ``x**0.5 → √x``,
   ``x**-1 → 1/x``, ``x**0 → 1``;
2. neutral elements: ``x·1``, ``1·x``, ``x/1``, ``x+0``, ``0+x``, ``x−0`` → ``x``;
3. double negation ``−(−x) → x``, and ``a + (−b) → a − b``, ``a − (−b) → a + b``;
4. Cast to a tensor's own type, Identity, and Transpose that changes nothing → their input;
5. Reshape of a Reshape, Transpose of a Transpose → one (unless a product reads the outer one as its transposed factor,
   which costs nothing);
6. Expand of a summand or factor whose partner has the shape of the result → broadcasting;
7. Transpose of a Gemm without other readers → the Gemm of the transposed factors, in reverse order;
8. Add of a tensor to a Gemm of equal shape without other readers → the Gemm with that summand, unless the summand is a
   Gemm, too: copying the summand takes as long as the addition;
9. a constant bias of zeros (some exporters always write one) → none;
10. ConstantOfShape of a few known elements, and Expand to an empty tensor (which onnxruntime's optimizer drops on an
    axis of 1) → a constant; Sum of one term → that term;
11. Cast after a lossless Cast → one; ``−((−a)·b)`` and ``−((−a)/b)`` → ``a·b`` and ``a/b``;
12. ``(x·a)·b`` → ``x·(a·b)`` if one of the numbers is a power of two, so that the result is exact, and ``(x + x)·b``
    → ``x·(2·b)``; both occur in the tangent of ``√(x·x)``.

A replacement keeps shape and element type, so a pattern does not apply if its constant would enlarge the other operand
by broadcasting. Values that are graph inputs or outputs keep their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.marks import is_detached, is_for_precision, is_marked_constant
from gradgraph.graph.nodes import before_swap, input_at, inputs_of, is_standard, made_by, read_once, source_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, attributes
from gradgraph.passes.normal.simplifying.affected_nodes import Changes

Rewrite = Callable[[Builder, ir.Node], Var | None]
REWRITES: dict[str, list[Rewrite]] = {}


def rewrites(*op_types: str) -> Callable[[Rewrite], Rewrite]:
    """Add a row to the table: ``rewrite(op, node)`` returns the replacement of the node's first output, or ``None``."""

    def register(rewrite: Rewrite) -> Rewrite:
        for op_type in op_types:
            REWRITES.setdefault(op_type, []).append(rewrite)
        return rewrite

    return register


def simplify(model: ir.Model, changes: Changes | None = None) -> ir.Model:
    """Apply the table to ``model`` in place, in one sweep in graph order, bodies included, and return it.

    ``changes`` are those since the last of several sweeps over a model: nodes that none of them affects are skipped.
    """
    editor, changes = Editor(model), changes or Changes()
    with editor.replacing_many():
        for node in changes.since_last_sweep(model):
            if node.domain or not changes.affect(node):
                continue
            for rewrite in REWRITES.get(node.op_type, ()):
                new = rewrite(editor.op, node)
                if new is not None and _keeps_outputs(node, new):
                    read = inputs_of(node)
                    changes.add([*read, new.value], editor.replace(node, new))
                    break
    return model


def _keeps_outputs(node: ir.Node, new: Var) -> bool:
    """Whether ``new`` may replace ``node``: only the output of a new node may replace a graph output."""
    producer = new.value.producer()
    return not node.outputs[0].is_graph_output() or (producer is not None and producer.graph is None)


# --- predicates of patterns -----------------------------------------------------------------------------


def _number(value: ir.Value | None) -> float | None:
    """Return the number in a one-element constant; None for other values."""
    data = shapes.small_constant(value)
    return None if data is None or data.size != 1 or data.dtype.kind not in "fiu" else float(data.reshape(())[()])


def _keeps_shape(x: ir.Value, other: ir.Value | None) -> bool:
    """Whether broadcasting the one-element ``other`` against ``x`` keeps the shape of ``x``."""
    known = None if other is None or other.shape is None else len(other.shape)
    return known == 0 or (known is not None and x.shape is not None and known <= len(x.shape))


def same_dims(a: ir.Value, b: ir.Value) -> bool:
    """Whether both shapes are known to be equal, symbolic names included."""
    dims = shapes.recorded_shape(a)
    return dims is not None and None not in dims and dims == shapes.recorded_shape(b)


def operand_pairs(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Return the two inputs of ``node``; for a sum or product, in both orders."""
    a, b = inputs_of(node)
    return [(a, b), (b, a)] if node.op_type in ("Add", "Mul") else [(a, b)]


# --- the table -----------------------------------------------------------------------------------------


@rewrites("Pow")
def _power(op: Builder, node: ir.Node) -> Var | None:
    base, exponent = inputs_of(node)
    number = _number(exponent)
    if number is None or not _keeps_shape(base, exponent):
        return None
    x = op.wrap(base)
    how: dict[float, Callable[[], Var]] = {
        -1.0: lambda: op.Reciprocal(x),
        0.0: lambda: op.ones_like(x),
        0.5: lambda: op.Sqrt(x),
        1.0: lambda: x,
        2.0: lambda: x * x,
        3.0: lambda: x * x * x,
    }
    if number == -1.0 and not x.is_float:
        return None
    return how[number]() if number in how else None


@rewrites("Mul", "Div", "Add", "Sub")
def _neutral(op: Builder, node: ir.Node) -> Var | None:
    neutral = 1.0 if node.op_type in ("Mul", "Div") else 0.0
    for x, other in operand_pairs(node):
        if _number(other) == neutral and _keeps_shape(x, other):
            return op.wrap(x)
    return None


@rewrites("Mul")
def _number_times_number(op: Builder, node: ir.Node) -> Var | None:
    for value, number in operand_pairs(node):
        if (outer := _number(number)) is None or not is_marked_constant(number) or not _keeps_shape(value, number):
            continue
        x, inner = _multiple(value) if read_once(value, node) else (None, 1.0)
        exact = 0.5 in (abs(math.frexp(outer)[0]), abs(math.frexp(inner)[0]))
        if x is not None and exact and op.wrap(x).is_float and 2**-14 <= abs(inner * outer) <= 2**14:
            return op.wrap(x) if inner * outer == 1.0 else op.wrap(x) * (inner * outer)
    return None


def _multiple(value: ir.Value) -> tuple[ir.Value | None, float]:
    """Return x and k if ``value`` is k·x for a constant k; otherwise None and 1."""
    node = made_by(value, "Mul", "Add")
    if node is None:
        return None, 1.0
    if node.op_type == "Add":
        a, b = inputs_of(node)
        return (a, 2.0) if a is b else (None, 1.0)
    for x, other in operand_pairs(node):
        if is_marked_constant(other) and (number := _number(other)) is not None and _keeps_shape(x, other):
            return x, number
    return None, 1.0


@rewrites("Neg")
def _double_negation(op: Builder, node: ir.Node) -> Var | None:
    (value,) = inputs_of(node)
    inner = source_of(value, "Neg")
    return op.wrap(inner)


@rewrites("Neg")
def _negated_product(op: Builder, node: ir.Node) -> Var | None:
    (value,) = inputs_of(node)
    product = made_by(value, "Mul", "Div")
    if product is None or not read_once(value, node):
        return None
    a, b = inputs_of(product)
    if (inner := source_of(a, "Neg")) is not None:
        return op.emit(product.op_type, op.wrap(inner), op.wrap(b))
    inner = source_of(b, "Neg")
    return None if inner is None else op.emit(product.op_type, op.wrap(a), op.wrap(inner))


@rewrites("Add", "Sub")
def _negated_term(op: Builder, node: ir.Node) -> Var | None:
    for x, other in operand_pairs(node):
        if (inner := source_of(other, "Neg")) is not None:
            return op.emit("Sub" if node.op_type == "Add" else "Add", op.wrap(x), op.wrap(inner))
    return None


@rewrites("Identity")
def _identity(op: Builder, node: ir.Node) -> Var | None:
    return None if is_detached(node) else op.wrap(inputs_of(node)[0])


@rewrites("Cast")
def _useless_cast(op: Builder, node: ir.Node) -> Var | None:
    x = inputs_of(node)[0]
    return op.wrap(x) if x.dtype is not None and int(x.dtype) == node.attributes["to"].as_int() else None


_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_WIDER: dict[ir.DataType | None, Collection[ir.DataType]] = {  # types that represent every number of the first one
    ir.DataType.BOOL: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT16, *_FLOATS),
    ir.DataType.INT32: (ir.DataType.INT64, ir.DataType.DOUBLE),
    ir.DataType.FLOAT16: _FLOATS,
    ir.DataType.BFLOAT16: _FLOATS,
    ir.DataType.FLOAT: (ir.DataType.DOUBLE,),
}


@rewrites("Cast")
def _cast_twice(op: Builder, node: ir.Node) -> Var | None:
    (value,) = inputs_of(node)
    inner, first = made_by(value, "Cast"), source_of(value, "Cast")
    if first is None or inner is None or value.dtype not in _WIDER.get(first.dtype, ()):
        return None
    if is_for_precision(node) and not is_for_precision(inner):
        return None  # this Cast may be removed later; the model's own Cast must stay
    return op.cast(op.wrap(first), ir.DataType(node.attributes["to"].as_int()))


@rewrites("Reshape")
def _reshape_twice(op: Builder, node: ir.Node) -> Var | None:
    x, target = inputs_of(node)
    if (first := source_of(x, "Reshape")) is None:
        return None
    numbers = shapes.constant_of(target)
    if numbers is None or (numbers == 0).any():
        return None  # a 0 copies a size of the tensor in between
    return op.Reshape(op.wrap(first), op.wrap(target))


def _perm(node: ir.Node) -> list[int] | None:
    x, perm = node.inputs[0], node.attributes.get_ints("perm")
    if perm is not None:
        return list(perm)
    return None if x is None or x.shape is None else list(reversed(range(len(x.shape))))


def _is_factor(value: ir.Value) -> bool:
    """Whether only matrix products read ``value``."""
    readers = [node for node, _ in value.uses()]
    return bool(readers) and all(is_standard(n, "MatMul") for n in readers) and not value.is_graph_output()


@rewrites("Transpose")
def _useless_transpose(op: Builder, node: ir.Node) -> Var | None:
    perm = _perm(node)
    return op.wrap(inputs_of(node)[0]) if perm is not None and perm == list(range(len(perm))) else None


@rewrites("Transpose")
def _transpose_twice(op: Builder, node: ir.Node) -> Var | None:
    inner, outer_perm = made_by(node.inputs[0], "Transpose"), _perm(node)
    if inner is None or outer_perm is None:
        return None
    inner_perm, first = _perm(inner), inner.inputs[0]
    is_new_swap = before_swap(node.outputs[0]) is not None and before_swap(inner.outputs[0]) is None
    if inner_perm is None or first is None or (is_new_swap and _is_factor(node.outputs[0])):
        return None
    perm = [inner_perm[i] for i in outer_perm]
    return op.wrap(first) if perm == list(range(len(perm))) else op.Transpose(op.wrap(first), perm=perm)


def _own_product(value: ir.Value, node: ir.Node) -> tuple[ir.Value, ir.Value, dict[str, Any]] | None:
    """Return factors and attributes of the Gemm that computes ``value``.

    None if no Gemm does, if it has a summand, or if nodes other than ``node`` read ``value``.
    """
    product = made_by(value, "Gemm")
    if product is None or len(product.inputs) != 2 or not read_once(value, node):
        return None
    a, b = inputs_of(product)
    return a, b, attributes(product)


@rewrites("Transpose")
def _transposed_product(op: Builder, node: ir.Node) -> Var | None:
    found = _own_product(inputs_of(node)[0], node)
    if found is None or _perm(node) != [1, 0]:
        return None
    a, b, attrs = found
    turned = {"transA": 1 - attrs.get("transB", 0), "transB": 1 - attrs.get("transA", 0)}
    return op.Gemm(op.wrap(b), op.wrap(a), **{**attrs, **turned})


@rewrites("Add")
def _product_and_summand(op: Builder, node: ir.Node) -> Var | None:
    for other, value in operand_pairs(node):
        found = _own_product(value, node)
        if found is not None and same_dims(value, other) and made_by(other, "Gemm") is None:
            a, b, attrs = found
            return op.Gemm(op.wrap(a), op.wrap(b), op.wrap(other), **{**attrs, "beta": 1.0})
    return None


@rewrites("Add", "Sub", "Mul", "Div", "Sum", "Where")
def _useless_expand(op: Builder, node: ir.Node) -> Var | None:
    inputs = inputs_of(node)
    bare = [source_of(x, "Expand") or x for x in inputs]
    if bare == inputs:
        return None
    is_broadcast = any(a is b and same_dims(a, node.outputs[0]) for a, b in zip(inputs, bare, strict=True))
    return op.emit(node.op_type, *map(op.wrap, bare)) if is_broadcast else None


# --- constants -------------------------------------------------------------------------------------------

_MOST_ELEMENTS = 64  # maximum elements of a ConstantOfShape that becomes a constant
_NUMPY_ELEMENTS = 2.0**59  # at most 16 bytes: NumPy rejects larger sizes, even in an empty array


@rewrites("ConstantOfShape")
def _few_elements(op: Builder, node: ir.Node) -> Var | None:
    sizes = shapes.constant_of(inputs_of(node)[0])
    if sizes is None or sizes.min(initial=0) < 0 or np.prod(sizes, dtype=float) > _MOST_ELEMENTS:
        return None
    given = node.attributes.get_tensor("value")
    fill = np.zeros(1, np.float32) if given is None else given.numpy()
    return op.const(np.full(tuple(sizes), fill.item(), fill.dtype))


@rewrites("Expand")
def _no_elements(op: Builder, node: ir.Node) -> Var | None:
    dtype, dims = node.inputs[0].dtype if node.inputs[0] else None, shapes.all_sizes(shape_of(node.outputs[0]))
    if dtype is None or dims is None or 0 not in dims:
        return None
    if np.prod([float(d) for d in dims if d]) > _NUMPY_ELEMENTS:
        return None
    return op.const(np.zeros(dims, dtype.numpy()))


@rewrites("Conv", "ConvTranspose", "Gemm")
def _bias_of_zeros(op: Builder, node: ir.Node) -> Var | None:
    if not is_zeros(input_at(node, 2)):
        return None
    without: Var = op.emit(node.op_type, *map(op.wrap, inputs_of(node)[:2]), outputs=1, **attributes(node))
    return without


def is_zeros(value: ir.Value | None) -> bool:
    """Whether ``value`` is a constant of zeros, and not a parameter."""
    if (expanded := source_of(value, "Expand")) is not None:
        return is_zeros(expanded)
    if (filled := made_by(value, "ConstantOfShape")) is not None:
        given = filled.attributes.get_tensor("value")
        return given is None or not given.numpy().any()
    data = shapes.small_constant(value) if value is not None and is_marked_constant(value) else None
    return data is not None and not data.any()


@rewrites("Sum")
def _one_term(op: Builder, node: ir.Node) -> Var | None:
    terms = inputs_of(node)
    return op.wrap(terms[0]) if len(terms) == 1 else None
