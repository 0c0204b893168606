"""Gradient rules of matrix and tensor products, which are multilinear: every gradient is again a product."""

from __future__ import annotations

import string
from collections import Counter

import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard
from gradgraph.rules.broadcasting import unbroadcast
from gradgraph.rules.patterns import some
from gradgraph.rules.registry import Gradients, case, no_gradient, point, real, vjp

# --- MatMul ----------------------------------------------------------------------------------------


@vjp(
    "MatMul",
    case(real(2, 3), real(3, 4)),
    case(real(3), real(3)),
    case(real(3), real(3, 4)),
    case(real(2, 3), real(3)),
    case(real(3), real(2, 3, 4)),
    case(real(2, 5, 3), real(3)),
    case(real(2, 5, 3), real(3, 4)),
    case(real(2, 3), real(5, 3, 4)),
    case(real(2, 5, 3), real(2, 3, 4)),
    case(real(2, 1, 5, 3), real(4, 3, 2)),
    case(real(1, 2, 3), real(4, 3, 1)),
    case(real(2, 0), real(0, 3)),
    case(real(0, 3), real(3, 2)),
    case(real(2, 0, 3), real(3, 2)),
    case(real(0, 2, 3), real(1, 3, 2)),
)
def mat_mul(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    return product_gradients(op, dz, x, y)


def product_gradients(op: Builder, dz: Var, x: Var, y: Var) -> tuple[Var, Var]:
    """Return the gradients of both factors of ``x @ y``."""
    if x.shape is None and y.rank <= 2:
        return _linear_layer(op, dz, x, y) if y.rank == 2 else _by_vector(op, dz, x, y)
    if x.rank == 1 or y.rank == 1:
        return _vector_product(op, dz, x, y)
    if x.rank == y.rank == 2:
        return op.Gemm(dz, y, transB=1), op.Gemm(x, dz, transA=1)
    if y.rank == 2:
        return _linear_layer(op, dz, x, y)
    dx, dy = dz @ transposed(op, y), transposed(op, x) @ dz
    return unbroadcast(op, dx, dx, x), unbroadcast(op, dy, dy, y)


def _linear_layer(op: Builder, dz: Var, x: Var, y: Var) -> tuple[Var, Var]:
    """Return the gradients of ``x @ y`` for a matrix ``y``; leading axes of ``x`` are merged into one."""
    return dz @ transposed(op, y), op.Gemm(op.Flatten(x, axis=-1), op.Flatten(dz, axis=-1), transA=1)


def _vector_product(op: Builder, dz: Var, x: Var, y: Var) -> tuple[Var, Var]:
    """Return the gradients of ``x @ y`` if a factor is a vector; it is treated as a matrix of one row or column."""
    if x.rank == y.rank == 1:
        return dz * y, dz * x
    if y.rank == 1:
        return _by_vector(op, dz, x, y)
    row, dz = op.Unsqueeze(x, [0]), op.Unsqueeze(dz, [-2])
    dx, dy = product_gradients(op, dz, row, y)
    return op.Squeeze(dx, [0]), dy


def _by_vector(op: Builder, dz: Var, x: Var, y: Var) -> tuple[Var, Var]:
    """Return the gradients of ``x @ y`` for ``x`` of any rank and a vector ``y``."""
    return op.Unsqueeze(dz, [-1]) * y, op.Reshape(dz, [-1]) @ op.Flatten(x, axis=-1)


def transposed(op: Builder, x: Var) -> Var:
    """Return ``x`` with its last two axes swapped; if a Transpose computes ``x``, both are merged into one."""
    axes = list(range(x.rank))
    perm = [*axes[:-2], axes[-1], axes[-2]]
    node = x.value.producer()
    if node is not None and is_standard(node, "Transpose") and "perm" in node.attributes:
        perm = [node.attributes["perm"].as_ints()[a] for a in perm]
        x = op.wrap(some(node.inputs[0]))
    return x if perm == axes else op.Transpose(x, perm=perm)


# --- Gemm ------------------------------------------------------------------------------------------


@vjp(
    "Gemm",
    case(real(2, 3), real(3, 4)),
    case(real(2, 3), real(3, 4), real(4), alpha=0.5, beta=2.0),
    case(real(3, 2), real(3, 4), real(2, 1), transA=1, alpha=-1.5),
    case(real(2, 3), real(4, 3), real(1, 4), transB=1, beta=0.25),
    case(real(3, 2), real(4, 3), real(2, 4), transA=1, transB=1, alpha=2.0),
    case(real(2, 3), real(3, 4), real(), beta=0.0),
    case(real(2, 3), real(3, 4), real(1)),
    case(real(2, 3), real(3, 4), real(1, 1)),
    case(real(1, 3), real(3, 4), real(1, 4)),
    case(real(2, 0), real(0, 4), real(4)),
    case(real(0, 3), real(3, 4), real(4)),
)
def gemm(
    op: Builder,
    dy: Var,
    y: Var,
    a: Var,
    b: Var,
    c: Var | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
) -> Gradients:
    # with A' = A or Aᵀ and B' = B or Bᵀ:  dA' = α dY B'ᵀ,  dB' = α A'ᵀ dY,  dC = β dY
    if transA:
        da = op.Gemm(b, dy, alpha=alpha, transA=transB, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - transB)
    if transB:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=transA)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - transA)
    if c is None:
        return da, db
    return da, db, unbroadcast(op, dy if beta == 1.0 else dy * beta, y, c)


# --- Einsum ----------------------------------------------------------------------------------------


@vjp(
    "Einsum",
    case(real(2, 3), real(3, 4), equation="ij,jk->ik"),
    case(real(2, 3), real(3, 4), equation=" ij , jk "),  # implicit output: labels that occur once, in order
    case(real(2, 3), equation="ba"),
    case(real(2, 3, 4), real(2, 4, 5), equation="bij,bjk->bik"),
    case(real(2, 3), real(3, 4), real(4, 2), equation="ij,jk,ki->"),
    case(real(2), real(3), real(4), equation="i,j,k->kij"),
    case(real(2, 3), real(2, 3), equation="ij,ij->ij"),
    case(real(2, 3), equation="ij->"),  # sums
    case(real(2, 3, 4), equation="ijk->j"),
    case(real(2, 3), real(4), equation="ij,k->ik"),
    case(real(3, 3), equation="ii"),  # diagonals
    case(real(3, 3), equation="ii->i"),
    case(real(3, 3, 2), equation="iij->ji"),
    case(real(2, 2, 2), equation="iii->i"),
    case(real(3, 3, 2), real(3, 2), equation="iij,ij->j"),
    case(real(2, 5, 3, 4), real(4, 6), equation="...ij,jk->...ik"),  # ellipsis
    case(real(2, 1, 3), real(1, 4, 3), equation="...i,...i->..."),
    case(real(2, 3, 3), equation="...ii->...i"),
    case(real(4, 2, 3), real(3), equation="...i,i"),
    case(real(2, 3, 4), equation="i...->..."),
    case(real(2, 3), real(2, 3), equation="...,...->..."),
    case(real(2, 1), real(3, 4), equation="ij,jk->ik"),  # a size-1 axis broadcasts
    case(real(2, 3), real(2, 1), equation="ij,ij->i"),
    case(real(2, 3), real(2, 1), graph='a = Neg(x1)  e = Einsum<equation = "ij,ij->i">(x0, a)  y0 = Exp(e)'),
    case(real(), real(2, 3), equation=",ij->ji"),
    case(real(2, 0), real(0, 3), equation="ij,jk->ik"),
    case(real(0, 3), equation="ij->j"),
    case(real(1, 3), real(3, 1), equation="ij,jk->ik"),
)
def einsum(op: Builder, dz: Var, z: Var, *xs: Var, equation: str) -> Gradients:
    terms, out = subscripts(equation, [x.rank for x in xs])
    return [_einsum_gradient(op, i, dz, xs, terms, out) for i in range(len(xs))]


def _einsum_gradient(op: Builder, i: int, dz: Var, xs: tuple[Var, ...], terms: list[str], out: str) -> Var:
    """Return the gradient of operand ``i``: an Einsum of the cotangent and the other operands.

    The output of the Einsum has the labels of operand ``i``. For a diagonal (``iij``), a new label replaces the
    repeated ``i``, and an identity matrix is a further operand.
    """
    x, term = xs[i], terms[i]
    target, eyes = _without_repeats(op, x, term, "".join(terms))
    others = [(t, v) for j, (t, v) in enumerate(zip(terms, xs, strict=True)) if j != i]
    lone = _lone_labels(term, x, "".join([out, *(t for t, _ in eyes)]), others)
    factors = [(out, dz), *(_without_ones(op, t, v, lone) for t, v in others), *eyes]
    if lone:  # the gradient is constant along labels that only this operand has
        size = op.Concat(*(op.dim(x, term.index(label)) for label in lone), axis=0)
        factors.append((lone, op.full(size, 1, x.dtype)))
    dx = op.Einsum(*(v for _, v in factors), equation=",".join(t for t, _ in factors) + "->" + target)
    sizes = _sizes(terms, xs)
    shapes.record_shape(dx.value, tuple(sizes[label] for label in term))
    return unbroadcast(op, dx, dx, x)


def _without_repeats(op: Builder, x: Var, term: str, taken: str) -> tuple[str, list[tuple[str, Var]]]:
    """Return a term such as ``iij`` as ``iaj``, and for each repeated label a term (``ia``) and an identity matrix."""
    fresh = (c for c in string.ascii_letters if c not in taken)
    target, eyes = "", []
    for label in term:
        name = next(fresh) if label in target else label
        if name != label:
            eyes.append((label + name, _eye(op, op.dim(x, term.index(label)), x)))
        target += name
    return target, eyes


def _lone_labels(term: str, x: Var, covered: str, others: list[tuple[str, Var]]) -> str:
    """Return the labels of ``x`` that are not in ``covered``, nor known to have the same size in another operand."""
    dims = dict(zip(term, x.shape or (), strict=True))
    for labels, v in others:
        covered += "".join(c for c, d in zip(labels, v.shape or (), strict=True) if d is not None and d == dims.get(c))
    return "".join(label for label in dims if label not in covered)


def _without_ones(op: Builder, term: str, x: Var, labels: str) -> tuple[str, Var]:
    """Return the term and ``x`` without the axes ``labels``, which have size 1: onnxruntime does not broadcast them."""
    ones = [i for i, (c, d) in enumerate(zip(term, x.shape or (), strict=True)) if c in labels and d == 1]
    return "".join(c for i, c in enumerate(term) if i not in ones), op.Squeeze(x, ones) if ones else x


def _sizes(terms: list[str], xs: tuple[Var, ...]) -> dict[str, shapes.Dim]:
    """Return the size of every Einsum label, or None if it is unknown; axes of size 1 broadcast."""
    sizes: dict[str, shapes.Dim] = {}
    for term, x in zip(terms, xs, strict=True):
        for label, dim in zip(term, x.shape or (), strict=True):
            joint = shapes.broadcast((sizes.get(label, 1),), (dim,))
            sizes[label] = joint[0] if joint else None
    return sizes


def subscripts(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Return the labels of each operand and of the output, one per axis.

    Blanks are removed, ``...`` is replaced by new labels, and an implicit output is made explicit.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    widths = [
        rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)
    ]
    free = [c for c in string.ascii_letters if c not in equation]
    if max(widths) > len(free):
        raise ModelError(f"Einsum equation '{equation}' needs more than 52 labels; write it as two operators")
    spread = "".join(free[: max(widths)])  # labels of the widest ellipsis; narrower ones are right-aligned
    terms = [term.replace("...", spread[len(spread) - width :]) for term, width in zip(terms, widths, strict=True)]
    if not arrow:
        counts = Counter("".join(terms))
        out = spread + "".join(sorted(c for c, n in counts.items() if n == 1 and c not in spread))
    return terms, out.replace("...", spread)


def _eye(op: Builder, n: Var, like: Var) -> Var:
    """Return the n × n identity matrix in the type of ``like``; ``n`` is a vector of length 1."""
    return op.EyeLike(op.full(op.Concat(n, n, axis=0), 0, like.dtype))


# --- Det -------------------------------------------------------------------------------------------

no_gradient("a constant matrix; only the shape of the input matters", "EyeLike")


@vjp(
    "Det",
    case(real(3, 3)),
    case(real(2, 3, 3)),
    case(real(1, 1)),
    case(real(2, 1, 2, 2)),
    case(real(0, 2, 2)),
    point([[1.0, 2.0], [2.0, 4.0]], gives=[[[4.0, -2.0], [-2.0, 1.0]]]),  # singular: cofactors need no inverse
)
def det(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    # ∂det/∂xᵢⱼ is the cofactor: the determinant of x with row i replaced by the unit vector eⱼ
    eye = _eye(op, op.dim(x, -1), x)
    row = op.Cast(op.Unsqueeze(eye, [1, 3]), to=int(ir.DataType.BOOL))
    replaced = op.Where(row, op.Unsqueeze(eye, [0, 2]), op.Unsqueeze(x, [-4, -3]))
    return (op.Unsqueeze(dy, [-2, -1]) * op.Det(replaced),)
