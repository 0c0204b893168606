"""A Scan, written as a function of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from gradgraph.frontend.dims import Extent
from gradgraph.frontend.trace import current, wrap
from gradgraph.graph.builder import Var, all_of
from gradgraph.graph.shapes import record_shape

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor


def scanned(
    step: Callable[..., Sequence[Var]], states: Sequence[Tensor], along: Sequence[Tensor], rows: int = 0
) -> list[Tensor]:
    """Run ``step`` for each element along the first axis of ``along``.

    Args:
        step: gets the states and an element of each of ``along``, and returns the next states, which keep their shapes,
            and ``rows`` results of the shape of the first state.
        states: before the first element.
        along: tensors of equal length.
        rows: the number of its results, which are stacked along a new first axis.

    Returns:
        The last states, and then the results.
    """

    def element(of: Tensor, name: str, shape: Sequence[Extent]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(of.dtype), shape=ir.Shape(_words(shape)))

    inputs = [element(state, f"state{i}", state.shape) for i, state in enumerate(states)]
    inputs += [element(one, f"element{i}", one.shape[1:]) for i, one in enumerate(along)]
    body = current().builder.graph(inputs, step, "step")
    shapes = [*(state.shape for state in states), *(states[0].shape for _ in range(rows))]
    for output, shape in zip(body.outputs, shapes, strict=True):
        record_shape(output, tuple(_words(shape)))
    given = [tensor.traced for tensor in (*states, *along)]
    results = all_of(current().builder.Scan(*given, outputs=len(shapes), body=body, num_scan_inputs=len(along)))
    for i, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        result.value.type = ir.TensorType((states[i] if i < len(states) else states[0]).dtype)
        current().record(result, shape if i < len(states) else (along[0].shape[0], *shape))
    return [wrap(result) for result in results]


def _words(shape: Sequence[Extent]) -> list[int | str]:
    return [d if isinstance(d, int) else str(d) for d in shape]
