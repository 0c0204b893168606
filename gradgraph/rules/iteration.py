"""Helpers for the gradients of Loop and Scan: the backward pass of one iteration, and the values that it reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.errors import UnsupportedOperatorError, shown
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.prune import prune_graph
from gradgraph.passes.normal.functions.inline import applied
from gradgraph.rules.containers import (
    INT64,
    added,
    cotangent_type,
    element,
    empty,
    extended,
    inserted,
    is_sequence,
    typed,
    zeros,
)
from gradgraph.rules.indexing import gather
from gradgraph.rules.placement import FIRST
from gradgraph.rules.registry import Bodies
from gradgraph.rules.shape import flat, reshaped


class Backward:
    """The backward pass of one iteration, as a graph (``step``) that becomes the body of the backward loop.

    The first inputs of ``step`` (``entering``) are the cotangents of the states after this iteration and the running
    sums of cotangents of captured values. Then come ``slices``: the inputs of the forward body, and the cotangents of
    this iteration's rows of scan outputs.

    The first outputs of ``step`` are the cotangents of the states before the iteration and the new sums. Then come
    cotangents as rows: of the slices of scan inputs, and of rows gathered from captured values, which are combined
    after the loop.

    Attributes:
        states: the indices of the states that have a gradient.
        rows: the indices of the scan outputs that have a cotangent, among the outputs of the node.
        sliced: the indices of the scan inputs that have a gradient, among the inputs of the forward body.
        gathered: the captured values from which each iteration gathers different rows, with the Gathers that read them.
        captured: the other captured values.
        initial: the initial states of the backward loop.
        entering: the inputs of ``step`` for the states of the backward loop.
        slices: the other inputs of ``step``.
        used: the indices of the ``slices`` that ``step`` reads; only these must be provided.
    """

    def __init__(
        self,
        op: Builder,
        dys: Sequence[Var | None],
        ys: Sequence[Var],
        states: Sequence[Var],
        body: ir.Graph,
        bodies: Bodies,
        lead: int = 0,
    ) -> None:
        """Build the graph; ``lead`` is 1 if the body has an iteration number and a condition (Loop), else 0 (Scan)."""
        self.op, self.body, self.bodies, self.lead, self.first = op, body, bodies, lead, 2 * lead
        outputs, n = body.outputs[lead:], len(states)
        self.ys, self.count = ys, n
        ends = zip(ys, body.inputs[self.first :], outputs[:n], strict=False)  # of states, each in three positions
        self.states = [i for i, (y, *inner) in enumerate(ends) if any(map(bodies.active, (y.value, *inner)))]
        self.rows = [j for j in range(n, len(dys)) if dys[j] is not None]
        self.sliced = [k for k in range(self.first + n, len(body.inputs)) if bodies.active(body.inputs[k])]
        self.gathered = {x: nodes for x in bodies.captured if (nodes := gathers_by_counting(x, body, bodies, lead, n))}
        self.captured = [x for x in bodies.captured if x not in self.gathered]
        sums = [self._as_state(x, zeros(op, x)) for x in self.captured]
        self.initial = [*(total(op, [dys[i]], ys[i]) for i in self.states), *sums]
        self.entering = [cotangent(outputs[i]) for i in self.states] + [cotangent(x.value) for x in self.captured]
        for x, entering in zip(self.captured, self.entering[len(self.states) :], strict=True):
            entering.shape = ir.Shape([None]) if self._is_flat(x) else entering.shape
        self.slices = [*map(twin, body.inputs), *(cotangent(outputs[j]) for j in self.rows)]
        self.step = op.graph([*self.entering, *self.slices], self._write, "backward")
        prune_graph(self.step)
        self.used = [k for k, x in enumerate(self.slices) if x.uses()]

    def _write(self, *given: Var) -> list[Var]:
        op = self.op
        d_states, sums, rest = parts(given, len(self.states), len(self.captured))
        inputs, d_rows, _ = parts(rest, len(self.body.inputs), len(self.rows))
        cotangents = dict(zip((*self.states, *self.rows), (*d_states, *d_rows), strict=True))
        dys = [cotangents.get(i - self.lead) for i in range(len(self.body.outputs))]
        states, slices = [inputs[self.first + i] for i in self.states], [inputs[k] for k in self.sliced]
        single = [op.wrap(g.outputs[0]) for nodes in self.gathered.values() for g in nodes]
        found = self.bodies.gradients(op, self.body, inputs, dys, [*states, *self.captured, *slices, *single])
        new_states, terms, d_rows = parts(found, len(states), len(self.captured))
        return [
            *(total(op, [d], m) for d, m in zip(new_states, self._models(states, d_states), strict=True)),
            *(
                total(op, [s, d and self._as_state(x, d)], s)
                for x, s, d in zip(self.captured, sums, terms, strict=True)
            ),
            *(total(op, [d], x) for d, x in zip(d_rows, [*slices, *single], strict=True)),
        ]

    def _as_state(self, x: Var, dx: Var) -> Var:
        """Return ``dx`` as a state: flattened if the rank of ``x`` is unknown, as onnxruntime's Scan requires."""
        return flat(self.op, dx) if self._is_flat(x) else dx

    def _is_flat(self, x: Var) -> bool:
        return self.lead == 0 and x.shape is None and isinstance(x.value.type, ir.TensorType)

    def _models(self, states: Sequence[Var], dys: Sequence[Var]) -> list[Var]:
        """Return for each state a tensor of its shape: its cotangent, or the state itself if its shape changes."""
        changing = [changes(self.body.inputs[self.first + i], self.body.outputs[self.lead + i]) for i in self.states]
        return [x if c else dy for c, x, dy in zip(changing, states, dys, strict=True)]

    @property
    def row_count(self) -> int:
        """The number of scan outputs of the backward loop."""
        return len(self.sliced) + sum(map(len, self.gathered.values()))

    def gradients(self, results: Var | Sequence[Var], inputs: Sequence[Var]) -> list[Var | None]:
        """Return the gradients of ``inputs`` (the states and later inputs of the node) and of captured values.

        ``results`` are the outputs of the backward loop.
        """
        results = all_of(results)
        d_states, sums, d_slices, rows = parts(results, len(self.states), len(self.captured), len(self.sliced))
        places = [*self.states, *(k - self.first for k in self.sliced)]
        found = dict(zip(places, described([*d_states, *d_slices], [inputs[i] for i in places]), strict=True))
        sums = [reshaped(self.op, dx, x) if self._is_flat(x) else dx for x, dx in zip(self.captured, sums, strict=True)]
        outside = dict(zip(self.captured, described(sums, self.captured), strict=True))
        for x, nodes in self.gathered.items():
            terms = [self._put_together(x, node, rows.pop(0)) for node in nodes]
            outside[x] = total(self.op, terms, x)
        return [*(found.get(i) for i in range(len(inputs))), *(outside[x] for x in self.bodies.captured)]

    def _put_together(self, x: Var, node: ir.Node, rows: Var) -> Var:
        """Return the gradient of ``x`` from cotangents of the rows that ``node`` gathered, last iteration first."""
        op, chosen, axis = self.op, node.inputs[1], node.attributes["axis"].as_int() % x.rank
        assert chosen is not None
        places = saved(op, self.ys[0], self.body, chosen, self.count)
        last_first = op.Slice(places, [-1], [FIRST], [0], [-1])
        rank = x.rank + places.rank - 1
        rows.value.type, rows.value.shape = x.value.type, ir.Shape([None] * rank)
        if not (shapes.is_static(x.shape) and node.outputs[0].shape is not None):  # no iterations, so no sizes
            taken = op.Slice(op.shape(places), [1], [places.rank], [0])
            size = op.Concat(op.dim(places, 0), op.dims(x, 0, axis), taken, op.dims(x, axis + 1, x.rank), axis=0)
            rows = op.Reshape(rows, size, allowzero=1)
        turned = op.Transpose(rows, perm=[*range(1, axis + 1), 0, *range(axis + 1, rank)]) if axis else rows
        (dx,) = gather(op, turned, rows, x, last_first, axis=axis)
        assert dx is not None
        return dx


# --- row-wise gathers ----------------------------------------------------------------------------------


def gathers_by_counting(x: Var, body: ir.Graph, bodies: Bodies, lead: int, states: int) -> list[ir.Node]:
    """Return the Gathers in ``body`` that read ``x``; an empty list if ``x`` has other readers, or if rows may repeat.

    If each iteration gathers different rows, the cotangents of all rows are together as large as the gradient of ``x``,
    and are added once at the end. Adding a gradient as large as ``x`` in each iteration would have quadratic cost.
    """
    nodes = bodies.readers(x)
    alone = all(n.op_type == "Gather" and n.graph is body and n.inputs[0] is x.value for n in nodes)
    if x.value.shape is None or (x.value.is_graph_output() and x.value in body.outputs) or not alone:
        return []
    return nodes if all(_counts(n.inputs[1], body, lead, states) for n in nodes) else []


def _counts(place: ir.Value | None, body: ir.Graph, lead: int, states: int) -> bool:
    """Whether ``place``, computed from the iteration number or a counter state, provably differs in every iteration."""
    if place is None or place.shape is None or not place.shape.is_static():
        return False
    inputs = list(body.inputs)
    while place not in inputs:
        node = place.producer()
        if node is None or node.op_type not in _COUNTING or not _is_integer(place):
            return False
        moving = [v for v in node.inputs if v is not None and _varies(v, body)]
        if len(moving) != 1:
            return False
        place = moving[0]
    k = inputs.index(place)
    return bool(lead and k == 0) or (2 * lead <= k < 2 * lead + states and _steps(place, body.outputs[k - lead]))


_COUNTING = frozenset(["Add", "Cast", "Identity", "Reshape", "Squeeze", "Sub", "Unsqueeze"])


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _varies(value: ir.Value, body: ir.Graph) -> bool:
    node = value.producer()
    return value in body.inputs if node is None else node.graph is body


def _steps(entering: ir.Value, leaving: ir.Value) -> bool:
    """Whether each iteration adds a nonzero constant to this integer state."""
    node = leaving.producer()
    if (
        node is None
        or node.op_type not in ("Add", "Sub")
        or not _is_integer(entering)
        or node.inputs[0] is not entering
    ):
        return False
    step = shapes.constant_of(node.inputs[1])
    return step is not None and bool(step.all())


# --- saved states --------------------------------------------------------------------------------------


def changes(entering: ir.Value, leaving: ir.Value) -> bool:
    """Whether the shape of a state may change between iterations."""
    if entering.shape is None or leaving.shape is None or not isinstance(entering.type, ir.TensorType):
        return True
    before = shapes.as_dims(entering.shape)
    return None in before or before != shapes.as_dims(leaving.shape)


def saved(op: Builder, y: Var, body: ir.Graph, value: ir.Value, states: int) -> Var:
    """Return a scan output of the loop of ``y`` that stacks ``value`` from ``body`` over all iterations.

    The scan output is added unless the loop already has it.
    """
    node = y.value.producer()
    assert node is not None
    if (stack := _already_saved(node, body, value, states)) is not None:
        return op.wrap(stack)
    copy = ir.node("Identity", [value])
    copy.name = op.fresh_in(value.name or "", "saved")
    body.append(copy)
    body.outputs.append(_named(copy.outputs[0], copy.name, value))
    node.resize_outputs(len(node.outputs) + 1)
    for name in _ALONG:
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), 0])
    stack = _named(node.outputs[-1], op.fresh_in(y.value.name or "", value.name or ""), value)
    if value.shape is not None:
        stack.shape = ir.Shape([None, *shapes.as_dims(value.shape)])
    return op.wrap(stack)


def _already_saved(node: ir.Node, body: ir.Graph, value: ir.Value, states: int) -> ir.Value | None:
    """Return the scan output of ``node`` that stacks ``value`` on axis 0 in iteration order, or None if none does."""
    lead = len(body.outputs) - len(node.outputs)
    copies = [n.outputs[0] for n in value.consumers() if n.op_type == "Identity" and n.outputs[0].is_graph_output()]
    for place in (list(body.outputs).index(c) - lead for c in copies if c in body.outputs):
        lists = [node.attributes[name].as_ints() for name in _ALONG if name in node.attributes]
        if place >= states and not any(numbers[place - states] for numbers in lists):
            return node.outputs[place]
    return None


_ALONG = ("scan_output_axes", "scan_output_directions")


def _named(value: ir.Value, name: str, like: ir.Value) -> ir.Value:
    value.name, value.type, value.shape = name, like.type, like.shape
    return value


def replayed(
    op: Builder, trips: Var, states: Sequence[Var], body: ir.Graph, places: Sequence[int]
) -> dict[int, Callable[[Var], Var]]:
    """Run the forward Loop again, and return functions that look up past values of states of varying shape.

    ``places`` are indices of states among the inputs of ``body``. For each of them, the returned function maps an
    iteration number to the state at the start of that iteration. Past states are stored in sequences; the values of a
    state that is itself a sequence are concatenated to one sequence. ``trips`` is the number of iterations.
    """
    lists = [k for k in places if is_sequence(states[k - 2])]

    def write(number: Var, go: Var, *values: Var) -> list[Var]:
        entering, histories, _ = parts(values, len(states), len(places))
        inputs = [x.value for x in (number, go, *entering)]
        nodes, copies = applied(body, inputs, functools.partial(op.fresh_in, op.scope))
        op.nodes.extend(nodes)
        leaving = [op.wrap(copies.get(y, y)) for y in body.outputs[1 : 1 + len(states)]]
        longer = [_remembered(op, h, entering[k - 2]) for k, h in zip(places, histories, strict=True)]
        return [go, *leaving, *longer, *(op.SequenceLength(entering[k - 2]) for k in lists)]

    histories = [_history(op, states[k - 2], body.inputs[k]) for k in places]
    inputs = [*map(twin, body.inputs), *(twin(h.value) for h in histories)]
    graph = op.graph(inputs, write, "replay")
    prune_graph(graph)
    count = len(states) + len(histories)
    results = op.Loop(trips, True, *states, *histories, body=graph, outputs=count + len(lists))
    _, found, lengths = parts(all_of(results), len(states), len(places))
    kept = {k: typed(x, h) for k, x, h in zip(places, found, histories, strict=True)}
    read: dict[int, Callable[[Var], Var]] = {k: functools.partial(element, op, h) for k, h in kept.items()}
    for k, n in zip(lists, lengths, strict=True):
        n.value.type, n.value.shape = INT64, ir.Shape([None])
        read[k] = functools.partial(_list_at, op, states[k - 2], kept[k], n)
    return read


def _history(op: Builder, state: Var, entering: ir.Value) -> Var:
    """Return an empty sequence for a state's values in all iterations; sizes that may change are unknown in it."""
    if isinstance(state.value.type, ir.OptionalType):
        raise UnsupportedOperatorError(
            f"the optional '{shown(state.value.name)}' is a state of a Loop, whose gradient needs to store its values; "
            "use a tensor as the state"
        )
    history = empty(op, state)
    if entering.shape is not None:
        history.value.shape = ir.Shape(shapes.sizes_or(entering.shape, None))
    return history


def _remembered(op: Builder, history: Var, x: Var) -> Var:
    if not is_sequence(x):
        return inserted(op, history, x)
    return extended(op, history, op.SequenceLength(x), lambda place: element(op, x, place))


def _list_at(op: Builder, state: Var, history: Var, lengths: Var, at: Var) -> Var:
    """Return a sequence state at the start of iteration ``at``: the corresponding part of ``history``.

    ``history`` is the concatenation of the state's values in all iterations; their lengths are ``lengths``.
    """
    start = op.Gather(op.CumSum(lengths, 0, exclusive=1), at)
    taken = extended(op, empty(op, state), op.Gather(lengths, at), lambda place: element(op, history, start + place))
    return typed(taken, state)


# --- graphs and their values ---------------------------------------------------------------------------


def twin(x: ir.Value) -> ir.Value:
    """Return a new value with the type and shape of ``x``."""
    return ir.Value(name=_last(x.name), type=x.type, shape=x.shape)


def cotangent(x: ir.Value) -> ir.Value:
    """Return a new value for the gradient of ``x``."""
    return ir.Value(name=f"d_{_last(x.name)}", type=cotangent_type(x), shape=x.shape)


def _last(name: str | None) -> str:
    """Return a name without its scope prefixes; the builder prepends the scope of the new node."""
    return (name or "x").rsplit("/", 1)[-1]


def parts(items: Sequence[Any], *counts: int) -> tuple[list[Any], ...]:
    """Split ``items`` into lists of lengths ``counts``, and a list of the remaining items."""
    cuts = [*itertools.accumulate(counts, initial=0), len(items)]
    return tuple(list(items[a:b]) for a, b in itertools.pairwise(cuts))


def total(op: Builder, terms: Sequence[Var | None], model: Var) -> Var:
    """Return the sum of the terms that are not None; zeros shaped like ``model`` if all are None."""
    known = [t for t in terms if t is not None]
    result = known[0] if known else zeros(op, model)
    for term in known[1:]:
        result = added(op, result, term)
    return result


def described(results: Var | Sequence[Var], models: Sequence[Var]) -> list[Var]:
    """Set the types and shapes of ``results``, the gradients of ``models``, to those of ``models``, and return them."""
    found = all_of(results)
    for result, model in zip(found, models, strict=True):
        result.value.type, result.value.shape = cotangent_type(model.value), model.value.shape
    return found


def inlined(op: Builder, graph: ir.Graph, given: Sequence[Var | None]) -> list[Var]:
    """Return the outputs of ``graph`` applied to ``given``; its nodes are moved to ``op``."""
    for x, replacement in zip(graph.inputs, given, strict=True):
        if replacement is not None:
            x.replace_all_uses_with(replacement.value)
    nodes, outputs = list(graph), [op.wrap(v) for v in graph.outputs]
    graph.outputs.clear()
    graph.remove(nodes)
    op.nodes.extend(nodes)
    return outputs
