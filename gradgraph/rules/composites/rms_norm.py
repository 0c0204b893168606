"""RMS normalization: division by the root mean square, as in most language models."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import constant_of
from gradgraph.rules.composites.table import Found, composite
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.patterns import Walk, need, need_one_rank, number_of, some
from gradgraph.rules.registry import Gradients, attributes, case, positive, real


def find_rms_norm(walk: Walk) -> Found:
    """Match x/r, or x·i with i = 1/r, where r = √(mean(x²) + ε)."""

    def by_factor(pair: tuple[ir.Value | None, ir.Value | None]) -> Found:
        x, inverse = pair
        node = walk.to(inverse, "Reciprocal", "Div", "Pow")
        if node.op_type == "Pow":
            need(number_of(node.inputs[1]) == -0.5)
            return Found((x,), (inverse,), {"axes": _axes_of_mean(walk, node.inputs[0], x), "is_inverse": 1})
        need(node.op_type == "Reciprocal" or number_of(node.inputs[0]) == 1.0)
        return Found((x,), (inverse,), {"axes": _axes_of_root(walk, node.inputs[-1], x), "is_inverse": 1})

    x, other = walk.last.inputs
    if walk.last.op_type == "Div":
        return Found((x,), (other,), {"axes": _axes_of_root(walk, other, x), "is_inverse": 0})
    return walk.first(by_factor, [(x, other), (other, x)])


def _axes_of_root(walk: Walk, root: ir.Value | None, x: ir.Value | None) -> list[int]:
    return _axes_of_mean(walk, walk.to(root, "Sqrt").inputs[0], x)


def _axes_of_mean(walk: Walk, wide: ir.Value | None, x: ir.Value | None) -> list[int]:
    """Return the axes of the mean if ``wide`` is ``mean(x²) + ε``, else raise MismatchError."""
    total = walk.to(wide, "Add")
    term = next((v for v in total.inputs if (n := some(v).producer()) is not None and n.op_type == "ReduceMean"), None)
    mean = walk.to(term, "ReduceMean")
    axes = constant_of(mean.inputs[1]) if len(mean.inputs) == 2 else None
    square = walk.to(mean.inputs[0], "Mul", "Pow")
    exponent = square.inputs[1]
    need(attributes(mean)["keepdims"] == 1 and square.inputs[0] is x)
    need(exponent is x if square.op_type == "Mul" else number_of(exponent) == 2.0)
    need(axes is not None and axes.size > 0)
    need_one_rank(walk, x)
    epsilon = some(next((v for v in total.inputs if v is not term), None))
    need(all(d == 1 for d in some(shape_of(epsilon))))  # a larger epsilon would make the output larger than x
    return [int(a) for a in some(axes).reshape(-1)]


_MEAN = "two = Constant<value = real {2.0}>()  e = Constant<value = real {0.1}>()  last = Constant<value_ints = [-1]>()"
_MEAN += "  q = Pow(x0, two)  m = ReduceMean(q, last)  v = Add(m, e)  r = Sqrt(v)"


@composite(
    "RmsNormalization",
    ["Mul", "Div"],
    find_rms_norm,
    case(
        real(2, 3), real(3), graph=f"{_MEAN}  i = Reciprocal(r)  n = Mul(x0, i)  y0 = Mul(n, x1)"
    ),  # torch.onnx.export
    case(
        real(2, 3),
        real(3),
        graph=f"{_MEAN}  c = Constant<value = real {{1.0}}>()  i = Div(c, r)  n = Mul(i, x0)  y0 = Mul(x1, n)",
    ),
    case(real(2, 3), graph=f"{_MEAN}  c = Constant<value = real {{-0.5}}>()  i = Pow(v, c)  y0 = Mul(x0, i)"),
    case(real(2, 3), graph=f"{_MEAN}  y0 = Div(x0, r)"),
    case(
        real(2, 3),
        graph="e = Constant<value = real[1] {0.1}>()  a = Constant<value_ints = [-1]>()  q = Mul(x0, x0)"
        "  m = ReduceMean(q, a)  v = Add(e, m)  r = Sqrt(v)  y0 = Div(x0, r)",
    ),
    case(real(2, 3), graph=f"{_MEAN}  y0 = Div(x0, r)  y1 = Exp(m)", outputs=2),
    case(real(0, 3), graph=f"{_MEAN}  y0 = Div(x0, r)"),
    case(
        real(2, 3, 4),
        graph="e = Constant<value = real {0.1}>()  a = Constant<value_ints = [1, 2]>()  q = Mul(x0, x0)"
        "  m = ReduceMean(q, a)  v = Add(e, m)  r = Sqrt(v)  y0 = Div(x0, r)",
    ),
)
def rms_normalization(
    op: Builder, dy: Var, y: Var, x: Var, factor: Var, *, axes: list[int], is_inverse: int
) -> Gradients:
    inverse = factor if is_inverse else 1.0 / factor
    return (rms_normalization_gradient(op, dy, y, inverse, axes=axes),)


@named_operator(
    "RmsNormalizationGrad",
    case(real(4, 3), real(4, 3), positive(4, 1), axes=[-1]),
    case(real(2, 3, 4), real(2, 3, 4), positive(2, 1, 1), axes=[1, 2]),
    like=[1],
)
def rms_normalization_gradient(op: Builder, dy: Var, y: Var, inverse: Var, *, axes: list[int]) -> Var:
    """Return the gradient of x, ``(dy − y·mean(dy·y))·i``, where ``y = x·i`` and ``i = 1/√(mean(x²) + ε)``."""
    return (dy - y * op.ReduceMean(dy * y, axes, keepdims=1)) * inverse
