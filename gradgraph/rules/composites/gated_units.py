"""Gated activations, x times a function of x: SiLU and both forms of GELU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard
from gradgraph.rules.activation import gelu_gradient, silu_gradient
from gradgraph.rules.composites.table import Found, composite
from gradgraph.rules.patterns import Walk, is_number, need, need_one_rank, number_of, some, with_number
from gradgraph.rules.registry import Gradients, case, point, real, uniform

FAR = [[40.0, -40.0, 0.0]]
MOST_FACTORS = 3  # maximum nesting of products in a GELU


# --- SiLU: x·σ(x) ------------------------------------------------------------------------------------------------


def find_silu(walk: Walk) -> Found:
    """Match x·σ(x), with the factors in either order."""

    def gated(pair: tuple[ir.Value | None, ir.Value | None]) -> Found:
        x, gate = pair
        need(walk.to(gate, "Sigmoid").inputs[0] is x)
        return Found((x,), (gate,))

    x, y = walk.last.inputs
    return walk.first(gated, [(x, y), (y, x)])


@composite(
    "Silu",
    ["Mul"],
    find_silu,
    case(real(2, 3), graph="s = Sigmoid(x0)  y0 = Mul(x0, s)"),
    case(real(0, 3), graph="s = Sigmoid(x0)  y0 = Mul(s, x0)"),
    case(real(2, 3), real(3), graph="s = Sigmoid(x0)  t = Mul(s, x0)  u = Mul(s, x1)  y0 = Mul(t, u)"),
    point(FAR, gives=[[[1.0, 0.0, 0.5]]], graph="s = Sigmoid(x0)  y0 = Mul(x0, s)"),
    elementwise=True,
)
def silu(op: Builder, dy: Var, y: Var, x: Var, gate: Var) -> Gradients:
    return (silu_gradient(op, dy, y, gate),)


# --- GELU: ½·x·(1 + g(x)) ----------------------------------------------------------------------------------------


def find_gelu(walk: Walk) -> Found:
    """Match a GELU: a product, in any order, of x, a sum 1 + g (or ½ + ½·g) with g = erf or tanh, and constants."""

    def gelu_by(gate: ir.Node) -> Found:
        walk.passed.append(gate)
        half, g = _one_and(walk, gate)
        curve = walk.to(g, "Erf", "Tanh")
        x = _erf_argument(walk, curve) if curve.op_type == "Erf" else _tanh_argument(walk, curve)
        need_one_rank(walk, x)
        number, others = _factors(walk, walk.last, x)
        is_half = number * half == 0.5 and x.dtype is not None and x.dtype.is_floating_point()
        need(is_half and sorted(map(id, others)) == sorted(map(id, (x, gate.outputs[0]))))
        return Found((x,), (), {"approximate": "none" if curve.op_type == "Erf" else "tanh"})

    return walk.first(gelu_by, _sums_below(walk.last))


def _sums_below(last: ir.Node) -> Iterator[ir.Node]:
    """Yield the Add nodes that are factors of ``last``."""
    level = [last]
    for _ in range(MOST_FACTORS):
        producers = [x.producer() for node in level for x in node.inputs if x is not None]
        yield from (node for node in producers if node is not None and is_standard(node, "Add"))
        level = [node for node in producers if node is not None and is_standard(node, "Mul", "Div")]


def _one_and(walk: Walk, gate: ir.Node) -> tuple[float, ir.Value]:
    """Return (c, g) if ``gate`` computes ``c + c·g`` with c = 1 or ½, else raise MismatchError."""
    for one, term in (gate.inputs, gate.inputs[::-1]):
        c = number_of(one)
        if c == 1.0:
            return 1.0, some(term)
        if c == 0.5:
            g, factor = with_number(walk.to(term, "Mul", "Div"))
            need(factor == 0.5)
            return 0.5, g
    return some(None)


def _erf_argument(walk: Walk, erf: ir.Node) -> ir.Value:
    """Return x if ``erf`` computes erf(x/√2), else raise MismatchError."""
    node = walk.to(erf.inputs[0], "Mul", "Div")
    x, _ = with_number(node)
    root = math.sqrt(0.5) if node.op_type == "Mul" else math.sqrt(2.0)
    need(any(is_number(v, root) for v in node.inputs))
    return x


def _tanh_argument(walk: Walk, tanh: ir.Node) -> ir.Value:
    """Return x if ``tanh`` computes tanh(√(2/π)·(x + 0.044715·x³)), else raise MismatchError."""
    node = walk.to(tanh.inputs[0], "Mul")
    inner, _ = with_number(node)
    need(any(is_number(v, math.sqrt(2.0 / math.pi)) for v in node.inputs))
    total = walk.to(inner, "Add")

    def cubic(pair: tuple[ir.Value | None, ir.Value | None]) -> Found:
        x, term = pair
        product = walk.to(term, "Mul")
        cube, _ = with_number(product)
        need(any(is_number(v, 0.044715) for v in product.inputs) and _is_cube(walk, cube, some(x)))
        return Found((x,))

    a, b = total.inputs
    return some(walk.first(cubic, [(a, b), (b, a)]).inputs[0])


def _is_cube(walk: Walk, cube: ir.Value, x: ir.Value) -> bool:
    node = walk.to(cube, "Mul", "Pow")
    if node.op_type == "Pow":
        return node.inputs[0] is x and number_of(node.inputs[1]) == 3.0
    square = next((v for v in node.inputs if v is not x), None)
    product = walk.to(square, "Mul", "Pow")
    factor = product.inputs[1]
    is_square = factor is x if product.op_type == "Mul" else number_of(factor) == 2.0
    return x in node.inputs and product.inputs[0] is x and is_square


def _factors(walk: Walk, last: ir.Node, x: ir.Value) -> tuple[float, list[ir.Value]]:
    """Return the constant factor of the product ``last``, and its other factors; ``x`` is not split into factors."""
    number, others = 1.0, []
    level = [last.outputs[0]]
    for _ in range(MOST_FACTORS + 1):
        products = [v for v in level if v is not x and (n := v.producer()) is not None and is_standard(n, "Mul", "Div")]
        others += [v for v in level if v not in products]
        level = []
        for value in products:
            node = walk.to(value, "Mul", "Div") if value is not last.outputs[0] else last
            c = number_of(node.inputs[1])
            need(node.op_type == "Mul" or bool(c))
            for i, factor in enumerate(node.inputs):
                c = number_of(factor)
                number *= 1.0 if c is None else c if node.op_type == "Mul" or i == 0 else 1.0 / c
                level += [some(factor)] if c is None else []
    need(not level)
    return number, others


_ERF = "one = Constant<value = real {1.0}>()  half = Constant<value = real {0.5}>()"
_ERF += "  root = Constant<value = real {1.4142135623730951}>()  s = Div(x0, root)  e = Erf(s)"
_TANH = "one = Constant<value = real {1.0}>()  half = Constant<value = real {0.5}>()"
_TANH += "  k = Constant<value = real {0.7978845608028654}>()  c = Constant<value = real {0.044715}>()"
_TANH += "  three = Constant<value = real {3.0}>()"
_SUM = "  term = Mul(c, cube)  a = Add(x0, term)  u = Mul(k, a)  e = Tanh(u)"
_NUMBERS = uniform(-6.0, 6.0, 2, 3)


@composite(
    "Gelu",
    ["Mul", "Div"],
    find_gelu,
    case(_NUMBERS, graph=f"{_ERF}  a = Add(e, one)  m = Mul(x0, a)  y0 = Mul(m, half)"),  # torch.onnx.export
    case(_NUMBERS, graph=f"{_ERF}  a = Add(one, e)  m = Mul(half, a)  y0 = Mul(x0, m)"),
    case(_NUMBERS, graph=f"{_ERF}  a = Add(e, one)  m = Mul(half, x0)  y0 = Mul(m, a)"),
    case(_NUMBERS, graph=f"{_ERF}  h = Mul(e, half)  a = Add(h, half)  y0 = Mul(x0, a)"),
    case(_NUMBERS, graph=f"{_ERF}  two = Add(one, one)  a = Add(e, one)  m = Mul(x0, a)  y0 = Div(m, two)"),
    case(
        _NUMBERS,
        graph=f"{_TANH}  sq = Mul(x0, x0)  cube = Mul(x0, sq){_SUM}  b = Add(one, e)  m = Mul(x0, b)"
        "  y0 = Mul(half, m)",
    ),
    case(
        _NUMBERS,
        graph=f"{_ERF}  three = Constant<value = real {{3.0}}>()  c = Constant<value = real {{1.5}}>()  a = Add(e, one)"
        "  m = Mul(x0, a)  n = Div(m, three)  y0 = Mul(n, c)",
    ),
    case(
        _NUMBERS,
        graph="one = Constant<value = real {1.0}>()  half = Constant<value = real {0.5}>()"
        "  root = Constant<value = real {0.7071067811865476}>()  s = Mul(x0, root)  e = Erf(s)  a = Add(e, one)"
        "  m = Mul(x0, a)  y0 = Mul(m, half)",
    ),
    case(
        _NUMBERS,
        graph=f"{_TANH}  two = Constant<value = real {{2.0}}>()  sq = Pow(x0, two)  cube = Mul(sq, x0){_SUM}"
        "  b = Add(one, e)  m = Mul(x0, b)  y0 = Mul(half, m)",
    ),
    case(_NUMBERS, graph=f"{_TANH}  cube = Pow(x0, three){_SUM}  b = Add(e, one)  m = Mul(half, x0)  y0 = Mul(m, b)"),
    case(
        _NUMBERS,
        real(3),
        graph=f"{_ERF}  a = Add(e, one)  m = Mul(x0, a)  y0 = Mul(m, half)  y1 = Mul(e, x1)",
        outputs=2,
    ),
    point(FAR, gives=[[[1.0, 0.0, 0.5]]], graph=f"{_ERF}  a = Add(e, one)  m = Mul(x0, a)  y0 = Mul(m, half)"),
    elementwise=True,
)
def gelu(op: Builder, dy: Var, y: Var, x: Var, *, approximate: str) -> Gradients:
    return (gelu_gradient(op, dy, x, approximate=approximate),)
