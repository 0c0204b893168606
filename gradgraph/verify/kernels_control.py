"""Kernels of control flow, sequences and optionals for the float64 oracle: replace wrong or limited kernels of onnx.

In onnx's ReferenceEvaluator, Scan supports only axis 0 and one direction. Loop concatenates scan outputs of matrices
instead of stacking them, treats an absent condition as false, and fails for zero iterations. SequenceInsert at the end
inserts in front, and SequenceMap has no access to outer values. An optional is a list when it is made, but not when
read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from gradgraph.graph.shapes import shape_of_type, sizes_or
from gradgraph.verify.kernel import Kernel

Arrays = list[Any]  # arrays, and lists of arrays for sequences


class _WithBody(Kernel):
    body: Any  # OpRun sets both from the node's attribute
    _run_body: Any

    def need_context(self) -> bool:
        return True

    def _step(self, context: dict[str, Any], inputs: Arrays, attributes: Any) -> Arrays:
        """Run the body once with ``inputs`` and the captured values ``context``; return its outputs."""
        feeds = {**context, **dict(zip(self.body.input_names, inputs, strict=True))}
        return list(self._run_body(feeds, attributes=attributes))

    def _stacked(self, rows: Arrays, position: int, axis: int = 0) -> np.ndarray:
        """Return the rows of scan output ``position`` stacked along ``axis``; without rows, symbolic sizes are 0."""
        if rows:
            return np.stack(rows, axis)
        kind = self.body.output_types[position]
        dims = sizes_or(shape_of_type(kind), 0)
        dims.insert(axis % (len(dims) + 1), 0)
        return np.zeros(dims, onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


class Loop(_WithBody):
    def _run(
        self,
        limit: np.ndarray | None = None,
        condition: np.ndarray | None = None,
        *states: Any,
        context: Any = None,
        attributes: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        values, count = list(states), 0
        columns: list[Arrays] = [[] for _ in self.body.output_names[1 + len(values) :]]
        go = True if condition is None else bool(np.asarray(condition).item())
        while go and (limit is None or count < int(np.asarray(limit).item())):
            again, *results = self._step(context, [np.array(count, np.int64), np.array(go), *values], attributes)
            values = results[: len(states)]
            for column, y in zip(columns, results[len(states) :], strict=True):
                column.append(y)
            go, count = bool(np.asarray(again).item()), count + 1
        return (*values, *(self._stacked(c, 1 + len(states) + i) for i, c in enumerate(columns)))


class Scan(_WithBody):
    def _run(
        self,
        *inputs: Any,
        context: Any = None,
        attributes: Any = None,
        num_scan_inputs: int = 1,
        scan_input_axes: list[int] | None = None,
        scan_input_directions: list[int] | None = None,
        scan_output_axes: list[int] | None = None,
        scan_output_directions: list[int] | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        n = len(inputs) - num_scan_inputs
        values = list(inputs[:n])
        axes, directions = scan_input_axes or [0] * num_scan_inputs, scan_input_directions or [0] * num_scan_inputs
        sources = [
            np.flip(np.moveaxis(x, axis, 0), 0) if backward else np.moveaxis(x, axis, 0)
            for x, axis, backward in zip(inputs[n:], axes, directions, strict=True)
        ]
        columns: list[Arrays] = [[] for _ in self.body.output_names[n:]]
        for slices in zip(*sources, strict=True):
            results = self._step(context, [*values, *map(np.asarray, slices)], attributes)
            values = results[:n]
            for column, y in zip(columns, results[n:], strict=True):
                column.append(y)
        axes, directions = scan_output_axes or [0] * len(columns), scan_output_directions or [0] * len(columns)
        rows = (c[::-1] if backward else c for c, backward in zip(columns, directions, strict=True))
        return (*values, *(self._stacked(c, n + i, axis) for i, (c, axis) in enumerate(zip(rows, axes, strict=True))))


class SequenceMap(_WithBody):
    def _run(
        self, first: Arrays, *others: Any, context: Any = None, attributes: Any = None, **_: Any
    ) -> tuple[Arrays, ...]:
        results: list[Arrays] = [[] for _ in self.body.output_names]
        for i, x in enumerate(first):
            row = [x, *(y[i] if isinstance(y, list) else y for y in others)]
            for column, y in zip(results, self._step(context, row, attributes), strict=True):
                column.append(y)
        return tuple(results)


class SequenceInsert(Kernel):
    def _run(self, sequence: Arrays, tensor: np.ndarray, position: np.ndarray | None = None) -> tuple[Arrays]:
        place = len(sequence) if position is None else int(np.asarray(position).item())
        place += len(sequence) if place < 0 else 0
        return ([*sequence[:place], tensor, *sequence[place:]],)


class SequenceAt(Kernel):
    def _run(self, sequence: Arrays, position: np.ndarray) -> tuple[np.ndarray]:
        return (sequence[int(np.asarray(position).item())],)


class Optional(Kernel):
    """Optional, whose value in this oracle is its element, or ``None`` if it is empty."""

    def _run(self, x: Any = None, type: Any = None) -> tuple[Any]:
        return (x,)
