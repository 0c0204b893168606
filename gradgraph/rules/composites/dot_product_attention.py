"""Scaled dot-product attention, softmax(mask(c·Q·Kᵀ))·V, or softmax(S)·V for scores S of a different form."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Shape
from gradgraph.rules.broadcasting import unbroadcast
from gradgraph.rules.composites.table import Found, composite
from gradgraph.rules.linalg import product_gradients, transposed
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.patterns import MismatchError, Walk, need, number_of, some, with_number
from gradgraph.rules.registry import Gradients, attributes, boolean, case, real, uniform
from gradgraph.rules.softmax import softmax_gradient

MOST_STEPS = 8  # maximum nodes between the product and its last mask


def find_weighed(walk: Walk) -> Found:
    """Match P·V with P = Softmax(S), where a Where may replace NaN in P with zeros. The inputs are S and V."""
    p, v = walk.last.inputs
    softmax = walk.to(_unguarded(walk, some(p)), "Softmax")
    rank = len(some(shape_of(some(p))))
    need(attributes(softmax)["axis"] % rank == rank - 1 and len(some(shape_of(some(v)))) == rank >= 2)
    return Found((softmax.inputs[0], v), (p,))


def _unguarded(walk: Walk, p: ir.Value) -> ir.Value:
    """Return ``p`` before the Where, if any, that replaces NaN (0/0, in fully masked rows) with zeros."""
    node = p.producer()
    if node is None or not is_standard(node, "Where"):
        return p
    condition, instead, weights = node.inputs
    asked = some(some(condition).producer())
    need(is_standard(asked, "IsNaN") and asked.inputs[0] is weights and number_of(instead) == 0.0)
    walk.passed.append(node)
    return some(weights)


def find_attention(walk: Walk) -> Found:
    """Match softmax(mask(c·Q·Kᵀ))·V.

    Going backwards from the softmax, it accepts an optional Where, additions, constant factors, and Q·Kᵀ.
    """
    weighed = find_weighed(walk)
    (scores, v), (p,) = weighed.inputs, weighed.kept
    condition, kept, scores = _split_where(walk, some(scores))
    masks, scores = _split_masks(walk, scores)
    scale, scores = _split_scale(walk, scores)
    product = walk.to(scores, "MatMul")
    q, k = (some(x) for x in product.inputs)
    ranks = {len(some(shape_of(x))) for x in (q, k, scores, some(p))}
    need(len(ranks) == 1)
    return Found((q, k, v, *masks), (p, scores, condition), {"scale": scale, "kept": kept, "masks": len(masks)})


def _split_where(walk: Walk, scores: ir.Value) -> tuple[ir.Value | None, int, ir.Value]:
    """Return (condition, ``kept``, scores) of a Where that replaces some scores with a constant.

    ``kept`` is 1 if scores are kept where the condition is true, else 0. Without a Where, the condition is None.
    """
    node = scores.producer()
    if node is None or not is_standard(node, "Where"):
        return None, 1, scores
    walk.passed.append(node)
    condition, a, b = node.inputs
    kept = 1 if number_of(b) is not None else 0
    need(number_of(b if kept else a) is not None)
    return condition, kept, some(a if kept else b)


def _split_masks(walk: Walk, scores: ir.Value) -> tuple[list[ir.Value], ir.Value]:
    masks = []
    while (node := scores.producer()) is not None and is_standard(node, "Add"):
        walk.passed.append(node)
        scores, mask = _split_sum(node)
        masks.append(mask)
    return masks, scores


def _split_sum(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Return the operands of an Add: the scores, computed from Q·Kᵀ, and the mask."""
    for scores, mask in (node.inputs, node.inputs[::-1]):
        if scores is not None and mask is not None and _has_product(scores):
            return scores, mask
    raise MismatchError


def _has_product(scores: ir.Value) -> bool:
    """Whether ``scores`` is a matrix product, up to sums and factors."""
    waiting: list[ir.Value | None] = [scores]
    for _ in range(MOST_STEPS):
        node = None if not waiting or (x := waiting.pop()) is None else x.producer()
        if node is not None and is_standard(node, "MatMul"):
            return True
        if node is not None and is_standard(node, "Add", "Mul", "Div"):
            waiting += node.inputs
    return False


def _split_scale(walk: Walk, scores: ir.Value) -> tuple[float, ir.Value]:
    scale = 1.0
    while (node := scores.producer()) is not None and is_standard(node, "Mul", "Div"):
        walk.passed.append(node)
        scores, factor = with_number(node)
        scale *= factor
    return scale, scores


_HEADS = (real(2, 3, 4), real(2, 4, 5), real(2, 5, 2))  # values are narrower than keys
_WIDE = (real(2, 3, 4), real(2, 4, 2), real(2, 2, 5))
_GUARD = "zero = Constant<value = real {0.0}>()  s = Softmax(t)  n = IsNaN(s)  p = Where(n, zero, s)"
_HALF = "half = Constant<value = real {0.5}>()  low = Constant<value = real {-1e30}>()"
_END = "  p = Softmax(t)  y0 = MatMul(p, x2)"
_CONDITION = "one = Constant<value = real {1.0}>()  b = Less(x3, one)"


@composite(
    "Attention",
    ["MatMul"],
    find_attention,
    case(*_HEADS, graph=f"t = MatMul(x0, x1){_END}"),
    case(*_WIDE, graph=f"t = MatMul(x0, x1){_END}"),
    case(real(3, 4), real(4, 5), real(5, 2), graph=f"t = MatMul(x0, x1){_END}"),
    case(*_HEADS, graph=f"{_HALF}  s = MatMul(x0, x1)  t = Mul(s, half){_END}"),
    case(*_HEADS, graph=f"{_HALF}  s = MatMul(x0, x1)  t = Div(s, half){_END}"),
    case(*_HEADS, real(3, 5), graph=f"{_HALF}  s = MatMul(x0, x1)  r = Mul(half, s)  t = Add(r, x3){_END}"),
    case(
        *_HEADS,
        real(5),
        real(2, 1, 5),
        graph=f"{_HALF}  s = MatMul(x0, x1)  r = Mul(half, s)  u = Add(x3, r)  t = Add(u, x4){_END}",
    ),
    case(*_HEADS, real(3, 5), graph=f"{_HALF}  {_CONDITION}  s = MatMul(x0, x1)  t = Where(b, s, low){_END}"),
    case(
        *_HEADS,
        real(2, 3, 5),
        graph=f"{_HALF}  {_CONDITION}  s = MatMul(x0, x1)  m = Mul(s, half)"
        f"  r = Add(m, x3)  t = Where(b, half, r){_END}",
    ),
    case(*_HEADS, graph=f"t = MatMul(x0, x1){_END}  y1 = Exp(p)", outputs=2),  # the weights are an output, too
    case(*_HEADS, graph=f"t = MatMul(x0, x1)  {_GUARD}  y0 = MatMul(p, x2)"),
    case(*_HEADS, graph=f"t = MatMul(x0, x1)  {_GUARD}  y0 = MatMul(p, x2)  y1 = Exp(p)", outputs=2),
    case(real(1, 3, 4), real(2, 4, 5), real(1, 5, 2), graph=f"t = MatMul(x0, x1){_END}"),  # a single query head
    case(real(1, 3, 4), real(1, 4, 5), real(2, 5, 2), real(2, 3, 5), graph=f"s = MatMul(x0, x1)  t = Add(s, x3){_END}"),
    case(real(2, 1, 4), real(2, 4, 5), real(2, 5, 2), real(3, 1), graph=f"s = MatMul(x0, x1)  t = Add(s, x3){_END}"),
    case(real(1, 4), real(4, 5), real(5, 2), real(3, 5), graph=f"s = MatMul(x0, x1)  t = Add(s, x3){_END}"),
    case(real(0, 3, 4), real(0, 4, 5), real(0, 5, 2), graph=f"t = MatMul(x0, x1){_END}"),
)
def attention(
    op: Builder,
    dy: Var,
    y: Var,
    q: Var,
    k: Var,
    v: Var,
    *others: Var | None,
    scale: float,
    kept: int,
    masks: int,
) -> Gradients:
    added, (p, scores, condition) = others[:masks], others[masks:]
    assert p is not None and scores is not None
    spread = None if _same(p.shape, scores.shape) else scores
    dq, dk, dv, ds = attention_gradient(op, dy, y, p, q, transposed(op, k), v, spread, condition, kept=kept)
    if scale != 1.0:
        dq, dk = dq * scale, dk * scale
    return dq, transposed(op, dk), dv, *(unbroadcast(op, ds, p, m) for m in added if m is not None)


@named_operator(
    "AttentionGrad",
    case(real(2, 3, 2), real(2, 3, 2), uniform(0.1, 0.9, 2, 3, 5), real(2, 3, 4), real(2, 5, 4), real(2, 5, 2)),
    case(
        real(2, 3, 7),
        real(2, 3, 7),
        uniform(0.1, 0.9, 2, 3, 5),
        real(2, 3, 4),
        real(2, 5, 4),
        real(2, 5, 7),
        None,
        boolean(3, 5),
        kept=0,
    ),
    like=[3, 4, 5, 2],
)
def attention_gradient(
    op: Builder,
    dy: Var,
    y: Var,
    p: Var,
    q: Var,
    k: Var,
    v: Var,
    spread: Var | None = None,
    condition: Var | None = None,
    *,
    kept: int = 1,
) -> tuple[Var, Var, Var, Var]:
    """Return the gradients of Q, K, V and the masked scores S = Q·Kᵀ; ``p`` are the probabilities P = softmax(S).

    dP = dY·Vᵀ, dV = Pᵀ·dY, dS = P·(dP − Σ dP·P), dQ = dS·K, dK = dSᵀ·Q. If there is a ``condition``, dS is 0 except
    where the condition equals ``kept``. If a mask may broadcast Q·Kᵀ to a larger shape, ``spread`` is Q·Kᵀ, and dS is
    summed to the shape of ``spread`` before dQ and dK are computed.
    """
    dp, dv = product_gradients(op, dy, p, v)
    ds = weights_gradient(op, dp, p, dy, y)
    if condition is not None:
        ds = op.Where(condition, *((ds, 0.0) if kept else (0.0, ds)))
    product = ds if spread is None else unbroadcast(op, ds, ds, spread)
    dq, dk = product @ k, transposed(op, product) @ q
    return unbroadcast(op, dq, dq, q), unbroadcast(op, dk, dk, k), dv, ds


@composite(
    "WeighedValues",
    ["MatMul"],
    find_weighed,
    case(real(2, 3, 5), real(2, 5, 2), graph="p = Softmax(x0)  y0 = MatMul(p, x1)"),
    case(real(2, 3, 2), real(2, 2, 5), graph="p = Softmax(x0)  y0 = MatMul(p, x1)"),
    case(real(1, 3, 2), real(2, 2, 5), graph="p = Softmax(x0)  y0 = MatMul(p, x1)"),
    case(real(2, 3, 5), real(2, 5, 2), graph=f"t = Identity(x0)  {_GUARD}  y0 = MatMul(p, x1)"),
)
def weighed_values(op: Builder, dy: Var, y: Var, s: Var, v: Var, p: Var) -> Gradients:
    dp, dv = product_gradients(op, dy, p, v)
    return weights_gradient(op, dp, p, dy, y), dv


def weights_gradient(op: Builder, dp: Var, p: Var, dy: Var, y: Var) -> Var:
    """Return the gradient of the scores, P·(dP − Σ dP·P), for y = P·V and dP = dY·Vᵀ.

    The row sum Σ dP·P equals Σ dY·y. The latter is used unless the rows of y are longer than those of P.
    """
    keys, size = (None if x.shape is None else x.shape[-1] for x in (p, y))
    longer = isinstance(keys, int) and isinstance(size, int) and size > keys
    rows = None if p.shape is None or y.shape is None else (p.shape[:-1], y.shape[:-1])
    row = (dy, y) if rows is not None and _same(*rows) and not longer else ()
    return softmax_gradient(op, dp, p, *row, axis=-1)


def _same(a: Shape | None, b: Shape | None) -> bool:
    """Whether both shapes are known and equal."""
    return a is not None and a == b and None not in a
