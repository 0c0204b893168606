"""Training of attention with native kernels (``kernels/attention.cc``): scores and probabilities are never written.

If only an ``AttentionGrad`` reads S and P, or recomputed copies of them, one kernel computes

    S = scale·Q·Kᵀ + mask      P = Softmax(S)         O = P·V

and another one the three gradients. Heads are read in place: from [batch, heads, length, size], from [batch, length,
heads·size], or from a slice of a tensor that contains queries, keys and values. Results are written in the same
layouts, and the three gradients into one tensor if they are concatenated. Scale factors may be applied anywhere in
between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.autodiff.after import behind_orders
from gradgraph.backends.ort_cpu.attention_by_heads import unguarded
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.strided import (
    Destination,
    Sizes,
    Source,
    Strided,
    destinations,
    number,
    scaled,
    sizes_of,
    source,
    spreads,
)
from gradgraph.backends.ort_operators import kernel_of_several
from gradgraph.graph.builder import Var
from gradgraph.graph.nodes import is_standard, only_reader
from gradgraph.graph.prune import prune
from gradgraph.passes.normal.edit import Editor
from gradgraph.rules.named_operators import DOMAIN
from gradgraph.rules.patterns import MismatchError, need, some
from gradgraph.rules.registry import attributes

# with tiles: the minimum numbers of queries and of keys, head size, and multiplications in Q·Kᵀ, of all heads
LEAST_ROWS, LEAST_HEAD_SIZE = 32, 16
LEAST_WORK = 1 << 20
# With vectors, forward and backward, relative to the time of other forms, on one thread of an AMD EPYC. With AVX512:
# 1024 x 1024 scores of heads of 8 numbers 0.55, 256 x 256 of 16 0.6, 128 x 128 of 64 0.72 to 0.9, 512 x 512 of 64,
# causal, 0.68, 1500 x 1500 of 64 0.94, 4096 x 4096 1.0, 256 x 77 of 16 0.97; but 64 x 64 of 32 1.1, and 128 x 128 of
# 256 1.15. With AVX2: 1024 x 1024 of 8 0.54, 256 x 256 of 16 0.89; but 1500 x 1500 of 64 1.3.
LEAST_SCORES = 1 << 14  # with vectors: the minimum number of scores per head
MOST_HEAD_SIZES = {"avx512": 128, "avx2": 16}  # with vectors: the maximum head size, by the processor's highest level


def fold_attentions(model: ir.Model) -> None:
    """Replace every trained attention of the main graph with native kernels where they are faster, in place."""
    editor = Editor(model)
    written = False
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == "AttentionGrad"]:
        try:
            attention = _matched(node)
        except MismatchError:
            continue
        if not attention.is_worth_it(library.here()):
            continue
        _write(editor, attention)
        written = True
    if written:
        model.graph.sort()
        prune(model)


# --- matching ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A mask that is added to scores, or a condition that replaces scores with a number.

    Attributes:
        value: the mask or condition, which broadcasts to the scores.
        kept: for a condition, its value where scores are kept; None for an added mask.
        hidden: the number that replaces other scores.
    """

    value: ir.Value
    kept: bool | None = None
    hidden: float = 0.0

    @property
    def condition(self) -> ir.Value | None:
        return None if self.kept is None else behind_orders(self.value)

    def strides(self, rank: int) -> list[int]:
        """Return the strides between elements along the axes of the scores; 0 where the mask broadcasts."""
        shape = some(sizes_of(self.value))
        own = [0 if d == 1 else s for d, s in zip(shape, Strided.whole(shape).strides, strict=True)]
        return [0] * (rank - len(own)) + own

    def written(self, editor: Editor) -> Var:
        """Return the mask as a tensor to add to the scores."""
        op = editor.op
        value = op.wrap(self.value)
        if self.kept is None:
            return value
        choices = (0.0, self.hidden) if self.kept else (self.hidden, 0.0)
        return op.Where(value, *choices)


@dataclass(frozen=True)
class Gradient:
    """A gradient ``value`` of Q, K or V that already includes the factor ``scale``."""

    value: ir.Value
    scale: float

    def place(self, scale: float) -> tuple[Destination, float]:
        """Return the last value in a supported layout that equals the gradient times ``scale``, and the factor 1.

        On the way, nodes may transpose, reshape or scale the gradient. If none has this scale, since a factor of
        another layer is merged with it, return the last value in a supported layout, and its factor.
        """
        found = [d for d in destinations(self.value) if _view(d) is not None]
        exact = [d for d in found if math.isclose(self.scale * d.scale, scale, rel_tol=1e-5)]
        return (exact[-1], 1.0) if exact else (found[-1], self.scale * found[-1].scale / scale)


@dataclass(frozen=True)
class Attention:
    """The tensors and nodes of an attention.

    Attributes:
        sizes: the shape of the scores.
        scale: the factor of Q·Kᵀ.
        mask: the mask, if any.
        guarded: whether the output for a query without visible keys is 0 instead of NaN.
        q, k, v, dy: the inputs of the kernels.
        o: the output.
        gradient: the node ``AttentionGrad``.
        gradients: the gradients of q, k and v.
    """

    sizes: Sizes
    scale: float
    mask: Mask | None
    guarded: bool
    q: Source
    k: Source
    v: Source
    dy: Source
    o: ir.Value
    gradient: ir.Node
    gradients: tuple[Gradient, Gradient, Gradient]

    @property
    def kernel_sizes(self) -> Sizes:
        """The numbers of batch elements, heads, queries and keys, and the head sizes of keys and values."""
        batch, *heads = self.sizes[:-2]
        return batch, *(heads or [1]), *self.sizes[-2:], self.q.view.shape[-1], self.v.view.shape[-1]

    def is_worth_it(self, kernels: library.Library) -> bool:
        _, _, queries, keys, size, value_size = self.kernel_sizes
        if not kernels.has_tiles:
            is_large = queries * keys >= LEAST_SCORES and max(size, value_size) <= _most_head_size()
            return is_large and kernels.has_fast_vectors
        work = math.prod(self.sizes) * size
        return min(queries, keys) >= LEAST_ROWS and min(size, value_size) >= LEAST_HEAD_SIZE and work >= LEAST_WORK


def _most_head_size() -> int:
    known = library.levels_here()
    return next((size for level, size in MOST_HEAD_SIZES.items() if level in known), 0)


def _matched(gradient: ir.Node) -> Attention:
    """Return the attention whose gradient is ``AttentionGrad(dO, O, P, Q, Kᵀ, V, …)``.

    ``O = P·V`` and ``P = Softmax(S)``, with S as in ``_scores``. The gradient may read a recomputed copy of P, as its
    kernel recomputes P itself.

    Raises:
        MismatchError: if the kernels do not support the attention, or S or P have other readers.
    """
    dy, o, again, left, right, v = (some(x) for x in gradient.inputs[:6])
    spread, condition = (*gradient.inputs[6:], None, None)[:2]
    weighed = some(o.producer())
    need(is_standard(weighed, "MatMul") and weighed.inputs[1] is v and spread is None)
    p = some(weighed.inputs[0])
    weights = _weights(p, {weighed, gradient})
    need(again is p or _weights(again, {gradient}).is_like(weights))
    mask = weights.mask
    need((None if condition is None else behind_orders(condition)) is (mask.condition if mask else None))
    need(condition is None or mask is None or attributes(gradient).get("kept", 1) == mask.kept)
    q, k, values, slope = (some(source(x)) for x in (*weights.product.inputs, v, dy))
    read_q, read_k = (some(source(x, behind=True)) for x in (left, right))
    known_q, known_k = (some(source(x, behind=True)) for x in weights.product.inputs)
    need(values.scale == slope.scale == 1.0 and read_q.is_like(known_q) and read_k.is_like(known_k.turned()))
    need(not gradient.outputs[3].uses())
    need(all(x.graph is gradient.graph for x in (weights.product, weighed)))
    dq, dk, dv, _ = gradient.outputs
    need(all(y.uses() or y.is_graph_output() for y in (dq, dk, dv)))
    gradients = (Gradient(dq, read_k.scale), Gradient(dk, read_q.scale), Gradient(dv, 1.0))
    scale = weights.scale * q.scale * k.scale
    guarded = weights.guarded
    return Attention(weights.sizes, scale, mask, guarded, q, k.turned(), values, slope, o, gradient, gradients)


@dataclass(frozen=True)
class Weights:
    """The computation of attention weights: ``Softmax(mask(scale·product))``.

    Attributes:
        sizes: the shape of the scores.
        product: the node that computes Q·Kᵀ.
        scale: its factor.
        mask: the mask, if any.
        guarded: whether NaN is replaced by zeros.
    """

    sizes: Sizes
    product: ir.Node
    scale: float
    mask: Mask | None
    guarded: bool

    def is_like(self, other: Weights) -> bool:
        """Return whether ``self`` and ``other`` are computed from the same tensors by the same operations."""
        masks = [m and (behind_orders(m.value), m.kept, m.hidden) for m in (self.mask, other.mask)]
        mine, its = ([some(source(x, behind=True)) for x in w.product.inputs] for w in (self, other))
        are_same = all(a.is_like(b) and a.scale == b.scale for a, b in zip(mine, its, strict=True))
        alike = (self.sizes, self.scale, self.guarded) == (other.sizes, other.scale, other.guarded)
        return alike and masks[0] == masks[1] and are_same


def _weights(p: ir.Value, readers: Collection[ir.Node]) -> Weights:
    """Return the computation of the attention weights ``p``.

    Raises:
        MismatchError: if ``p`` is not a Softmax of scores, or has readers other than ``readers``.
    """
    need({node for node, _ in p.uses()} <= {*readers} and not p.is_graph_output())
    inside, own = unguarded(p, {*readers})
    need(inside is p or ({node for node, _ in inside.uses()} == own and not inside.is_graph_output()))
    sizes, softmax = some(sizes_of(inside)), some(inside.producer())
    need(p.dtype == ir.DataType.FLOAT and len(sizes) in (3, 4))
    need(is_standard(softmax, "Softmax") and attributes(softmax)["axis"] in (-1, len(sizes) - 1))
    return Weights(sizes, *_scores(some(softmax.inputs[0]), sizes), inside is not p)


def _scores(value: ir.Value, sizes: Sizes) -> tuple[ir.Node, float, Mask | None]:
    """Return the matrix product of queries and keys that computes the scores ``value``, its factor, and the mask."""
    scale, mask = 1.0, None
    while True:
        node = some(value.producer())
        need(only_reader(value) is not None and sizes_of(value) == sizes)
        factor = scaled(node)
        if is_standard(node, "MatMul"):
            return node, scale, mask
        if factor is not None:
            value, scale = factor[0], scale * factor[1]
            continue
        need(mask is None and scale == 1.0)
        value, mask = some(next(_masked(node, sizes), None))


def _masked(node: ir.Node, sizes: Sizes) -> Iterator[tuple[ir.Value, Mask]]:
    """Yield scores and mask if ``node`` may mask scores (Add, Where), for each possible assignment of its inputs."""
    if is_standard(node, "Add"):
        for scores, mask in (node.inputs, node.inputs[::-1]):
            if scores is not None and _is_of_products(scores) and mask is not None and spreads(sizes_of(mask), sizes):
                yield scores, Mask(mask)
    elif is_standard(node, "Where"):
        condition, *choices = node.inputs
        for kept, (scores, hidden) in ((True, choices), (False, choices[::-1])):
            known = number(hidden)
            if scores is None or condition is None or not known:
                continue
            if _is_of_products(scores) and spreads(sizes_of(condition), sizes):
                yield scores, Mask(condition, kept, known)


def _is_of_products(value: ir.Value) -> bool:
    """Return whether ``value`` is a matrix product, possibly scaled."""
    while (node := value.producer()) is not None and (factor := scaled(node)) is not None:
        value = factor[0]
    return node is not None and is_standard(node, "MatMul")


# --- rewriting ---------------------------------------------------------------------------------------------------


def _write(editor: Editor, attention: Attention) -> None:
    """Write one ``Attention`` instead of ``_scores``, Softmax and P·V, and one node for the gradients.

    ``Attention`` returns O, in its final layout, and for each row of S the maximum and the inverse sum of exponentials,
    [batch, heads, queries, 2], from which the gradient recomputes P.
    """
    op = editor.op
    *_, y = (d for d in destinations(attention.o, [attention.gradient]) if d.scale == 1.0 and _view(d) is not None)
    mask = [] if attention.mask is None else [attention.mask.written(editor)]
    common: dict[str, Any] = {
        "scale": attention.scale,
        "sizes": attention.kernel_sizes,
        "q": _layout(attention.q.view),
        "k": _layout(attention.k.view),
        "v": _layout(attention.v.view),
        "y": _layout(some(y.view())),
        "mask": [0] * 4 if attention.mask is None else _padded_strides(attention.mask.strides(len(attention.sizes))),
        "chosen": int(attention.mask is not None and attention.mask.kept is not None),
    }
    qkv = [op.wrap(x.base) for x in (attention.q, attention.k, attention.v)]
    shape = some(sizes_of(y.value))
    kept = (*attention.kernel_sizes[:3], 2)
    own = {"shape": shape, "guarded": int(attention.guarded)}
    made = kernel_of_several(op, "Attention", library.DOMAIN, [*qkv, *mask], [shape, kept], **own, **common)
    editor.place(some(attention.o.producer()))
    editor.replace(some(y.value.producer()), made[0])
    _write_gradient(
        editor, attention, [op.wrap(attention.dy.base), *qkv, *made, *mask], common | {"dy": _layout(attention.dy.view)}
    )


def _write_gradient(editor: Editor, attention: Attention, inputs: Sequence[Var], common: dict[str, Any]) -> None:
    """Write dQ, dK and dV by one node: into one tensor if they are concatenated, else each in its final layout."""
    found = [g.place(attention.scale if i < 2 else 1.0) for i, g in enumerate(attention.gradients)]
    places, factors = [place for place, _ in found], [factor for _, factor in found]
    packed = _side_by_side(places) if all(factor == 1.0 for factor in factors) else None
    values, views = packed or ([p.value for p in places], [some(_view(p)) for p in places])
    shapes = [some(sizes_of(x)) for x in values]
    layouts = {name: _layout(view) for name, view in zip(("dq", "dk", "dv"), views, strict=True)}
    named = dict(zip(("shape", "shape_of_dk", "shape_of_dv"), shapes, strict=False))
    op_type = "AttentionGrad" if packed is None else "PackedAttentionGrad"
    made = kernel_of_several(editor.op, op_type, library.DOMAIN, inputs, shapes, **common, **layouts, **named)
    made = [y if factor == 1.0 else y * factor for y, factor in zip(made, factors, strict=False)]
    editor.place(attention.gradient)
    for old, new in zip(values, made, strict=True):
        if old.producer() is attention.gradient:  # the old node is removed later, once its other outputs are unread
            editor.hand_over(old, new)
        else:
            editor.replace(some(old.producer()), new)


def _view(place: Destination, whole: Strided | None = None) -> Strided | None:
    """Return the layout of the tensor that ``place`` contains; None unless the elements of each head are contiguous."""
    view = place.view(whole)
    return view if view is not None and view.strides[-1] == 1 else None


def _side_by_side(places: Sequence[Destination]) -> tuple[list[ir.Value], list[Strided]] | None:
    """Return [the last tensor that contains the concatenated values at ``places``], and each value's view of it.

    None unless a Concat of exactly these values is their only reader.
    """
    node = only_reader(places[0].value, "Concat")
    if node is None or any(only_reader(p.value) is not node for p in places):
        return None
    parts = [some(sizes_of(x)) for x in node.inputs]
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
            _view(p, whole.part(axis, begin, parts[i][axis])) for p, begin, i in zip(places, begins, order, strict=True)
        ]
        if None not in views:
            found = [place.value], [some(view) for view in views]
    return found


def _layout(view: Strided) -> list[int]:
    """Return the offset of a view, and its strides of batch, head and row."""
    return [view.offset, *_padded_strides(view.strides)[:3]]


def _padded_strides(strides: Sequence[int]) -> list[int]:
    """Return the strides of batch, head, row and column, with 0 for a missing head axis."""
    return [*strides] if len(strides) == 4 else [strides[0], 0, *strides[1:]]
