"""Pass: infer the shapes of the states of a Loop.

ONNX shape inference leaves these shapes unknown because iterations may change them. Here a shape is proved by
induction: the states are assumed to enter the body with their initial shapes (an unknown size gets a fresh name), and
the body must return the same shapes. A size that an iteration changes becomes unknown, and the other sizes are tried
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.nodes import is_standard, made_by
from gradgraph.graph.shape_inference import assumptions, infer_node, shape_of
from gradgraph.graph.shapes import Dim, Shape
from gradgraph.graph.size_context import is_generated
from gradgraph.passes.normal.edit import calls_of

_ROUNDS = 4  # attempts per loop; each makes the sizes that changed unknown, the last one all sizes
_EMPTY: Shape = ("no elements",)  # the element shape of an empty sequence: it is compatible with every other
_TRIALS = 16  # maximum inferences per body on average, for any nesting depth of loops


def settle_states(model: ir.Model) -> bool:
    """Record the shapes of the states of Loops; return True if any shape was new.

    1. Outer Loops come first, because the shapes of inner Loops depend on them.
    2. The final state has the shape of the initial state if iterations preserve it.
    3. A size declared in the body stays, unless a number is known.
    4. The shape of a sequence is the shape of its elements; for an empty one, of the elements that the Loop inserts.
    """
    changed = False
    proofs = _Proofs(loops := calls_of(model, "Loop"))
    for node in loops:
        body = node.attributes["body"].as_graph()
        for initial, entering in zip(node.inputs[2:], body.inputs[2:], strict=True):
            if entering.type is None and initial is not None:
                entering.type = initial.type
        for i, shape in enumerate(proofs.of(node)):
            if shape != _EMPTY:
                changed |= _record(body.inputs[2 + i], shape) | _record(node.outputs[i], shape)
    return changed


def _record(value: ir.Value, shape: Shape | None) -> bool:
    old = shapes.recorded_shape(value)
    if shape is None or (old is not None and len(old) != len(shape)):
        return False
    known = [*zip(shape if old is None else old, shape, strict=True)]
    new = tuple(b if isinstance(b, int) or (_is_open(a) and not _is_open(b)) else a for a, b in known)
    shapes.record_shape(value, new)
    return new != old


def _is_open(dim: Dim) -> bool:
    return dim is None or is_generated(dim)


# --- the proof -------------------------------------------------------------------------------------------


class _Proofs:
    """Proved shapes of loop states, cached by the shapes of initial states and of values that the body captures.

    A nested loop is proved again for each assumption about the outer loop that changes these shapes.
    """

    def __init__(self, loops: Sequence[ir.Node]) -> None:
        self._empty: set[ir.Value] = set()
        self._known: dict[tuple[ir.Node, tuple[Shape | None, ...]], list[Shape | None]] = {}
        self._read: dict[ir.Node, list[ir.Value | None]] = {}
        self._left = _TRIALS * len(loops)

    def of(self, node: ir.Node) -> list[Shape | None]:
        """Return each state's shape before and after every iteration, with ``None`` for sizes that change."""
        if node not in self._read:
            self._read[node] = [*node.inputs[2:], *_captured(node.attributes["body"].as_graph())]
        key = node, tuple(map(self._known_of, self._read[node]))
        if key not in self._known:
            self._known[key] = self._proved(node)
        return self._known[key]

    def _proved(self, node: ir.Node) -> list[Shape | None]:
        body = node.attributes["body"].as_graph()
        assumed = [self._start(x, y, node.name or "") for x, y in zip(node.inputs[2:], body.inputs[2:], strict=True)]
        for _ in range(_ROUNDS):
            if self._left == 0:
                break
            self._left -= 1
            found = [_common_shape(a, b) for a, b in zip(assumed, self._after(body, assumed), strict=True)]
            if found == assumed:
                return found
            assumed = found
        return [None] * len(assumed)

    def _start(self, initial: ir.Value | None, entering: ir.Value, scope: str) -> Shape | None:
        """Return the initial shape of a state, with names for unknown sizes; None for an unknown rank."""
        if initial is None or not isinstance(initial.type, ir.TensorType | ir.SequenceType):
            return None
        before = self._known_of(initial)
        if before == _EMPTY:
            return _EMPTY
        return _with_names(before, shape_of(entering), f"{scope}.{entering.name}")

    def _after(self, body: ir.Graph, states: Sequence[Shape | None]) -> list[Shape | None]:
        """Return the shapes of the states after an iteration that starts with ``states``."""
        with assumptions([*body.inputs, *(y for node in body for y in node.outputs)]):
            for x, shape in zip(body.inputs[2:], states, strict=True):
                x.shape = None
                self._assume(x, shape)
            for node in body:
                self._infer(node)
            found = [self._known_of(y) for y in body.outputs[1 : 1 + len(states)]]
            self._empty.difference_update(body.inputs, *(node.outputs for node in body))
            return found

    def _infer(self, node: ir.Node) -> None:
        if is_standard(node, "Loop"):
            found = self.of(node)
        elif is_standard(node, "If"):
            found = [_common_shape(*results) for results in zip(*map(self._branch, subgraphs(node)), strict=True)]
        elif node.op_type in ("Identity", "SequenceInsert") and self._known_of(node.inputs[0]) == _EMPTY:
            found = [self._known_of(node.inputs[-1 if node.op_type == "Identity" else 1])]
        elif not any(subgraphs(node)):
            recorded = [y.shape for y in node.outputs]
            for y in node.outputs:
                y.shape = None
            infer_node(node)
            for y, old in zip(node.outputs, recorded, strict=True):
                y.shape = old if y.shape is None else y.shape
            return
        else:
            return
        for y, shape in zip(node.outputs, found, strict=False):
            self._assume(y, shape)

    def _branch(self, branch: ir.Graph) -> list[Shape | None]:
        with assumptions(y for node in branch for y in node.outputs):
            for node in branch:
                self._infer(node)
            found = [self._known_of(y) for y in branch.outputs]
            self._empty.difference_update(*(node.outputs for node in branch))
            return found

    def _assume(self, value: ir.Value, shape: Shape | None) -> None:
        self._empty.discard(value)
        if shape == _EMPTY:
            self._empty.add(value)
        else:
            shapes.record_shape(value, shape)

    def _known_of(self, value: ir.Value | None) -> Shape | None:
        empty = value in self._empty or made_by(value, "SequenceEmpty") is not None
        return _EMPTY if empty else shape_of(value)


def _captured(body: ir.Graph) -> list[ir.Value]:
    """Return the values that ``body`` captures from outside."""
    nodes = list(body.all_nodes())
    inside = {*body.inputs, *(y for node in nodes for y in node.outputs)}
    inside.update(x for node in nodes for graph in subgraphs(node) for x in graph.inputs)
    return list(dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v not in inside))


def _with_names(before: Shape | None, inside: Shape | None, name: str) -> Shape | None:
    """Return the shape before the loop, completed by the one inside and by names; None for an unknown rank."""
    if before is None or inside is None or len(before) != len(inside):
        before = inside = before or inside
    if before is None or inside is None:
        return None
    dims = [b if isinstance(b, int) and not isinstance(a, int) else a for a, b in zip(before, inside, strict=True)]
    return tuple(f"{name}.{i}" if _is_open(d) else d for i, d in enumerate(dims))


def _common_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    """Return the most specific shape that is compatible with both; None if unknown."""
    return shapes.common(a, b) if _EMPTY not in (a, b) else a if b == _EMPTY else b
