"""The order in which onnxruntime is given the nodes of a model: first those that need no batch, last loss and metrics.

onnxruntime sorts all nodes before each of its optimizations. It keeps those that are ready in a list, in the order of
the file, and walks through that list for every node. Many nodes of a step need no batch (decays of the optimizer,
transposed weights); late in the file, they are in the list from the start. Of 15,000 nodes of a step they are 2,000,
and its session takes 1.5 times as long to open as with these in front.

Of the inputs of a node, onnxruntime computes the one last that comes first. So these nodes are now computed just before
something reads them, and not before the whole batch.

It begins with what the last node that nobody reads needs. Were that an update, the loss would come at the very end, and
what it is computed from (the logarithms of all scores of a language model) would stay until then: a step of GPT-2 takes
6.4 GB that way, and 5.5 GB if it begins with the loss. Behind that come the updates, the one whose gradient comes first
last in the file: where the first of them needs the whole backward pass, all other gradients of weights wait for it with
what they are computed from (Stable Diffusion's U-Net, whose middle has the last names: 256 MiB in place of 18).

What it has optimised it writes in the order in which it computes. Of that file it would compute the nodes nearly the
other way round, wherever a node has several inputs: scores in pieces all lay in memory at once. ``computed_as_written``
puts them so that it computes them as they stood.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from gradgraph.backends.executed_order import executed_order
from gradgraph.files.protos import reads

_BACKWARD = "grad/"  # what the names of nodes of the backward pass begin with


def in_good_order(model: onnx.ModelProto, batch: Collection[str], following: Collection[str]) -> onnx.ModelProto:
    """Move nodes of ``model`` in place, and return it: to the front, to the end; otherwise they keep their order.

    Args:
        batch: inputs. Nodes that need none of them go to the front.
        following: the outputs that are next values of the state. Nodes that write others, which no node reads, go to
            the end, and before them those of ``following`` that no node reads: the one whose gradient comes first last.
    """
    waiting, read, following = set(batch), set[str](), set(following)
    gradient: dict[str, int] = {}  # of a tensor, the place of the last node of the backward pass that it needs
    for i, node in enumerate(model.graph.node):
        read.update(inputs := reads(node))
        if not waiting.isdisjoint(inputs):
            waiting.update(name for name in node.output if name)
        last = i if node.name.startswith(_BACKWARD) else max((gradient.get(x, -1) for x in inputs), default=-1)
        gradient.update(dict.fromkeys(node.output, last))

    def place(node: onnx.NodeProto) -> tuple[int, int]:
        is_read, is_next = not read.isdisjoint(node.output), not following.isdisjoint(node.output)
        if not is_read and not is_next:
            return 3, 0
        if waiting.isdisjoint(node.output):
            return 0, 0
        return (1, 0) if is_read else (2, -gradient[node.output[0]])

    model.graph.node.sort(key=place)
    return model


def computed_as_written(model: onnx.ModelProto) -> onnx.ModelProto:
    """Move nodes of ``model`` in place, and return it, so that onnxruntime computes them in the order that they had.

    They get the order in which onnxruntime would compute them as they stand. Of that one it makes the first again, but
    for a few nodes with several readers (36 of 1,623 in a step of GPT-2).
    """
    order = order_of(model.graph)
    places = iter(sorted(range(len(order)), key=order.__getitem__))
    model.graph.node.sort(key=lambda _: next(places))
    return model


def order_of(graph: onnx.GraphProto) -> list[int]:
    """The places of the nodes in the file, in the order in which onnxruntime computes them."""
    writer = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    return executed_order([{writer[name] for name in reads(node) if name in writer} for node in graph.node])
