"""Outputs that are probabilities already, and the logits that they were computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

SAME = frozenset({"Identity", "Cast"})  # what lies behind them lies in the same places
MOVED = frozenset({"Clip", "Concat", "Expand", "Flatten", "Gather", "Reshape", "Slice", "Squeeze", "Transpose",
                   "Unsqueeze"})  # fmt: skip


@dataclass(frozen=True)
class Probabilities:
    """A value that is a Softmax or a Sigmoid, perhaps moved to other places or cut.

    Attributes:
        kind: which of both.
        axis: of a Softmax that lies in the same places, from the front where its rank is known.
        logits: what it was computed from; None if that lies in other places, or has another type.
    """

    kind: Literal["Softmax", "Sigmoid"]
    axis: int | None = None
    logits: ir.Value | None = None


def probabilities(value: ir.Value) -> Probabilities | None:
    """How ``value`` came to be probabilities; None where it is none, or nobody can see that it is."""
    at, same = value, True
    while (node := at.producer()) is not None and node.domain == "" and at is node.outputs[0]:
        if node.op_type in ("Softmax", "Sigmoid"):
            return _found(value, node, same)
        if node.op_type not in SAME | MOVED or not node.inputs:
            return None
        same = same and node.op_type in SAME
        if node.op_type == "Concat":  # [1 − p, p], as of two classes
            parts = (probabilities(x) for x in node.inputs if x is not None)
            known = next((found for found in parts if found is not None), None)
            return None if known is None else Probabilities(known.kind)
        if node.inputs[0] is None:
            return None
        at = node.inputs[0]
    return None


def _found(value: ir.Value, node: ir.Node, same: bool) -> Probabilities:
    logits = node.inputs[0]
    kind: Literal["Softmax", "Sigmoid"] = "Softmax" if node.op_type == "Softmax" else "Sigmoid"
    if not same or logits is None:
        return Probabilities(kind)
    axis = None
    if kind == "Softmax":
        given = node.attributes.get("axis")
        axis = -1 if given is None else given.as_int()
        axis = axis % len(value.shape) if value.shape is not None and len(value.shape) else axis
    has_name = bool(logits.name) and logits.dtype == value.dtype and logits.producer() is not None
    return Probabilities(kind, axis, logits if has_name else None)
