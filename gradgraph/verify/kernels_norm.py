"""Kernels of normalization for the float64 oracle, where onnx's own kernels are wrong, incomplete or in float32.

LpNormalization omits |x| for p = 1; LRN loops over the batch where it should loop over channels; the functions
GroupNormalization and MeanVarianceNormalization cast to float32 inside; Dropout fails when only its ratio is absent;
Flatten fails on tensors without elements; SoftmaxCrossEntropyLoss takes log(0) where a probability underflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx.reference.ops.op_negative_log_likelihood_loss import _compute_negative_log_likelihood_loss as nll

from gradgraph.verify.kernel import Kernel

Result = tuple[np.ndarray, ...]


class Flatten(Kernel):
    def _run(self, x: np.ndarray, axis: int = 1) -> Result:
        axis = axis + x.ndim if axis < 0 else axis
        return (x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),)


class LpNormalization(Kernel):
    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2) -> Result:
        norm = np.sum(np.abs(x) ** p, axis=axis, keepdims=True) ** (1.0 / p)
        return (np.where(norm == 0, 0, x / norm).astype(x.dtype),)


class LRN(Kernel):
    def _run(self, x: np.ndarray, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int = 1) -> Result:
        before, after = (size - 1) // 2, size // 2
        padded = np.pad(x**2, [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
        sums = sum(padded[:, i : i + x.shape[1]] for i in range(size))
        return ((x / (bias + alpha / size * sums) ** beta).astype(x.dtype),)


class GroupNormalization(Kernel):
    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        epsilon: float = 1e-5,
        num_groups: int = 1,
        stash_type: int = 1,
    ) -> Result:
        grouped = x.reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)
        variance = grouped.var(axis=-1, keepdims=True)
        y = ((grouped - grouped.mean(axis=-1, keepdims=True)) / np.sqrt(variance + epsilon)).reshape(x.shape)
        per_channel = (-1,) + (1,) * (x.ndim - 2)
        return ((y * scale.reshape(per_channel) + bias.reshape(per_channel)).astype(x.dtype),)


class MeanVarianceNormalization(Kernel):
    def _run(self, x: np.ndarray, axes: Sequence[int] = (0, 2, 3)) -> Result:
        over = tuple(axes)
        return ((x - x.mean(axis=over, keepdims=True)) / (x.std(axis=over, keepdims=True) + 1e-9),)


class Dropout(Kernel):
    def _run(
        self,
        x: np.ndarray,
        ratio: np.ndarray | None = None,
        training: np.ndarray | None = None,
        seed: int | None = None,
    ) -> Result:
        rate = 0.5 if ratio is None else float(ratio)
        if training is None or not training:
            rate = 0.0
        mask = np.random.RandomState(seed).uniform(size=x.shape) >= rate
        y = np.where(mask, x / (1 - rate), 0).astype(x.dtype)
        return (y, mask)[: len(self.onnx_node.output)]


class SoftmaxCrossEntropyLoss(Kernel):
    def _run(
        self,
        x: np.ndarray,
        target: np.ndarray,
        weight: np.ndarray | None = None,
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> Result:
        shifted = x - x.max(axis=1, keepdims=True)
        log_prob = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        (loss,) = nll(log_prob, target, weight, reduction, ignore_index)
        return (loss, log_prob)[: len(self.onnx_node.output)]
