"""Call a model several times in one graph: at other inputs, in the body of a Scan, with gradients in between.

A ``Net`` is a model in normal form whose nodes have been taken out of its graph. Each call copies the nodes that depend
on the replaced values. Weights, and nodes that depend on none of these values, stay in the graph and are shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.autodiff.append import builder_for
from gradgraph.autodiff.path import Path, reads
from gradgraph.autodiff.reverse import Override, backward
from gradgraph.autodiff.samples import batched_inputs, check_independent
from gradgraph.errors import DifferentiationError, Remedies, shown
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.prune import detach, needed
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import as_dims, record_shape
from gradgraph.passes.normal.functions.inline import copied
from gradgraph.passes.normal.simplifying.clean import clean_up

Points = Mapping[ir.Value, Var]  # for each site, the value that replaces it


class Net:
    """A model whose nodes can be copied several times into its own graph.

    Args:
        model: the model in normal form; its graph is rewritten.
        sites: the values that calls replace: inputs, initializers or inner values.
        results: the values that calls compute.
        chunk: the number of points that one call evaluates as additional rows of the batch.
        named_operators: keep named operators as single nodes.

    Attributes:
        op: the builder of the new graph.
    """

    def __init__(
        self,
        model: ir.Model,
        sites: Sequence[ir.Value],
        results: Sequence[ir.Value],
        chunk: int = 1,
        named_operators: bool = False,
    ) -> None:
        self.model, self.graph = model, model.graph
        self.op: Builder = builder_for(model, named_operators)
        self.op.scope = "call"
        self.sites, self.results, self.chunk = list(sites), list(results), chunk
        self.batched = rows_of(model.graph, results, sites, "use chunk=1") if chunk > 1 else []
        sizes = (as_dims(x.shape)[0] for x in self.batched if x.shape is not None)
        self._batch = next((d for d in sizes if isinstance(d, str)), "batch")
        self._nodes, changed = list[ir.Node](), set(self.sites) | set(self.batched)
        for node in self.graph:
            if any(x in changed for x in reads(node)):
                self._nodes.append(node)
                changed.update(node.outputs)
        staying = set(needed(self.graph, self.sites, lambda n: n.outputs, reads)[0])
        self._removed = [n for n in self._nodes if n not in staying]
        for y in (y for node in self._removed for y in node.outputs):  # the first call takes the names of the model
            (self.op.reserve if y in self.results else self.op.release)(y.name or "")
        self.graph.outputs.clear()
        self.graph.remove(self._removed)

    def here(self) -> dict[ir.Value, Var]:
        """Return the sites of the model itself."""
        return {x: self.op.wrap(x) for x in self.sites}

    def call(self, points: Points, rows: int = 1) -> Call:
        """Copy the model with its sites replaced by ``points``; with ``rows``, each has that many times the samples."""
        op, begin = self.op, len(self.op.nodes)
        stored = {x: y.value for x, y in points.items()}
        if rows > 1:
            stored |= {x: repeated(op, op.wrap(x), rows).value for x in self.batched if x not in points}
        for x, y in stored.items():
            if x.shape is not None:
                record_shape(y, as_dims(x.shape) if rows == 1 else (f"{self._batch}_rows", *as_dims(x.shape)[1:]))
        nodes, _ = needed(self._nodes, self.results, lambda n: [y for y in n.outputs if y not in stored], reads)
        copies, found = copied(nodes, op.fresh, stored)
        if rows > 1:
            _rename_batch(self._batch, found.values())
        op.nodes.extend(copies)
        return Call(op, begin, {**found, **stored})

    def nodes_before(self, y: ir.Value) -> Iterator[ir.Node]:
        """Yield the nodes of the model that ``y`` is computed by and that depend on the sites, in order."""
        yield from needed(self._nodes, [y], lambda n: [v for v in n.outputs if v not in self.sites], reads)[0]

    def finish(self, outputs: Sequence[ir.Value]) -> ir.Model:
        """Make ``outputs`` the outputs of the graph, and return the simplified model."""
        for node in self._removed:
            detach(node)
        self.op.finish(self.graph)
        self.graph.outputs.extend(outputs)
        self.graph.sort()
        return clean_up(self.model)

    def named(self, y: Var, name: str) -> ir.Value:
        """Return ``y`` as a separate value with the name ``name``, or the next free one.

        The names of the results of the model are free. A result that is the same in all calls stays as it is.
        """
        if y.value.name == name and y.value.producer() is not None:
            return y.value
        if name in (own := [v.name for v in self.results if v.producer() in self._removed]):
            self.op.release(own[own.index(name)] or "")
        result = self.op.Identity(y, name=name).value
        result.type, result.shape = y.value.type, y.value.shape
        return result


class Call:
    """One call of a ``Net``: the copy of each of its values, by the original."""

    def __init__(self, op: Builder, begin: int, copies: Mapping[ir.Value, ir.Value]) -> None:
        self._op, self._begin, self._copies = op, begin, copies
        self._nodes = op.nodes  # a body that is written inside this one has a list of its own

    def __getitem__(self, value: ir.Value) -> Var:
        return self._op.wrap(self._copies.get(value, value))

    def gradients(
        self,
        y: Var,
        seed: Var,
        wrt: Sequence[ir.Value],
        overrides: Callable[[Call], Mapping[ir.Node, Override]] | None = None,
    ) -> dict[ir.Value, Var]:
        """Return the vector-Jacobian product of ``y`` with ``seed`` for each of ``wrt``; zeros if there is no path.

        ``y`` was computed from values of this call; ``overrides`` replace the gradient rules of nodes.
        """
        sources = {x: self[x] for x in wrt}
        nodes = self._nodes[self._begin :] + ([] if self._op.nodes is self._nodes else self._op.nodes)
        path = Path(nodes, [y.value], [x.value for x in sources.values()])
        found = backward(self._op, path, {y.value: seed}, overrides=overrides(self) if overrides else None)
        return {x: found[v.value] if v.value in found else self._op.zeros_like(v) for x, v in sources.items()}


# --- loops ----------------------------------------------------------------------------------------------------


Body = Callable[[list[Var], list[Var]], tuple[Sequence[Var], Sequence[Var]]]


def looped(
    op: Builder, scanned: Sequence[np.ndarray], states: Sequence[Var], body: Body, unroll: bool
) -> tuple[list[Var], list[Var]]:
    """Repeat ``body`` for each row of ``scanned``; return the last states, and the other results stacked.

    Nodes of the body that depend on neither rows nor states are moved in front of the loop.

    Args:
        scanned: arrays with one row for each iteration.
        states: the states before the first iteration.
        body: ``body(rows, states)`` returns the new states and further results.
        unroll: write the iterations one after another, without a Scan.
    """
    if unroll:
        kept = []
        for i in range(len(scanned[0])):
            states, results = body([op.const(a[i]) for a in scanned], list(states))
            kept.append(results)
        return list(states), [op.Concat(*(op.Unsqueeze(y, [0]) for y in ys), axis=0) for ys in zip(*kept, strict=True)]
    given, before, count = [op.const(a) for a in scanned], list[ir.Node](), len(states)
    places = [_place("state", y.value.type, y.shape) for y in states]
    places += [_place("row", y.value.type, a.shape[1:]) for y, a in zip(given, scanned, strict=True)]

    def write(*inputs: Var) -> list[Var]:
        new, results = body(list(inputs[count:]), list(inputs[:count]))
        changing, inside = set(places), list[ir.Node]()
        for node in op.nodes:
            moves = any(x in changing for x in reads(node))
            (inside if moves else before).append(node)
            changing.update(node.outputs if moves else ())
        op.nodes[:] = inside
        return [*new, *results]

    graph = op.graph(places, write, name="step")
    op.nodes.extend(before)
    found = all_of(op.Scan(*states, *given, outputs=len(graph.outputs), body=graph, num_scan_inputs=len(given)))
    for i, (y, inner) in enumerate(zip(found, graph.outputs, strict=True)):
        y.value.type = inner.type
        shape = states[i].shape if i < count else shape_of(inner)
        if shape is not None:
            y.value.shape = ir.Shape(shape if i < count else [len(scanned[0]), *shape])
    return list(found[:count]), list(found[count:])


def _place(name: str, kind: ir.TypeProtocol | None, shape: Sequence[int | str | None] | None) -> ir.Value:
    return ir.Value(name=name, type=kind, shape=None if shape is None else ir.Shape(shape))


# --- rows of the batch -------------------------------------------------------------------------------------------


def batch_of(graph: ir.Graph, path: Path, remedy: str) -> list[ir.Value]:
    """Return the inputs with one sample per row; raise DifferentiationError unless samples are independent."""
    batched, remedies = batched_inputs(graph), Remedies(remedy=remedy, shell=remedy)
    for y in path.targets:
        if check_independent(graph, batched, y, path, remedies) != 0:
            raise DifferentiationError(f"'{shown(y.name)}' does not have one row per sample", **remedies)
    return batched


def rows_of(graph: ir.Graph, results: Sequence[ir.Value], sites: Sequence[ir.Value], remedy: str) -> list[ir.Value]:
    """Return the inputs with one sample per row, as ``batch_of``; the ``sites`` must have one row per sample, too."""
    batched = batch_of(graph, Path(graph, results, sites), remedy)
    for x in sites:
        if x not in batched:
            batch_of(graph, Path(graph, [x], batched), remedy)
    return batched


def _rename_batch(size: str, values: Iterable[ir.Value]) -> None:
    """Rename the batch dimension ``size`` in the shapes of copies that have more rows."""
    pattern = re.compile(rf"(?<!\w){re.escape(size)}(?!\w)")
    for y in values:
        if y.shape is not None:
            dims = [pattern.sub(f"{size}_rows", d) if isinstance(d, str) else d for d in as_dims(y.shape)]
            y.shape = ir.Shape(dims)


def repeated(op: Builder, x: Var, rows: int) -> Var:
    """Return ``x`` [batch, …] repeated along its first axis, ``rows`` times."""
    return merged(op, op.Expand(op.Unsqueeze(x, [0]), op.const([rows, *[1] * x.rank])), x)


def merged(op: Builder, x: Var, like: Var, rows: int | None = None) -> Var:
    """Merge the first two axes of ``x`` [rows, batch, …]; ``like`` has the shape [batch, …], or any for one row."""
    if rows == 1:
        return op.Squeeze(x, [0])
    return op.Reshape(x, op.Concat(op.const([-1]), op.dims(like, 1), axis=0) if like.rank > 1 else op.const([-1]))


def split(op: Builder, x: Var, rows: int) -> Var:
    """Split the first axis of ``x`` [rows · batch, …] into two: [rows, batch, …]; add it if ``rows`` is 1."""
    if rows == 1:
        return op.Unsqueeze(x, [0])
    tail = [op.dims(x, 1)] if x.rank > 1 else []
    result = op.Reshape(x, op.Concat(op.const([rows, -1]), *tail, axis=0))
    result.value.shape = ir.Shape([rows, None, *(x.shape or ())[1:]])
    return result
