"""Concatenation of the outputs of several batches along the sample axis.

The outputs of a single batch are returned unchanged. Outputs without a sample axis are stacked on a new first axis
(batches); outputs that depend on no input are returned once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from gradgraph.data.arrays.batch import Array
from gradgraph.errors import DataError, shown
from gradgraph.files.protos import reads
from gradgraph.graph.shapes import shape_of_type


@dataclass(frozen=True)
class Layout:
    """The candidates for the sample axis of a model output.

    Attributes:
        axes: the axes with the model's batch dimension, or else the axes of unknown size; None if it may be any axis.
        varies: whether the output depends on the batch.
    """

    axes: tuple[int, ...] | None = None
    varies: bool = True

    def axis(self, parts: Sequence[tuple[Array, int]]) -> int | None:
        """Return the first candidate axis whose size is the number of samples in each of ``parts``; None if none fits.

        ``parts`` are the outputs of each batch, with their number of samples.
        """
        found = range(min(array.ndim for array, _ in parts)) if self.axes is None else self.axes
        return next((i for i in found if all(array.shape[i : i + 1] == (rows,) for array, rows in parts)), None)


def layouts(model: onnx.ModelProto, fed: Collection[str]) -> dict[str, Layout]:
    """Return the layout of each output of a model, by name; ``fed`` names the inputs that contain the batch.

    The batch dimension is the first axis of the first of these inputs.
    """
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
    """Join the ``parts`` of one output: its array and number of samples for each batch.

    Raises:
        DataError: if the output's other dimensions differ between batches.
    """
    arrays = [array for array, _ in parts]
    if len(parts) == 1 or not layout.varies:
        return arrays[0]
    axis = layout.axis(parts)
    if len({without(array.shape, axis) for array in arrays}) > 1:
        raise DataError(
            f"the output '{shown(name)}' has different shapes in different batches",
            remedy="predict with per_batch=True, which returns the outputs of each batch separately",
            shell="pad the inputs to one length, or choose other outputs with --output",
        )
    return np.stack(arrays) if axis is None else np.concatenate(arrays, axis)


def filled(batch: Mapping[str, Array], size: int) -> tuple[Mapping[str, Array], int]:
    """Pad a batch to ``size`` samples with copies of its last sample; return it with its original number of samples."""
    rows = len(next(iter(batch.values())))
    if rows >= size:
        return batch, rows
    return {n: np.concatenate([a, np.repeat(a[-1:], size - rows, axis=0)]) for n, a in batch.items()}, rows


def of_first(name: str, array: Array, rows: int, size: int, layout: Layout) -> Array:
    """Return the first ``rows`` samples of an output of a batch padded to ``size`` samples.

    Raises:
        DataError: if the output has no sample axis, but depends on the batch.
    """
    axis = layout.axis([(array, size)])
    if axis is not None:
        return array.take(range(rows), axis)
    if not layout.varies:
        return array
    raise DataError(
        f"the output '{shown(name)}' is one value for a batch of {size} samples, but the last batch has only {rows}; "
        f"give a multiple of {size} samples, or choose other outputs"
    )


def without(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """Return ``shape`` without ``axis``; unchanged if ``axis`` is None."""
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
