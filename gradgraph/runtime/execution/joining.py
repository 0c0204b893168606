"""Joining outputs of batches along the sample axis.

For a single batch, outputs are unchanged. Otherwise, the parts are concatenated along the sample axis. An output
without one has one entry per batch, on a new first axis, or is returned once if it depends on no input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from gradgraph.errors import DataError, shown
from gradgraph.files.protos import reads
from gradgraph.graph.shapes import shape_of_type
from gradgraph.runtime.data.batch import Array


@dataclass(frozen=True)
class Layout:
    """The sample axis of an output.

    Attributes:
        axes: the axes that have the batch size in the model, or no declared size; None if unknown.
        varies: whether the output depends on the batch at all.
    """

    axes: tuple[int, ...] | None = None
    varies: bool = True

    def axis(self, parts: Sequence[tuple[Array, int]]) -> int | None:
        """Return the first axis with the batch size in all parts (outputs with the samples of their batch)."""
        found = range(min(array.ndim for array, _ in parts)) if self.axes is None else self.axes
        return next((i for i in found if all(array.shape[i : i + 1] == (rows,) for array, rows in parts)), None)


def layouts(model: onnx.ModelProto, fed: Collection[str]) -> dict[str, Layout]:
    """Return the layouts of the model's outputs; the first of the ``fed`` inputs has the batch size."""
    graph = model.graph
    dims = {v.name: shape_of_type(v.type) for v in (*graph.input, *graph.output)}
    inputs = [dims[v.name] for v in graph.input if v.name in fed]
    size = next((d[0] for d in inputs if d), None)
    known = {d for each in inputs for d in each or () if isinstance(d, str)}
    reached = set(fed)
    for node in graph.node:
        if not reached.isdisjoint(reads(node)):
            reached.update(node.output)

    def axes(of: Sequence[int | str | None] | None) -> tuple[int, ...] | None:
        if of is None or size is None:
            return None
        open_ = [i for i, d in enumerate(of) if d is None or (isinstance(d, str) and d not in known)]
        return tuple(i for i, d in enumerate(of) if d == size) or tuple(open_)

    return {o.name: Layout(axes(dims[o.name]), o.name in reached) for o in graph.output}


def joined(name: str, parts: Sequence[tuple[Array, int]], layout: Layout) -> Array:
    """Join an output of all batches from its parts with the samples of each; raises DataError."""
    arrays = [array for array, _ in parts]
    if len(parts) == 1 or not layout.varies:
        return arrays[0]
    axis = layout.axis(parts)
    if len({without(array.shape, axis) for array in arrays}) > 1:
        raise DataError(
            f"the output '{shown(name)}' has another shape in each batch",
            remedy="predict with per_batch=True, which gives the outputs of each batch as they are",
            shell="pad the inputs to one length, or choose others with --output",
        )
    return np.stack(arrays) if axis is None else np.concatenate(arrays, axis)


def filled(batch: Mapping[str, Array], size: int) -> tuple[Mapping[str, Array], int]:
    """Pad a batch with copies of its last sample to ``size``, for a fixed batch size; return it and its own samples."""
    rows = len(next(iter(batch.values())))
    if rows >= size:
        return batch, rows
    return {n: np.concatenate([a, np.repeat(a[-1:], size - rows, axis=0)]) for n, a in batch.items()}, rows


def of_first(name: str, array: Array, rows: int, size: int, layout: Layout) -> Array:
    """Return the part of an output of ``size`` samples that belongs to the first ones; raises DataError."""
    axis = layout.axis([(array, size)])
    if axis is not None:
        return array.take(range(rows), axis)
    if not layout.varies:
        return array
    raise DataError(
        f"the output '{shown(name)}' has one value for {size} samples, and the last batch has only {rows}; "
        f"give a multiple of {size}, or choose other outputs"
    )


def without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """Return ``shape`` without an axis, if it has that axis."""
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
