"""Forms that backends share which do not extend one another; each of them says for itself that it has use for one."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradgraph.builder import Builder, Var


def scattered_winners(
    op: Builder, x: Var, indices: Var, size: Var | None = None, *, kernel_shape: list[int], **attrs: Any
) -> Var | None:
    """Zeros with x at the positions, where there is no MaxUnpool. Without pads, as gradients of a MaxPool write it."""
    if size is not None or x.shape is None or any(attrs.get("pads") or ()):
        return None
    strides = list(attrs.get("strides") or [1] * len(kernel_shape))
    last = op.shape(x) - op.const(np.array([0, 0, *[1] * len(kernel_shape)]))
    shape = last * op.const(np.array([1, 1, *strides])) + op.const(np.array([0, 0, *kernel_shape]))
    zeros = op.full(op.ReduceProd(shape, keepdims=1), 0, x.dtype)
    return op.Reshape(op.ScatterElements(zeros, op.Reshape(indices, [-1]), op.Reshape(x, [-1])), shape)
