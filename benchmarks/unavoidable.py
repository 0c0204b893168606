"""The minimum work of a training step: its products and convolutions, and the memory that it must touch.

It is counted from the forward model, whatever graph computes the step. Each product occurs up to three times: forward,
and in the gradients of both factors, if they depend on trained weights. All other operators are assumed to be fused:
connected operators between two products are one pass forward and one backward.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from benchmarks.flops import GATES, Shapes, shapes_of

PRODUCTS = ("MatMul", "Gemm")
CONVOLUTIONS = ("Conv", "ConvTranspose")
# no operations, or fused into the product that reads or writes the result
FREE = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Shape", "Constant", "Cast", "Expand"}
# numbers that the update reads or writes per parameter: weight, gradient, and optimizer state both ways
STATE_PASSES = {"sgd": 3, "adamw": 7}
NUMBER = 4  # bytes of a float32


@dataclass(frozen=True)
class Form:
    """A way to compute a product alone.

    Attributes:
        body: nodes in ONNX's text form, from ``a`` and ``b`` to ``y``.
        shapes: the shapes of a, b and y.
        constant: whether ``b`` is a constant, which onnxruntime packs beforehand.
    """

    body: str
    shapes: tuple[tuple[int, ...], ...]
    constant: bool = False


@dataclass(frozen=True)
class Work:
    """A product or convolution, with the forms among which the fastest is chosen."""

    kind: str
    forms: tuple[Form, ...]


def work(model: onnx.ModelProto) -> Counter[Work]:
    """Return the products and convolutions of a step, with their numbers of occurrences.

    Args:
        model: a model with static shapes in normal form, whose floating-point initializers are all trained.

    Raises:
        KeyError: a shape is unknown.
    """
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes, trained = shapes_of(graph), _trained(graph)
    found: Counter[Work] = Counter()
    for node in graph.node:
        wanted = [name in trained for name in node.input[:2]]
        for item, times in _of_node(node, shapes, wanted):
            found[item] += times
    return found


def traffic(model: onnx.ModelProto, optimizer: str) -> int:
    """Return the bytes that a step must read or write beyond its products: for the update, and between products."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    parameters = sum(math.prod(t.dims) for t in graph.initializer if _is_floating(t.data_type))
    return NUMBER * (STATE_PASSES[optimizer] * parameters + _between(graph))


# --- arithmetic ----------------------------------------------------------------------------------------------


def _of_node(node: onnx.NodeProto, shapes: Shapes, wanted: list[bool]) -> Iterator[tuple[Work, int]]:
    """Yield the products of a node with their counts; ``wanted`` says which input gradients are included."""
    if node.op_type in PRODUCTS:
        kind = "attention" if len(shapes[node.input[1]]) > 2 else "products"  # both factors are computed
        yield from ((item, 1) for item in _products(*_sizes(node, shapes), wanted, kind))
    elif node.op_type in CONVOLUTIONS:
        yield from ((item, 1) for item in _convolutions(node, shapes, wanted))
    elif node.op_type in GATES:
        time, batch, features = shapes[node.input[0]]
        directions, rows, _ = shapes[node.input[1]]
        hidden = rows // GATES[node.op_type]
        yield from ((item, directions) for item in _products(1, time * batch, features, rows, wanted))
        steps = (_product(1, batch, hidden, rows), _product(1, batch, rows, hidden))
        yield from ((item, time * directions) for item in steps)
        yield _product(1, hidden, time * batch, rows), directions


def _sizes(node: onnx.NodeProto, shapes: Shapes) -> tuple[int, int, int, int]:
    """Return the number of matrices in a product, and their rows, terms and columns."""
    a, b, y = (shapes[name] for name in (*node.input[:2], node.output[0]))
    if node.op_type == "Gemm":
        return 1, y[0], a[0] if _attributes(node).get("transA") else a[1], y[1]
    if len(b) == 2:
        return 1, math.prod(a[:-1]), a[-1], b[1]
    return math.prod(y[:-2]), y[-2], a[-1], y[-1]


def _products(
    stack: int, rows: int, terms: int, columns: int, wanted: list[bool], kind: str = "products"
) -> Iterator[Work]:
    """Yield the product of a and b, and its gradients with respect to the ``wanted`` factors."""
    yield _product(stack, rows, terms, columns, kind)
    if wanted[0]:
        yield _product(stack, rows, columns, terms, kind)
    if wanted[1]:
        yield _product(stack, terms, rows, columns, kind)


def _product(stack: int, rows: int, terms: int, columns: int, kind: str = "products", shared: str = "") -> Work:
    """Return a product with or without a transposed factor; ``shared`` ("a" or "") is common to the stack."""
    lead = (stack,) if stack > 1 else ()
    y = (*lead, rows, columns)
    forms = []
    for left, right in ((0, 0), (1, 0), (0, 1)):
        a = (terms, rows) if left else (rows, terms)
        b = (columns, terms) if right else (terms, columns)
        fused = f"com.microsoft.FusedMatMul<transA = {left}, transB = {right}>" if left or right else "MatMul"
        shapes = (a if shared == "a" else (*lead, *a), (*lead, *b), y)
        forms.append(Form(f"y = {fused}(a, b)", shapes))
    return Work(kind, tuple(forms))


def _convolutions(node: onnx.NodeProto, shapes: Shapes, wanted: list[bool]) -> Iterator[Work]:
    """Yield a convolution and its gradients, as onnxruntime's Conv or as products over windows."""
    x, w, y = (shapes[name] for name in (*node.input[:2], node.output[0]))
    groups = _attributes(node).get("group", 1)
    turned = node.op_type == "ConvTranspose"
    small, large = (x, y) if turned else (y, x)  # the side whose elements are sums over windows of the other
    taps, outer, places = math.prod(w[2:]) * large[1] // groups, small[1], math.prod(small[2:])
    whole = () if turned else _as_convolution(node, x, w, y)
    sizes = [(outer, taps, places, "a"), (taps, outer, places, "a"), (outer, places, taps, "")]
    if turned:
        sizes[:2] = sizes[1::-1]
    for (rows, terms, columns, shared), needed in zip(sizes, (True, *wanted), strict=True):
        products = _product(x[0], rows, terms, columns, shared=shared).forms if groups == 1 else ()
        if needed:
            yield Work("convolutions", (*whole, *products))


def _as_convolution(node: onnx.NodeProto, *shapes: tuple[int, ...]) -> tuple[Form, ...]:
    given = {k: list(v) if isinstance(v, Iterable) else v for k, v in _attributes(node).items() if k != "auto_pad"}
    listed = ", ".join(f"{k} = {v}" for k, v in {"group": 1, **given}.items())
    body = f"y = Conv<{listed}>(a, b)"
    return Form(body, shapes), Form(body, shapes, constant=True)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _is_floating(kind: int) -> bool:
    return kind in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)


def _trained(graph: onnx.GraphProto) -> set[str]:
    """Return the names of parameters and of all tensors that depend on them."""
    names = {t.name for t in graph.initializer if _is_floating(t.data_type) and len(t.dims)}
    for node in graph.node:
        if node.op_type != "Shape" and not names.isdisjoint(node.input):
            names.update(node.output)
    return names


# --- memory --------------------------------------------------------------------------------------------------


def _between(graph: onnx.GraphProto) -> int:
    """Return how many numbers operators between products read and write, in one pass each way per group of operators.

    Forward, a group reads results of products and inputs, and writes operands of products and outputs. Backward, it
    reads both (the outputs' cotangents), and writes the cotangents of what it read.
    """
    shapes = shapes_of(graph)
    given = {t.name for t in graph.initializer}
    groups = _groups([n for n in graph.node if not _is_product(n)], given)
    read_by_products = {name for n in graph.node if _is_product(n) for name in n.input}
    leaving = read_by_products | {v.name for v in graph.output}
    total = 0
    for nodes in groups:
        if all(n.op_type in FREE or _adds_bias(n, given) for n in nodes):
            continue
        made = {name for n in nodes for name in n.output}
        read = {name for n in nodes for name in n.input} - made - given - {""}
        size = [sum(math.prod(shapes[n]) for n in names) for names in (read, made & leaving)]
        total += (size[0] + size[1]) + (2 * size[0] + size[1])
    return total


def _is_product(node: onnx.NodeProto) -> bool:
    return node.op_type in (*PRODUCTS, *CONVOLUTIONS, *GATES)


def _adds_bias(node: onnx.NodeProto, given: set[str]) -> bool:
    """Whether a node adds an initializer, which products can do as they write."""
    return node.op_type == "Add" and not given.isdisjoint(node.input)


def _groups(nodes: list[onnx.NodeProto], given: set[str]) -> list[list[onnx.NodeProto]]:
    """Return groups of nodes that are connected by tensors, except by those in ``given``."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            name = root[name]
        return name

    for node in nodes:
        names = [name for name in (*node.input, *node.output) if name and name not in given]
        for other in names[1:]:
            root[find(other)] = find(names[0])
    found: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in nodes:
        found[find(node.output[0])].append(node)
    return list(found.values())
