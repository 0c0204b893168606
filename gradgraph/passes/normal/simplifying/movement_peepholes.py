"""Peepholes for nodes that only move data (rows of the table in ``peepholes.py``).

1. Reshape, Flatten, Squeeze, Unsqueeze, Expand, Tile, Pad and Slice that change nothing → their input; a chain of
   reshapes that ends with its first shape → its input; another chain without other readers, to a shape with at most one
   unknown size → one Reshape;
2. Transpose that moves only axes of size 1 → Reshape;
3. Reshape to a computed shape with at most one unknown size → Reshape to constants, with −1 for the unknown one;
4. the sum of adjacent Pads along one axis (gradients of slices of one tensor) → Concat, and one Pad if there is padding
   left at the ends;
5. Concat of one tensor → that tensor; Concat of Concats without other readers, on the same axis → one;
6. ReduceSum, -Mean, -Max, -Min and -Prod over axes of size 1 → Squeeze, or nothing; Squeeze of a reduction without
   other readers → a reduction that also covers the squeezed axes;
7. Pad on some axes → Pad on all axes: onnxruntime assumes pads of all axes when it moves a Transpose past a Pad; Pad
   with zeros before a pool → Pad with an input that lists all axes: onnxruntime fuses a Pad without that input into the
   pool, whose padding does not count as zero in a maximum and must be smaller than the kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import input_at, inputs_of, made_by, read_once, source_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Shape
from gradgraph.passes.normal.simplifying.peepholes import is_zeros, operand_pairs, rewrites, same_dims
from gradgraph.passes.normal.spelling.padded_convolutions import pads_zeros, zeros_around

_MOST_PARTS = 64  # maximum parts of a merged Concat: merging a long chain of Concats would take quadratic time
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")  # no effect on axes of size 1
_RESHAPINGS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


@rewrites(*_RESHAPINGS)
def _there_and_back(op: Builder, node: ir.Node) -> Var | None:
    before, result = node.inputs[0], node.outputs[0]
    while before is not None and not same_dims(before, result):
        before = source_of(before, *_RESHAPINGS)
    return op.wrap(before)


@rewrites(*_RESHAPINGS)
def _in_one_step(op: Builder, node: ir.Node) -> Var | None:
    x, dims = inputs_of(node)[0], shape_of(node.outputs[0])
    first = source_of(x, *_RESHAPINGS)
    if first is None or not read_once(x, node) or (target := _as_target(dims)) is None:
        return None
    return op.Reshape(op.wrap(first), target)


@rewrites("Expand", "Tile")
def _repeats_nothing(op: Builder, node: ir.Node) -> Var | None:
    x, times = inputs_of(node)
    numbers, dims = shapes.constant_of(times), shape_of(x)
    if numbers is None or dims is None or len(numbers) > len(dims):
        return op.wrap(x) if same_dims(x, node.outputs[0]) else None
    pairs = zip(reversed(numbers), reversed(dims), strict=False)
    once = all(n == 1 or (n == d and node.op_type == "Expand") for n, d in pairs)
    return op.wrap(x) if once else None


@rewrites("Pad")
def _pads_nothing(op: Builder, node: ir.Node) -> Var | None:
    x, pads = inputs_of(node)[:2]
    numbers = shapes.constant_of(pads)
    return op.wrap(x) if numbers is not None and not numbers.any() else None


@rewrites("Pad")
def _pads_all_axes(op: Builder, node: ir.Node) -> Var | None:
    x, pads, fill, axes = (*node.inputs, None, None)[:4]
    rank = None if x is None or x.shape is None else len(x.shape)
    if x is None or pads is None or rank is None:
        return None
    pooled = any(use.node.op_type in ("AveragePool", "MaxPool") for use in node.outputs[0].uses())
    wanted = np.arange(rank) if pooled and pads_zeros(node) else None
    chosen = np.arange(rank) if axes is None else shapes.constant_of(axes)
    if chosen is None or (len(chosen) == rank and (axes is None) == (wanted is None)):
        return None
    places = np.concatenate([chosen % rank, chosen % rank + rank])
    numbers, spread = shapes.constant_of(pads), np.zeros(2 * rank, np.int64)
    if numbers is None:
        all_pads = op.ScatterElements(op.const(spread), op.const(places), op.wrap(pads), axis=0)
    else:
        spread[places] = numbers
        all_pads = op.const(spread)
    fill_again = op.wrap(fill)
    return op.Pad(op.wrap(x), all_pads, fill_again, wanted, mode=node.attributes.get_string("mode"))


@rewrites("Slice")
def _takes_all(op: Builder, node: ir.Node) -> Var | None:
    x = inputs_of(node)[0]
    steps = shapes.constant_of(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
    return op.wrap(x) if steps is not None and (steps > 0).all() and same_dims(x, node.outputs[0]) else None


def _as_target(dims: Shape | None) -> np.ndarray | None:
    """Return ``dims`` as target of a Reshape, with −1 for an unknown size; None if several are unknown or one is 0."""
    if dims is None or 0 in dims or len(dims) > len(shapes.known_sizes(dims)) + 1:
        return None
    return np.array(shapes.sizes_or(dims, -1), np.int64)


@rewrites("Transpose")
def _moves_ones(op: Builder, node: ir.Node) -> Var | None:
    x = inputs_of(node)[0]
    dims, target = shape_of(x), _as_target(shape_of(node.outputs[0]))
    perm = node.attributes.get_ints("perm")
    if dims is None or target is None or perm is None:
        return None
    moved = [axis for axis in perm if dims[axis] != 1]
    return op.Reshape(op.wrap(x), target) if moved == sorted(moved) else None


@rewrites("Reshape")
def _known_target(op: Builder, node: ir.Node) -> Var | None:
    (x, given), dims = inputs_of(node), shape_of(node.outputs[0])
    if shapes.constant_of(given) is not None or (target := _as_target(dims)) is None:
        return None
    if -1 in target and shapes.all_sizes(shape_of(x) or (None,)) is not None:
        return None  # the size follows from ``x``, so this Reshape checks that the computed size is equal
    return op.Reshape(op.wrap(x), target)


# --- adjacent pads ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """The position of ``x`` in the result of a zero Pad of one axis.

    Attributes:
        x: the padded tensor.
        axis: the padded axis.
        begin, end: the positions where ``x`` begins and ends along the axis.
        total: the size of the axis after padding.
        others: the sizes of the other axes.
    """

    x: ir.Value
    axis: int
    begin: int
    end: int
    total: int
    others: Shape


def _span(value: ir.Value) -> _Span | None:
    node = made_by(value, "Pad")
    around = None if node is None else zeros_around(node)
    padded = [(axis, *pads) for axis, pads in enumerate(around or ()) if any(pads)]
    if node is None or len(padded) != 1:
        return None
    x, (axis, before, after) = inputs_of(node)[0], padded[0]
    dims = shape_of(x) or ()
    size, others = dims[axis], dims[:axis] + dims[axis + 1 :]
    if not isinstance(size, int) or None in others:
        return None
    return _Span(x, axis, before, before + size, before + size + after, others)


@rewrites("Sum", "Add")
def _side_by_side(op: Builder, node: ir.Node) -> Var | None:
    spans = [span for value in inputs_of(node) if (span := _span(value)) is not None]
    if len(spans) < max(2, len(inputs_of(node))) or len({(s.axis, s.total, s.others) for s in spans}) > 1:
        return None
    spans.sort(key=lambda s: (s.begin, s.end))
    if any(a.end != b.begin for a, b in itertools.pairwise(spans)):
        return None
    first, last = spans[0], spans[-1]
    joined = op.Concat(*(op.wrap(s.x) for s in spans), axis=first.axis)
    room = [first.begin, last.total - last.end]
    return op.Pad(joined, room, None, [first.axis]) if any(room) else joined


@rewrites("Concat")
def _nested(op: Builder, node: ir.Node) -> Var | None:
    axis, parts = node.attributes["axis"].as_int(), inputs_of(node)
    if len(parts) == 1:
        return op.wrap(parts[0])
    found = [_joined(part, node, axis) for part in parts]
    flat = [x for part, inner in zip(parts, found, strict=True) for x in inner or [part]]
    return op.Concat(*map(op.wrap, flat), axis=axis) if any(found) and len(flat) <= _MOST_PARTS else None


def _joined(value: ir.Value, reader: ir.Node, axis: int) -> list[ir.Value] | None:
    """Return the parts of ``value`` if a Concat on ``axis`` joins them and ``reader`` is its only reader, else None."""
    node = made_by(value, "Concat")
    if node is None or not read_once(value, reader):
        return None
    return inputs_of(node) if node.attributes["axis"].as_int() == axis else None


@rewrites("Add")
def _placed_in_zeros(op: Builder, node: ir.Node) -> Var | None:
    for tensor, value in operand_pairs(node):
        placed = _into_zeros(value)
        if placed is not None and read_once(value, node) and same_dims(tensor, value):
            indices, updates = map(op.wrap, placed)
            there = op.GatherND(op.wrap(tensor), indices)
            return op.ScatterND(op.wrap(tensor), indices, there + updates)
    return None


def _into_zeros(value: ir.Value) -> list[ir.Value] | None:
    """Return the indices and updates if ``value`` is a ScatterND into zeros, else None."""
    node = made_by(value, "ScatterND")
    if node is None or not is_zeros(node.inputs[0]) or node.attributes.get_string("reduction", "none") != "none":
        return None
    return inputs_of(node)[1:]


@rewrites(*_REDUCTIONS)
def _over_ones(op: Builder, node: ir.Node) -> Var | None:
    x = inputs_of(node)[0]
    axes, dims = shapes.constant_of(input_at(node, 1)), shape_of(x)
    if axes is None or not axes.size or dims is None or any(dims[int(a)] != 1 for a in axes):
        return None
    return op.wrap(x) if node.attributes.get_int("keepdims", 1) else op.Squeeze(op.wrap(x), axes)


@rewrites("Squeeze")
def _squeezed_reduction(op: Builder, node: ir.Node) -> Var | None:
    value, squeezed = inputs_of(node)[0], shapes.constant_of(input_at(node, 1))
    inner = made_by(value, *_REDUCTIONS)
    if inner is None or not read_once(value, node):
        return None
    dims, axes = shape_of(inner.inputs[0]), shapes.constant_of(input_at(inner, 1))
    if dims is None or axes is None or not axes.size or squeezed is None:
        return None
    reduced = {int(a) % len(dims) for a in axes}
    keeps = inner.attributes.get_int("keepdims", 1)
    left = [i for i in range(len(dims)) if keeps or i not in reduced]
    gone = {left[int(a)] for a in squeezed}
    if keeps and not reduced <= gone:
        return None
    return op.emit(inner.op_type, op.wrap(inputs_of(inner)[0]), sorted(reduced | gone), keepdims=0)
