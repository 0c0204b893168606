"""Gradient rules of activations.

Derivatives at kinks follow PyTorch: the left derivative for Relu and similar functions, 0 at the ends of HardSigmoid.
If the derivative follows from the sign of the output (as for Relu), the rule reads the output instead of the input, so
that the forward pass may fuse or overwrite the input. No formula overflows for large inputs.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.named_operators import named_operator
from gradgraph.rules.registry import Gradients, case, key_of, point, real, uniform, vjp
from gradgraph.rules.rounding import wide

FAR, NAN = [100.0, -100.0, -200.0], math.nan


# --- piecewise linear --------------------------------------------------------------------------------------


@vjp(
    "Relu",
    case(real(2, 3)),
    case(real()),
    case(real(0)),
    point([0.0, -0.0, *FAR, NAN], gives=[[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]]),
)
def relu(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (relu_gradient(op, dy, y),)


@named_operator("ReluGrad", case(real(2, 3), real(2, 3)), case(real(), real()), case(real(0), real(0)), like=[1])
def relu_gradient(op: Builder, dy: Var, y: Var) -> Var:
    return dy * op.cast(y > 0.0, dy.dtype)


@vjp(
    "LeakyRelu",
    case(real(2, 3)),
    case(real(2, 3), alpha=0.3),
    case(real(2, 3), alpha=0.0),
    case(real(2, 3), alpha=1.5),
    case(real(2, 3), alpha=-0.5),
    case(real(0)),
    point([0.0, *FAR, NAN], gives=[[0.25, 1.0, 0.25, 0.25, 0.25]], alpha=0.25),
    point([0.0, 1.0, -1.0], gives=[[-0.5, 1.0, -0.5]], alpha=-0.5),
)
def leaky_relu(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float) -> Gradients:
    above = (y if alpha >= 0.0 else x) > 0.0
    if 0.0 <= alpha <= 1.0:
        return (dy * op.Clip(op.cast(above, dy.dtype), alpha),)  # faster than Where
    return (op.Where(above, dy, dy * alpha),)


@vjp(
    "PRelu",
    case(real(2, 3), real(2, 3)),
    case(real(2, 3, 4), real(3, 1)),
    case(real(2, 3), real(1)),
    case(real(0, 3), real(3)),
    point([0.0, 2.0, -2.0], [0.25, 0.5, 0.75], gives=[[0.25, 1.0, 0.75], [0.0, 0.0, -2.0]]),
    point([NAN], [0.25], gives=[[0.25], [NAN]]),
    broadcasts=True,
)
def prelu(op: Builder, dy: Var, y: Var, x: Var, slope: Var) -> Gradients:
    return dy * op.Where(x > 0.0, 1.0, slope), dy * op.Min(x, 0.0)


@vjp(
    "ThresholdedRelu",
    case(uniform(-2.0, 0.9, 2, 3)),
    case(uniform(1.1, 2.0, 2, 3)),
    case(real(2, 3), alpha=0.1),
    case(uniform(-0.4, 0.4, 3), alpha=-0.5),
    case(uniform(0.3001, 0.3001, 3), alpha=0.3),  # the next number in float16
    case(real(0)),
    point([0.0, 1.0, 1.5, *FAR, NAN], gives=[[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]]),
    point([0.0, -1.0, -2.0], gives=[[1.0, 0.0, 0.0]], alpha=-1.0),
)
def thresholded_relu(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float) -> Gradients:
    return (dy * op.cast(wide(op, x) > alpha, dy.dtype),)  # alpha is float32, and may not be representable in x's type


@vjp(
    "Shrink",
    case(uniform(-0.4, 0.4, 2, 3)),
    case(real(2, 3), lambd=0.1),
    case(real(2, 3), lambd=0.1, bias=0.1),
    case(uniform(0.6, 2.0, 3), bias=0.3),
    case(uniform(0.3001, 0.3001, 3), lambd=0.3),  # the next number in float16
    case(real(0)),
    point([0.0, 0.5, -0.5, 0.6, -0.6, NAN], gives=[[0.0, 0.0, 0.0, 1.0, 1.0, 0.0]]),
)
def shrink(op: Builder, dy: Var, y: Var, x: Var, *, lambd: float, bias: float) -> Gradients:
    return (dy * op.cast(op.Abs(wide(op, x)) > lambd, dy.dtype),)  # lambd is float32, as above


@vjp(
    "HardSigmoid",
    case(uniform(-2.0, 2.0, 2, 3)),
    case(uniform(2.6, 4.0, 3)),
    case(uniform(-2.0, 2.0, 2, 3), alpha=1 / 6),
    case(uniform(-0.4, 0.4, 3), alpha=-0.5, beta=0.3),
    case(real(0)),
    case(real(3), graph="s = Erf(x0)  y0 = HardSigmoid<alpha = 0.5, beta = 0.5>(s)"),
    case(uniform(-0.5, 0.2, 3), graph="s = Erf(x0)  y0 = HardSigmoid<alpha = 0.5, beta = 0.8>(s)"),
    case(uniform(0.8, 2.0, 3), graph="s = Erf(x0)  y0 = HardSigmoid<alpha = 0.5, beta = 0.8>(s)"),  # saturated
    case(uniform(1.2, 2.0, 3), graph="s = Neg(x0)  y0 = HardSigmoid<alpha = 0.5, beta = 0.5>(s)"),
    point([0.0, -1.0, 1.0, *FAR, NAN], gives=[[0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]], alpha=0.5),
)
def hard_sigmoid(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float, beta: float) -> Gradients:
    producer = x.value.producer()
    is_erf = producer is not None and key_of(producer) == ("", "Erf")
    if is_erf and abs(alpha) <= min(beta, 1.0 - beta):
        return (dy * alpha,)  # Erf is in [-1, 1], so x is never outside the ramp
    y = op.HardSigmoid(wide(op, x), alpha=alpha, beta=beta)
    return (dy * op.cast(y > y * y, dy.dtype) * alpha,)  # 0 < y < 1


@vjp(
    "HardSwish",
    case(uniform(-2.9, 2.9, 2, 3)),
    case(uniform(3.1, 4.0, 3)),
    case(uniform(-4.0, -3.1, 3)),
    case(real(0)),
    point([0.0, 1.5, *FAR], gives=[[0.5, 1.0, 1.0, 0.0, 0.0]]),
    point([-3.0, 3.0], gives=[[0.0, 1.0]]),
)
def hard_swish(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (hard_swish_gradient(op, dy, x),)


@named_operator("HardSwishGrad", case(real(2, 3), uniform(-4.0, 4.0, 2, 3)), case(real(0), real(0)), like=[1])
def hard_swish_gradient(op: Builder, dy: Var, x: Var) -> Var:
    u = x * (1.0 / 6.0)
    inside = op.cast(op.Abs(x) < 3.0, dy.dtype)  # where the Clip below does not saturate
    return dy * (op.Clip(u + 0.5, 0.0, 1.0) + u * inside)  # one Where costs as much as four of these nodes


# --- exponential for x < 0 -------------------------------------------------------------------------------


@vjp(
    "Elu",
    case(real(2, 3)),
    case(real(2, 3), alpha=0.5),
    case(real(2, 3), alpha=2.0),
    case(real(2, 3), alpha=-0.5),
    case(real(0)),
    point([0.0, *FAR], gives=[[1.0, 1.0, 0.0, 0.0]]),
    point([0.0, *FAR], gives=[[0.5, 1.0, 0.0, 0.0]], alpha=0.5),
)
def elu(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float) -> Gradients:
    if alpha == 1.0:
        return (dy * (op.Min(y, 0.0) + 1.0),)
    return (dy * op.Where((y if alpha >= 0.0 else x) > 0.0, 1.0, y + alpha),)


@vjp(
    "Selu",
    case(real(2, 3)),
    case(real(2, 3), alpha=0.5, gamma=2.0),
    case(real(2, 3), alpha=1.5, gamma=-0.5),
    case(real(0)),
    point([0.0, *FAR], gives=[[3.0, 2.0, 0.0, 0.0]], alpha=1.5, gamma=2.0),
)
def selu(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float, gamma: float) -> Gradients:
    return (dy * op.Where(x > 0.0, gamma, y + gamma * alpha),)


@vjp(
    "Celu",
    case(real(2, 3)),
    case(real(2, 3), alpha=0.5),
    case(real(2, 3), alpha=2.0),
    case(real(0)),
    point([0.0, *FAR], gives=[[1.0, 1.0, 0.0, 0.0]]),
    point([0.0, *FAR], gives=[[1.0, 1.0, 0.0, 0.0]], alpha=0.5),
)
def celu(op: Builder, dy: Var, y: Var, x: Var, *, alpha: float) -> Gradients:
    below = op.Min(y, 0.0)
    return (dy * ((below if alpha == 1.0 else below * (1.0 / alpha)) + 1.0),)


# --- smooth ----------------------------------------------------------------------------------------------------


@vjp("Sigmoid", case(real(2, 3)), case(real()), case(real(0)), point([0.0, *FAR], gives=[[0.25, 0.0, 0.0, 0.0]]))
def sigmoid(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * y * (1.0 - y),)


@vjp("Softplus", case(real(2, 3)), case(real()), case(real(0)), point([0.0, *FAR], gives=[[0.5, 1.0, 0.0, 0.0]]))
def softplus(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    return (dy * op.Sigmoid(x),)


@vjp("Softsign", case(real(2, 3)), case(real()), case(real(0)), point([0.0, 3.0, -1.0], gives=[[1.0, 0.0625, 0.25]]))
def softsign(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    scale = op.Abs(x) + 1.0
    return (dy / (scale * scale),)


@vjp("Mish", case(real(2, 3)), case(real()), case(real(0)), point([0.0, *FAR], gives=[[0.6, 1.0, 0.0, 0.0]]))
def mish(op: Builder, dy: Var, y: Var, x: Var) -> Gradients:
    t = op.Tanh(op.Softplus(x))
    return (dy * (t + x * op.Sigmoid(x) * (1.0 - t * t)),)


@vjp(
    "Gelu",
    case(real(2, 3)),
    case(real(2, 3), approximate="none"),
    case(real(2, 3), approximate="tanh"),
    case(real(0)),
    point([0.0, *FAR], gives=[[0.5, 1.0, 0.0, 0.0]]),
    point([0.0, *FAR], gives=[[0.5, 1.0, 0.0, 0.0]], approximate="tanh"),
)
def gelu(op: Builder, dy: Var, y: Var, x: Var, *, approximate: str) -> Gradients:
    return (gelu_gradient(op, dy, x, approximate=approximate),)


@named_operator(
    "GeluGrad",
    case(real(2, 3), uniform(-6.0, 6.0, 2, 3), approximate="none"),
    case(real(2, 3), uniform(-6.0, 6.0, 2, 3), approximate="tanh"),
    like=[1],
)
def gelu_gradient(op: Builder, dy: Var, x: Var, *, approximate: str) -> Var:
    if approximate == "tanh":
        return dy * _tanh_gelu_slope(op, x)
    s = x * math.sqrt(0.5)  # Φ(x) + x·φ(x), with the constant factor of φ inside the exponential
    return dy * (s * op.Exp(-0.5 * math.log(math.pi) - s * s) + normal_cdf(op, x))


def normal_cdf(op: Builder, x: Var) -> Var:
    """Return Φ(x), the cumulative distribution function of the standard normal distribution."""
    erf = op.Erf(x * math.sqrt(0.5))
    if x.dtype == ir.DataType.FLOAT:  # one pass with the same accuracy; onnxruntime has no HardSigmoid for doubles
        return op.HardSigmoid(erf, alpha=0.5, beta=0.5)
    return erf * 0.5 + 0.5


def _tanh_gelu_slope(op: Builder, x: Var) -> Var:
    """Return the derivative of the tanh GELU, x·σ(v) with v = 2√(2/π)·(x + 0.044715·x³): σ + x·v'·σ·(1 - σ)."""
    if x.dtype != ir.DataType.DOUBLE:
        x = op.Clip(x, -20.0, 20.0)  # x³ overflows; the slope is 0 or 1 well before that
    k = 2.0 * math.sqrt(2.0 / math.pi)
    square = x * x
    sigmoid = op.Sigmoid(x * (square * (0.044715 * k) + k))
    return sigmoid * ((1.0 - sigmoid) * (x * (square * (3 * 0.044715 * k) + k)) + 1.0)


@named_operator("SiluGrad", case(real(2, 3), real(2, 3), uniform(0.1, 0.9, 2, 3)), like=[1])
def silu_gradient(op: Builder, dy: Var, y: Var, gate: Var) -> Var:
    """Return the gradient of y = x·σ(x) from y and ``gate`` = σ(x): dy·(y·(1 − σ) + σ)."""
    return dy * (y * (1.0 - gate) + gate)
