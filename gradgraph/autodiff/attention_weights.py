"""Find the nodes that compute attention probabilities: from queries × keys to probabilities × values.

With n positions, attention probabilities are n × n numbers per head, and cheap to recompute: one product and a softmax.
FlashAttention (Dao et al., 2022, arXiv:2205.14135) does not store them either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Shape, all_sizes, is_elementwise, size_factors

_MOVES = frozenset({"Reshape", "Squeeze", "Unsqueeze"})  # reshaping operators that windowed attention uses


def weights_of_attentions(forward: Sequence[ir.Node]) -> tuple[list[int], set[ir.Node]]:
    """Return the indices after the products of attention probabilities and values, and the nodes of the probabilities.

    Indices are ascending and refer to ``forward``, the nodes of the graph in order.
    """
    place = {node: i for i, node in enumerate(forward)}
    ends, made = set[int](), set[ir.Node]()
    for node in forward:
        if node.op_type == "Softmax" and node.domain == "":
            after = _up_to_products(node, place)
            if after is not None:
                products, between = after
                ends.update(place[product] + 1 for product in products)
                for maker in between:
                    made.update(_makers(maker, place))
    return sorted(ends), made


def probabilities_of(forward: Sequence[ir.Node]) -> list[ir.Value]:
    """Return the attention probabilities that ``forward``, the nodes of a graph in order, computes by a Softmax."""
    place = {node: i for i, node in enumerate(forward)}
    softmaxes = (node for node in forward if node.op_type == "Softmax" and node.domain == "")
    return [node.outputs[0] for node in softmaxes if _up_to_products(node, place) is not None]


def _up_to_products(softmax: ir.Node, place: Mapping[ir.Node, int]) -> tuple[list[ir.Node], list[ir.Node]] | None:
    """Return the products that read the probabilities of ``softmax``, and the nodes from ``softmax`` up to them.

    The nodes in between may be a dropout or guards against NaN. Returns None if no product reads the probabilities.
    """
    products, between, waiting = list[ir.Node](), dict[ir.Node, None](), [softmax]
    while waiting:
        node = waiting.pop()
        between[node] = None
        for reader in (use.node for y in node.outputs for use in y.uses() if use.node in place):
            if _is_product(reader):
                products.append(reader)
            elif reader not in between and _keeps_numbers(reader) and _as_large(reader.outputs[0], node.outputs[0]):
                waiting.append(reader)
    return (products, list(between)) if products else None


def _makers(node: ir.Node, place: Collection[ir.Node]) -> Iterator[ir.Node]:
    """Yield ``node`` and the nodes that compute its input, back to the product of queries and keys.

    Only producers with as many elements as ``node`` are included, and nodes that runtimes fuse with the product.
    """
    seen, waiting = {node}, [(node, False)]
    while waiting:
        node, is_under_product = waiting.pop()
        yield node
        is_under_product |= _is_product(node)
        for x in node.inputs:
            maker = None if x is None else x.producer()
            if maker is None or maker in seen or maker not in place or maker.domain:
                continue
            if _fuses_with_product(maker) if is_under_product else _makes_as_many(maker, node):
                seen.add(maker)
                waiting.append((maker, is_under_product))


def _is_product(node: ir.Node) -> bool:
    return node.op_type == "MatMul" and node.domain == ""


def _fuses_with_product(node: ir.Node) -> bool:
    """Whether runtimes fuse ``node`` with a product after it; to round equally, both must then be recomputed."""
    factors = [x for x in node.inputs if x is not None and x.is_initializer() and x.shape is not None]
    is_scale = node.op_type in ("Mul", "Div") and any(all_sizes(shape_of(x)) in ([], [1]) for x in factors)
    return node.domain == "" and (node.op_type == "Transpose" or is_scale)


def _makes_as_many(maker: ir.Node, node: ir.Node) -> bool:
    """Whether ``maker`` is an operator of attention and outputs as many elements as ``node``."""
    makes = _keeps_numbers(maker) or maker.op_type in ("MatMul", "Softmax")
    return makes and _as_large(maker.outputs[0], node.outputs[0])


def _keeps_numbers(node: ir.Node) -> bool:
    """Whether ``node`` is elementwise or only moves elements."""
    return node.domain == "" and (is_elementwise(node) or node.op_type in _MOVES)


def _as_large(x: ir.Value | None, y: ir.Value) -> bool:
    """Whether ``x`` and ``y`` are known to have equally many elements."""
    mine, its = (_factors(shape_of(v)) for v in (x, y))
    return mine is not None and mine == its


def _factors(shape: Shape | None) -> tuple[int, list[str]] | None:
    """Return the product of the numeric sizes, and the sorted names of symbolic sizes; None if a size is unknown."""
    if shape is None or None in shape:
        return None
    number, names = 1, list[str]()
    for d in shape:
        if isinstance(d, int):
            number *= d
        else:
            for part in size_factors(str(d)):
                if part.isdecimal():
                    number *= int(part)
                else:
                    names.append(part)
    return number, sorted(names)
