"""Gradient rules of normalization: subtract a mean, divide by a deviation, scale.

Notation: ``x̂ = (x − mean(x)) · inv`` with ``inv = 1/√(var(x) + ε)``. Gradients of scales are computed from the centred
x: the equivalent Σ dy·x − mean·Σ dy would lose digits by cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.broadcasting import unbroadcast
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.registry import Gradients, case, point, positive, real, vjp
from gradgraph.rules.rounding import all_wide, back

# test points: for two numbers, only a fraction ε/(var + ε) of the cotangent remains, which must be accurate
_TINY, _APART = "epsilon = 1.1641532182693481e-10", 0.7  # ε = 2⁻³³
_LEFT = (_APART**2 + 2.0**-33) ** -1.5

_VECTORS = "s = Cast<to = 1>(x1)  b = Cast<to = 1>(x2)  m = Cast<to = 1>(x3)  v = Cast<to = 1>(x4)"

# with at most this many numbers per mean and deviation, cancellation amplifies rounding errors
MOST_NUMBERS_PROJECTED_OUT = 4


def inverse_deviation(op: Builder, variance: Var, epsilon: float) -> Var:
    return op.Reciprocal(op.Sqrt(variance + epsilon))


def _standardized(op: Builder, x: Var, axes: Sequence[int], epsilon: float) -> tuple[Var, Var]:
    """Return ``x̂ = (x − mean)·inv`` and ``inv = 1/√(var + epsilon)``, with mean and variance over ``axes``."""
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    inv = inverse_deviation(op, op.ReduceMean(centred * centred, axes, keepdims=1), epsilon)
    return centred * inv, inv


def _standardized_vjp(
    op: Builder, g: Var, xhat: Var, inv: Var, axes: Sequence[int], epsilon: float | None = None
) -> Var:
    """Return the cotangent of x from ``g``, the cotangent of ``x̂``.

    If ``epsilon`` is given, rounding errors are corrected where few elements share a mean (see ``_are_few``).
    """
    k = op.ReduceMean(g * xhat, axes, keepdims=1)
    u = g - op.ReduceMean(g, axes, keepdims=1) - xhat * k
    if epsilon is not None and _are_few([(xhat.shape or ())[axis] for axis in axes]):
        beyond = op.ReduceMean(u * xhat, axes, keepdims=1) - k * (inv * inv * epsilon)
        u = u - op.ReduceMean(u, axes, keepdims=1) - xhat * beyond
    return inv * u


def _are_few(sizes: Sequence[int | str | None]) -> bool:
    """Whether so few elements share a mean and deviation that their cotangent cancels almost completely.

    For two elements, only the fraction ε/(var + ε) remains, which may be as small as the rounding error (1e-5).
    """
    return 1 < math.prod(d if isinstance(d, int) else math.inf for d in sizes) <= MOST_NUMBERS_PROJECTED_OUT


def channel_sums(op: Builder, x: Var) -> Var:
    """Return ``x`` summed over all axes except channels: first space, then the batch, twice as fast as a single sum."""
    of_sample = op.ReduceSum(x, list(range(2, x.rank)), keepdims=0) if x.rank > 2 else x
    return op.ReduceSum(of_sample, [0], keepdims=int(x.rank == 1))  # x of rank 1 has one channel


def columns(op: Builder, v: Var, x: Var) -> Var:
    """Return a vector over channels as [C, 1, …], so that it broadcasts against ``x``."""
    return op.Unsqueeze(v, list(range(1, x.rank - 1))) if x.rank > 2 else v


def _by_channel(op: Builder, scale: Var, *vs: Var) -> list[Var]:
    """Return tensors as [samples, channels, numbers] if a rank is unknown, else unchanged."""
    if all(v.shape is not None for v in vs):
        return list(vs)
    rows = []
    for v in vs:
        sizes = op.Concat(op.dims(v, 0, 1), op.shape(scale), op.ReduceProd(op.dims(v, 2), [0]), axis=0)
        rows.append(op.Reshape(v, sizes, allowzero=1))
        shapes.record_shape(rows[-1].value, (None, None, None))
    return rows


def _as_given(op: Builder, dx: Var, x: Var) -> Var:
    """Return ``dx`` reshaped to the shape of ``x``, to undo ``_by_channel``."""
    return dx if x.shape is not None else op.Reshape(dx, op.shape(x), allowzero=1)


def _size(op: Builder, x: Var, axes: Sequence[int]) -> Var:
    """Return the number of elements of ``x`` along ``axes``, as a floating-point scalar."""
    dims = op.Concat(*(op.dim(x, axis) for axis in axes), axis=0)
    count = op.ReduceProd(dims, keepdims=0)
    return op.cast(count, x.dtype) if count.const is None else op.const(count.const, x.dtype)


def _widest(*dtypes: ir.DataType) -> ir.DataType:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _cast_all(op: Builder, dtype: ir.DataType, *vs: Var) -> list[Var]:
    return [op.like(op.cast(v, dtype), v) for v in vs]


# --- BatchNormalization ------------------------------------------------------------------------------


@vjp(
    "BatchNormalization",
    case(real(2, 3, 4), real(3), real(3), real(3), positive(3)),
    case(real(4, 3), real(3), real(3), real(3), positive(3), epsilon=0.1),
    case(real(4), real(1), real(1), real(1), positive(1)),
    case(real(2, 3, 2, 2), real(3), real(3), real(3), positive(3)),
    case(real(2, 1, 1, 1), real(1), real(1), real(1), positive(1)),
    case(real(0, 3, 2), real(3), real(3), real(3), positive(3)),
    case(real(4, 3), real(3), real(3), real(3), positive(3), training_mode=1),
    case(real(4, 3), real(3), real(3), real(3), positive(3), training_mode=1, outputs=3, read=[0]),
    case(real(3, 2, 4), real(2), real(2), real(2), positive(2), training_mode=1, outputs=3),
    case(real(2, 3, 2, 2), real(3), real(3), real(3), positive(3), training_mode=1, outputs=3, momentum=0.3),
    case(real(3, 2, 4), real(2), real(2), real(2), positive(2), training_mode=1, outputs=3, read=[0]),
    case(real(3, 2, 4), real(2), real(2), real(2), positive(2), training_mode=1, outputs=3, read=[2], epsilon=0.1),
    case(real(3, 2, 4), real(2), real(2), real(2), positive(2), training_mode=1, outputs=3, read=[1], momentum=0.0),
    case(real(2, 3, 2, 2), real(3), real(3), real(3), positive(3), training_mode=1, outputs=3, momentum=0.0),
    case(real(2, 3, 2, 2, 1), real(3), real(3), real(3), positive(3), training_mode=1, outputs=3),
    case(real(4, 2), real(2), real(2), real(2), positive(2), training_mode=1, outputs=3, momentum=1.0),
    point(  # few numbers
        *([[1.0] * 3, [1.0 - 2 * _APART] * 3], [2.0**34] * 3, [0.0] * 3, [0.0] * 3, [1.0] * 3, [[1.0], [0.0]]),
        gives=[[[_LEFT] * 3, [-_LEFT] * 3], None, None, None, None, None],
        graph="s = Constant<value_ints=[2, 3]>()  x = Reshape(x0, s)"
        f"  h, m, v = BatchNormalization<training_mode = 1, {_TINY}>(x, x1, x2, x3, x4)  y0 = Mul(h, x5)",
    ),
    point(
        *([[[_APART, -_APART, _APART, -_APART]]], [2.0**34], [0.0], [0.0], [1.0], [1.0, 0.0, 1.0, 0.0]),
        gives=[[[[_LEFT, -_LEFT, _LEFT, -_LEFT]]], None, None, None, None, None],
        graph="s = Constant<value_ints=[1, 1, 4]>()  x = Reshape(x0, s)"
        f"  h, m, v = BatchNormalization<training_mode = 1, {_TINY}>(x, x1, x2, x3, x4)  y0 = Mul(h, x5)",
    ),
    point(  # vectors in float32
        *([[1.0], [3.0]], [2.0], [0.0], [0.0], [3.0]),
        gives=[[[1.0], [1.0]], [2.0], [2.0], [-2.0], [-0.5]],
        graph=f"{_VECTORS}  y0 = BatchNormalization<epsilon = 1.0>(x0, s, b, m, v)",
    ),
    point(  # a mean that float32 rounds
        *([[0.2], [0.4]], [2.0], [0.0], [0.0], [1.0]),
        gives=[[[0.0], [0.0]], [0.0], [2.0], None, None],
        graph=f"{_VECTORS}  y0, m1, v1 = BatchNormalization<training_mode = 1, momentum = 0.0>(x0, s, b, m, v)",
    ),
    point(  # a constant channel: no variance, so ε keeps it finite
        [[[2.0, 2.0]]], [3.0], [1.0], [0.0], [1.0], gives=[[[[0.0, 0.0]]], [0.0], [2.0], None, None], training_mode=1
    ),
)
def batch_normalization(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    *inputs: Var,
    epsilon: float,
    momentum: float,
    training_mode: int,
) -> Gradients:
    dtype = _widest(*(v.dtype for v in inputs))
    dy = op.zeros_like(inputs[0]) if dys[0] is None else op.like(dys[0], inputs[0])
    dy, x, scale, _, mean, var = _cast_all(op, dtype, dy, *inputs)
    dy, x = _by_channel(op, scale, dy, x)
    if not training_mode:
        dx, *others = _with_given_statistics(op, dy, x, scale, mean, var, epsilon)
        return back(op, [_as_given(op, dx, inputs[0]), *others], inputs)
    updated = [op.output(ys[0], i) for i in (1, 2)]  # onnxruntime supports training mode with all three outputs only
    given = updated if momentum == 0.0 and updated[0].dtype == dtype else _batch_statistics(op, x)
    dx, dscale, db = batch_normalization_gradient(op, dy, x, scale, *given, epsilon=epsilon)
    running = [None if d is None else op.cast(d, dtype) for d in (*dys[1:], None, None)][:2]
    if any(d is not None for d in running):
        dx = dx + _from_running_statistics(op, running, x, given[0], momentum)
    dx = _as_given(op, dx, inputs[0])
    return back(op, [dx, dscale, db, *(None if d is None else d * momentum for d in running)], inputs)


def _with_given_statistics(op: Builder, dy: Var, x: Var, scale: Var, mean: Var, var: Var, epsilon: float) -> list[Var]:
    inv = inverse_deviation(op, var, epsilon)
    slope = scale * inv
    db = channel_sums(op, dy)
    dscale = channel_sums(op, dy * (x - columns(op, mean, x))) * inv
    return [dy * columns(op, slope, x), dscale, db, -db * slope, dscale * slope * inv * -0.5]


def _batch_statistics(op: Builder, x: Var) -> list[Var]:
    """Return the mean and the biased variance of each channel."""
    n = batch_size(op, x)
    mean = channel_sums(op, x) / n
    centred = x - columns(op, mean, x)
    return [mean, channel_sums(op, centred * centred) / n]


@named_operator(
    "BatchNormalizationGrad",
    case(real(4, 3), real(4, 3), real(3), real(3), positive(3), epsilon=0.1),
    case(real(3, 2, 4), real(3, 2, 4), real(2), real(2), positive(2), epsilon=1e-5),
    case(real(2, 3, 2, 3), real(2, 3, 2, 3), real(3), real(3), positive(3), epsilon=1e-5),
    like=(1, 2, 2),
)
def batch_normalization_gradient(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, var: Var, *, epsilon: float
) -> tuple[Var, Var, Var]:
    """Return the gradients of x, scale and bias; ``mean`` and (biased) ``var`` are the statistics of ``x`` per channel.

    The formula ``dx = a·(dy − k·centred − s)``, with a, k and s per channel, needs few passes over large tensors. If a
    channel has few elements, the terms in the bracket cancel almost completely, so the projection is applied twice.
    """
    u, a, dscale, db = _unscaled(op, dy, x, scale, mean, var, epsilon)
    return u * columns(op, a, x), dscale, db


@named_operator(
    "UnscaledBatchNormalizationGrad",
    case(real(2, 3, 2, 3), real(2, 3, 2, 3), real(3), real(3), positive(3), epsilon=1e-5),
    case(real(3, 2, 4), real(3, 2, 4), real(2), real(2), positive(2), epsilon=0.1),
    like=(1, 2, 2, 2),
)
def unscaled_batch_normalization_gradient(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, var: Var, *, epsilon: float
) -> tuple[Var, Var, Var, Var]:
    """Return u, a, dscale and dbias with ``dx = a·u``, for callers that apply the factor a elsewhere."""
    return _unscaled(op, dy, x, scale, mean, var, epsilon)


def _unscaled(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, var: Var, epsilon: float
) -> tuple[Var, Var, Var, Var]:
    centred = x - columns(op, mean, x)
    db, along = channel_sums(op, dy), channel_sums(op, dy * centred)
    dscale, a, k, s = batch_normalization_factors(op, x, scale, var, db, along, epsilon)
    u = dy - (centred * columns(op, k, x) + columns(op, s, x))
    return _projected_again(op, u, centred, var, along, epsilon) if has_few(x) else u, a, dscale, db


def has_few(x: Var) -> bool:
    """Whether each channel of ``x`` is known to have few elements (see ``_are_few``)."""
    return x.shape is not None and _are_few([*x.shape[:1], *x.shape[2:]])


def _projected_again(op: Builder, u: Var, centred: Var, var: Var, along: Var, epsilon: float) -> Var:
    """Return ``u`` corrected for rounding errors, so that per channel Σ u = 0 and Σ u·centred = along·ε/(var + ε)."""
    n, wide = batch_size(op, u), var + epsilon
    k = (channel_sums(op, u * centred) - along * (epsilon / wide)) / (wide * n)
    mean = channel_sums(op, u) / n
    return u - (centred * columns(op, k, u) + columns(op, mean, u))


def batch_normalization_factors(
    op: Builder, x: Var, scale: Var, var: Var, db: Var, along: Var, epsilon: float
) -> tuple[Var, Var, Var, Var]:
    """Return ``dscale``, and per channel the factors a, k and s of ``dx = a·(dy − k·centred − s)``.

    ``db`` is Σ dy, and ``along`` is Σ dy·centred.
    """
    n = batch_size(op, x)
    inv = inverse_deviation(op, var, epsilon)
    dscale = along * inv
    return dscale, scale * inv, dscale * inv / n, db / n


def _from_running_statistics(op: Builder, running: Sequence[Var | None], x: Var, mean: Var, momentum: float) -> Var:
    """Return the cotangent of x from the cotangents ``running`` of the new running mean and variance.

    The new statistics are momentum · old + (1 − momentum) · batch statistic.
    """
    dmean, dvar = running
    n, share = batch_size(op, x), 1 - momentum
    terms = [] if dmean is None else [columns(op, dmean * share / n, x)]
    if dvar is not None:
        terms.append((x - columns(op, mean, x)) * columns(op, dvar * (2 * share) / n, x))
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def batch_size(op: Builder, x: Var) -> Var | float:
    """Return the number of elements per channel."""
    return _size(op, x, [axis for axis in range(x.rank) if axis != 1])


# --- normalization within a sample -------------------------------------------------------------------------------


@vjp(
    "LayerNormalization",
    case(real(2, 3), real(3), real(3)),
    case(real(2, 3, 4), real(4), real(4), axis=-1),
    case(real(2, 3, 4), real(3, 4), real(3, 4), axis=1, epsilon=0.1),
    case(real(2, 3, 4), real(2, 3, 4), axis=0),
    case(real(2, 3, 4), real(4)),
    case(real(2, 3, 4), real(1), real(1)),
    case(real(2, 3, 4), real(4), real(3, 1), axis=-2),
    case(real(0, 3), real(3), real(3)),
    case(real(2, 3), real(3), real(3), outputs=3),
    case(real(2, 3, 4), real(3, 4), axis=1, outputs=3),
    case(real(2, 3), real(3), real(3), outputs=3, read=[1]),
    case(real(2, 3), real(3), real(3), outputs=3, read=[2]),
    case(real(2, 1), real(1), real(1)),
    point([[2.0, 2.0]], [3.0, 3.0], [0.0, 1.0], gives=[[[0.0, 0.0]], [0.0, 0.0], [1.0, 1.0]]),
)
def layer_normalization(
    op: Builder,
    dys: tuple[Var | None, ...],
    ys: tuple[Var, ...],
    *inputs: Var,
    axis: int,
    epsilon: float,
    stash_type: int,
) -> Gradients:
    x, scale = inputs[:2]
    dy = op.zeros_like(x) if dys[0] is None else dys[0]
    dtype = _widest(x.dtype, ir.DataType(stash_type))
    dy, x, scale = _cast_all(op, dtype, dy, x, scale)
    axes = list(range(axis, 0)) if x.shape is None and axis < 0 else list(range(axis % x.rank, x.rank))
    if dtype == stash_type == inputs[0].dtype:
        mean, inv = op.output(ys[0], 1, dtype), op.output(ys[0], 2, dtype)
    else:  # the node's own statistics have lower precision than x, or are computed from a rounded x
        mean = op.ReduceMean(x, axes, keepdims=1)
        inv = _standardized(op, x, axes, epsilon)[1]
    if x.shape is None:  # the named operator requires a nonnegative axis
        dx, dscale = _layer_gradients(op, dy, x, scale, mean, inv, axes)
    else:
        dx, dscale = layer_normalization_gradient(op, dy, x, scale, mean, inv, axis=axes[0])
    if any(d is not None for d in dys[1:]):
        dx = dx + _from_statistics(op, [*dys[1:], None][:2], x, (x - mean) * inv, inv, axes)
    return back(op, [dx, dscale, *(unbroadcast(op, dy, x, b) for b in inputs[2:])], inputs)


@named_operator(
    "LayerNormalizationGrad",
    case(real(4, 3), real(4, 3), real(3), real(4, 1), positive(4, 1), axis=1),
    case(real(2, 3, 4), real(2, 3, 4), real(4), real(2, 3, 1), positive(2, 3, 1), axis=2),
    case(real(2, 3, 4), real(2, 3, 4), real(3, 4), real(2, 1, 1), positive(2, 1, 1), axis=1),
    case(real(2, 3, 4), real(2, 3, 4), real(1), real(2, 3, 1), positive(2, 3, 1), axis=2),
    like=(1, 2),
)
def layer_normalization_gradient(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, inv: Var, *, axis: int
) -> tuple[Var, Var]:
    """Return the gradients of x and scale; ``mean`` and ``inv`` have size 1 along ``axis`` and later axes."""
    return _layer_gradients(op, dy, x, scale, mean, inv, list(range(axis, x.rank)))


def _layer_gradients(
    op: Builder, dy: Var, x: Var, scale: Var, mean: Var, inv: Var, axes: Sequence[int]
) -> tuple[Var, Var]:
    xhat = (x - mean) * inv
    return _standardized_vjp(op, dy * scale, xhat, inv, axes), unbroadcast(op, dy * xhat, x, scale)


def _from_statistics(op: Builder, dys: Sequence[Var | None], x: Var, xhat: Var, inv: Var, axes: list[int]) -> Var:
    """Return the cotangent of x, or a tensor that broadcasts to it, from the cotangents of mean and inv.

    ∂mean/∂x = 1/n and ∂inv/∂x = −inv²·x̂/n.
    """
    dmean, dinv = (None if d is None else op.cast(d, x.dtype) for d in dys)
    terms = [] if dmean is None else [dmean]
    terms += [] if dinv is None else [-dinv * inv * inv * xhat]
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    return total / _size(op, x, axes)


@vjp(
    "InstanceNormalization",
    case(real(2, 3, 4), real(3), real(3)),
    case(real(2, 3, 2, 2), real(3), real(3), epsilon=0.1),
    case(real(2, 1, 4), real(1), real(1)),
    case(real(2, 3, 1, 2, 2), real(3), real(3)),
    case(real(2, 3, 1), real(3), real(3)),
    case(real(0, 3, 4), real(3), real(3)),
    point(  # few numbers
        *([[[1.0, 1.0 - 2 * _APART] * 2]], [2.0**34], [0.0], [[[1.0, 0.0, 1.0, 0.0]]]),
        gives=[[[[_LEFT, -_LEFT, _LEFT, -_LEFT]]], None, None, None],
        graph="s = Constant<value_ints=[1, 1, 4]>()  x = Reshape(x0, s)"
        f"  h = InstanceNormalization<{_TINY}>(x, x1, x2)  y0 = Mul(h, x3)",
    ),
)
def instance_normalization(op: Builder, dy: Var, y: Var, x: Var, scale: Var, b: Var, *, epsilon: float) -> Gradients:
    given, affine = x, (scale, b)
    dy, x, scale = all_wide(op, dy, x, scale)
    dy, x = _by_channel(op, scale, dy, x)
    space = list(range(2, x.rank))
    xhat, inv = _standardized(op, x, space, epsilon)
    dx = _as_given(op, _standardized_vjp(op, dy * columns(op, scale, x), xhat, inv, space, epsilon), given)
    return back(op, [dx, channel_sums(op, dy * xhat), channel_sums(op, dy)], (given, *affine))


@vjp(
    "GroupNormalization",
    case(real(2, 4, 3), real(4), real(4), num_groups=2),
    case(real(2, 4, 2, 2), real(4), real(4), num_groups=1, epsilon=0.1),
    case(real(2, 4, 2, 2), real(4), real(4), num_groups=4),
    case(real(2, 6), real(6), real(6), num_groups=3),
    case(real(1, 1, 3), real(1), real(1), num_groups=1),
    point(  # few numbers
        *([[[_APART], [-_APART]]], [2.0**34, 2.0**34], [0.0, 0.0], [[[1.0], [0.0]]]),
        gives=[[[[_LEFT], [-_LEFT]]], None, None, None],
        graph="s = Constant<value_ints=[1, 2, 1]>()  x = Reshape(x0, s)"
        f"  h = GroupNormalization<num_groups = 1, stash_type = 11, {_TINY}>(x, x1, x2)  y0 = Mul(h, x3)",
    ),
)
def group_normalization(
    op: Builder, dy: Var, y: Var, x: Var, scale: Var, b: Var, *, num_groups: int, epsilon: float, stash_type: int
) -> Gradients:
    dtype = _widest(x.dtype, ir.DataType(stash_type))
    wide_dy, wide_x, wide_scale = _cast_all(op, dtype, dy, x, scale)
    dy_by_channel, x_by_channel = _by_channel(op, wide_scale, wide_dy, wide_x)
    dx, *others = _group_gradients(op, dy_by_channel, x_by_channel, wide_scale, num_groups=num_groups, epsilon=epsilon)
    return back(op, [_as_given(op, dx, x), *others], (x, scale, b))


def _group_gradients(op: Builder, dy: Var, x: Var, scale: Var, *, num_groups: int, epsilon: float) -> list[Var]:
    groups = [0, num_groups, -1]  # [N, groups, elements of one group]
    xhat, inv = _standardized(op, op.Reshape(x, groups), [-1], epsilon)
    g = op.Reshape(dy * columns(op, scale, x), groups)
    dx = op.Reshape(_standardized_vjp(op, g, xhat, inv, [-1], epsilon), op.shape(x))
    return [dx, channel_sums(op, dy * op.Reshape(xhat, op.shape(x))), channel_sums(op, dy)]


@vjp(
    "MeanVarianceNormalization",
    case(real(2, 3, 2, 2)),
    case(real(2, 3, 4), axes=[0, 2]),
    case(real(3, 4), axes=[-1]),
    case(real(3, 4), axes=[0, 1]),
    # a constant channel: the deviation has a kink there, like √ at 0; the zero branch is used
    point([[2.0, 2.0]], gives=[[[0.0, 0.0]]], axes=[1]),
    point(
        [[2.0, 2.0]],
        [1.0, 0.0],
        gives=[[[5e8, -5e8]], None],
        graph="h = MeanVarianceNormalization<axes = [1]>(x0)  y0 = Mul(h, x1)",
    ),
)
def mean_variance_normalization(op: Builder, dy: Var, y: Var, x: Var, *, axes: list[int]) -> Gradients:
    # y = centred / (σ + 1e-9), and ∂σ/∂x = centred / (n σ) = y / n up to 1e-9/σ; float16 has no 1e-9
    dtype = x.dtype
    dy, y, x = all_wide(op, dy, y, x)
    centred = x - op.ReduceMean(x, axes, keepdims=1)
    deviation = op.Sqrt(op.ReduceMean(centred * centred, axes, keepdims=1))
    slope = centred / op.Where(op.Equal(deviation, 0.0), 1.0, deviation)
    along = slope * op.ReduceMean(dy * y, axes, keepdims=1)
    return (op.cast((dy - op.ReduceMean(dy, axes, keepdims=1) - along) / (deviation + 1e-9), dtype),)


# --- division by a norm -----------------------------------------------------------------------------------------


@vjp(
    "LpNormalization",
    case(real(2, 3)),
    case(real(2, 3, 4), axis=1),
    case(real(2, 3, 4), axis=0, p=1),
    case(real(2, 3), p=1),
    case(real(4)),
    case(real(2, 1)),
    case(real(0, 3)),
    # the output and the gradient of a zero vector are defined as zero
    point([[0.0, 0.0], [3.0, 4.0]], gives=[[[0.0, 0.0], [0.032, -0.024]]]),
    point([[0.0, 0.0], [1.0, 3.0]], gives=[[[0.0, 0.0], [0.0, 0.0]]], p=1),
    point([0.0, 3.0, 4.0], gives=[[0.2, 0.032, -0.024]]),  # a zero element of a nonzero vector has a gradient
    point([0.0, 1.0, 3.0], gives=[[0.25, 0.0, 0.0]], p=1),
)
def lp_normalization(op: Builder, dy: Var, y: Var, x: Var, *, axis: int, p: int) -> Gradients:
    dtype = x.dtype
    dy, y, x = all_wide(op, dy, y, x)
    norm = op.ReduceL1(x, [axis], keepdims=1) if p == 1 else op.ReduceL2(x, [axis], keepdims=1)
    along = (op.Sign(x) if p == 1 else y) * op.ReduceSum(dy * y, [axis], keepdims=1)
    return (op.cast((dy - along) / op.Where(op.Equal(norm, 0.0), float("inf"), norm), dtype),)


@vjp(
    "LRN",
    case(real(2, 5, 2, 2), size=3),
    case(real(2, 5, 2, 2), size=4, alpha=0.5, beta=0.6, bias=2.0, onnxruntime="onnxruntime supports odd sizes only"),
    case(real(1, 2, 1, 3), size=5, alpha=1.0, beta=1.5),
    case(real(2, 3, 1, 1), size=1, alpha=0.3),
    case(real(2, 5, 3), size=3, alpha=0.3, onnxruntime="onnxruntime supports images only"),
)
def lrn(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float, beta: float, bias: float, size: int) -> Gradients:
    before, after = (size - 1) // 2, size // 2
    scale = channel_mean(op, x * x, size, before, after) * alpha + bias  # y = x · scale^−β
    around = channel_mean(op, dy * y / scale, size, after, before)  # over the outputs that read each input
    return (dy * scale**-beta - x * around * (2 * alpha * beta),)


def channel_mean(op: Builder, x: Var, size: int, before: int, after: int) -> Var:
    """Return the mean over a window of ``size`` channels, with zeros beyond the ends, by pooling along channels."""
    space = x.rank - 2
    pads = [before, *[0] * space, after, *[0] * space]
    image = op.Unsqueeze(x, [1])
    pooled = op.AveragePool(image, kernel_shape=[size, *[1] * space], pads=pads, count_include_pad=1)
    return op.Squeeze(pooled, [1])
