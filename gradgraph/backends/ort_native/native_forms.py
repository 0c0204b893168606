"""Native kernels (``kernels/``): the first choice if a Trainer has them.

A form writes one node of their domain, and supports float32 only; kernels reject sizes that they do not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.norm_forms import is_of_batch
from gradgraph.backends.ort_cpu.pool_forms import TIES
from gradgraph.backends.ort_native.library import DOMAIN, MOST_AXES
from gradgraph.backends.ort_native.native_bounds import FREE
from gradgraph.backends.ort_native.native_table import form, pays_here
from gradgraph.backends.ort_native.programs import written_number
from gradgraph.backends.ort_operators import kernel_of_several
from gradgraph.graph.builder import Builder, Var, Written
from gradgraph.graph.shapes import is_static, recorded_shape
from gradgraph.rules.norm import has_few
from gradgraph.rules.registry import case, distinct, positive, real, uniform
from gradgraph.rules.windows import Windows, windows

LONG = 40_000  # elements of a test case: several chunks of work, the last one shorter


def where_windows_lie(seen: Windows) -> dict[str, Sequence[int]]:
    """Return the attributes for the windows: strides, dilations, and padding (begins, ends)."""
    return {"strides": seen.strides, "dilations": seen.dilations, "begins": seen.begins, "ends": seen.ends}


def native_kernel(
    op: Builder, op_type: str, inputs: Sequence[Var | None], like: Sequence[Var], **attrs: Any
) -> Written | None:
    """Write one native node; its outputs have the types and shapes of ``like``.

    None unless all of ``like`` are float32, and all ranks are known and at most ``MOST_AXES``.
    """
    if any(v.value.dtype != ir.DataType.FLOAT for v in like):
        return None
    if any(v is not None and (v.shape is None or v.rank > MOST_AXES) for v in (*inputs, *like)):
        return None
    given = list(inputs)
    while given[-1] is None:
        given.pop()
    results = kernel_of_several(op, op_type, DOMAIN, given, [recorded_shape(v.value) for v in like], **attrs)
    return results[0] if len(results) == 1 else tuple(results)


_FACTORS = (uniform(-0.2, -0.1), positive())


@form(
    "AdamUpdate",
    case(real(LONG), real(LONG), real(LONG), positive(LONG), *_FACTORS, uniform(0.9, 1.0), takes=[0.1, 0.001]),
)
def adam_in_one_pass(
    op: Builder, p: Var, g: Var, m: Var, v: Var, *rest: Var | None, takes: Sequence[float]
) -> Written | None:
    """Compute AdamUpdate in one pass over seven arrays, not 12 or 13 passes; None unless float32."""
    return native_kernel(op, "AdamUpdate", [p, g, m, v, *rest], [p, m, v], takes=takes)


@form(
    "MomentumUpdate",
    case(real(LONG), real(LONG), real(LONG), uniform(-0.2, -0.1), decay=0.9, nesterov=1),
)
def momentum_in_one_pass(op: Builder, p: Var, g: Var, m: Var, *rest: Var | None, **attrs: Any) -> Written | None:
    """Compute MomentumUpdate in one pass over five arrays, not 4 to 8 passes; None unless float32."""
    return native_kernel(op, "MomentumUpdate", [p, g, m, *rest], [p, m], **attrs)


# --- activations -----------------------------------------------------------------------------------------------------


KINKS = np.array([-0.0, 0.0, -1.0, np.inf, -np.inf, np.nan, 6.0, 6.1], np.float32)
TAILS = np.linspace(-20.0, 20.0, 8_001, dtype=np.float32)


def _program(op: Builder, inputs: Sequence[Var], like: Var, *lines: str) -> Written | None:
    """Write one native node that runs the program ``lines`` (``kernels/elementwise.cc``); return its last result.

    None unless float32.
    """
    last = [len(inputs) + len(lines) - 1]
    program = {"program": "; ".join(lines), "arity": len(inputs), "outputs": last}
    return native_kernel(op, "Elementwise", inputs, [like], **program)


@form("ReluGrad", case(real(8), KINKS), case(real(LONG), real(LONG)))
def relu_in_one_pass(op: Builder, dy: Var, y: Var) -> Written | None:
    return _program(op, [dy, y], y, "ReluGrad 0 1")


@form("ClipGrad", case(real(8), KINKS, np.clip(KINKS, 0, 6)))
def clip_in_one_pass(op: Builder, dy: Var, x: Var, y: Var) -> Written | None:
    return _program(op, [dy, x, y], x, "ClipGrad 0 1 2")


@form("HardSwishGrad", case(real(8), KINKS / 2))
def hard_swish_in_one_pass(op: Builder, dy: Var, x: Var) -> Written | None:
    return _program(op, [dy, x], x, "HardSwishGrad 0 1")


@form("SiluGrad")
def silu_in_one_pass(op: Builder, dy: Var, y: Var, gate: Var) -> Written | None:
    return _program(op, [dy, y, gate], y, "SiluGrad 0 1 2")


@form(
    "GeluGrad",
    case(real(8_001), TAILS, approximate="none"),
    case(real(8_001), TAILS, approximate="tanh"),
)
def gelu_in_one_pass(op: Builder, dy: Var, x: Var, *, approximate: str) -> Written | None:
    """Compute GeluGrad in one pass, not 9, with the kernel's exp and erf; None unless float32."""
    if approximate == "tanh":
        return _program(op, [dy, x], x, "TanhGeluGrad 0 1")
    root = written_number(0.5**0.5)  # as in the forward pass, so that values and tangents share instructions
    return _program(op, [dy, x], x, f"Mul 1 {root}", "Erf 2", "HardSigmoid 3 #0.5 #0.5", "GeluGrad 0 1 4")


# --- row-wise -------------------------------------------------------------------------------------------------------


@form(
    "LayerNormalizationGrad",
    case(real(5, 77, 48), real(5, 77, 48), real(48), real(5, 77, 1), positive(5, 77, 1), axis=2),
)
def layer_norm_by_rows(op: Builder, dy: Var, x: Var, scale: Var, mean: Var, inv: Var, *, axis: int) -> Written | None:
    """Compute LayerNormalizationGrad in two passes, the second over rows that are still in the cache.

    None unless float32, and ``scale`` has the known sizes of the normalised axes.
    """
    sizes = None if x.shape is None else x.shape[axis:]
    if not sizes or sizes != scale.shape or not is_static(sizes):
        return None
    return native_kernel(op, "LayerNormalizationGrad", [dy, x, scale, mean, inv], [x, scale], axis=axis)


@form("SoftmaxGrad", case(real(40, 3, 77), positive(40, 3, 77), axis=-1))
def softmax_by_rows(
    op: Builder, dy: Var, y: Var, do: Var | None = None, o: Var | None = None, *, axis: int
) -> Written | None:
    """Compute SoftmaxGrad, ``y·(dy − Σ dy·y)`` along the last axis, in one pass; ``Σ do·o`` may replace the sum.

    None for other axes, or unless float32.
    """
    if y.shape is None or axis % len(y.shape) != len(y.shape) - 1:
        return None
    return native_kernel(op, "SoftmaxGrad", [dy, y, do, o], [y])


# --- per channel -----------------------------------------------------------------------------------------------------
# For the plain layout (blocks of 1 channel); ``native_blocked.py`` converts these nodes to blocks.


NORMS = (
    case(real(3, 5, 7, 9), real(3, 5, 7, 9), real(5), real(5), positive(5), epsilon=1e-5),
    case(real(2, 3, 9_000), real(2, 3, 9_000), real(3), real(3), positive(3), epsilon=0.1),
    case(real(131, 3, 3, 3), real(131, 3, 3, 3), real(3), real(3), positive(3), epsilon=1e-5),
    case(real(0, 3, 16), real(0, 3, 16), real(3), real(3), positive(3), epsilon=1e-5),
)


def _norms_pay(_: Call) -> bool:
    return pays_here("batch normalisation")


def _norm_gradient(
    op: Builder, op_type: str, dy: Var, x: Var, *rest: Var, vectors: int, **attrs: float
) -> Written | None:
    """Write a gradient of BatchNormalization; return dx (or u, where ``dx = a·u``) and ``vectors`` per-channel vectors.

    None unless x is float32 with at least three axes and not ``has_few(x)``.
    """
    if x.shape is None or len(x.shape) < 3 or has_few(x):
        return None
    inputs, like = [dy, x, *rest], [x, *[rest[0]] * vectors]
    return native_kernel(op, op_type, inputs, like, **attrs, block=1, **FREE)


@form("BatchNormalizationGrad", *NORMS, when=_norms_pay)
def batch_norm_backwards(op: Builder, *inputs: Var, epsilon: float) -> Written | None:
    """Compute BatchNormalizationGrad in two passes instead of 5; returns None if ``_norm_gradient`` does."""
    return _norm_gradient(op, "BatchNormalizationGrad", *inputs, epsilon=epsilon, vectors=2)


@form("UnscaledBatchNormalizationGrad", *NORMS, when=_norms_pay)
def unscaled_batch_norm_backwards(op: Builder, *inputs: Var, epsilon: float) -> Written | None:
    """Compute u, a, dscale and db in two passes, where ``dx = a·u``; returns None if ``_norm_gradient`` does."""
    return _norm_gradient(op, "UnscaledBatchNormalizationGrad", *inputs, epsilon=epsilon, vectors=3)


STATISTICS = (real(5), real(5), real(5), positive(5))
OF_BATCH: dict[str, Any] = {"training_mode": 1, "momentum": 0.0, "epsilon": 1e-5}


@form(
    "BatchNormalization",
    case(real(3, 5, 7, 9), *STATISTICS, outputs=3, **OF_BATCH),
    case(real(2, 5, 9_000), *STATISTICS, outputs=3, **OF_BATCH),
    case(real(131, 5, 3, 3), *STATISTICS, outputs=3, **OF_BATCH),
    when=_norms_pay,
)
def batch_norm(op: Builder, x: Var, scale: Var, bias: Var, *_: Var, **attrs: Any) -> Written | None:
    """Compute BatchNormalization in two passes, on several threads; onnxruntime's kernel is single-threaded.

    None in evaluation mode, or unless x is float32 with at least three axes.
    """
    if not is_of_batch(attrs) or x.shape is None or len(x.shape) < 3:
        return None
    inputs, like = [x, scale, bias], [x, scale, scale]
    return native_kernel(op, "BatchNormalization", inputs, like, epsilon=attrs.get("epsilon", 1e-5), block=1, **FREE)


@form(
    "MaxPoolGrad",
    case(real(2, 3, 2, 3), distinct(2, 3, 5, 7), kernel_shape=[3, 2], strides=[2, 2], dilations=[1, 2]),
    case(real(1, 1, 2, 3), TIES, kernel_shape=[2, 2], strides=[1, 2], pads=[1, 0, 0, 0]),
    case(real(2, 3, 3, 3), distinct(2, 3, 6, 6), kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
)
def max_pool_backwards(op: Builder, dy: Var, x: Var, **attrs: Any) -> Written | None:
    """Compute MaxPoolGrad by finding the maximum of every window again, which avoids the slow MaxPool with Indices.

    None unless x is float32 [N, C, H, W] and the padding is explicit.
    """
    seen = windows(**attrs)
    if seen.rank != 2 or None in seen.kernel or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", ""):
        return None
    where = {"kernel": seen.kernel, "strides": seen.strides, "dilations": seen.dilations, "begins": seen.begins}
    return native_kernel(op, "MaxPoolGrad", [dy, x], [x], block=1, **where)
