"""Kernels of indexing operators for the float64 oracle; the kernels of the ReferenceEvaluator reject valid inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradgraph.verify.kernel import Kernel


class Pad(Kernel):
    """Pad with negative pads, which crop (after positive padding)."""

    def _run(
        self,
        data: np.ndarray,
        pads: np.ndarray,
        value: np.ndarray | None = None,
        axes: np.ndarray | None = None,
        mode: Any = "constant",
    ) -> tuple[np.ndarray]:
        chosen = range(data.ndim) if axes is None else [int(a) % data.ndim for a in axes]
        width = np.zeros((data.ndim, 2), np.int64)
        width[list(chosen)] = np.asarray(pads).reshape(2, -1).T
        more: dict[str, Any] = (
            {} if mode != "constant" else {"constant_values": 0 if value is None else np.asarray(value).item()}
        )
        crop = tuple(slice(-min(b, 0), n + min(e, 0)) for (b, e), n in zip(width, data.shape, strict=True))
        return (np.pad(data[crop], np.maximum(width, 0), mode=mode, **more).astype(data.dtype),)


class OneHot(Kernel):
    """OneHot that accepts ``depth`` of shape [1]; the row of an index out of [-depth, depth) is all ``off``."""

    def _run(self, indices: np.ndarray, depth: np.ndarray, values: np.ndarray, axis: int = -1) -> tuple[np.ndarray]:
        count = int(np.asarray(depth).item())
        column = np.expand_dims(np.where(indices < 0, indices + count, indices), axis)
        ahead = axis % (indices.ndim + 1)
        hot = column == np.arange(count).reshape([-1 if i == ahead else 1 for i in range(indices.ndim + 1)])
        return (np.where(hot, values[1], values[0]).astype(values.dtype),)


class GatherElements(Kernel):
    """GatherElements with indices that are smaller than the data along other axes."""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        place: list[Any] = list(np.indices(indices.shape))
        place[axis] = indices
        return (data[tuple(place)],)


class Slice(Kernel):
    """Slice that clamps starts as specified: with a negative step, a start before the axis is its first element."""

    def _run(
        self,
        data: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        axes: np.ndarray | None = None,
        steps: np.ndarray | None = None,
    ) -> tuple[np.ndarray]:
        along = range(len(starts)) if axes is None else axes.tolist()
        strides = [1] * len(starts) if steps is None else steps.tolist()
        for start, stop, axis, step in zip(starts.tolist(), ends.tolist(), along, strides, strict=True):
            data = np.take(data, _chosen(start, stop, step, data.shape[axis]), axis)
        return (data,)


def _chosen(start: int, stop: int, step: int, size: int) -> np.ndarray:
    start, stop = (v + size if v < 0 else v for v in (start, stop))
    if step > 0:
        return np.arange(min(max(start, 0), size), min(max(stop, 0), size), step)
    return np.arange(min(max(start, 0), size - 1), min(max(stop, -1), size - 1), step)
