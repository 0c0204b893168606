"""Gradients of control flow: the gradient of an If is an If, the gradient of a loop is a loop run backwards.

Each iteration of the backward loop recomputes its forward iteration from the state at its start, which the forward loop
saves as a scan output. The cost is thus linear in the number of iterations, and only one iteration's intermediate
values are in memory. The states of the backward loop are the cotangents of the forward states, and the sums of
cotangents of captured values. Cotangents of scan inputs are scan outputs of the backward loop; cotangents of scan
outputs are its scan inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.errors import UnsupportedOperatorError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.prune import prune_graph
from gradgraph.rules.containers import counters, is_sequence
from gradgraph.rules.iteration import Backward, changes, described, inlined, replayed, saved, total, twin
from gradgraph.rules.registry import Bodies, Gradients, case, integers, positive, real, uniform, vjp

# --- If ----------------------------------------------------------------------------------------------


_CHOICE = """
c = Cast <to = 9> (x0)
y0 = If (c) <
    then_branch = a () => (real[n] a0) { e = Exp(x1) a0 = Mul(e, x2) },
    else_branch = b () => (real[n] b0) { b0 = Sin(x1) }
>
"""

_NESTED_CHOICE = """
t = ReduceSum <keepdims = 0> (x0)
c = Greater(t, x2)
d = Not(c)
y0, y1 = If (c) <
    then_branch = a () => (real[n] a0, real a1) { a0 = Identity(x0) a1 = ReduceMax <keepdims = 0> (x1) },
    else_branch = b () => (real[m] b0, real b1) {
        b0 = If (d) <
            then_branch = e () => (real[m] e0) { e1 = Mul(x0, x1) e0 = Concat <axis = 0> (e1, x0) },
            else_branch = f () => (real[m] f0) { f0 = Neg(x1) }
        >
        b1 = Mul(x2, x2)
    }
>
"""


@vjp(
    "If",
    case(integers(1, 2), real(3), real(1), graph=_CHOICE),
    case(integers(0, 1), real(3), real(1), graph=_CHOICE),
    case(np.array([True]), real(3), real(1), graph=_CHOICE),
    case(positive(3), real(3), uniform(-2, -1), graph=_NESTED_CHOICE, outputs=2),
    case(positive(3), real(3), uniform(9, 10), graph=_NESTED_CHOICE, outputs=2),
    case(positive(3), real(3), uniform(9, 10), graph=_NESTED_CHOICE, outputs=2, read=[0]),
    captures=True,
)
def if_(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    condition: Var,
    *,
    then_branch: ir.Graph,
    else_branch: ir.Graph,
    bodies: Bodies,
) -> Gradients:
    """Return the gradients of an If: an If with the same condition, whose branches are backward passes.

    The gradient of a value that only one branch captures is zero in the other branch.
    """
    captured = bodies.captured

    def backward(branch: ir.Graph) -> ir.Graph:
        def write() -> list[Var]:
            gradients = bodies.gradients(op, branch, [], dys, captured)
            return [total(op, [dx], x) for x, dx in zip(captured, gradients, strict=True)]

        graph = op.graph([], write, "backward")
        prune_graph(graph)
        return graph

    then, otherwise = backward(then_branch), backward(else_branch)
    results = op.If(condition, then_branch=then, else_branch=otherwise, outputs=len(captured))
    return [None, *described(results, captured)]


# --- Scan --------------------------------------------------------------------------------------------


_RECURRENCE = """
y0, y1 = Scan <num_scan_inputs = 1, body = b (real[n] s, real[n] x) => (real[n] t, real[n] y) {
    h = MatMul(x2, s) k = Add(h, x) t = Tanh(k) y = Mul(t, s)
}> (x0, x1)
"""

_SIDEWAYS = """
y0, y1, y2, y3 = Scan <
    num_scan_inputs = 3,
    scan_input_axes = [1, -1, 0], scan_input_directions = [1, 0, 1],
    scan_output_axes = [-1, 1], scan_output_directions = [0, 1],
    body = b (real[n] s, int64 i, real[n] x, real[n, m] u, int64 k) => (real[n] t, int64 j, real[n] y, real[m, n] z) {
        j = Add(i, k)
        w = CastLike(i, s)
        v = Mul(w, x)
        t = Add(v, s)
        e = ReduceSum <keepdims = 0> (u)
        y = Mul(e, t)
        z = Transpose(u)
    }
> (x0, x4, x1, x2, x3)
"""

_MAP = """
y0, y1, y2 = Scan <num_scan_inputs = 1, body = b (real[n] x) => (real[n] y, real[n] z, real[n] w) {
    p = Mul(x, x1) y = Sin(p) z = Mul(p, p) w = Exp(p)
}> (x0)
"""


_COUNTDOWN = """
two = Constant <value_int = 2> ()
y0, y1 = Scan <num_scan_inputs = 1, body = b (int64 k, real x) => (int64 l, real[n] y) {
    one = Constant <value_int = 1> ()
    l = Sub(k, one)
    axis = Constant <value_ints = [-1]> ()
    column = Unsqueeze(l, axis)
    g = Gather <axis = -1> (x1, column)
    h = Squeeze(g, axis)
    y = Mul(h, x)
}> (two, x0)
"""

# the state that enters an iteration is a scan output, twice: in reverse order, and in the order that the gradient needs
_SHOWN = """
y0, y1, y2 = Scan <
    num_scan_inputs = 1, scan_output_axes = [0, 0], scan_output_directions = [1, 0],
    body = b (real[n] s, real[n] x) => (real[n] t, real[n] y, real[n] z) {
        t = Mul(s, x) y = Identity(s) z = Identity(s)
    }
> (x0, x1)
"""

# the state has its initial value in the first iteration only
_REPLACED = """
y0, y1 = Scan <num_scan_inputs = 1, body = b (real[n] s, int64[n] k) => (real[n] t, real[n] y) {
    t = CastLike(k, s) y = Mul(s, s)
}> (x0, x1)
"""


@vjp(
    "Scan",
    case(real(2), real(4, 2), real(2, 2), graph=_RECURRENCE, outputs=2),
    case(real(2), real(1, 2), real(2, 2), graph=_RECURRENCE, outputs=2, read=[0]),
    case(real(2), real(4, 2), real(2, 2), graph=_RECURRENCE, outputs=2, read=[1]),
    case(real(2), real(2, 3), real(2, 2, 3), integers(1, 4, 3), np.array(1), graph=_SIDEWAYS, outputs=4),
    case(real(3, 2), real(2), graph=_MAP, outputs=3),
    case(real(3), real(2, 4), graph=_COUNTDOWN, outputs=2),
    case(real(2), integers(1, 4, 3, 2), graph=_REPLACED, outputs=2, read=[1]),
    case(real(2), real(3, 2), graph=_SHOWN, outputs=3),
    captures=True,
)
def scan(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    *inputs: Var,
    body: ir.Graph,
    num_scan_inputs: int,
    bodies: Bodies,
    **along: Sequence[int],
) -> Gradients:
    """Return the gradients of a Scan: a Scan over its inputs and output cotangents in reverse."""
    n = len(inputs) - num_scan_inputs
    _refuse_sequences(bodies.captured, ys)
    back = Backward(op, dys, ys, inputs[:n], body, bodies)
    read = _along(inputs[n:], along.get("scan_input_axes"), along.get("scan_input_directions"))
    written = _along(dys[n:], along.get("scan_output_axes"), along.get("scan_output_directions"))
    places = back.used or [n]  # a Scan needs at least one scan input, which determines its length
    others = [*read, *(written[j - n] for j in back.rows)]
    rows = [others[k - n] if k >= n else (saved(op, ys[0], body, body.inputs[k], n), 0, 0) for k in places]
    back.step.inputs[:] = [*back.entering, *(back.slices[k] for k in places)]
    results = op.Scan(
        *back.initial,
        *(x for x, _, _ in rows),
        body=back.step,
        num_scan_inputs=len(rows),
        scan_input_axes=[axis for _, axis, _ in rows],
        scan_input_directions=[1 - direction for _, _, direction in rows],
        scan_output_axes=[read[k - n][1] for k in back.sliced] + [0] * (back.row_count - len(back.sliced)),
        scan_output_directions=[1 - read[k - n][2] for k in back.sliced] + [0] * (back.row_count - len(back.sliced)),
        outputs=len(back.initial) + back.row_count,
    )
    return back.gradients(results, inputs)


def _along(
    xs: Sequence[Var | None], axes: Sequence[int] | None, directions: Sequence[int] | None
) -> list[tuple[Var | None, int, int]]:
    zeros = [0] * len(xs)
    return list(zip(xs, axes or zeros, directions or zeros, strict=True))


def _refuse_sequences(captured: Sequence[Var], ys: Sequence[Var]) -> None:
    """Reject captured sequences: Scan states, in which gradients of captured values are summed, must be tensors."""
    node = ys[0].value.producer()
    found = next((x for x in captured if is_sequence(x)), None)
    if found is not None and node is not None:
        raise UnsupportedOperatorError(
            f"{describe(node)} reads the sequence '{shown(found.value.name)}' from outside, whose "
            "gradient a Scan cannot accumulate; make it a scan input (ConcatFromSequence), or use a Loop"
        )


# --- Loop --------------------------------------------------------------------------------------------


_POWERS = """
y0, y1 = Loop <body = b (int64 i, bool c, real[n] s) => (bool d, real[n] t, real[n] y) {
    d = Identity(c) h = MatMul(x2, s) t = Tanh(h) y = Mul(t, s)
}> (x0, , x1)
"""

# until the sum of the state exceeds x1
_UNTIL = """
one = Constant <value_int = 1> ()
yes = Cast <to = 9> (one)
y0, y1 = Loop <body = b (int64 i, bool c, real[n] s) => (bool d, real[n] t, real y) {
    t = Mul(s, x2) y = ReduceSum <keepdims = 0> (t) d = Less(y, x1)
}> ( , yes, x0)
"""

# the second state grows, and the first, a counter without a gradient, indexes a captured value
_GROWING = """
zero = Constant <value_int = 0> ()
k, y0, y1 = Loop <body = b (int64 i, bool c, int64 k, real[n] s) => (bool d, int64 l, real[m] t, real y) {
    d = Identity(c)
    one = Constant <value_int = 1> ()
    l = Add(k, one)
    r = Gather(x2, k)
    axes = Constant <value_ints = [0]> ()
    p = Unsqueeze(r, axes)
    q = Mul(s, r)
    t = Concat <axis = 0> (q, p)
    y = ReduceLogSumExp <keepdims = 0> (t)
}> (x0, , zero, x1)
"""

_NESTED = """
y0 = Loop <body = b (int64 i, bool c, real[n] s) => (bool d, real[n] t) {
    d = Identity(c)
    o, w = Loop <body = e (int64 j, bool f, real[n] u) => (bool g, real[n] v, real[n] x) {
        g = Identity(f)
        even = Mod(j, x0)
        choice = Cast <to = 9> (even)
        v = If (choice) <
            then_branch = p () => (real[n] p0) { p0 = Mul(u, s) },
            else_branch = q () => (real[n] q0) { q1 = Mul(u, x2) q0 = Sin(q1) }
        >
        x = Mul(v, v)
    }> (x0, , s)
    z = Constant <value_ints = [0]> ()
    a = ReduceSum <keepdims = 0> (w, z)
    t = Add(o, a)
}> (x0, , x1)
"""

_ROWS = """
one = Constant <value_int = 1> ()
yes = Cast <to = 9> (one)
y0 = Loop <body = b (int64 i, bool c) => (bool d, real[n] y) {
    d = Identity(c) g = Gather(x1, i) y = Mul(g, x2)
}> (x0, yes)
"""

# a captured value is read by a Gather at the iteration number, and by another operator
_READ_TWICE = """
one = Constant <value_int = 1> ()
yes = Cast <to = 9> (one)
y0 = Loop <body = b (int64 i, bool c) => (bool d, real[n] y) {
    d = Identity(c)
    axes = Constant <value_ints = [0]> ()
    row = Unsqueeze(i, axes)
    g = Gather(x1, row)
    h = GatherElements(x1, row)
    y = Mul(g, h)
}> (x0, yes)
"""

# one index in the first iteration, two afterwards
_WIDENED = """
zero = Constant <value_ints = [0]> ()
k, y0 = Loop <body = b (int64 i, bool c, int64[n] k) => (bool d, int64[m] l, real y) {
    d = Identity(c)
    steps = Constant <value_ints = [1, 2]> ()
    l = Add(k, steps)
    g = Gather(x1, k)
    h = Mul(g, g)
    y = ReduceSum <keepdims = 0> (h)
}> (x0, , zero)
"""

# the state that enters an iteration is the second scan output
_STACKED = """
y0, y1, y2 = Loop <body = b (int64 i, bool c, real[n] s) => (bool d, real[n] t, real[n] y, real[n] z) {
    d = Identity(c) t = Mul(s, s) y = Sin(s) z = Identity(s)
}> (x0, , x1)
"""

# the second state has its initial value in the first iteration only, and the first state accumulates it
_RESTARTED = """
y0, y1 = Loop <body = b (int64 i, bool c, real[n] s, real[n] r) => (bool d, real[n] t, real[n] q) {
    d = Identity(c) p = Mul(r, r) t = Add(s, p) q = CastLike(x2, s)
}> (x0, , x1, x1)
"""

# nothing reads the second state, whose shape changes
_UNREAD = """
y0, y1 = Loop <body = b (int64 i, bool c, real[n] s, real[m] r) => (bool d, real[n] t, real[k] q) {
    d = Identity(c) t = Sin(s) q = Concat <axis = 0> (s, t)
}> (x0, , x1, x2)
"""


@vjp(
    "Loop",
    case(np.array(4), real(2), real(2, 2), graph=_POWERS, outputs=2),
    case(np.array(0), real(2), real(2, 2), graph=_POWERS, outputs=2),
    case(np.array(3), real(2), real(2, 2), graph=_POWERS.replace("real[n]", "real[]"), outputs=2),
    case(np.array(4), real(2), real(2, 2), graph=_POWERS, outputs=2, read=[0]),
    case(positive(2), uniform(30, 31), uniform(1.5, 2, 1), graph=_UNTIL, outputs=2),
    case(np.array(3), real(2), positive(4), graph=_GROWING, outputs=2),
    case(np.array(2), real(2), real(2), graph=_NESTED),
    case(np.array(2), real(4, 3), real(1), graph=_ROWS),
    case(np.array(0), real(4, 3), real(1), graph=_ROWS),
    case(np.array(3), real(40, 3), real(1), graph=_ROWS),
    case(np.array(3), real(2), integers(1, 4, 2), graph=_RESTARTED, outputs=2, read=[0]),
    case(np.array(2), real(2), real(2), graph=_UNREAD, outputs=2),
    case(np.array(3), real(4), graph=_READ_TWICE),
    case(np.array(2), real(4), graph=_WIDENED),
    case(np.array(3), positive(2), graph=_STACKED, outputs=3),
    captures=True,
)
def loop(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    limit: Var | None = None,
    condition: Var | None = None,
    *states: Var,
    body: ir.Graph,
    bodies: Bodies,
) -> Gradients:
    """Return the gradients of a Loop: a Loop over its iterations in reverse order.

    Each backward iteration recomputes its forward iteration from the saved state.
    """
    back = Backward(op, dys, ys, states, body, bodies, lead=1)
    rows = {k: dy for k, j in enumerate(back.rows, len(body.inputs)) if k in back.used and (dy := dys[j]) is not None}
    needed = [k for k in back.used if 2 <= k < len(body.inputs)]
    moving = [k for k in needed if changes(body.inputs[k], body.outputs[k - 1])]
    rows |= {k: saved(op, ys[0], body, body.inputs[k], len(states)) for k in needed if k not in moving}
    counted = next(iter(rows.values()), None) or saved(op, ys[0], body, body.inputs[0], len(states))
    trips = op.Squeeze(op.dim(counted, 0), [0])  # each iteration wrote a row
    read: dict[int, Callable[[Var], Var]] = {k: functools.partial(op.Gather, x) for k, x in rows.items()}
    if moving:
        read |= replayed(op, trips, states, body, moving)

    def write(number: Var, go: Var, *entering: Var) -> list[Var]:
        at = trips - 1 - number
        given = {k: row(at) for k, row in read.items()} | {0: _as_number(op, at, body.inputs[0]), 1: op.const(True)}
        return [go, *inlined(op, back.step, [*entering, *(given.get(k) for k in range(len(back.slices)))])]

    graph = op.graph([*counters("number"), *map(twin, back.entering)], write, "backward")
    prune_graph(graph)
    results = op.Loop(trips, True, *back.initial, body=graph, outputs=len(back.initial) + back.row_count)
    node = ys[0].value.producer()
    assert node is not None
    before = len(node.inputs) - len(states)  # without states, the condition may be absent
    return [*[None] * before, *back.gradients(results, states)]


def _as_number(op: Builder, x: Var, number: ir.Value) -> Var:
    """Return the scalar ``x`` in the shape of the body's iteration number, a vector in PyTorch's legacy exports."""
    return op.Unsqueeze(x, [0]) if number.shape is not None and len(number.shape) == 1 else x
