"""ONNX Scan, with the body written as a Python function of one step."""

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
    """Call ``step`` for each index of the first axis of the tensors in ``along``, as ``jax.lax.scan`` does.

    Args:
        step: a function, called as ``step(*states, *elements)`` with one element of each tensor in ``along``. It
            returns the next states, with unchanged shapes, and then ``rows`` outputs, each with the shape of the first
            state.
        states: the initial states.
        along: the tensors to scan; their first axes have equal sizes.
        rows: the number of outputs per step. Each is stacked along a new first axis.

    Returns:
        The final states, followed by the stacked outputs.
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
