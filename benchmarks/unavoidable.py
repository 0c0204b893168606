"""What a training step of a model cannot avoid: its products and convolutions, and the memory that it must touch.

Counted from the forward model, whatever graph computes the step. Every product has up to three: its own, the gradient
of either factor where something trained lies behind it. All else is taken to be fused as well as can be: operators
that hang together between two products are one pass there and one back.
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
# they change nothing, or a product reads and writes in their order
FREE = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Shape", "Constant", "Cast", "Expand"}
# times that the update reads or writes as many numbers as there are parameters: with the gradient, slots both ways
STATE_PASSES = {"sgd": 3, "adamw": 7}
NUMBER = 4  # bytes of a float32


@dataclass(frozen=True)
class Form:
    """One way to compute a product alone.

    Attributes:
        body: nodes in ONNX's text, from ``a`` and ``b`` to ``y``.
        shapes: of a, b and y.
        constant: is ``b`` a constant, which onnxruntime puts into its own order beforehand?
    """

    body: str
    shapes: tuple[tuple[int, ...], ...]
    constant: bool = False


@dataclass(frozen=True)
class Work:
    """A product or convolution, in all the forms that may be the fastest."""

    kind: str
    forms: tuple[Form, ...]


def work(model: onnx.ModelProto) -> Counter[Work]:
    """Products and convolutions of a step, and how often each is needed.

    Args:
        model: of static shapes, in normal form; every floating initializer is trained.

    Raises:
        KeyError: a shape is not known.
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
    """Bytes that a step must read or write beside its products: the update's, and those of what lies between them."""
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    parameters = sum(math.prod(t.dims) for t in graph.initializer if _is_floating(t.data_type))
    return NUMBER * (STATE_PASSES[optimizer] * parameters + _between(graph))


# --- arithmetic ----------------------------------------------------------------------------------------------


def _of_node(node: onnx.NodeProto, shapes: Shapes, wanted: list[bool]) -> Iterator[tuple[Work, int]]:
    """The node's products, those of its gradients only where ``wanted``."""
    if node.op_type in PRODUCTS:
        kind = "attention" if len(shapes[node.input[1]]) > 2 else "products"  # of two factors that are computed
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
    """How many products of how many rows, terms and columns."""
    a, b, y = (shapes[name] for name in (*node.input[:2], node.output[0]))
    if node.op_type == "Gemm":
        return 1, y[0], a[0] if _attributes(node).get("transA") else a[1], y[1]
    if len(b) == 2:
        return 1, math.prod(a[:-1]), a[-1], b[1]
    return math.prod(y[:-2]), y[-2], a[-1], y[-1]


def _products(
    stack: int, rows: int, terms: int, columns: int, wanted: list[bool], kind: str = "products"
) -> Iterator[Work]:
    """``a·b``, and the gradients of its factors."""
    yield _product(stack, rows, terms, columns, kind)
    if wanted[0]:
        yield _product(stack, rows, columns, terms, kind)
    if wanted[1]:
        yield _product(stack, terms, rows, columns, kind)


def _product(stack: int, rows: int, terms: int, columns: int, kind: str = "products", shared: str = "") -> Work:
    """Its factors as they lie, or one of them turned; ``shared``, "a" or "": one factor for the whole stack."""
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
    """A convolution and its gradients: by onnxruntime's, or as products of what lies in its windows."""
    x, w, y = (shapes[name] for name in (*node.input[:2], node.output[0]))
    groups = _attributes(node).get("group", 1)
    turned = node.op_type == "ConvTranspose"
    small, large = (x, y) if turned else (y, x)  # the side that is summed over windows of the other
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
    """Names of the parameters and of all that depends on them."""
    names = {t.name for t in graph.initializer if _is_floating(t.data_type) and len(t.dims)}
    for node in graph.node:
        if node.op_type != "Shape" and not names.isdisjoint(node.input):
            names.update(node.output)
    return names


# --- memory --------------------------------------------------------------------------------------------------


def _between(graph: onnx.GraphProto) -> int:
    """Numbers read and written by operators that are no products, each group of them in one pass there and one back.

    There, a group reads what products or inputs gave it, and writes what products or outputs take. Back, it reads both
    (its outputs' cotangents) and writes the cotangents of what it read.
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
    """Products can do that as they write."""
    return node.op_type == "Add" and not given.isdisjoint(node.input)


def _groups(nodes: list[onnx.NodeProto], given: set[str]) -> list[list[onnx.NodeProto]]:
    """Nodes that hang together by the tensors that they read or write."""
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
