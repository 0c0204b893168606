"""In-place replacement of a model's nodes by new ones from the builder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.errors import ModelError, UnknownNameError, shown, suggestion
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.checks import UNNAMED, WITH_BODIES, describe, has_bodies, subgraphs
from gradgraph.graph.nodes import is_standard, plain
from gradgraph.graph.prune import detach
from gradgraph.graph.prune import is_wanted as is_wanted


class Editor:
    """An editor that replaces nodes of a model with new nodes, written with the builder ``op``.

    New constants become initializers of the main graph, even for nodes in bodies. All names are new and unique in the
    whole model, except that outputs of a replaced node keep their names.
    """

    def __init__(self, model: ir.Model, op: Builder | None = None) -> None:
        self.root = model.graph
        self.op = Builder(taken=names_of(model)) if op is None else op
        self._gone: dict[ir.Graph, list[ir.Node]] | None = None

    def place(self, node: ir.Node) -> list[ir.Node]:
        """Insert all nodes written so far before ``node``, and return them; their constants become initializers."""
        for value in self.op.constants:
            self.root.register_initializer(value)
        placed, self.op.nodes, self.op.constants = self.op.nodes, [], []
        graph_of(node).insert_before(node, placed)
        return placed

    @contextlib.contextmanager
    def replacing_many(self) -> Iterator[None]:
        """Return a context that removes replaced nodes together at its end, as each removal scans all outputs."""
        gone = self._gone = {}
        yield
        self._gone = None
        for graph, nodes in gone.items():
            graph.remove(nodes, safe=True)

    def replace(self, node: ir.Node, *outputs: Var | None) -> list[ir.Node]:
        """Replace the outputs of ``node`` with ``outputs``; return the new nodes.

        New values get the name, type and shape of the old ones, and new nodes the metadata of ``node``. An old output
        may be omitted (``None``, or at the end) only if nothing reads it.
        """
        placed = self.place(node)
        named: set[ir.Value] = set()
        for i, old in enumerate(node.outputs):
            new = outputs[i] if i < len(outputs) else None
            if new is not None:
                placed.extend(self._take_over(node, old, new.value, set(placed), named))
        for new_node in placed:
            own = new_node.metadata_props
            own.update({k: v for k, v in node.metadata_props.items() if k not in own})
        first = outputs[0].value.producer() if outputs and outputs[0] is not None else None
        if first is not None and first in placed:
            first.name = node.name
            if UNNAMED in node.meta:
                first.meta[UNNAMED] = True
        if self._gone is None:
            discard(node)
        else:
            detach(node)
            self._gone.setdefault(graph_of(node), []).append(node)
        return placed

    def write_form(self, node: ir.Node, form: Callable[..., Any], misfit: str) -> list[ir.Node]:
        """Replace ``node`` with ``form(op, node, *inputs, **attributes)``; return the new nodes.

        A form returns a Var or a tuple of them, or None to keep the node.

        Raises:
            ModelError: the form does not accept the node's inputs or attributes; ``misfit`` is the message.
        """
        try:
            outputs = form(self.op, node, *map(self.op.wrap, node.inputs), **attributes(node))
        except TypeError as error:
            raise ModelError(f"{describe(node)} {misfit}: {error}; export the model again") from error
        return [] if outputs is None else self.replace(node, *all_of(outputs))

    def hand_over(self, old: ir.Value, new: Var) -> None:
        """Make readers of ``old`` read ``new``, whose node was just inserted; ``new`` gets the name of ``old``."""
        node, producer = old.producer(), new.value.producer()
        assert node is not None and producer is not None
        self._take_over(node, old, new.value, {producer}, set())

    def _take_over(
        self, node: ir.Node, old: ir.Value, new: ir.Value, placed: set[ir.Node], named: set[ir.Value]
    ) -> Sequence[ir.Node]:
        extra: Sequence[ir.Node] = ()
        if new.producer() in placed and new not in named:
            pass
        elif old.is_graph_output():  # an output must keep its name, and this value has a name of its own
            source, new = new, self.op.Identity(Var(self.op, new)).value
            new.type = source.type  # for a sequence the builder sets only the element type
            extra = self.place(node)
        else:
            old.replace_all_uses_with(new)
            return ()
        named.add(new)
        new.name, new.type = old.name, old.type if new.type is None else new.type
        if old.shape is not None:
            new.shape = old.shape
        replace_value(old, new)
        old.name = None
        return extra


def graph_of(node: ir.Node) -> ir.Graph:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    return graph


def emptied(body: ir.Graph) -> list[ir.Node]:
    """Remove the nodes from ``body`` and return them, so that they can be inserted elsewhere."""
    nodes = list(body)
    body.outputs.clear()
    body.remove(nodes)
    return nodes


def discard(node: ir.Node) -> None:
    """Remove a node whose outputs nothing reads, and disconnect its bodies from the values that they read."""
    detach(node)
    graph_of(node).remove(node, safe=True)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace ``old`` with ``new``, also among the outputs of its graph. This is faster than onnx-ir's function."""
    if old.is_graph_output():
        assert old.graph is not None
        outputs = old.graph.outputs
        for _ in range(outputs.count(old)):
            outputs[outputs.index(old)] = new
    # an outer value may also be an output of a body, which is not among the outputs of its own graph
    old.replace_all_uses_with(new, replace_graph_outputs=old.is_graph_output())


def graphs_of(model: ir.Model) -> Iterator[ir.Graph]:
    """Yield the main graph and the bodies of If, Loop, Scan and SequenceMap, but not of custom operators."""
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        yield graph
        with_bodies = [n for n in graph if n.op_type in WITH_BODIES and has_bodies(n)]
        stack.extend(g for n in reversed(with_bodies) for g in subgraphs(n))


def calls_of(model: ir.Model, *op_types: str) -> list[ir.Node]:
    """Return the nodes in ``nodes_of(model)`` whose operator is one of ``op_types``, in ONNX's own domain."""
    return [node for node in nodes_of(model) if is_standard(node, *op_types)]


def nodes_of(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of ``graphs_of(model)``, each before the nodes in its bodies."""
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        with_bodies = []
        for node in graph:
            yield node
            if node.op_type in WITH_BODIES and has_bodies(node) and node.graph is graph:
                with_bodies.append(node)
        stack.extend(g for n in reversed(with_bodies) for g in subgraphs(n))


def attributes(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of ``node`` as Python values, by name."""
    return plain(node.attributes)


def names_of(model: ir.Model) -> Iterator[str]:
    """Yield the names of all values and nodes, in all graphs."""
    stack = [model.graph]
    while stack:
        graph = stack.pop()
        names = [*graph.initializers, *(v.name for v in graph.inputs)]
        for node in graph:
            names.append(node.name)
            names += [v.name for v in node.outputs]
            if node.domain or node.op_type in WITH_BODIES:
                stack.extend(subgraphs(node))
        yield from filter(None, names)


def next_free(wanted: str, taken: Collection[str]) -> str:
    """Return ``wanted`` if it is free, otherwise the first free name of ``wanted_1``, ``wanted_2``, …."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name


def value_named(model: ir.Model, name: str, weight: bool = False) -> ir.Value:
    """Return the input, initializer or computed value ``name`` of the main graph.

    Raises:
        UnknownNameError: no value has this name; if ``weight``, the error suggests only initializers.
    """
    graph = model.graph
    stored = [*graph.initializers.values()]
    inner = [v for node in graph for v in node.outputs]
    known = {v.name: v for v in (*graph.outputs, *inner, *graph.inputs, *stored) if v.name}
    if name not in known:
        kind, among = ("weight", [v.name or "" for v in stored]) if weight else ("value", [*known])
        raise UnknownNameError(f"the model has no {kind} '{shown(name)}'{suggestion(name, among)}")
    return known[name]
