"""Recognise outputs that are probabilities, and find the logits that they are computed from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from gradgraph.autodiff.decomposed_activations import sigmoid_of, softmax_of
from gradgraph.graph.nodes import is_standard, made_by

SAME = frozenset({"Identity", "Cast"})  # operators that keep elements at their positions
MOVES = frozenset({"Expand", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
CUT = frozenset({"Clip", "Concat"})  # operators that keep probabilities probabilities, but no longer match the logits


@dataclass(frozen=True)
class Probabilities:
    """A value that is a Softmax or a Sigmoid, possibly transposed, reshaped or sliced afterwards ("moved").

    Attributes:
        kind: ``Softmax`` or ``Sigmoid``.
        axis: the axis of a Softmax, counted from the front if the rank is known; None if moves rearranged its elements.
        source: the logits; None if they have a different type, or if moves rearranged the elements.
        negated: whether the value is computed from the negative of ``source``, such as 1/(1 + exp(source)).
        moves: the nodes that moved a Sigmoid, in order; applied to ``source``, they move the logits in the same way.
    """

    kind: Literal["Softmax", "Sigmoid"]
    axis: int | None = None
    source: ir.Value | None = None
    negated: bool = False
    moves: tuple[ir.Node, ...] = ()

    @property
    def logits(self) -> ir.Value | None:
        """The logits of the probabilities; None if they were negated or moved."""
        return None if self.negated or self.moves else self.source


def probabilities(value: ir.Value) -> Probabilities | None:
    """Trace ``value`` back to a Softmax or Sigmoid; return None if it is not known to be probabilities."""
    at, moves, cut = value, list[ir.Node](), False
    while (node := at.producer()) is not None and node.domain == "" and at is node.outputs[0]:
        if (found := _made_here(at)) is not None:
            together = cut or (moves and found.kind == "Softmax")  # the axis is that of the logits before they move
            return Probabilities(found.kind) if together else _placed(value, replace(found, moves=tuple(moves)))
        if node.op_type not in SAME | MOVES | CUT or not node.inputs:
            return None
        cut = cut or node.op_type in CUT
        if node.op_type in MOVES:
            moves.insert(0, node)
        if node.op_type == "Concat":  # such as [1 − p, p] for two classes
            parts = (probabilities(x) for x in node.inputs if x is not None)
            known = next((found for found in parts if found is not None), None)
            return None if known is None else Probabilities(known.kind)
        if node.inputs[0] is None:
            return None
        at = node.inputs[0]
    return None


def _made_here(value: ir.Value) -> Probabilities | None:
    """Return the Softmax or Sigmoid, one operator or decomposed, that computes ``value``; None if none does."""
    if (node := made_by(value, "Softmax", "Sigmoid")) is not None:
        if is_standard(node, "Sigmoid"):
            return Probabilities("Sigmoid", None, node.inputs[0])
        given = node.attributes.get("axis")
        return Probabilities("Softmax", -1 if given is None else given.as_int(), node.inputs[0])
    if (softmax := softmax_of(value)) is not None:
        return Probabilities("Softmax", softmax[1], softmax[0])
    sigmoid = sigmoid_of(value)
    return None if sigmoid is None else Probabilities("Sigmoid", None, *sigmoid)


def _placed(value: ir.Value, found: Probabilities) -> Probabilities:
    """Return ``found`` with its axis counted from the front of ``value``, and ``source`` None if it is unusable."""
    axis, source = found.axis, found.source
    if axis is not None and value.shape is not None and len(value.shape):
        axis %= len(value.shape)
    if source is None or not source.name or source.dtype != value.dtype or source.producer() is None:
        source = None
    return replace(found, axis=axis, source=source)
