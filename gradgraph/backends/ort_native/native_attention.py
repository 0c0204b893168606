"""Attention that is trained, by native kernels (``kernels/attention.cc``): scores and weights are never written.

What is looked for is what the rules write, where nothing else reads S, P, dP and dS:

    S = scale·Q·Kᵀ + mask      P = Softmax(S)         O = P·V
    dP = dO·Vᵀ                 dV = Pᵀ·dO             dS = SoftmaxGrad(dP, P[, dO, O])
    dQ = scale·dS·K            dK = scale·dSᵀ·Q

Heads are read where they lie: in a tensor [batch, heads, length, size], or [batch, length, heads·size], or in a part of
one that queries, keys and values share. Results are written the same way, and the three gradients side by side where
they are concatenated. Factors that make up the scale may stand anywhere on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir

from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.strided import (
    Destination,
    Sizes,
    Source,
    Strided,
    destinations,
    number,
    only_reader,
    scaled,
    sizes_of,
    source,
)
from gradgraph.backends.ort_operators import kernel_of_several
from gradgraph.builder import Var
from gradgraph.normal.edit import Editor
from gradgraph.operators import DOMAIN
from gradgraph.prune import prune
from gradgraph.registry import attributes

LEAST_ROWS, LEAST_HEAD_SIZE = 32, 16  # queries and keys; numbers of a head
LEAST_WORK = 1 << 20  # multiplications in Q·Kᵀ, of all heads

_T = TypeVar("_T")


def fold_attentions(model: ir.Model) -> None:
    """Let native kernels compute every attention of the main graph that is trained, in place."""
    editor = Editor(model)
    written = False
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == "SoftmaxGrad"]:
        attention = _attention(node)
        if attention is None or not attention.is_worth_it():
            continue
        if not library.here().has_tiles:
            return
        _write(editor, attention)
        written = True
    if written:
        model.graph.sort()
        prune(model)


# --- what it is --------------------------------------------------------------------------------------------------


class _OtherError(Exception):
    """It is not what is looked for."""


def _some(x: _T | None) -> _T:
    if x is None:
        raise _OtherError
    return x


def _need(condition: bool) -> None:
    if not condition:
        raise _OtherError


@dataclass(frozen=True)
class Mask:
    """``value`` is added to scores; or, a condition, has ``hidden`` put in their place where it is not as ``kept``."""

    value: ir.Value
    kept: bool | None = None
    hidden: float = 0.0

    def strides(self, rank: int) -> list[int]:
        """From one element to the next along the axes of the scores."""
        shape = _some(sizes_of(self.value))
        own = [0 if d == 1 else s for d, s in zip(shape, Strided.whole(shape).strides, strict=True)]
        return [0] * (rank - len(own)) + own

    def written(self, editor: Editor) -> Var:
        """As numbers."""
        op = editor.op
        value = op.wrap(self.value)
        if self.kept is None:
            return value
        choices = (0.0, self.hidden) if self.kept else (self.hidden, 0.0)
        return op.Where(value, *choices)


@dataclass(frozen=True)
class Gradient:
    """A product of the way back, ``scale`` times what is wanted, or the transpose of that."""

    value: ir.Value
    scale: float
    turned: bool

    def view(self, place: Destination, whole: Strided | None = None) -> Strided | None:
        """How it lies there, if the numbers of a head lie side by side."""
        view = place.view(whole)
        view = view.turned() if view is not None and self.turned else view
        return view if view is not None and view.strides[-1] == 1 else None


@dataclass(frozen=True)
class Attention:
    """Tensors that take part, and nodes."""

    sizes: Sizes  # of the scores
    scale: float
    mask: Mask | None
    q: Source
    k: Source
    v: Source
    dy: Source
    o: ir.Value
    softmax_gradient: ir.Node
    dp: ir.Node
    gradients: tuple[Gradient, Gradient, Gradient]  # of q, k and v

    @property
    def kernel_sizes(self) -> Sizes:
        """Batch, heads, queries, keys, and the numbers of a head of keys and of values."""
        batch, *heads = self.sizes[:-2]
        return batch, *(heads or [1]), *self.sizes[-2:], self.q.view.shape[-1], self.v.view.shape[-1]

    def is_worth_it(self) -> bool:
        _, _, queries, keys, size, value_size = self.kernel_sizes
        work = math.prod(self.sizes) * size
        return min(queries, keys) >= LEAST_ROWS and min(size, value_size) >= LEAST_HEAD_SIZE and work >= LEAST_WORK


def _attention(gradient: ir.Node) -> Attention | None:
    try:
        return _matched(gradient)
    except _OtherError:
        return None


def _matched(gradient: ir.Node) -> Attention:
    dp, p = (_some(x) for x in gradient.inputs[:2])
    sizes = _some(sizes_of(p))
    softmax, back = _some(p.producer()), _some(dp.producer())
    _need(p.dtype == ir.DataType.FLOAT and len(sizes) in (3, 4) and only_reader(dp) is gradient)
    _need(all(attributes(n).get("axis", -1) in (-1, len(sizes) - 1) for n in (softmax, gradient)))
    _need(_is(softmax, "Softmax") and _is(back, "MatMul"))
    product, scale, mask = _scores(_some(softmax.inputs[0]), sizes)
    q, k, dy, v = (_some(source(x)) for x in (*product.inputs, *back.inputs))
    k, v = k.turned(), v.turned()
    weighed = _some(next((n for n, i in p.uses() if _is(n, "MatMul") and i == 0 and source(n.inputs[1]) == v), None))
    o = weighed.outputs[0]
    _need(v.scale == dy.scale == 1.0 and list(gradient.inputs[2:]) in ([], [back.inputs[0], o]))
    ds, slope_scale = _slopes(gradient.outputs[0], mask)
    dq, dk, dv = _over_keys(ds, k, slope_scale), _over_queries(ds, q, slope_scale), _over_queries(p, dy, 1.0)
    products = {weighed, gradient, *(_some(g.value.producer()) for g in (dq, dk, dv))}
    _need(all(_is_read_by(products, x) for x in (p, ds)))
    _need(all(x.graph is gradient.graph for x in (product, softmax, weighed, back, *products)))
    return Attention(sizes, scale * q.scale * k.scale, mask, q, k, v, dy, o, gradient, back, (dq, dk, dv))


def _is(node: ir.Node, op_type: str) -> bool:
    return node.domain == "" and node.op_type == op_type


def _is_read_by(products: set[ir.Node], value: ir.Value) -> bool:
    """By these alone, as it is or transposed?"""
    readers = {node for node, _ in value.uses()}
    turned = {node for node in readers if _is(node, "Transpose")}
    beyond = {node for t in turned for node, _ in t.outputs[0].uses()}
    outputs = [value, *(t.outputs[0] for t in turned)]
    return readers - turned | beyond <= products and not any(x.is_graph_output() for x in outputs)


def _scores(value: ir.Value, sizes: Sizes) -> tuple[ir.Node, float, Mask | None]:
    """The product of queries and keys that became ``value``, its factor, and the mask behind that."""
    scale, mask = 1.0, None
    while True:
        node = _some(value.producer())
        _need(only_reader(value) is not None and sizes_of(value) == sizes)
        factor = scaled(node)
        if _is(node, "MatMul"):
            return node, scale, mask
        if factor is not None:
            value, scale = factor[0], scale * factor[1]
            continue
        _need(mask is None and scale == 1.0)
        value, mask = _some(next(_masked(node, sizes), None))


def _masked(node: ir.Node, sizes: Sizes) -> Iterator[tuple[ir.Value, Mask]]:
    """Scores, and what hides some of them."""
    if _is(node, "Add"):
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if scores is not None and _is_of_products(scores) and mask is not None and _spreads(mask, sizes):
                yield scores, Mask(mask)
    elif _is(node, "Where"):
        condition, *choices = node.inputs
        for kept, (scores, hidden) in ((True, choices), (False, choices[::-1])):
            known = number(hidden)
            if scores is None or condition is None or not known:
                continue
            if _is_of_products(scores) and _spreads(condition, sizes):
                yield scores, Mask(condition, kept, known)


def _is_of_products(value: ir.Value) -> bool:
    while (node := value.producer()) is not None and (factor := scaled(node)) is not None:
        value = factor[0]
    return node is not None and _is(node, "MatMul")


def _spreads(mask: ir.Value, sizes: Sizes) -> bool:
    shape = sizes_of(mask)
    if shape is None or len(shape) > len(sizes):
        return False
    return all(d in (1, size) for d, size in zip(reversed(shape), reversed(sizes), strict=False))


def _slopes(ds: ir.Value, mask: Mask | None) -> tuple[ir.Value, float]:
    """The cotangent of Q·Kᵀ, and its factor."""
    if mask is not None and mask.kept is not None:
        node = _some(only_reader(ds))
        others = [x for x in node.inputs[1:] if x is not ds]
        _need(_is(node, "Where") and node.inputs[0] is mask.value and len(others) == 1 and number(others[0]) == 0.0)
        _need((node.inputs[1] is ds) == mask.kept)
        ds = node.outputs[0]
    scale = 1.0
    while (reader := only_reader(ds)) is not None and (factor := scaled(reader)) is not None:
        ds, scale = reader.outputs[0], scale * factor[1]
    return ds, scale


def _over_keys(ds: ir.Value, k: Source, scale: float) -> Gradient:
    """dS·K"""
    for node, i in ds.uses():
        other = source(node.inputs[1]) if _is(node, "MatMul") and i == 0 else None
        if other is not None and other.is_like(k):
            return Gradient(node.outputs[0], scale * other.scale, turned=False)
    raise _OtherError


def _over_queries(rows: ir.Value, x: Source, scale: float) -> Gradient:
    """rowsᵀ·x, or xᵀ·rows"""
    for node, i in rows.uses():
        if _is(node, "MatMul") and i == 1:
            other = source(node.inputs[0])
            if other is not None and other.turned().is_like(x):
                return Gradient(node.outputs[0], scale * other.scale, turned=True)
        product = only_reader(node.outputs[0]) if _is(node, "Transpose") else None
        if product is None or not _is(product, "MatMul") or product.inputs[0] is not node.outputs[0]:
            continue
        turned, other = source(node.outputs[0]), source(product.inputs[1])
        if turned is not None and turned.turned().is_like(source(rows)) and other is not None and other.is_like(x):
            return Gradient(product.outputs[0], scale * other.scale, turned=False)
    raise _OtherError


# --- how it is written -------------------------------------------------------------------------------------------


def _write(editor: Editor, it: Attention) -> None:
    op = editor.op
    y = _last(d for d in destinations(it.o, [it.softmax_gradient]) if d.scale == 1.0 and _lies_well(d.view()))
    mask = [] if it.mask is None else [it.mask.written(editor)]
    common: dict[str, Any] = {
        "scale": it.scale,
        "sizes": it.kernel_sizes,
        "q": _layout(it.q.view),
        "k": _layout(it.k.view),
        "v": _layout(it.v.view),
        "y": _layout(_some(y.view())),
        "mask": [0] * 4 if it.mask is None else _four(it.mask.strides(len(it.sizes))),
        "chosen": int(it.mask is not None and it.mask.kept is not None),
    }
    qkv = [op.wrap(x.base) for x in (it.q, it.k, it.v)]
    shape = _some(sizes_of(y.value))
    kept = (*it.kernel_sizes[:3], 2)
    made = kernel_of_several(op, "Attention", library.DOMAIN, [*qkv, *mask], [shape, kept], shape=shape, **common)
    editor.place(_some(it.o.producer()))
    editor.replace(_some(y.value.producer()), made[0])
    _write_gradient(editor, it, [op.wrap(it.dy.base), *qkv, *made, *mask], common | {"dy": _layout(it.dy.view)})


def _write_gradient(editor: Editor, it: Attention, inputs: Sequence[Var], common: dict[str, Any]) -> None:
    places = [_place(g, it.scale if i < 2 else 1.0) for i, g in enumerate(it.gradients)]
    packed = _side_by_side(it.gradients, places)
    values, views = packed or (
        [p.value for p in places],
        [_some(g.view(p)) for g, p in zip(it.gradients, places, strict=True)],
    )
    shapes = [_some(sizes_of(x)) for x in values]
    layouts = {name: _layout(view) for name, view in zip(("dq", "dk", "dv"), views, strict=True)}
    named = dict(zip(("shape", "shape_of_dk", "shape_of_dv"), shapes, strict=False))
    op_type = "AttentionGrad" if packed is None else "PackedAttentionGrad"
    made = kernel_of_several(editor.op, op_type, library.DOMAIN, inputs, shapes, **common, **layouts, **named)
    editor.place(it.dp)
    for old, new in zip(values, made, strict=True):
        editor.replace(_some(old.producer()), new)


def _lies_well(view: Strided | None) -> bool:
    return view is not None and view.strides[-1] == 1


def _last(items: Iterator[_T]) -> _T:
    *_, last = items
    return last


def _place(gradient: Gradient, scale: float) -> Destination:
    """The last place where it lies well, and is what is wanted."""
    return _last(
        d
        for d in destinations(gradient.value)
        if math.isclose(gradient.scale * d.scale, scale, rel_tol=1e-5) and gradient.view(d) is not None
    )


def _side_by_side(
    gradients: Sequence[Gradient], places: Sequence[Destination]
) -> tuple[list[ir.Value], list[Strided]] | None:
    """Where they are concatenated, and perhaps moved on: that tensor, and how each lies in it."""
    node = only_reader(places[0].value)
    if node is None or not _is(node, "Concat") or any(only_reader(p.value) is not node for p in places):
        return None
    parts = [_some(sizes_of(x)) for x in node.inputs]
    if len(parts) != len(places):
        return None
    axis = int(attributes(node)["axis"]) % len(parts[0])
    order = [list(node.inputs).index(p.value) for p in places]
    begins = [sum(part[axis] for part in parts[:i]) for i in order]
    found = None
    for place in destinations(node.outputs[0]):
        whole = place.view()
        if place.scale != 1.0 or whole is None:
            continue
        views = [
            g.view(p, whole.part(axis, begin, parts[i][axis]))
            for g, p, begin, i in zip(gradients, places, begins, order, strict=True)
        ]
        if None not in views:
            found = [place.value], [_some(view) for view in views]
    return found


def _layout(view: Strided) -> list[int]:
    """Offset, and strides of batch, head and row."""
    return [view.offset, *_four(view.strides)[:3]]


def _four(strides: Sequence[int]) -> list[int]:
    """Those of batch, head, row and column, where there may be no heads."""
    return [*strides] if len(strides) == 4 else [strides[0], 0, *strides[1:]]
