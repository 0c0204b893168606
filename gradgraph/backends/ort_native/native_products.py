"""Matrix products by native kernels, with AMX tiles (``kernels/amx.h``) if the processor has them.

Without tiles, they compute only large products with a transposed left factor (``kernels/products.h``), such as
gradients of weights. onnxruntime transposes such a factor again for every 128 columns. Measured with onnxruntime 1.31
on one core of an AMD EPYC (Zen 4), in GFLOP/s: 81 to 90 in onnxruntime, 99 to 101 in native kernels. For untransposed
factors, it is 97 to 102 and 98 to 100, so onnxruntime computes such products.

With tiles, measured on two cores of an Intel Xeon with AMX, float32: 0.6 to 0.8 of the time of onnxruntime's products
for 64 rows or more, at equal accuracy, unless other processes use the memory.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.stacked_products import never_changes
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.native_table import form
from gradgraph.backends.ort_operators import CONTRIB, kernel
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import before_swap, only_reader
from gradgraph.graph.shapes import all_sizes, broadcast
from gradgraph.rules.registry import attributes, case, real

LEAST_WORK = 1 << 22  # minimum multiplications per product for which tiles pay, also in a stack of products
LEAST_ROWS = 64  # minimum rows and columns: with fewer, packing the other factor dominates
FEW_ROWS = range(2, 49)  # numbers of rows for which reading a variable weight unpacked saves 10 to 50 % of the time
LARGE_WEIGHT = 1 << 16  # the minimum number of elements of such a weight
LEAST_SIDE, LEAST_TURNED = 512, 1 << 29  # minimum sizes and multiplications for a transposed left factor to pay


def _has_few_rows(call: Call) -> bool:
    """Return whether AMX tiles would multiply few rows by a large, non-constant, untransposed weight."""
    a, b = all_sizes(call.shape(0)), all_sizes(call.shape(1))
    weight = call.inputs[1]
    if a is None or b is None or weight is None or len(a) < 2 or len(b) != 2:
        return False
    source = weight.value.producer()
    turned = call.attrs.get("transA") or call.attrs.get("transB") or (source and source.op_type == "Transpose")
    if turned or math.prod(a[:-1]) not in FEW_ROWS or math.prod(b) < LARGE_WEIGHT or never_changes(weight.value):
        return False
    return library.here().has_tiles


def _sizes(call: Call) -> tuple[int, int, int] | None:
    """Return rows, inner size and columns of each product; None if they are unknown."""
    a, b = all_sizes(call.shape(0)), all_sizes(call.shape(1))
    if a is None or b is None or min(len(a), len(b)) < 2:
        return None
    turned = call.attrs.get("transA"), call.attrs.get("transB")
    columns, inner = b[-2:] if turned[1] else b[:-3:-1]
    rows = a[-1] if turned[0] else math.prod(a) // max(inner, 1) if len(b) == 2 else a[-2]
    return rows, inner, columns


def _is_large(call: Call) -> bool:
    """Return whether sizes are known, and the product is large enough for tiles."""
    sizes = _sizes(call)
    if sizes is None or min(sizes[0], sizes[2]) < LEAST_ROWS or math.prod(sizes) < LEAST_WORK:
        return False
    return library.here().has_tiles


def _turns_left(call: Call) -> bool:
    """Return whether ``call`` is one large product with a transposed left factor, as in the gradient of a weight."""
    sizes, left = _sizes(call), call.inputs[0]
    if sizes is None or left is None or max(len(call.shape(i) or ()) for i in (0, 1)) > 2:
        return False
    turned = bool(call.attrs.get("transA")) != (before_swap(left.value) is not None)
    return turned and min(sizes) >= LEAST_SIDE and math.prod(sizes) >= LEAST_TURNED and library.here().has_fast_vectors


def _is_worth_it(call: Call) -> bool:
    return _is_large(call) or _has_few_rows(call) or _turns_left(call)


def _product(op: Builder, a: Var, b: Var, c: Var | None = None, **attrs: Any) -> Var | None:
    """Write ``alpha·op(a)·op(b) + beta·c``; a Transpose before the product becomes an attribute of its factor.

    None unless the factors are float32 with known shapes that broadcast, and 2 to ``MOST_AXES`` axes.
    """
    if a.shape is None or b.shape is None or min(a.rank, b.rank) < 2 or max(a.rank, b.rank) > library.MOST_AXES:
        return None
    if a.value.dtype != ir.DataType.FLOAT:
        return None
    a, left = _as_it_lies(op, a, bool(attrs.get("transA", 0)))
    b, right = _as_it_lies(op, b, bool(attrs.get("transB", 0)))
    assert a.shape is not None and b.shape is not None
    stack = broadcast(a.shape[:-2], b.shape[:-2])
    if stack is None:
        return None
    shape = (*stack, a.shape[-1 if left else -2], b.shape[-2 if right else -1])
    factors = {k: float(attrs.get(k, 1.0)) for k in ("alpha", "beta")}
    inputs = [a, b] if c is None else [a, b, c]
    return kernel(op, "MatMul", library.DOMAIN, inputs, shape, transA=int(left), transB=int(right), **factors)


def _as_it_lies(op: Builder, x: Var, turned: bool) -> tuple[Var, bool]:
    """Return a factor without its Transpose of the last two axes, if any, and whether the kernel must transpose it."""
    source = before_swap(x.value)
    return (x, turned) if source is None else (op.wrap(source), not turned)


STACKS = (
    case(real(40, 70), real(70, 50)),
    case(real(3, 5, 7), real(7, 4)),
    case(real(6, 5, 7), real(6, 7, 4)),
    case(real(2, 1, 5, 7), real(3, 7, 4)),
    case(real(1, 7), real(5, 7, 4)),
    case(real(5, 0), real(0, 4)),
    case(real(0, 5), real(5, 4)),
)


@form("MatMul", *STACKS, when=_is_worth_it)
def matmul_by_tiles(op: Builder, a: Var, b: Var) -> Var | None:
    """Write MatMul as one native node; None unless the factors are float32 of known shapes."""
    return _product(op, a, b)


@form(
    "FusedMatMul",
    case(real(6, 5, 7), real(6, 4, 7), alpha=0.25, transB=1),
    case(real(6, 7, 5), real(6, 7, 4), transA=1),
    domain=CONTRIB,
    when=_is_worth_it,
)
def fused_matmul_by_tiles(
    op: Builder, a: Var, b: Var, *, transBatchA: int = 0, transBatchB: int = 0, **attrs: Any
) -> Var | None:
    """Write FusedMatMul, ``α·a·b`` with each factor optionally transposed, as one native node.

    None unless the factors are float32 of known shapes, and ``transBatchA`` and ``transBatchB`` are 0.
    """
    return None if transBatchA or transBatchB else _product(op, a, b, **attrs)


@form(
    "Gemm",
    case(real(40, 70), real(70, 50)),
    case(real(40, 70), real(70, 50), real(50)),
    case(real(70, 40), real(50, 70), real(40, 50), alpha=-0.5, beta=2.0, transA=1, transB=1),
    case(real(17, 70), real(70, 33), real(17, 1), beta=0.5),
    case(real(17, 5), real(5, 33), real(1, 33)),
    case(real(17, 5), real(5, 33), real(1)),
    case(real(17, 0), real(0, 33), real(33)),
    when=_is_worth_it,
)
def gemm_by_tiles(op: Builder, a: Var, b: Var, c: Var | None = None, **attrs: Any) -> Var | None:
    """Write Gemm, ``α·a·b + β·c`` with each factor optionally transposed, as one native node.

    None unless the factors are float32 of known shapes.
    """
    return _product(op, a, b, c, **attrs)


def _biased(*summands: Var | None) -> tuple[ir.Node, Var] | None:
    """Return the MatMul and the bias if ``summands`` are a vector and a MatMul without other readers; else None."""
    for product, bias in zip(summands, reversed(summands), strict=True):
        node = None if product is None else product.value.producer()
        if product is None or bias is None or node is None or node.op_type != "MatMul" or len(node.inputs) != 2:
            continue
        width = (product.shape or (None,))[-1]
        if only_reader(product.value) is not None and isinstance(width, int) and bias.shape == (width,):
            return node, bias
    return None


def _gets_bias(call: Call) -> bool:
    found = _biased(*call.inputs)
    return found is not None and found[0].domain == library.DOMAIN


@form(
    "Add",
    case(real(2, 5, 7), real(7, 4), real(4), graph="t = MatMul(x0, x1)  y0 = Add(x2, t)"),
    case(real(5, 7), real(7, 1), real(1), graph="t = MatMul(x0, x1)  y0 = Add(t, x2)"),
    when=_gets_bias,
)
def bias_in_product(op: Builder, a: Var, b: Var) -> Var | None:
    """Compute the Add of a bias to a MatMul by one kernel; None for any other Add.

    Separate passes were 4 % of a step of BERT.
    """
    found = _biased(a, b)
    if found is None:
        return None
    node, bias = found
    left, right = (op.wrap(x) for x in node.inputs if x is not None)
    return _product(op, left, right, bias, **attributes(node))
