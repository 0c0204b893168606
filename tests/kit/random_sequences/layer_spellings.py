"""Linear layers, normalizations and activations, each written in several ways."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.kit.random_sequences.sequence_draft import Draft


def linear(net: Draft, x: str, n: int, m: int, bias: bool | None = None, rank: int = 3) -> str:
    """Append a linear layer from [.., n] to [.., m]."""
    bias = net.chance(0.7) if bias is None else bias
    how = net.one_of(["matmul", "matmul", "transposed", "gemm", "einsum", "normed", "lora"])
    if how == "gemm" and rank == 3:
        turned = net.one_of([0, 1])
        w = net.weight(*((m, n) if turned else (n, m)), spread=1 / math.sqrt(n))
        flat = net.reshape(x, -1, n) if net.chance(0.5) else net.op("Reshape", x, np.array([-1, n]))
        c = [net.weight(*net.one_of([(m,), (1, m), ()]), spread=0.1, name="bias")] if bias else []
        y = net.op("Gemm", flat, w, *c, transB=turned, alpha=net.one_of([1.0, 0.5]), beta=net.one_of([1.0, 2.0]))
        return net.reshape(y, "B", "S", m)
    if how == "einsum" and rank == 3:
        y = net.op("Einsum", x, net.weight(n, m), equation="bsn,nm->bsm")
    elif how == "transposed":
        y = net.op("MatMul", x, net.swap(net.weight(m, n, spread=1 / math.sqrt(n)), 2))
    elif how == "normed":  # weight norm
        v, g = net.weight(m, n), net.weight(m, 1, around=1.0, spread=0.2, name="g")
        size = net.op("ReduceL2", v, np.array([1]), keepdims=1)
        w = net.op("Mul", v, net.op("Div", g, size)) if net.chance(0.5) else net.op("Div", net.op("Mul", g, v), size)
        y = net.op("MatMul", x, net.swap(w, 2))
    elif how == "lora":
        a, b = net.weight(n, 2, name="lora"), net.weight(2, m, spread=0.5, name="lora")
        low = net.op("MatMul", net.op("MatMul", x, a), b)
        y = net.op("Add", net.op("MatMul", x, net.weight(n, m)), net.op("Mul", low, 0.5))
    else:
        y = net.op("MatMul", x, net.weight(n, m))
    if not bias:
        return y
    b = net.weight(*net.one_of([(m,), (m,), (1, m), (1, 1, m)[-rank:], (1,), ()]), spread=0.1, name="bias")
    return net.op("Add", *((y, b) if net.chance(0.6) else (b, y)))


Normalised = Callable[[Draft, str, int, float], str | None]
LAST = np.array([-1])


def norm(net: Draft, x: str, width: int | None = None) -> str:
    """Append a random normalization, of ``width`` features per head if given."""
    how, eps = net.one_of(NORMS), net.one_of([1e-5, 1e-3, 0.1])
    if width is not None and how in OF_SEQUENCES:
        return x
    return how(net, x, width or net.width, eps) or x


def scale(net: Draft, *shape: int) -> str:
    return net.weight(*shape, around=1.0, spread=0.2, name="scale")


def offset(net: Draft, *shape: int) -> str:
    return net.weight(*shape, spread=0.2, name="offset")


def layer_norm(net: Draft, x: str, d: int, eps: float) -> str:
    bias = [offset(net, d)] if net.chance(0.7) else []
    return net.op("LayerNormalization", x, scale(net, d), *bias, axis=-1, epsilon=eps)


def sequence_norm(net: Draft, x: str, d: int, eps: float) -> str | None:
    """Append a normalization over two axes, with parameters that broadcast or not."""
    if "S" in net.open:
        return None
    shape = net.one_of([(net.length, d), (net.length, d), (1, d), (net.length, 1)])
    bias = [offset(net, *shape)] if net.chance(0.7) else []
    return net.op("LayerNormalization", x, scale(net, *shape), *bias, axis=1, epsilon=eps)


def norm_in_pieces(net: Draft, x: str, d: int, eps: float) -> str:
    """Append a layer normalization in several nodes, as TorchScript's exporter writes it."""
    centred = net.op("Sub", x, net.op("ReduceMean", x, LAST))
    square = net.op("Pow", centred, 2.0) if net.chance(0.5) else net.op("Mul", centred, centred)
    below = net.op("Sqrt", net.op("Add", net.op("ReduceMean", square, LAST), eps))
    return net.op("Add", net.op("Mul", net.op("Div", centred, below), scale(net, d)), offset(net, d))


def norm_of_tensorflow(net: Draft, x: str, d: int, eps: float) -> str:
    mean = net.op("ReduceMean", x, LAST)
    centred = net.op("Sub", x, mean)
    variance = net.op("ReduceMean", net.op("Mul", centred, centred), LAST)
    times = net.op("Mul", net.op("Reciprocal", net.op("Sqrt", net.op("Add", variance, eps))), scale(net, d))
    return net.op("Add", net.op("Mul", x, times), net.op("Sub", offset(net, d), net.op("Mul", mean, times)))


def rms_norm(net: Draft, x: str, d: int, eps: float) -> str:
    below = net.op("Sqrt", net.op("Add", net.op("ReduceMean", net.op("Pow", x, 2.0), LAST), eps))
    if net.chance(0.5):
        return net.op("Mul", scale(net, d), net.op("Mul", x, net.op("Reciprocal", below)))
    return net.op("Mul", net.op("Div", x, below), scale(net, *net.one_of([(d,), (1, d), ()])))


def simplified_norm(net: Draft, x: str, d: int, eps: float) -> str:
    return net.op("SimplifiedLayerNormalization", x, scale(net, d), axis=-1, epsilon=eps)


def unit_norm(net: Draft, x: str, d: int, eps: float) -> str:
    if net.chance(0.5):
        return net.op("Mul", net.op("LpNormalization", x, axis=-1, p=2), math.sqrt(d))
    return net.op("Mul", net.op("Div", x, net.op("Clip", net.op("ReduceL2", x, LAST), 1e-5)), scale(net, 1))


def mean_variance_norm(net: Draft, x: str, d: int, eps: float) -> str:
    return net.op("MeanVarianceNormalization", net.op("Add", x, offset(net, d)), axes=[-1])


def group_norm(net: Draft, x: str, d: int, eps: float) -> str | None:
    """Append a group normalization as TorchScript's exporter writes it."""
    if d % 2:
        return None
    flat = net.op("Reshape", net.op("Transpose", x, perm=[0, 2, 1]), np.array([0, 2, -1]))
    y = net.op("InstanceNormalization", flat, np.ones(2, np.float32), np.zeros(2, np.float32), epsilon=eps)
    y = net.reshape(y, "B", d, "S")
    y = net.op("Add", net.op("Mul", y, scale(net, d, 1)), offset(net, d, 1))
    return net.op("Transpose", y, perm=[0, 2, 1])


def batch_norm(net: Draft, x: str, d: int, eps: float) -> str | None:
    if net.batch < 2:
        return None
    mean, var = (f"statistic_{len(net.constants) + i}" for i in range(2))
    net.constants[mean] = net.rng.normal(size=d).astype(np.float32)
    net.constants[var] = net.rng.uniform(0.5, 2, d).astype(np.float32)
    flat = net.op("Transpose", x, perm=[0, 2, 1])
    y = net.op("BatchNormalization", flat, scale(net, d), offset(net, d), mean, var, epsilon=eps)
    return net.op("Transpose", y, perm=[0, 2, 1])


NORMS: list[Normalised] = [
    layer_norm, layer_norm, norm_in_pieces, norm_of_tensorflow, rms_norm, rms_norm, simplified_norm, unit_norm,
    mean_variance_norm, sequence_norm, group_norm, batch_norm,
]  # fmt: skip
OF_SEQUENCES = (sequence_norm, group_norm, batch_norm)  # normalizations that require three axes


def activation(net: Draft, x: str, width: int) -> str:
    return net.one_of(ACTIVATIONS)(net, x, width)


def named(net: Draft, x: str, width: int) -> str:
    return net.op(net.one_of(["Mish", "Tanh", "Softplus", "Elu", "Sigmoid"]), x)


def gelu(net: Draft, x: str, width: int) -> str:
    return net.op("Gelu", x, approximate=net.one_of(["none", "tanh"]))


def gelu_by_erf(net: Draft, x: str, width: int) -> str:
    if net.chance(0.4):  # TensorFlow
        y = net.op("Add", 1.0, net.op("Erf", net.op("Mul", x, math.sqrt(0.5))))
        return net.op("Mul", net.op("Mul", 0.5, x), y)
    y = net.op("Add", net.op("Erf", net.op("Div", x, math.sqrt(2))), 1.0)
    return net.op("Mul", net.op("Mul", x, y), 0.5) if net.chance(0.5) else net.op("Mul", x, net.op("Mul", y, 0.5))


def gelu_by_tanh(net: Draft, x: str, width: int) -> str:
    cube = net.op("Pow", x, 3.0) if net.chance(0.5) else net.op("Mul", x, net.op("Mul", x, x))
    inner = net.op("Mul", net.op("Add", x, net.op("Mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return net.op("Mul", net.op("Mul", x, 0.5), net.op("Add", net.op("Tanh", inner), 1.0))


def fused_gelu(net: Draft, x: str, width: int) -> str:
    """Append a Gelu as onnxruntime's optimizer writes it."""
    op_type = net.one_of(["Gelu", "BiasGelu", "FastGelu", "QuickGelu"])
    biased = op_type == "BiasGelu" or (op_type == "FastGelu" and net.chance(0.5))
    bias = [net.weight(width, spread=0.1, name="bias")] if biased else []
    return net.op(op_type, x, *bias, domain="com.microsoft")


def silu(net: Draft, x: str, width: int) -> str:
    """Append a SiLU, perhaps with a constant or trained factor."""
    beta = net.one_of([None, None, 1.702, "learnt"])
    beta = net.weight(around=1.0, spread=0.2, name="beta") if beta == "learnt" else beta
    gate = net.op("Sigmoid", x if beta is None else net.op("Mul", x, beta))
    return net.op("Mul", *((x, gate) if net.chance(0.5) else (gate, x)))


def squared_relu(net: Draft, x: str, width: int) -> str:
    y = net.op("Relu", x)
    return net.op("Mul", y, y) if net.chance(0.5) else net.op("Pow", y, 2.0)


def mish_in_pieces(net: Draft, x: str, width: int) -> str:
    return net.op("Mul", x, net.op("Tanh", net.op("Softplus", x)))


ACTIVATIONS: list[Callable[[Draft, str, int], str]] = [
    named, gelu, gelu_by_erf, gelu_by_tanh, fused_gelu, silu, squared_relu, mish_in_pieces,
]  # fmt: skip


def feed_forward(net: Draft, x: str) -> str:
    d = net.width
    inner = net.one_of([d, 2 * d, 4 * d, 1, 3])
    y = norm(net, x) if net.chance(0.6) else x
    how = net.one_of(["plain", "plain", "glu", "packed", "interleaved"])
    if how == "plain":
        y = linear(net, y, d, inner)
        y = activation(net, y, inner)
    elif how == "glu":
        up = linear(net, y, d, inner)
        y = net.op("Mul", activation(net, linear(net, y, d, inner), inner), up)
    else:
        y = linear(net, y, d, 2 * inner)
        if how == "interleaved":
            a, b = (net.op("Slice", y, np.array([i]), np.array([2**31]), np.array([-1]), np.array([2])) for i in (0, 1))
        else:
            a, b = net.op("Split", y, outputs=2, axis=-1, num_outputs=2)
        y = net.op("Mul", a, activation(net, b, inner))
    return residual(net, x, dropout(net, linear(net, y, inner, d)))


def residual(net: Draft, x: str, y: str) -> str:
    how = net.one_of(["", "", "", "scalar", "vector", "half", "post"])
    if how == "scalar":
        y = net.op("Mul", y, net.weight(*net.one_of([(), (1,), (1, 1, 1)]), around=0.5, spread=0.1, name="alpha"))
    if how == "vector":
        y = net.op("Mul", net.weight(net.width, around=0.5, spread=0.1, name="gamma"), y)
    if how == "half":
        return net.op("Mean", x, y)
    y = net.op("Add", x, y) if net.chance(0.5) else net.op("Add", y, x)
    return norm(net, y) if how == "post" else y


def dropout(net: Draft, x: str) -> str:
    if not net.chance(0.12):
        return x
    net.random = True
    return net.op("Dropout", x, net.one_of([0.1, 0.5]), *([np.array(False)] if net.chance(0.5) else []))
