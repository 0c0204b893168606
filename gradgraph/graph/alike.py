"""Nodes that are alike: ONNX's rules tell the same of their outputs, so they are asked once.

Many nodes of a network are: the update of each weight, the layers of one size. To ask takes 0.1 ms, most of which is
spent on writing the node as a protobuf message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.graph.schemas import schema_of

Told = TypeVar("Told")
Dims = Sequence[tuple[int | str | None, ...] | None]
Numbers = Sequence[np.ndarray | None]

_MOST = 4096  # nodes of which the answer is remembered
_PLAIN = frozenset(ir.AttributeType[f"{kind}{s}"] for kind in ("INT", "FLOAT", "STRING") for s in ("", "S"))


def asked_once(
    ask: Callable[[ir.Node, Dims, Numbers, int], Told],
) -> Callable[[ir.Node, Dims, Numbers, int], Told]:
    """Let ``ask`` be called once for nodes that are alike.

    Args:
        ask: takes a node, the shapes of its inputs, the numbers of those that may steer shapes, and the opset. What it
            gives has no names of the node.
    """
    remembered: dict[Hashable, Told] = {}

    @functools.wraps(ask)
    def answer(node: ir.Node, given: Dims, numbers: Numbers, opset: int) -> Told:
        key = _key(node, given, numbers, opset)
        if key is None:
            return ask(node, given, numbers, opset)
        found = remembered.get(key)
        if found is None:
            if len(remembered) >= _MOST:
                remembered.clear()
            found = remembered[key] = ask(node, given, numbers, opset)
        return found

    return answer


def _key(node: ir.Node, given: Dims, numbers: Numbers, opset: int) -> Hashable | None:
    """All that ONNX's rules read of ``node``; None if that is much: tensors, bodies, sequences."""
    if any(a.type not in _PLAIN or a.is_ref() for a in node.attributes.values()):
        return None
    read: list[Hashable] = []
    for v, shape, array in zip(node.inputs, given, numbers, strict=True):
        if v is not None and (type(v.type) is not ir.TensorType or not v.name):
            return None
        known = None if array is None else (array.dtype.str, array.shape, array.tobytes())
        read.append(None if v is None else (v.dtype, shape, known))
    attributes = tuple([(a.name, a.type, a.value) for a in node.attributes.values()])
    named = tuple([bool(out.name) for out in node.outputs])  # those without a name are left out
    return schema_of(node.op_type, opset, node.domain), attributes, tuple(read), named
