"""Weights of GRU, LSTM and RNN in PyTorch's order of gates and names, and in ONNX's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.surgery.operation import Array

# for each gate of ONNX, its index in PyTorch: input, output, forget, cell; update, reset, hidden
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
_PARAMETERS = {1: ("weight_ih",), 2: ("weight_hh",), 3: ("bias_ih", "bias_hh")}


def is_recurrent(node: ir.Node) -> bool:
    return node.op_type in GATES and not node.domain


def numbered(nodes: Iterable[tuple[ir.Node, str]]) -> dict[ir.Node, int]:
    """Return the number of each recurrent layer in its module, from pairs of (node, module)."""
    counts: Counter[str] = Counter()
    found: dict[ir.Node, int] = {}
    for node, module in nodes:
        if is_recurrent(node) and node not in found:
            found[node] = counts[module]
            counts[module] += 1
    return found


def parameters(node: ir.Node, value: ir.Value, number: int) -> list[str]:
    """Return the names of PyTorch's parameters that an input of a recurrent node consists of, in their order."""
    places = [place for place in _PARAMETERS if place < len(node.inputs) and node.inputs[place] is value]
    both = node.attributes.get_string("direction", "forward") == "bidirectional"
    ends = ["", "_reverse"] if both else [""]
    return [f"{name}_l{number}{end}" for end in ends for name in (_PARAMETERS[places[0]] if places else ())]


def in_order(node: ir.Node, arrays: Sequence[Array]) -> Array:
    """Return PyTorch's parameters, each with gates along the first axis, as one input of the node."""
    gates = list(GATES[node.op_type])
    turned = [a.reshape(len(gates), -1, *a.shape[1:])[gates].reshape(a.shape) for a in arrays]
    return np.concatenate(turned)
