"""Runtime check that inputs sharing a symbolic dimension have equal sizes.

If one input ``[N, 3]`` is fed one row and another four, elementwise operators would silently broadcast the single row,
and its gradient would be wrong. So each of these inputs passes through a Reshape to the common size, which copies no
data. If sizes differ, it reshapes to a larger size, and so fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shapes import recorded_shape
from gradgraph.passes.normal.edit import names_of

COMPARED = "/is_as_long_as/"  # joins two tensor names to a node name, which runtimes show in errors


def compare_sizes(
    model: ir.Model, own: Collection[ir.Value], are_taken: Callable[[Sequence[ir.Node]], bool]
) -> ir.Model:
    """Add checks to ``model``, in place, that inputs sharing a symbolic dimension have equal sizes.

    Args:
        own: the inputs of the original model, without the cotangents or tangents that a transform added. A dimension
            is checked, on all inputs, if at least two original inputs share it.
        are_taken: returns whether the runtime supports these nodes. If not, no checks are added.
    """
    places: dict[str, dict[ir.Value, int]] = {}
    for x in model.graph.inputs:
        for axis, size in enumerate(recorded_shape(x) or () if isinstance(x.type, ir.TensorType) else ()):
            if isinstance(size, str):
                places.setdefault(size, {}).setdefault(x, axis)
    shared = {size: found for size, found in places.items() if sum(x in own for x in found) > 1}
    op = Builder(names_of(model), "sizes")
    sizes = {size: _common(op, found) for size, found in shared.items()}
    written_shapes: dict[tuple[ir.Value, ...], Var] = {}
    compared: dict[ir.Value, ir.Value] = {}
    for found in shared.values():
        for x in found:
            if x not in compared:
                other = next(y for y in found if y is not x)
                compared[x] = _in_these(op, x, sizes, written_shapes, f"{x.name}{COMPARED}{other.name}")
    if not are_taken(op.nodes):
        return model
    written = set(op.nodes)
    for x, y in compared.items():
        for node, place in [use for use in x.uses() if use[0] not in written]:
            node.replace_input_with(place, y)
    op.finish(model.graph, before=next(iter(model.graph), None))
    return model


def _common(op: Builder, places: Mapping[ir.Value, int]) -> Var:
    """Return the common size of the inputs along their axes in ``places``, as a vector of length 1.

    If the sizes differ, the result is larger than all of them.
    """
    sizes = [op.Shape(op.wrap(x), start=i, end=i + 1) for x, i in places.items()]
    most = op.Max(*sizes)
    return most + (most - op.Min(*sizes))


def _in_these(
    op: Builder, x: ir.Value, sizes: Mapping[str, Var], shapes: dict[tuple[ir.Value, ...], Var], name: str
) -> ir.Value:
    """Return ``x`` reshaped to its declared shape, ``sizes`` by dimension name; ``shapes`` caches shape tensors."""
    shape = recorded_shape(x) or ()
    parts = [
        op.const([d]) if isinstance(d, int) else sizes.get(d or "") or op.Shape(op.wrap(x), start=i, end=i + 1)
        for i, d in enumerate(shape)
    ]
    key = tuple(part.value for part in parts)
    if key not in shapes:
        shapes[key] = op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]
    y = op.Reshape(op.wrap(x), shapes[key], allowzero=1, name=name)
    y.value.type, y.value.shape = x.type, ir.Shape(shape)
    return y.value
