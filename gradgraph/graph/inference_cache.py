"""A cache for ONNX's shape inference of single nodes.

Many nodes of a network are alike, such as the updates of all weights, and layers of equal size. Inferring one
takes 0.1 ms, mostly for writing the node as a protobuf message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from gradgraph.graph.schemas import schema_of

Answer = TypeVar("Answer")
Dims = Sequence[tuple[int | str | None, ...] | None]
Numbers = Sequence[np.ndarray | None]

_MOST = 4096  # entries in the cache
_PLAIN = frozenset(ir.AttributeType[f"{kind}{s}"] for kind in ("INT", "FLOAT", "STRING") for s in ("", "S"))


def cached_by_node(
    ask: Callable[[ir.Node, Dims, Numbers, int], Answer],
) -> Callable[[ir.Node, Dims, Numbers, int], Answer]:
    """Return a cached version of ``ask``; results must not contain names of nodes.

    It is called with a node, its input shapes, constants that may determine shapes, and the opset.
    """
    remembered: dict[Hashable, Answer] = {}

    @functools.wraps(ask)
    def answer(node: ir.Node, given: Dims, numbers: Numbers, opset: int) -> Answer:
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
    """Return a cache key for ``node``; None if it reads sequences or has tensors or graphs as attributes."""
    if any(a.type not in _PLAIN or a.is_ref() for a in node.attributes.values()):
        return None
    read: list[Hashable] = []
    for v, shape, array in zip(node.inputs, given, numbers, strict=True):
        if v is not None and (type(v.type) is not ir.TensorType or not v.name):
            return None
        known = None if array is None else (array.dtype.str, array.shape, array.tobytes())
        read.append(None if v is None else (v.dtype, shape, known))
    attributes = tuple([(a.name, a.type, a.value) for a in node.attributes.values()])
    named = tuple([bool(out.name) for out in node.outputs])  # absent ones are skipped
    return schema_of(node.op_type, opset, node.domain), attributes, tuple(read), named
