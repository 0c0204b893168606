"""Kernels of element-wise operators and reductions for the float64 oracle.

They compute in the precision of the input, and support 0-d tensors.
"""

from __future__ import annotations

import functools

import numpy as np

from gradgraph.verify.kernel import Kernel


class Mean(Kernel):
    """Mean that broadcasts any operand; onnx's own kernel adds into its first operand in place."""

    def _run(self, *xs: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(functools.reduce(np.add, xs) / len(xs), xs[0].dtype),)


class Softsign(Kernel):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(x / (1 + np.abs(x)), x.dtype),)


class ReduceLogSumExp(Kernel):
    def _run(
        self, x: np.ndarray, axes: np.ndarray | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> tuple[np.ndarray]:
        if axes is None or len(axes) == 0:
            if noop_with_empty_axes:
                return (x,)
            axes = np.arange(x.ndim)
        over = tuple(int(i) for i in axes)
        top = np.max(x, axis=over, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        y = np.log(np.sum(np.exp(x - top), axis=over, keepdims=True)) + top
        return (np.asarray(y if keepdims else np.squeeze(y, over), x.dtype),)
