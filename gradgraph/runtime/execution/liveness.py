"""The bytes of tensors alive at a time in a run of a lowered graph: a lower bound of an arena's size.

It reads the protobuf of the graph, in the order in which onnxruntime computes it, so that it takes 20 µs a node.
``memory`` is the estimate for users, which includes overwriting, kinds, and the gaps of the arena.
"""

from __future__ import annotations

import math
from collections import Counter

import onnx
from onnx import helper

from gradgraph.files.protos import reads
from gradgraph.graph.shapes import all_sizes, shape_of_type
from gradgraph.runtime.execution.node_order import order_of

VIEWS = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose output lies where their first input does."""


def most_alive(model: onnx.ModelProto) -> int:
    """The most bytes of tensors that live at a time, without inputs, outputs, and what bodies of nodes make.

    A tensor whose sizes are open counts as much as the largest input of its node.
    """
    nodes = model.graph.node
    read, order = [reads(node) for node in nodes], order_of(model.graph)
    storage = dict[str, str]()  # of views
    for node in (nodes[i] for i in order):
        if node.op_type in VIEWS and not node.domain:
            storage[node.output[0]] = storage.get(node.input[0], node.input[0])
    lying = [{storage.get(name, name) for name in names} for names in read]
    bound = {storage.get(o.name, o.name) for o in model.graph.output}  # memory of the caller's
    left, sizes = Counter(name for names in lying for name in names), _sizes(model.graph)
    alive, now, most = dict[str, int](), 0, 0
    for i in order:
        largest = max((sizes.get(name, 0) for name in read[i]), default=0)
        for name in nodes[i].output:
            if name and name not in storage and name not in bound:
                alive[name] = sizes.setdefault(name, largest)
                now += alive[name]
        most = max(most, now)
        left.subtract(lying[i])
        now -= sum(alive.pop(name, 0) for name in lying[i] if not left[name])
    return most


def _sizes(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the bytes of the values of known size."""
    found = dict[str, int]()
    for value in (*graph.input, *graph.value_info):
        sizes, dtype = all_sizes(shape_of_type(value.type)), value.type.tensor_type.elem_type
        if sizes is not None and dtype:  # not a sequence
            found[value.name] = math.prod(sizes) * helper.tensor_dtype_to_np_dtype(dtype).itemsize
    return found
