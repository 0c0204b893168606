"""The order in which onnxruntime is given the nodes of a model: first those that need no batch, last loss and metrics.

onnxruntime sorts all nodes before each of its optimizations. It keeps those that are ready in a list, in the order of
the file, and walks through that list for every node. Many nodes of a step need no batch (decays of the optimizer,
transposed weights); late in the file, they are in the list from the start. Of 15,000 nodes of a step they are 2,000,
and its session takes 1.5 times as long to open as with these in front.

Of the inputs of a node, onnxruntime computes the one last that comes first. So these nodes are now computed just before
something reads them, and not before the whole batch.

It begins with what the last node that nobody reads needs. Were that an update, the loss would come at the very end, and
what it is computed from (the logarithms of all scores of a language model) would stay until then: a step of GPT-2 takes
6.4 GB that way, and 5.5 GB if it begins with the loss.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from gradgraph.autodiff.path import reads as values_read
from gradgraph.files.protos import reads


def in_good_order(model: onnx.ModelProto, batch: Collection[str], following: Collection[str]) -> onnx.ModelProto:
    """Move nodes of ``model`` in place, and return it: to the front, to the end; otherwise they keep their order.

    Args:
        batch: inputs. Nodes that need none of them go to the front.
        following: the outputs that are next values of the state. Nodes that write others, which no node reads, go to
            the end.
    """
    waiting, read, following = set(batch), set[str](), set(following)
    for node in model.graph.node:
        read.update(inputs := reads(node))
        if not waiting.isdisjoint(inputs):
            waiting.update(name for name in node.output if name)

    def place(node: onnx.NodeProto) -> int:
        is_result = read.isdisjoint(node.output) and following.isdisjoint(node.output)
        return 2 if is_result else int(not waiting.isdisjoint(node.output))

    model.graph.node.sort(key=place)
    return model


def as_executed(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of ``graph`` in the order in which onnxruntime computes them, as far as it leaves them what they are.

    It begins at the last node that nobody reads, and computes first what the last of several inputs needs.
    """
    place = {node: i for i, node in enumerate(graph)}
    before = {node: sorted({place[m] for x in values_read(node) if (m := x.producer()) in place}) for node in place}
    nodes, found, seen = list(place), list[ir.Node](), set[int]()
    stack = [(i, False) for i, node in enumerate(nodes) if not any(y.uses() for y in node.outputs)]
    while stack:
        i, is_ready = stack.pop()
        if is_ready:
            found.append(nodes[i])
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            stack.extend((j, False) for j in before[nodes[i]])
    return found
