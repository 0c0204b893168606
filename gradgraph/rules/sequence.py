"""Gradient rules of sequences and optionals.

Sequences with constant indices were already replaced by tensors in the normal form. The remaining ones are built at run
time; their gradients are sequences of equal length, with the gradient of each element.
"""

from __future__ import annotations

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.containers import element, erased, inserted, joined, sizes, typed, zeros
from gradgraph.rules.registry import Gradients, case, integers, no_gradient, real, vjp

no_gradient("it has no elements", "SequenceEmpty")
no_gradient("a count", "SequenceLength")
no_gradient("a truth value", "OptionalHasElement")


def from_the_front(op: Builder, place: Var, length: Var) -> Var:
    """Return the index ``place``, which may be negative, as a nonnegative index."""
    if place.const is not None and (place.const >= 0).all():
        return place
    place = op.cast(place, length.dtype)
    return op.Where(place < 0, place + length, place)


# --- sequences ---------------------------------------------------------------------------------------

_CHOSEN = "s = SequenceConstruct(x0, x1, x0)  e = SequenceAt(s, x2)  y0 = Mul(e, e)"
_STRETCHED = """
s = SequenceConstruct(x0, x1)
t = SequenceInsert(s, x2, x3)
u = SequenceErase(t, x4)
y0 = ConcatFromSequence <axis = -1> (u)
"""
_CUT = "s = SplitToSequence <axis = 1> (x0, x1)  a = SequenceAt(s, x2)  b = SequenceAt(s, x3)  y0 = Mul(a, b)"
_ROWS = "s = SplitToSequence <axis = -1, keepdims = 0> (x0)  e = SequenceAt(s, x1)  y0 = Sin(e)"
_PARTED = "s = SplitToSequence <axis = -1> (x0)  e = SequenceAt(s, x1)  y0 = Sin(e)"
_STACKED = """
s = SequenceConstruct(x0, x1)
t = SequenceErase(s, x2)
u = SequenceInsert(t, x1)
v = SequenceErase(u)
w = SequenceInsert(v, x0)
y0 = ConcatFromSequence <axis = -1, new_axis = 1> (w)
"""
_SLICES = """
s = SplitToSequence <axis = -1> (x0)
t = SequenceErase(s, x1)
y0 = ConcatFromSequence <axis = 0> (t)
"""
_LAST = """
s = SequenceConstruct(x0, x1)
t = SequenceInsert(s, x2, x3)
u = SequenceErase(t)
y0 = ConcatFromSequence <axis = 0> (u)
"""
_MAPPED = """
s = SequenceConstruct(x0, x1)
k = SequenceMap <body = b (real[n] x) => (real[n] y) { p = Mul(x, x2) y = Sin(p) }> (s)
y0 = SequenceAt(k, x3)
"""
_ZIPPED = """
s = SequenceConstruct(x0, x1)
t = SplitToSequence <axis = 0, keepdims = 0> (x2)
k, l = SequenceMap <body = b (real[n] x, real[n] y, real[m] z) => (real[n] u, real[m] v) {
    u = Mul(x, y) w = ReduceSum(u) v = Add(w, z)
}> (s, t, x3)
a = ConcatFromSequence <axis = 0> (k)
b = ConcatFromSequence <axis = 0, new_axis = 1> (l)
y0 = MatMul(a, b)
"""
_GROWN = """
s0 = SequenceConstruct(x0, x1)
s = Loop <body = b (int64 i, bool c, seq(real[n]) t) => (bool d, seq(real[n]) u) {
    d = Identity(c)
    e = SequenceAt(t, i)
    f = SequenceAt(t, x3)
    g = Mul(e, f)
    u = SequenceInsert(t, g)
}> (x2, , s0)
y0 = ConcatFromSequence <axis = 0> (s)
"""
_GROWN_BESIDE = """
s0 = SequenceConstruct(x0, x1)
y1, s, m = Loop <
    body = b (int64 i, bool c, real[n] r, seq(real[n]) t, int64 k) => (bool d, real[n] q, seq(real[n]) u, int64 l) {
    d = Identity(c)
    e = SequenceAt(t, i)
    q = Sin(e)
    l = Add(k, i)
    g = Mul(e, r)
    u = SequenceInsert(t, g)
}> (x2, , x0, s0, x2)
y0 = ConcatFromSequence <axis = 0> (s)
"""


@vjp(
    "SequenceConstruct",
    case(real(3), real(3), integers(1, 2), graph=_CHOSEN),
    case(real(3), real(3), integers(-1, 0), graph=_CHOSEN),
    case(real(3), real(3), real(1), integers(1, 2), graph=_MAPPED),
    case(real(1), real(1), real(2, 1), real(3), graph=_ZIPPED),
)
def sequence_construct(op: Builder, dy: Var, y: Var, *xs: Var) -> Gradients:
    return [element(op, dy, op.const(i)) for i in range(len(xs))]


@vjp(
    "SequenceAt",
    case(real(2, 5), [2, 2, 1], 0, 1, graph=_CUT),
    case(real(2, 5), 2, 0, -2, graph=_CUT),
    case(real(2, 5), 2, integers(1, 2), integers(-2, -1), graph=_CUT),
)
def sequence_at(op: Builder, dy: Var, y: Var, sequence: Var, place: Var) -> Gradients:
    at = from_the_front(op, place, op.SequenceLength(sequence))
    return (inserted(op, erased(op, zeros(op, sequence), at), dy, at),)


@vjp(
    "SequenceInsert",
    case(real(2, 1), real(2, 2), real(2, 3), integers(1, 2), integers(0, 1), graph=_STRETCHED),
    case(real(2, 1), real(2, 2), real(2, 3), integers(-2, -1), integers(1, 2), graph=_STRETCHED),
    case(real(2, 1), real(2, 2), real(2, 3), 2, 0, graph=_STRETCHED),
    case(real(2), real(2), 3, integers(-1, 0), graph=_GROWN),
    case(real(2), real(2), 3, graph=_GROWN_BESIDE, outputs=2),
)
def sequence_insert(op: Builder, dy: Var, y: Var, sequence: Var, x: Var, place: Var | None = None) -> Gradients:
    at = op.const(-1) if place is None else from_the_front(op, place, op.SequenceLength(sequence))
    return erased(op, dy, at), element(op, dy, at)


@vjp(
    "SequenceErase",
    case(real(3), real(3), integers(0, 1), graph=_STACKED),
    case(real(3), real(3), integers(-1, 0), graph=_STACKED),
    case(real(4), real(3), real(2), integers(0, 1), graph=_LAST),
)
def sequence_erase(op: Builder, dy: Var, y: Var, sequence: Var, place: Var | None = None) -> Gradients:
    at = None if place is None else from_the_front(op, place, op.SequenceLength(sequence))
    gone = element(op, sequence, op.const(-1) if at is None else at)
    return (inserted(op, dy, op.zeros_like(gone), at),)


@vjp(
    "SplitToSequence",
    case(real(2, 5), [2, 2, 1], integers(0, 1), integers(1, 2), graph=_CUT),
    case(real(2, 4), 2, integers(0, 1), integers(-1, 0), graph=_CUT),
    case(real(2, 3), integers(1, 2), graph=_ROWS),
    case(real(2, 3), integers(1, 2), graph=_PARTED),
    case(real(2, 3), integers(1, 2), graph=_SLICES),
    case(real(2, 3), integers(1, 2), graph=_SLICES.replace("-1>", "-1, keepdims = 0>")),
)
def split_to_sequence(
    op: Builder, dy: Var, y: Var, x: Var, split: Var | None = None, *, axis: int = 0, keepdims: int = 1
) -> Gradients:
    return (joined(op, dy, axis, split is None and not keepdims),)


@vjp(
    "ConcatFromSequence",
    case(real(2, 1), real(2, 2), real(2, 0), integers(1, 2), integers(0, 1), graph=_STRETCHED),
    case(real(3), real(3), integers(1, 2), graph=_STACKED),
)
def concat_from_sequence(op: Builder, dy: Var, y: Var, sequence: Var, *, axis: int, new_axis: int = 0) -> Gradients:
    if new_axis:
        return (typed(op.SplitToSequence(dy, None, axis=axis, keepdims=0), sequence),)
    return (typed(op.SplitToSequence(dy, sizes(op, sequence, axis), axis=axis), sequence),)


# --- optionals ---------------------------------------------------------------------------------------

_PRESENT = "o = Optional(x0)  e = OptionalGetElement(o)  y0 = Mul(e, e)"
_DECIDED = """
c = Cast <to = 9> (x0)
o = If (c) <
    then_branch = a () => (optional(real[n]) a0) { e = Exp(x1) a0 = Optional(e) },
    else_branch = b () => (optional(real[n]) b0) { b0 = Optional(x1) }
>
y0 = OptionalGetElement(o)
"""


@vjp("Optional", case(real(3), graph=_PRESENT), case(integers(1, 2), real(3), graph=_DECIDED))
@vjp(
    "OptionalGetElement", case(real(3), graph=_PRESENT), case(real(3), graph="e = OptionalGetElement(x0)  y0 = Exp(e)")
)
def same(op: Builder, dy: Var, y: Var, x: Var | None = None) -> Gradients:
    """Return ``dy``: the gradient of an optional is the gradient of its content."""
    return (dy,)
