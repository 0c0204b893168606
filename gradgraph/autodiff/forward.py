"""Forward mode: tangents are pushed through the nodes in graph order, ``dy = J·dx`` at each.

Linear operators, products and elementwise functions have a tangent rule in ``tangents.py``, and bodies of If, Loop and
Scan compute tangents along with values (``bodies.py``). All other operators use two vjps: the gradient rule computes
``Jᵀ·c``, which is linear in the cotangent ``c``, and the vjp of this function of ``c`` at the tangent ``t`` is ``J·t``.
So every operator with a gradient rule has a tangent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.append import builder_for, named, new_input
from gradgraph.autodiff.bodies import HAVE_BODIES, Widened, Widener
from gradgraph.autodiff.path import Path, reads, reads_smoothly
from gradgraph.autodiff.reverse import backward, check_rules
from gradgraph.autodiff.select import Names, find_path, float_outputs, select
from gradgraph.autodiff.tangents import PUSHES, TOGETHER, known_dims
from gradgraph.errors import DifferentiationError, shown
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.prune import needed
from gradgraph.graph.scoped_names import scoped
from gradgraph.passes.normal.simplifying.clean import clean_up
from gradgraph.rules.composites.table import Call, calls
from gradgraph.rules.containers import cotangent_type


def append_jvp(
    work: ir.Model, outputs: Names, wrt: Names, *, allow_unused: bool = False, named_operators: bool = False
) -> ir.Model:
    """Apply ``jvp`` to a model in normal form, in place.

    With ``named_operators``, operators of the domain ``gradgraph`` are not expanded.
    """
    targets = float_outputs(work.graph, outputs)
    chosen = select(work.graph, wrt, targets)
    path = find_path(work, targets, chosen, allow_unused)
    return add_tangents(work, path, path.targets, "tangent", named_operators)


def add_tangents(
    model: ir.Model, path: Path, likes: Sequence[ir.Value], suffix: str, named_operators: bool = False
) -> ir.Model:
    """Add an input ``"<name>.tangent"`` for each of ``path.wrt``, and the tangent of each of ``path.targets``.

    Args:
        model: a model in normal form; changed in place.
        path: the path to push tangents along; each of its nodes must have a rule.
        likes: one value per target, whose name (with ``.<suffix>``), shape and type the tangent gets.
        suffix: the suffix of the names of the new outputs.
        named_operators: keep named operators as single nodes, where tangents pass through them like gradients.
    """
    op = builder_for(model, named_operators)
    tangents = {x: new_input(op, model.graph, f"{x.name}.tangent", x) for x in path.wrt}
    write_tangents(model, op, path, tangents, likes, suffix)
    return clean_up(model)


def write_tangents(
    model: ir.Model, op: Builder, path: Path, tangents: dict[ir.Value, Var], likes: Sequence[ir.Value], suffix: str
) -> list[ir.Value]:
    """Add the tangent of each of ``path.targets`` as an output, computed from existing ``tangents``.

    Unlike ``add_tangents``, this adds no inputs and does not simplify the model. Returns the new outputs.
    """
    graph = model.graph
    forward = _Forward(op, path, tangents)
    found = {like: tangents[y] for like, y in zip(likes, path.targets, strict=True) if y in tangents}
    results = named(op, likes, found, suffix, allow_unused=True)
    op.finish(graph)
    graph.outputs.extend(results)
    forward.join(model)
    forward.release(model, graph.outputs)
    return results


class _Forward:
    """A forward-mode pass: it adds the tangent of every value on ``path`` to the dict ``tangents``."""

    def __init__(self, op: Builder, path: Path, tangents: dict[ir.Value, Var]) -> None:
        self.op, self.path, self.tangents = op, path, tangents
        self._cotangents: dict[ir.Value, ir.Value] = {}  # placeholder → the value whose shape it has
        self._composites: dict[ir.Node, Call] = {}
        self._widened: list[Widened] = []
        self._moved: dict[ir.Value, ir.Value] = {}  # output of a replaced node → output of its replacement
        self._widener = Widener(op, path, tangents, self._push)
        self._push(path.nodes)
        op.scope = "jvp"

    def _push(self, nodes: Sequence[ir.Node]) -> None:
        on_path = [node for node in nodes if self.path.is_on(node)]
        self._composites |= calls(on_path, self.path.active, set(self.path.wrt))
        for node in on_path:
            self.op.scope = scoped("jvp", node.name or "")
            for y, dy in self._pushed(node).items():
                own = [self.tangents[y]] if y in self.tangents else []  # of an inner value in ``path.wrt``
                self.tangents[y] = self.op.like(self.op.sum_of([*own, dy]), self.op.wrap(y))

    def join(self, model: ir.Model) -> None:
        """Replace each node for which a new node computes values and tangents together, and sort the graph."""
        for node in self._widened:
            node.take_place()
            self._moved.update(zip(node.old.outputs, node.values, strict=True))
        if self._widened:
            model.graph.sort()

    def release(self, model: ir.Model, results: Sequence[ir.Value]) -> None:
        """Replace each placeholder of a cotangent with the value whose shape it has.

        The remaining nodes read only the shapes of placeholders. ``model`` must not have been pruned yet: the shape of
        a replaced value may still be needed.

        Raises:
            DifferentiationError: a gradient rule is not linear in its cotangent.
        """
        left = Path(model.graph, results, self._cotangents).nodes
        if left:
            raise DifferentiationError(
                f"a gradient rule is not linear in its cotangent: {left[0].op_type} (node '{shown(left[0].name)}') in "
                "its derivative still reads the cotangent; correct the rule, or use value_and_grad instead"
            )
        self._read_shapes_elsewhere(model.graph, results)
        for cotangent, y in self._cotangents.items():
            cotangent.replace_all_uses_with(self._moved.get(y, y))

    def _read_shapes_elsewhere(self, graph: ir.Graph, results: Sequence[ir.Value]) -> None:
        """Replace inputs of Shape nodes that depend on placeholders with needed tensors of equal shape."""
        before_bodies = itertools.takewhile(lambda node: node.op_type not in HAVE_BODIES, self.path.nodes)
        _, kept = needed(graph, results, lambda node: node.outputs, reads)
        ours = [x for x in (*self.path.wrt, *(y for node in before_bodies for y in node.outputs)) if x in kept]
        known = {dims: x for x in reversed(ours) if (dims := known_dims(x)) is not None}
        computed = Path(graph, (), self._cotangents).reached
        for node in graph:  # not in bodies, where the same dimension name may mean another size
            x = node.inputs[0] if node.op_type == "Shape" else None
            if x in computed and (dims := known_dims(x)) in known:
                node.replace_input_with(0, known[dims])

    def _pushed(self, node: ir.Node) -> Mapping[ir.Value, Var]:
        """Return the nonzero tangents of the outputs of ``node``."""
        if node.domain == "" and node.op_type in HAVE_BODIES:
            self._widened.append(widened := self._widener.widen(node))
            return widened.tangents
        if (whole := self._composite_tangent(node)) is not None:
            return whole
        inputs = [None if x is None else self.tangents.get(x) for x in node.inputs]
        if (both := self._value_and_tangent(node, inputs)) is not None:
            return both
        push = PUSHES.get(node.op_type) if node.domain == "" and any(inputs) else None
        outputs = push(self.op, node, inputs) if push is not None else None
        if outputs is None:
            return self._by_transposing(node)
        return dict(zip(node.outputs, outputs, strict=True))

    def _composite_tangent(self, node: ir.Node) -> Mapping[ir.Value, Var] | None:
        """Return the tangent of an elementwise composite if ``node`` is its last node, else None."""
        known = self._composites.get(node)
        x = known.found.inputs[0] if known is not None and known.composite.elementwise else None
        if known is None or x not in self.tangents:
            return None
        (y,) = node.outputs
        (dy,) = known.gradients(self.op, self.tangents[x], self.op.wrap(y))
        return None if dy is None else {y: dy}

    def _value_and_tangent(self, node: ir.Node, inputs: Sequence[Var | None]) -> Mapping[ir.Value, Var] | None:
        """Emit value and tangent of ``node`` by a rule for both; return the tangent, or None without a rule."""
        write = TOGETHER.get(node.op_type) if node.domain == "" else None
        found = write(self.op, node, inputs[0]) if write is not None and inputs[0] is not None else None
        if found is None:
            return None
        (y,), (value, dy) = node.outputs, found
        value.value.type, value.value.shape = y.type, y.shape
        self._widened.append(Widened(node, [value.value], {y: dy}))
        return self._widened[-1].tangents

    def _by_transposing(self, node: ir.Node) -> Mapping[ir.Value, Var]:
        """Return tangents by two vjps: Jᵀ·c by the gradient rule of ``node``, then the vjp of Jᵀ·c with respect to c.

        The first vjp consists of standard nodes only, because named operators have no gradient rules.
        """
        sources = dict.fromkeys(x for x in reads_smoothly(node) if x in self.tangents)
        outputs = [y for y in node.outputs if y in self.path.active]
        cotangents = {y: self._stand_in(y) for y in outputs}
        with self.op.naming_operators(False):
            pushed = self._twice(node, sources, cotangents)
        return {y: pushed[c.value] for y, c in cotangents.items() if c.value in pushed}

    def _twice(
        self, node: ir.Node, sources: Iterable[ir.Value], cotangents: Mapping[ir.Value, Var]
    ) -> Mapping[ir.Value, Var]:
        op = self.op
        before = len(op.nodes)
        pulled = backward(op, Path([node], cotangents, sources), cotangents)
        seeds: dict[ir.Value, list[Var]] = {}
        for x, dx in pulled.items():  # inputs may share one gradient, as those of x + y
            seeds.setdefault(dx.value, []).append(self.tangents[x])
        linear = Path(op.nodes[before:], seeds, [c.value for c in cotangents.values()])
        check_rules(linear)
        return backward(op, linear, {dx: op.sum_of(terms) for dx, terms in seeds.items()})

    def _stand_in(self, y: ir.Value) -> Var:
        cotangent = ir.Value(name=self.op.fresh(f"{y.name}.cotangent"), type=cotangent_type(y), shape=y.shape)
        self._cotangents[cotangent] = y
        return self.op.wrap(cotangent)
