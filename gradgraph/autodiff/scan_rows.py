"""Move nodes of a graph into the body of a Scan, which runs them once per row: for each unit vector, or each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.path import reads
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Dim, Shape, record_shape


def scanned(
    op: Builder, graph: ir.Graph, slices: Mapping[ir.Value, Var], results: Sequence[ir.Value], rows: Dim = None
) -> list[Var]:
    """Return ``results`` for every slice, computed by one Scan and stacked along a new first axis.

    Nodes that depend on no slice stay outside and run once. A result of unknown rank is stacked flat, because runtimes
    need the rank of a body's outputs.

    Args:
        op: the builder that receives the Scan; it must not have pending nodes.
        graph: the graph whose nodes move into the body if they depend on ``slices``.
        slices: maps each placeholder to the tensor that it is a slice of, along the first axis.
        results: the values of the graph to compute for every slice.
        rows: the number of slices, if known, for the shapes of the results.
    """
    inside = _dependent(graph, slices)
    graph.remove(inside)

    def write(*_: Var) -> list[Var]:
        op.nodes.extend(inside)
        rows = [op.wrap(y) for y in results]
        return [row if row.shape is not None else op.Reshape(row, [-1]) for row in rows]

    body, given = op.graph(list(slices), write, name="row"), list(slices.values())
    found = all_of(op.Scan(*given, outputs=len(results), body=body, num_scan_inputs=len(given)))
    for y, row in zip(found, results, strict=True):
        y.value.type = row.type
        if row.shape is not None:
            y.value.shape = ir.Shape([rows, *row.shape])
    return found


def _dependent(graph: ir.Graph, on: Mapping[ir.Value, Var]) -> list[ir.Node]:
    """Return the nodes of ``graph`` that depend on any value in ``on``, in order."""
    moving = set(on)
    inside = []
    for node in graph:
        if any(x in moving for x in reads(node)):
            inside.append(node)
            moving.update(node.outputs)
    return inside


def sizes_of(op: Builder, x: ir.Value, start: int = 0) -> tuple[Var, Shape | None]:
    """Return the sizes of ``x`` from axis ``start`` on, as a vector in the graph and as a (partly) known shape."""
    shape = shape_of(x)
    return op.dims(op.wrap(x), start), None if shape is None else shape[start:]


def reshaped(op: Builder, x: Var, *parts: tuple[Var, Shape | None], name: str) -> ir.Value:
    """Return ``x`` reshaped to the concatenated ``parts``, which are results of ``sizes_of``."""
    result = op.Reshape(x, op.Concat(*(sizes for sizes, _ in parts), axis=0), allowzero=1, name=name)
    known = [dim for _, shape in parts for dim in shape or ()]
    if all(shape is not None for _, shape in parts):
        record_shape(result.value, tuple(known))
    return result.value
