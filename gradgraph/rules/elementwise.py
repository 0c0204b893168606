"""One number in, one number out: arithmetic and the elementary functions.

Notation: ``z = f(x, y)``; ``dz`` is the cotangent of ``z``.
"""

from __future__ import annotations

from gradgraph.builder import Builder, Var
from gradgraph.registry import Gradients, case, no_gradient, point, positive, real, vjp


@vjp("Add", case(real(2, 3), real(2, 3)), case(real(2, 1, 3), real(4, 1)), case(real(1), real()), case(real(0, 3), real(3)), broadcasts=True)
def add(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    return dz, dz


@vjp("Sub", case(real(2, 3), real(2, 3)), case(real(3), real(2, 1)), broadcasts=True)
def sub(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    return dz, -dz


@vjp("Mul", case(real(2, 3), real(2, 3)), case(real(2, 1, 3), real(4, 1)), broadcasts=True)
def mul(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    return dz * y, dz * x


@vjp("Div", case(real(2, 3), real(2, 3)), case(real(2, 1, 3), real(4, 1)), case(real(), real(3)), broadcasts=True)
def div(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    dx = dz / y
    return dx, -dx * z


@vjp(
    "Pow",
    case(positive(2, 3), real(3)),
    case(real(4), [2.0, 3.0, 1.0, 0.0]),
    point([0.0, 0.0, 0.0, -2.0], [0.0, 1.0, 2.0, 2.0], gives=[[0.0, 1.0, 0.0, -4.0], [0.0, 0.0, 0.0, 0.0]]),
    broadcasts=True,
)
def pow(op: Builder, dz: Var, z: Var, x: Var, y: Var) -> Gradients:
    down = op.Where(op.Equal(y, 0.0), 1.0, y - 1.0)  # 0 * 0**-1 is NaN, 0 * 0**1 is not
    base = op.Where(x > 0.0, x, 1.0)  # y varies only over a positive base
    return dz * y * x**down, dz * z * op.Log(base)


@vjp("Exp", case(real(2, 3)))
def exp(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * y,)


@vjp("Log", case(positive(2, 3)))
def log(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / x,)


@vjp("Sqrt", case(positive(2, 3)))
def sqrt(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy / (y * 2.0),)


@vjp("Neg", case(real(2, 3)))
def neg(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (-dy,)


no_gradient("piecewise constant", "Floor", "Ceil", "Round", "Sign")
