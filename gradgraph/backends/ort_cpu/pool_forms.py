"""Gradients of pooling.

Measured with onnxruntime 1.31 on two AVX512 cores, float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.backends.ort_cpu.cpu_table import form
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import known_sizes
from gradgraph.rules.pool import tiles
from gradgraph.rules.registry import case, distinct, real
from gradgraph.rules.windows import windows

TIES = np.array([[[[1, 1, 0, 0, 0, 2], [1, 1, 0, 0, 2, 2]]]], np.float32)


@form(
    "MaxPoolGrad",
    case(real(2, 3, 2, 3), distinct(2, 3, 6, 6), kernel_shape=[3, 2], strides=[3, 2]),
    case(real(1, 1, 1, 3), TIES, kernel_shape=[2, 2], strides=[2, 2]),
)
def without_indices(op: Builder, dy: Var, x: Var, **attrs: Any) -> Var | None:
    """Compute MaxPoolGrad of adjacent windows by comparing x with the maximum of its window, without Indices.

    It takes half the time of pooling with Indices. Of several equal maxima, the first one receives the gradient: their
    positions, numbered backwards, are compared in the same way. None unless x is float32 [N, C, H, W] of known sizes,
    and windows cover each element exactly once.
    """
    seen, sizes = windows(**attrs), known_sizes((x.shape or ())[2:])
    if x.value.dtype != ir.DataType.FLOAT or x.rank != 4 or len(sizes) != 2 or not tiles(seen, x, dy):
        return None
    pool = {k: v for k, v in attrs.items() if k != "auto_pad"}  # pads are explicit by now, so the forward node is equal
    kernel = [k or 1 for k in seen.kernel]
    scales = op.const(np.array([1, 1, *kernel], np.float32))
    rank = op.const(falling(kernel, sizes))

    def spread(v: Var) -> Var:
        nearest: dict[str, Any] = {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        return op.Resize(v, None, scales, **nearest)

    largest = op.cast(op.Equal(x, spread(op.MaxPool(x, **pool))), x.dtype) * rank
    behind = largest - spread(op.MaxPool(largest, **pool))  # 0 for the winner, else -1 or less
    return spread(dy) * op.HardSigmoid(behind, alpha=1.0, beta=1.0)


def falling(kernel: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """Return an image of ``size`` in which each window of size ``kernel`` has the numbers n, n − 1, …, 1."""
    window = np.arange(math.prod(kernel), 0, -1, dtype=np.float32).reshape(kernel)
    return np.tile(window, [d // k for d, k in zip(size, kernel, strict=True)])
