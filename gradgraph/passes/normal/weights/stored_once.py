"""Find weights that an exporter merged because their initial values were equal.

PyTorch's exporters store equal tensors once. After training no two weights are equal, but in an untrained network all
biases are zeros, all scales are ones, and copied layers are equal. Merged weights would be trained as one weight.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from gradgraph.passes.normal.weights.places import behind_moves, place_of

_NUMBER = re.compile(r"_\d+$")
_SAMPLE = 256  # the numbers that are compared before all others


def find_merged(weights: Iterable[ir.Value]) -> list[ir.Value]:
    """Return the weights that several modules read, and that may be several weights with equal initial values.

    The modules must read a weight as the same input of the same operator, unless all its numbers are equal. Two kinds
    of reads are excluded: reads of embedding tables, which encoders and decoders share on purpose, and reads by a
    gradient in the model, which must use the weight of the forward pass.
    """
    return [v for v in weights if len(v.uses()) > 1 and _is_merged(v)]


def modules_of(value: ir.Value) -> dict[str, list[tuple[ir.Node, int]]]:
    """Return the uses of a weight, as (node, input index), by module, or one per use if modules are not recorded."""
    found: dict[str, list[tuple[ir.Node, int]]] = {}
    for i, (node, position, module, _) in enumerate(_places(value)):
        found.setdefault(module or f"/{i}", []).append((node, position))
    return found


def _places(value: ir.Value) -> list[tuple[ir.Node, int, str, str]]:
    """Return the uses of a weight with module and parameter name; ``l`` and ``l_1`` in branches are one module."""
    found = [(node, position, *place_of(node, position)) for node, position in value.uses()]
    if all(node.graph is value.graph for node, *_ in found) or value.graph is None:
        return found
    attributes = ((a, n) for n in value.graph.all_nodes() if n.op_type == "If" for a in n.attributes.values())
    branches = {a.as_graph(): n for a, n in attributes if a.type == ir.AttributeType.GRAPH}
    first: dict[tuple[ir.Node, str], tuple[ir.Graph, str]] = {}  # keyed by the If, and the name without its number
    for i, (node, position, module, role) in enumerate(found):
        graph = node.graph
        inside = branches.get(graph) if isinstance(graph, ir.Graph) else None
        if inside is not None and isinstance(graph, ir.Graph) and module:
            branch, name = first.setdefault((inside, _NUMBER.sub("", module)), (graph, module))
            found[i] = (node, position, module if branch is graph else name, role)
    return found


def _is_merged(value: ir.Value) -> bool:
    kinds: dict[tuple[str, int], set[str]] = {}
    for node, position, module, role in _places(value):
        reader, at = behind_moves(node, position)
        is_table = reader.op_type == "Gather" or (reader.op_type in ("MatMul", "Gemm") and at == 0)
        if module and role and not is_table and not _is_of_a_gradient(reader):
            kinds.setdefault((reader.op_type, at), set()).add(module)
    if any(len(modules) > 1 for modules in kinds.values()):
        return True
    return len(set().union(*kinds.values())) > 1 and _is_one_number(value)


def _is_of_a_gradient(node: ir.Node) -> bool:
    """Whether the node computes a gradient, judging by the names that gradgraph uses: ``grad/net.2/Gemm/Gemm_1``."""
    scope = node.name or ""
    if not scope.startswith("grad/") or node.graph is None:
        return False
    scopes = set(itertools.accumulate(scope.removeprefix("grad/").split("/"), "{}/{}".format))
    return any(other.name in scopes for other in node.graph)


def _is_one_number(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or not tensor.size:
        return False
    data = tensor.numpy().reshape(-1)
    return bool((data[:_SAMPLE] == data[0]).all() and np.equal(data, data[0]).all())
