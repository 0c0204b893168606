"""The choice of the cut between values that are kept and nodes that run in each epoch.

It is a minimum cut, which minimises the bytes kept for each sample. Nodes after the cut run in each epoch, which costs
a part of the bytes that they read and write, so that a cheap node whose result is larger than its input (a Cast, a
Resize) stays after the cut. Matrix products, loops and unknown operators never run in each epoch if their result can be
kept.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.autodiff.path import reads
from gradgraph.graph.minimum_cut import NEVER, Network
from gradgraph.graph.shapes import is_elementwise
from gradgraph.runtime.features.static_values import StaticValues

_LONG = 1 << 40  # the cost of computing a matrix product in each epoch: more than the bytes of any sample
_RUN = 4  # bytes that a node reads and writes in each epoch, per byte kept, at equal cost
_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# operators that take about as long as reading and writing their tensors
_NAMES = (
    "ArgMax ArgMin AveragePool BatchNormalization Concat ConstantOfShape CumSum DepthToSpace DequantizeLinear Dropout "
    "Expand Gather GatherElements GatherND GlobalAveragePool GlobalMaxPool GroupNormalization Hardmax "
    "InstanceNormalization LayerNormalization LogSoftmax LpNormalization MaxPool OneHot Pad QuantizeLinear "
    "RMSNormalization ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare Resize Shape Size Slice Softmax SpaceToDepth Split Tile Transpose Trilu"
)
_MOVES = frozenset(_NAMES.split())


def takes_long(node: ir.Node) -> bool:
    """Whether ``node`` computes more than it reads and writes, as matrix products do."""
    return bool(node.domain) or not (is_elementwise(node) or node.op_type in _VIEWS | _MOVES)


def cheapest_cut(static: StaticValues) -> list[ir.Value]:
    """Return the values to keep, in the order in which they are computed; inputs of the batch may be among them."""
    network = Network()
    end = "end"
    for x in static.rows:
        if x.producer() is None:
            network.add("begin", ("value", x), static.rows[x].nbytes)
    for node in static.nodes:
        network.add("begin", node, _cost(node, static))
        if node in static.mixing:
            network.add(node, end, NEVER)
        for y in node.outputs:
            network.add(node, ("value", y), static.rows[y].nbytes if y in static.rows else NEVER)
        for x in reads(node):
            network.add(("value", x), node, NEVER)
    for x in static.read:
        network.add(("value", x), end, NEVER)
    after = network.sink_side("begin", end)
    return [x for x in static.rows if ("value", x) in after and (x.producer() or "begin") not in after]


def _cost(node: ir.Node, static: StaticValues) -> int:
    """Return the cost of running ``node`` in each epoch."""
    if takes_long(node):
        return _LONG
    if node.op_type in _VIEWS:
        return 0
    touched = (*(x for x in node.inputs if x is not None), *node.outputs)
    return sum(static.sizes.get(x.name or "", 0) for x in touched) // _RUN
