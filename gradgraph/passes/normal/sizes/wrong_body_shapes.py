"""Pass: remove wrong shapes that the body of a Loop or Scan declares for its inputs.

Runtimes only warn about wrong shapes, and compute with the actual ones. But gradient rules use declared shapes to
decide which axes to sum over: if a state were wrongly declared a scalar, the gradient of a weight that it multiplies
would have the wrong shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from gradgraph.graph.shapes import Shape, clash, recorded_shape
from gradgraph.passes.normal.edit import calls_of, nodes_of

_TOLD = "gradgraph.told_false"  # metadata of an input whose declared shape was removed: later shapes are inferred ones
_Entry = tuple[ir.Value, list[Shape | None]]  # an input of a body, and the shapes of the values passed to it


def drop_wrong_body_shapes(model: ir.Model) -> bool:
    """Remove wrong declared shapes, and shapes that may have been inferred from them; return True if there were any.

    The declared shape of a state is wrong if it contradicts the initial state or the state that an iteration returns.
    """
    entries = itertools.chain.from_iterable(map(_entries, calls_of(model, "Loop", "Scan")))
    false = [v for v, shapes in entries if _TOLD not in v.meta and any(_contradicts(v, shape) for shape in shapes)]
    for value in false:
        value.shape = None
        value.meta[_TOLD] = True
    own = {*model.graph.outputs}
    for value in (v for node in nodes_of(model) for v in node.outputs if false and v not in own):
        value.shape = None
    return bool(false)


def _contradicts(value: ir.Value, entering: Shape | None) -> bool:
    declared = recorded_shape(value)
    if declared is None or entering is None:
        return False
    return len(declared) != len(entering) or clash(declared, entering)


def _entries(node: ir.Node) -> Iterator[_Entry]:
    """Yield the body's states, and slices of a Scan, each with the shapes of the values that are passed to it."""
    body = node.attributes["body"].as_graph()
    if node.op_type == "Loop":
        yield from _states(node.inputs[2:], body.inputs[2:], body.outputs[1:])
        return
    count = len(body.inputs) - node.attributes["num_scan_inputs"].as_int()
    yield from _states(node.inputs[:count], body.inputs[:count], body.outputs)
    axes = node.attributes.get_ints("scan_input_axes", [0] * len(node.inputs))
    for outside, value, axis in zip(node.inputs[count:], body.inputs[count:], axes, strict=False):
        whole = recorded_shape(outside)
        if whole:
            at = axis % len(whole)
            yield value, [(*whole[:at], *whole[at + 1 :])]


def _states(
    begin: Sequence[ir.Value | None], inside: Sequence[ir.Value], results: Sequence[ir.Value]
) -> Iterator[_Entry]:
    for first, value, result in zip(begin, inside, results, strict=False):
        yield value, [recorded_shape(first), recorded_shape(result)]
