"""Batches of shuffled rows, gathered by the training session instead of NumPy.

The rows of a shuffled batch are scattered over the user's arrays, outside the CPU cache. NumPy copies rows one by one
in one thread; a Gather node before the step uses all threads and takes at most half the time. The session's inputs are
then the user's whole arrays, without a copy, and the row indices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.data.arrays.batch import Feed
from gradgraph.data.arrays.rows import Rows, Table
from gradgraph.graph.shapes import shape_of_type
from gradgraph.runtime.execution.binding import BoundSession, Ports
from gradgraph.runtime.execution.ort_values import to_ortvalue
from gradgraph.runtime.execution.state import State, aligned_empty

Shapes = Mapping[str, tuple[int, ...]]


class GatheringSession(BoundSession):
    """A training session that gathers the rows of a batch itself.

    For ordinary batches, it gathers all rows of their arrays in order.

    Args:
        session: a session of a model with a Gather in front, from :func:`gather`.
        shapes: the shapes of the inputs whose rows are gathered, as passed to :func:`gather`.
        state, ports, overwritable, keeps: as for ``BoundSession``.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        shapes: Shapes,
        state: State,
        ports: Ports,
        overwritable: frozenset[str],
        keeps: bool | None = None,
    ) -> None:
        self._all = np.arange(_count(shapes))
        rows = aligned_empty(self._all.shape, self._all.dtype)
        self._rows = rows.data
        ports = replace(ports, constants={**ports.constants, ROWS: to_ortvalue(rows)})
        super().__init__(session, state, ports, overwritable, keeps=keeps)
        self.gathers = shapes
        self._tables: dict[int, Table] = {}  # the table bound for each set of state tensors

    def release(self) -> None:
        self._tables.clear()
        super().release()

    def feed(self, feeds: Mapping[str, Feed]) -> ort.IOBinding:
        number = self._state.side
        if type(feeds) is not Rows:
            self._rows[:] = self._all.data
            self._tables.pop(number, None)
            return super().feed({_column(name): feed for name, feed in feeds.items()})
        self._rows[:] = feeds.indices
        side = self.current_side()
        if self._tables.get(number) is not feeds.table:
            for name, array in feeds.table.arrays.items():
                assert isinstance(array, np.ndarray)  # the arrays of a Table are all NumPy arrays
                side.bind(_column(name), array)
            self._tables[number] = feeds.table
        return side.binding


ROWS = "gradgraph.rows"


def _column(name: str) -> str:
    return f"gradgraph.column.{name}"


def _count(shapes: Shapes) -> int:
    return next(iter(shapes.values()))[0]


def gather(model: onnx.ModelProto, shapes: Shapes) -> bool:
    """Insert a Gather after inputs of ``model``, in place, so that the model reads whole columns and row indices.

    ``shapes`` are the shapes of these inputs in a batch. Return whether the model was changed: False if ``shapes`` is
    empty or does not match the model's inputs.
    """
    inputs = {i.name: i for i in model.graph.input}
    if not shapes or any(
        name not in inputs or shape_of_type(inputs[name].type) != shape for name, shape in shapes.items()
    ):
        return False
    gathers = [onnx.helper.make_node("Gather", [_column(n), ROWS], [n], f"gradgraph/gather/{n}") for n in shapes]
    nodes = [*gathers, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name in shapes:
        model.graph.value_info.append(inputs[name])
        inputs[name].name = _column(name)
        inputs[name].type.tensor_type.shape.dim[0].dim_param = "gradgraph.samples"
    model.graph.input.append(onnx.helper.make_tensor_value_info(ROWS, onnx.TensorProto.INT64, [_count(shapes)]))
    return True
