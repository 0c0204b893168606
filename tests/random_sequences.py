"""Random networks on sequences, as exporters write them: transformers, mixtures of experts, gates, recurrences.

Every block can be written in several ways: with one operator or taken apart, in the manner of PyTorch's exporters or of
tf2onnx. Activations are smooth, so that central differences are exact and rounding tips nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, CLASSES, LONGEST = 11, 5, 14
Dim = int | str  # "B" and "S" stand for the batch and the length of sequences
Array = np.ndarray[Any, Any]


class Network:
    """A model under construction.

    Attributes:
        batch, length: sizes of the first batch.
        open: which of "B" and "S" the model leaves open.
        ids: does it read ids (int64) or features?
        own_loss: whether its first output is a loss of its own; else ``rank`` is that of its logits.
        random: does it draw masks in training?
    """

    def __init__(self, seed: int, large: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}
        self.inputs: list[tuple[str, int, list[Dim]]] = []
        self.open = self.one_of([(), (), ("B",), ("B", "S")])
        self.batch, self.length = self.one_of([1, 2, 2, 3, 8]), self.one_of([1, 2, 4, 5, 8])
        self.width = self.one_of([4, 8, 8, 12, 16])
        if large:
            self.batch, self.length, self.width = (self.one_of(those) for those in ([4, 16], [8, 12], [32, 64]))
        self.blocks: list[str] = []
        self.random = False
        self.own_loss = False
        self.opset = 21
        self.causal = self.chance(0.4)
        self._dims: dict[str, str] = {}
        self._masks: dict[str, str] = {}
        self._write()

    # --- choices ---

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    # --- what is written ---

    def op(self, op_type: str, *inputs: Any, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
        """A node, the name of its output (or names, of several); inputs are names, ``None`` or constants."""
        names = [f"{op_type.lower()}_{len(self.nodes)}" + (f".{i}" if i else "") for i in range(outputs)]
        given = ["" if x is None else x if isinstance(x, str) else self.constant(x) for x in inputs]
        self.nodes.append(helper.make_node(op_type, given, names, name=names[0], domain=domain, **attrs))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any) -> str:
        """An initializer or a Constant; Python integers are int64, Python floats float32.

        Floats of several elements are Constants, so that they are no weights.
        """
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        if self.chance(0.5) or (array.dtype == np.float32 and array.size > 1):
            name = f"/Constant_{len(self.nodes)}_output_0"
            value = numpy_helper.from_array(array, name)
            self.nodes.append(helper.make_node("Constant", [], [name], value=value))
        else:
            name = f"/Constant_{len(self.constants)}"
            self.constants[name] = array
        return name

    def weight(self, *shape: int, around: float = 0.0, spread: float | None = None, name: str = "weight") -> str:
        spread = 1 / math.sqrt(max(1, shape[0] if shape else 1)) if spread is None else spread
        name = f"{name}_{len(self.weights)}"
        self.weights[name] = (around + spread * self.rng.normal(size=shape)).astype(np.float32)
        return name

    def dim(self, d: Dim) -> Any:
        """A size, as a number or the name of a tensor of one element."""
        if not isinstance(d, str):
            return d
        if d not in self.open:
            return self.batch if d == "B" else self.length
        if d not in self._dims:
            axis = "BS".index(d)
            self._dims[d] = self.op("Gather", self.op("Shape", self.source), np.array([axis]), axis=0)
        return self._dims[d]

    def sizes(self, dims: Sequence[Dim]) -> Any:
        """A shape as a constant, or by Concat of what is read at run time."""
        known = [self.dim(d) for d in dims]
        if not any(isinstance(d, str) for d in known):
            return np.array(known, np.int64)
        return self.op("Concat", *(d if isinstance(d, str) else np.array([d]) for d in known), axis=0)

    def reshape(self, x: str, *dims: Dim) -> str:
        """To these sizes, one of which may be left to the runtime."""
        if sum(isinstance(d, str) and d in self.open for d in dims) <= 1 and self.chance(0.6):
            known = [-1 if isinstance(d, str) and d in self.open else self.dim(d) for d in dims]
            return self.op("Reshape", x, np.array(known, np.int64))
        return self.op("Reshape", x, self.sizes(dims))

    def swap(self, x: str, rank: int) -> str:
        return self.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])

    # --- the whole ---

    def _write(self) -> None:
        self.is_ids = self.chance(0.6)
        if self.is_ids:
            self.source = "ids"
            self.inputs.append(("ids", TensorProto.INT64, ["B", "S"]))
        else:
            self.source = "x"
            self.inputs.append(("x", TensorProto.FLOAT, ["B", "S", 6]))
        x = embedding(self)
        for _ in range(int(self.rng.integers(1, 4))):
            kind = self.one_of(BLOCKS)
            self.blocks.append(kind.__name__)
            x = kind(self, x)
        x = norm(self, x) if self.chance(0.5) else x
        head(self, x)

    @property
    def model(self) -> onnx.ModelProto:
        dims = {"B": "batch", "S": "length"}
        sizes = {"B": self.batch, "S": self.length}
        inputs = [
            helper.make_tensor_value_info(n, t, [dims[d] if d in self.open else sizes.get(d, d) for d in shape])
            for n, t, shape in self.inputs
        ]
        tensors = [numpy_helper.from_array(v, n) for n, v in {**self.weights, **self.constants}.items()]
        shape = [] if self.own_loss else [*["B", "S"][: self.rank - 1], self.classes]
        shape = [dims[d] if d in self.open else sizes.get(d, d) for d in shape]
        output = [helper.make_tensor_value_info(self.output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "random", inputs, output, tensors)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        # onnx 1.23 gives the output of Attention no width where dimensions are open
        return onnx.shape_inference.infer_shapes(model) if self.opset < 23 else model

    def feeds(self, seed: int, batch: int | None = None, length: int | None = None) -> dict[str, Array]:
        """A batch of inputs: ids repeat, the last of some sequences are padding (0)."""
        rng = np.random.default_rng((seed, 1))
        batch = batch if batch and "B" in self.open else self.batch
        length = length if length and "S" in self.open else self.length
        lengths = rng.integers(1, length + 1, batch)
        inside = np.arange(length) < lengths[:, None]
        feeds: dict[str, Array] = {}
        for name, kind, shape in self.inputs:
            size = [{"B": batch, "S": length}.get(d, d) for d in shape]  # type: ignore[call-overload]
            if name == "ids":
                feeds[name] = rng.integers(1, VOCABULARY, size) * inside
            elif name == "mask":
                feeds[name] = inside.astype(helper.tensor_dtype_to_np_dtype(kind))
            elif name == "labels":
                feeds[name] = rng.integers(0, CLASSES, size)
            else:
                feeds[name] = rng.normal(size=size).astype(np.float32)
        return feeds


# --- in the beginning --------------------------------------------------------------------------------------


def embedding(net: Network) -> str:
    d = net.width
    if not net.is_ids:
        x = linear(net, net.source, 6, d)
    else:
        net.table = net.weight(VOCABULARY, d, spread=0.7, name="table")
        x = net.op("Gather", net.table, "ids", axis=0)
        how = net.one_of(["", "", "zero", "scale"])
        if how == "zero":
            pad = net.op("Equal", "ids", np.int64(0))
            x = net.op("Where", net.op("Unsqueeze", pad, np.array([-1])), 0.0, x)
        if how == "scale":
            x = net.op("Mul", x, math.sqrt(d))
    how = net.one_of(["", "range", "slice", "sines", "gather"])
    how = how if net.is_ids or how != "gather" else ""
    table = net.weight(LONGEST, d, spread=0.3, name="positions") if how in ("range", "slice", "gather") else ""
    if how == "range":
        end = net.dim("S")
        end = net.op("Squeeze", end, np.array([0])) if isinstance(end, str) else np.int64(end)
        x = net.op("Add", x, net.op("Gather", table, net.op("Range", np.int64(0), end, np.int64(1))))
    elif how == "slice":
        end = net.dim("S")
        end = end if isinstance(end, str) else np.array([end])
        x = net.op("Add", x, net.op("Slice", table, np.array([0]), end, np.array([0])))
    elif how == "gather":  # positions are counted among what is no padding, as RoBERTa does
        seen = net.op("Cast", net.op("Not", net.op("Equal", "ids", np.int64(0))), to=TensorProto.INT64)
        place = net.op("Mul", net.op("CumSum", seen, np.int64(1)), seen)
        x = net.op("Add", x, net.op("Gather", table, place))
    elif how == "sines" and "S" not in net.open:
        t = np.arange(net.length)[:, None] * 10.0 ** -np.arange(d)
        x = net.op("Add", x, np.sin(t).astype(np.float32)[None])
    if net.chance(0.3):
        x = norm(net, x)
    return dropout(net, x)


def dropout(net: Network, x: str) -> str:
    if not net.chance(0.12):
        return x
    net.random = True
    return net.op("Dropout", x, net.one_of([0.1, 0.5]), *([np.array(False)] if net.chance(0.5) else []))


# --- layers ------------------------------------------------------------------------------------------------


def linear(net: Network, x: str, n: int, m: int, bias: bool | None = None, rank: int = 3) -> str:
    """[.., n] to [.., m]."""
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


Normalised = Callable[[Network, str, int, float], str | None]
LAST = np.array([-1])


def norm(net: Network, x: str, width: int | None = None) -> str:
    """Over the last axis, or none of those that fit; of heads where a width is given."""
    how, eps = net.one_of(NORMS), net.one_of([1e-5, 1e-3, 0.1])
    if width is not None and how in OF_SEQUENCES:
        return x
    return how(net, x, width or net.width, eps) or x


def scale(net: Network, *shape: int) -> str:
    return net.weight(*shape, around=1.0, spread=0.2, name="scale")


def offset(net: Network, *shape: int) -> str:
    return net.weight(*shape, spread=0.2, name="offset")


def layer_norm(net: Network, x: str, d: int, eps: float) -> str:
    bias = [offset(net, d)] if net.chance(0.7) else []
    return net.op("LayerNormalization", x, scale(net, d), *bias, axis=-1, epsilon=eps)


def sequence_norm(net: Network, x: str, d: int, eps: float) -> str | None:
    """Over two axes, with parameters that broadcast or not."""
    if "S" in net.open:
        return None
    shape = net.one_of([(net.length, d), (net.length, d), (1, d), (net.length, 1)])
    bias = [offset(net, *shape)] if net.chance(0.7) else []
    return net.op("LayerNormalization", x, scale(net, *shape), *bias, axis=1, epsilon=eps)


def norm_in_pieces(net: Network, x: str, d: int, eps: float) -> str:
    """As TorchScript writes it."""
    centred = net.op("Sub", x, net.op("ReduceMean", x, LAST))
    square = net.op("Pow", centred, 2.0) if net.chance(0.5) else net.op("Mul", centred, centred)
    below = net.op("Sqrt", net.op("Add", net.op("ReduceMean", square, LAST), eps))
    return net.op("Add", net.op("Mul", net.op("Div", centred, below), scale(net, d)), offset(net, d))


def norm_of_tensorflow(net: Network, x: str, d: int, eps: float) -> str:
    mean = net.op("ReduceMean", x, LAST)
    centred = net.op("Sub", x, mean)
    variance = net.op("ReduceMean", net.op("Mul", centred, centred), LAST)
    times = net.op("Mul", net.op("Reciprocal", net.op("Sqrt", net.op("Add", variance, eps))), scale(net, d))
    return net.op("Add", net.op("Mul", x, times), net.op("Sub", offset(net, d), net.op("Mul", mean, times)))


def rms_norm(net: Network, x: str, d: int, eps: float) -> str:
    below = net.op("Sqrt", net.op("Add", net.op("ReduceMean", net.op("Pow", x, 2.0), LAST), eps))
    if net.chance(0.5):
        return net.op("Mul", scale(net, d), net.op("Mul", x, net.op("Reciprocal", below)))
    return net.op("Mul", net.op("Div", x, below), scale(net, *net.one_of([(d,), (1, d), ()])))


def simplified_norm(net: Network, x: str, d: int, eps: float) -> str:
    return net.op("SimplifiedLayerNormalization", x, scale(net, d), axis=-1, epsilon=eps)


def unit_norm(net: Network, x: str, d: int, eps: float) -> str:
    if net.chance(0.5):
        return net.op("Mul", net.op("LpNormalization", x, axis=-1, p=2), math.sqrt(d))
    return net.op("Mul", net.op("Div", x, net.op("Clip", net.op("ReduceL2", x, LAST), 1e-5)), scale(net, 1))


def mean_variance_norm(net: Network, x: str, d: int, eps: float) -> str:
    return net.op("MeanVarianceNormalization", net.op("Add", x, offset(net, d)), axes=[-1])


def group_norm(net: Network, x: str, d: int, eps: float) -> str | None:
    """As TorchScript writes it."""
    if d % 2:
        return None
    flat = net.op("Reshape", net.op("Transpose", x, perm=[0, 2, 1]), np.array([0, 2, -1]))
    y = net.op("InstanceNormalization", flat, np.ones(2, np.float32), np.zeros(2, np.float32), epsilon=eps)
    y = net.reshape(y, "B", d, "S")
    y = net.op("Add", net.op("Mul", y, scale(net, d, 1)), offset(net, d, 1))
    return net.op("Transpose", y, perm=[0, 2, 1])


def batch_norm(net: Network, x: str, d: int, eps: float) -> str | None:
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
OF_SEQUENCES = (sequence_norm, group_norm, batch_norm)  # these want three axes


def activation(net: Network, x: str, width: int) -> str:
    return net.one_of(ACTIVATIONS)(net, x, width)


def named(net: Network, x: str, width: int) -> str:
    return net.op(net.one_of(["Mish", "Tanh", "Softplus", "Elu", "Sigmoid"]), x)


def gelu(net: Network, x: str, width: int) -> str:
    return net.op("Gelu", x, approximate=net.one_of(["none", "tanh"]))


def gelu_by_erf(net: Network, x: str, width: int) -> str:
    if net.chance(0.4):  # TensorFlow
        y = net.op("Add", 1.0, net.op("Erf", net.op("Mul", x, math.sqrt(0.5))))
        return net.op("Mul", net.op("Mul", 0.5, x), y)
    y = net.op("Add", net.op("Erf", net.op("Div", x, math.sqrt(2))), 1.0)
    return net.op("Mul", net.op("Mul", x, y), 0.5) if net.chance(0.5) else net.op("Mul", x, net.op("Mul", y, 0.5))


def gelu_by_tanh(net: Network, x: str, width: int) -> str:
    cube = net.op("Pow", x, 3.0) if net.chance(0.5) else net.op("Mul", x, net.op("Mul", x, x))
    inner = net.op("Mul", net.op("Add", x, net.op("Mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return net.op("Mul", net.op("Mul", x, 0.5), net.op("Add", net.op("Tanh", inner), 1.0))


def fused_gelu(net: Network, x: str, width: int) -> str:
    """As onnxruntime's optimizer writes it."""
    op_type = net.one_of(["Gelu", "BiasGelu", "FastGelu", "QuickGelu"])
    biased = op_type == "BiasGelu" or (op_type == "FastGelu" and net.chance(0.5))
    bias = [net.weight(width, spread=0.1, name="bias")] if biased else []
    return net.op(op_type, x, *bias, domain="com.microsoft")


def silu(net: Network, x: str, width: int) -> str:
    """Also with a factor, fixed or learnt."""
    beta = net.one_of([None, None, 1.702, "learnt"])
    beta = net.weight(around=1.0, spread=0.2, name="beta") if beta == "learnt" else beta
    gate = net.op("Sigmoid", x if beta is None else net.op("Mul", x, beta))
    return net.op("Mul", *((x, gate) if net.chance(0.5) else (gate, x)))


def squared_relu(net: Network, x: str, width: int) -> str:
    y = net.op("Relu", x)
    return net.op("Mul", y, y) if net.chance(0.5) else net.op("Pow", y, 2.0)


def mish_in_pieces(net: Network, x: str, width: int) -> str:
    return net.op("Mul", x, net.op("Tanh", net.op("Softplus", x)))


ACTIVATIONS: list[Callable[[Network, str, int], str]] = [
    named, gelu, gelu_by_erf, gelu_by_tanh, fused_gelu, silu, squared_relu, mish_in_pieces,
]  # fmt: skip


def feed_forward(net: Network, x: str) -> str:
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


def residual(net: Network, x: str, y: str) -> str:
    how = net.one_of(["", "", "", "scalar", "vector", "half", "post"])
    if how == "scalar":
        y = net.op("Mul", y, net.weight(*net.one_of([(), (1,), (1, 1, 1)]), around=0.5, spread=0.1, name="alpha"))
    if how == "vector":
        y = net.op("Mul", net.weight(net.width, around=0.5, spread=0.1, name="gamma"), y)
    if how == "half":
        return net.op("Mean", x, y)
    y = net.op("Add", x, y) if net.chance(0.5) else net.op("Add", y, x)
    return norm(net, y) if how == "post" else y


# --- attention ---------------------------------------------------------------------------------------------


def attention(net: Network, x: str) -> str:
    d = net.width
    y = norm(net, x) if net.chance(0.6) else x
    heads = net.one_of([h for h in (1, 2, 4) if d % h == 0])
    shared = net.one_of([g for g in (1, 2, 4) if heads % g == 0]) if net.chance(0.3) else heads  # heads of keys
    size = d // heads
    memory = net.op("Add", y, net.weight(d, name="memory")) if net.chance(0.15) else y
    q, k, v = projections(net, y, memory, heads, shared, size)
    if net.chance(0.2):
        q, k = norm(net, q, size), norm(net, k, size)
    if net.chance(0.25) and size % 2 == 0:
        q, k = rotary(net, q, size), rotary(net, k, size)
    if shared != heads:
        k, v = (repeated(net, t, shared, heads, size) for t in (k, v))
    out = weighed(net, q, k, v, heads, size)
    out = net.op("Transpose", out, perm=[0, 2, 1, 3])
    out = net.reshape(out, "B", "S", d)
    return residual(net, x, dropout(net, linear(net, out, d, d)))


def projections(net: Network, y: str, memory: str, heads: int, shared: int, size: int) -> list[str]:
    """Queries, keys and values, [B, heads, S, size]."""
    d = net.width
    how = net.one_of(["apart", "split", "five", "same"])
    if how == "same":  # q = k = v
        return (
            [split_heads(net, t, h, size) for t, h in ((y, heads), (memory, heads), (memory, heads))]
            if shared == heads
            else projections(net, y, memory, heads, shared, size)
        )
    if how == "five" and shared == heads and memory == y:
        packed = net.reshape(linear(net, y, d, 3 * d), "B", "S", 3, heads, size)
        packed = net.op("Transpose", packed, perm=[2, 0, 3, 1, 4])
        if net.chance(0.5):
            return [net.op("Gather", packed, np.int64(i), axis=0) for i in range(3)]
        parts = net.op("Split", packed, outputs=3, axis=0, num_outputs=3)
        return [net.op("Squeeze", p, np.array([0])) for p in parts]
    inner = shared * size
    if how == "split" and memory == y:
        packed = linear(net, y, d, d + 2 * inner)
        parts = net.op("Split", packed, np.array([d, inner, inner]), outputs=3, axis=2)
    else:
        parts = [linear(net, y, d, d), linear(net, memory, d, inner), linear(net, memory, d, inner)]
    return [split_heads(net, t, h, size) for t, h in zip(parts, (heads, shared, shared), strict=True)]


def split_heads(net: Network, x: str, heads: int, size: int) -> str:
    if net.chance(0.3):
        y = net.op("Reshape", x, np.array([0, 0, heads, size]))
    else:
        y = net.reshape(x, "B", "S", heads, size)
    return net.op("Transpose", y, perm=[0, 2, 1, 3])


def repeated(net: Network, x: str, shared: int, heads: int, size: int) -> str:
    """[B, shared, S, size], every head several times."""
    if net.chance(0.3):
        places = np.repeat(np.arange(shared), heads // shared)
        return net.op("Gather", x, places, axis=1)
    y = net.op("Unsqueeze", x, np.array([2]))
    y = net.op("Expand", y, net.sizes(["B", shared, heads // shared, "S", size]))
    return net.reshape(y, "B", heads, "S", size)


def rotary(net: Network, x: str, size: int) -> str:
    """Positions as rotations, of halves or of neighbours."""
    t = np.arange(LONGEST)[:, None] * 10.0 ** -np.arange(size // 2)
    halves = net.chance(0.6)
    t = np.concatenate([t, t], 1) if halves else np.repeat(t, 2, 1)
    end = net.dim("S")
    end = end if isinstance(end, str) else np.array([end])
    cos, sin = (net.op("Slice", f(t).astype(np.float32), np.array([0]), end, np.array([0])) for f in (np.cos, np.sin))
    half, last = size // 2, np.array([-1])
    if halves:
        if net.chance(0.5):
            a, b = net.op("Split", x, outputs=2, axis=-1, num_outputs=2)
        else:
            a = net.op("Slice", x, np.array([0]), np.array([half]), last)
            b = net.op("Slice", x, np.array([half]), np.array([2**63 - 1]), last)
        turned = net.op("Concat", net.op("Neg", b), a, axis=-1)
    else:
        a = net.op("Slice", x, np.array([0]), np.array([2**31]), last, np.array([2]))
        b = net.op("Slice", x, np.array([1]), np.array([2**31]), last, np.array([2]))
        pairs = [net.op("Unsqueeze", t, last) for t in (net.op("Neg", b), a)]
        turned = net.op("Reshape", net.op("Concat", *pairs, axis=-1), net.op("Shape", x))
    return net.op("Add", net.op("Mul", x, cos), net.op("Mul", turned, sin))


def weighed(net: Network, q: str, k: str, v: str, heads: int, size: int) -> str:
    """Softmax(q kᵀ + mask) v."""
    how = net.one_of(["plain", "plain", "plain", "flat", "linear", "sigmoid", "einsum"])
    if how == "linear":  # (elu(q) + 1)((elu(k) + 1)ᵀ v), normalised
        q, k = (net.op("Add", net.op("Elu", t), 1.0) for t in (q, k))
        state = net.op("MatMul", net.swap(k, 4), v)
        below = net.op("MatMul", q, net.swap(net.op("ReduceSum", k, np.array([2]), keepdims=1), 4))
        return net.op("Div", net.op("MatMul", q, state), below)
    scale = net.one_of(["div", "mul q", "both", "mul"])
    if scale == "mul q":
        q = net.op("Mul", q, size**-0.5)
    if scale == "both":
        q, k = (net.op("Mul", t, size**-0.25) for t in (q, k))
    if how == "einsum":
        scores = net.op("Einsum", q, k, equation="bhqd,bhkd->bhqk")
    elif how == "flat":  # as nn.MultiheadAttention is exported
        q, k = (
            net.op("Reshape", t, np.array([-1, net.dim("S"), size])) if not isinstance(net.dim("S"), str) else t
            for t in (q, k)
        )
        rank = 4 if isinstance(net.dim("S"), str) else 3
        scores = net.op("MatMul", q, net.swap(k, rank))
        scores = net.reshape(scores, "B", heads, "S", "S")
    else:
        scores = net.op("MatMul", q, net.swap(k, 4))
    if scale in ("div", "mul"):
        scores = net.op("Div", scores, size**0.5) if scale == "div" else net.op("Mul", scores, size**-0.5)
    if net.chance(0.1):
        scores = net.op("Mul", net.op("Tanh", net.op("Div", scores, 5.0)), 5.0)
    if net.chance(0.15) and "S" not in net.open:  # biases by distance, as in T5
        distance = np.clip(np.arange(net.length)[:, None] - np.arange(net.length) + 3, 0, 6)
        bias = net.op("Gather", net.weight(7, heads, spread=0.3, name="relative"), distance)
        scores = net.op("Add", scores, net.op("Unsqueeze", net.op("Transpose", bias, perm=[2, 0, 1]), np.array([0])))
    if how == "sigmoid":
        return net.op("MatMul", net.op("Sigmoid", scores), v)
    scores, allowed = masked(net, scores)
    weights = net.op("Softmax", scores, axis=net.one_of([-1, 3]))
    if allowed is not None:  # a row without anything is NaN
        if net.chance(0.5):
            weights = net.op("Where", net.op("IsNaN", weights), 0.0, weights)
        else:
            weights = net.op("Where", allowed, weights, 0.0)
    weights = dropout(net, weights)
    if how == "einsum":
        return net.op("Einsum", weights, v, equation="bhqk,bhkd->bhqd")
    return net.op("MatMul", weights, v)


def masked(net: Network, scores: str) -> tuple[str, str | None]:
    """Scores with what must not be seen, and the mask if rows of it may be empty."""
    emptied: str | None = None
    if net.causal:
        scores = net.op(*causal(net, scores))
    if net.chance(0.5 if net.is_ids else 0.3):
        inside = padding_mask(net)
        how = net.one_of(["where", "add", "ten thousand", "inf"])
        wide = net.op("Unsqueeze", inside, np.array([1, 2]))
        if how == "where":
            scores = net.op("Where", wide, scores, net.one_of([-1e9, -3.4028234663852886e38, -1e4]))
        elif how == "inf":
            scores = net.op("Where", wide, scores, -np.inf)
        else:
            outside = net.op("Sub", 1.0, net.op("Cast", wide, to=TensorProto.FLOAT))
            scores = net.op("Add", scores, net.op("Mul", outside, {"add": -1e9}.get(how, -1e4)))
    if net.chance(0.15) and "S" not in net.open:  # rows that may see nothing
        mask = net.rng.random((net.length, net.length)) < 0.6
        mask[0] = False
        emptied = net.constant(mask)
        scores = net.op("Where", emptied, scores, -np.inf)
    return scores, emptied


def padding_mask(net: Network) -> str:
    """Boolean [B, S]."""
    if "inside" not in net._masks:
        if net.is_ids and net.chance(0.6):
            net._masks["inside"] = net.op("Not", net.op("Equal", "ids", np.int64(0)))
        else:
            kind = net.one_of([TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT])
            net.inputs.append(("mask", kind, ["B", "S"]))
            net._masks["inside"] = "mask" if kind == TensorProto.BOOL else net.op("Cast", "mask", to=TensorProto.BOOL)
    return net._masks["inside"]


def causal(net: Network, scores: str) -> list[Any]:
    how = net.one_of(["trilu", "range", "slice", "add"])
    square = net.sizes(["S", "S"])
    lowest = net.one_of([-np.inf, -1e9, -3.4028234663852886e38])
    if how == "add":
        filled = net.op("ConstantOfShape", square, value=numpy_helper.from_array(np.array([lowest], np.float32)))
        return ["Add", scores, net.op("Trilu", filled, np.int64(1), upper=1)]
    if how == "range":
        end = net.dim("S")
        end = net.op("Squeeze", end, np.array([0])) if isinstance(end, str) else np.int64(end)
        places = net.op("Range", np.int64(0), end, np.int64(1))
        mask = net.op(
            "GreaterOrEqual", net.op("Unsqueeze", places, np.array([1])), net.op("Unsqueeze", places, np.array([0]))
        )
    elif how == "slice":
        end = net.dim("S")
        end = end if isinstance(end, str) else np.array([end])
        table = np.tril(np.ones((1, 1, LONGEST, LONGEST), bool))
        mask = net.op("Slice", table, np.array([0]), end, np.array([2]))
        mask = net.op("Slice", mask, np.array([0]), end, np.array([3]))
    else:
        ones = net.op("ConstantOfShape", square, value=numpy_helper.from_array(np.array([1], np.float32)))
        mask = net.op("Cast", net.op("Trilu", ones, upper=0), to=TensorProto.BOOL)
    return ["Where", mask, scores, lowest]


def new_attention(net: Network, x: str) -> str:
    """ONNX's own operators of opset 23."""
    net.opset = max(net.opset, 23)
    d = net.width
    heads = net.one_of([h for h in (1, 2, 4) if d % h == 0])
    shared = net.one_of([g for g in (1, 2, 4) if heads % g == 0])
    size = d // heads
    y = net.op("RMSNormalization", x, net.weight(d, around=1.0, spread=0.2, name="scale")) if net.chance(0.5) else x
    q, k, v = linear(net, y, d, d), linear(net, y, d, shared * size), linear(net, y, d, shared * size)
    four = net.chance(0.5)
    attrs: dict[str, Any] = {} if four else {"q_num_heads": heads, "kv_num_heads": shared}
    if four:
        q, k, v = split_heads(net, q, heads, size), split_heads(net, k, shared, size), split_heads(net, v, shared, size)
    mask = None
    if net.chance(0.4):
        mask = net.op("Unsqueeze", padding_mask(net), np.array([1, 2]))
        mask = net.op("Expand", mask, net.sizes(["B", 1, "S", "S"]))
        if net.chance(0.5):
            mask = net.op("Where", mask, 0.0, net.one_of([-1e9, -1e4]))
    if net.chance(0.3):
        attrs["softcap"] = 3.0
    if net.chance(0.3):
        attrs["scale"] = 0.3
    out = net.op("Attention", q, k, v, *([mask] if mask else []), is_causal=int(net.causal), **attrs)
    if four:
        out = net.reshape(net.op("Transpose", out, perm=[0, 2, 1, 3]), "B", "S", d)
    return residual(net, x, linear(net, out, d, d))


# --- other blocks ------------------------------------------------------------------------------------------


def mixture(net: Network, x: str) -> str:
    """Experts chosen by a router."""
    experts, chosen = net.one_of([2, 3, 4]), net.one_of([1, 2])
    p = net.op("Softmax", linear(net, x, net.width, experts), axis=-1)
    gates, places = net.op("TopK", p, np.array([chosen]), outputs=2, axis=-1)
    if net.chance(0.5):
        gates = net.op("Div", gates, net.op("ReduceSum", gates, LAST, keepdims=1))
    how = net.one_of([every_expert, weights_of_tokens, one_hot_experts, tokens_of_experts])
    return residual(net, x, how(net, x, gates, places, experts))


def gated_sum(net: Network, each: str, gates: str) -> str:
    gated = net.op("Mul", each, net.op("Unsqueeze", gates, LAST))
    return net.op("ReduceSum", gated, np.array([2]), keepdims=0)


def zeros_like(net: Network, x: str) -> str:
    return net.op("ConstantOfShape", net.op("Shape", x), value=numpy_helper.from_array(np.zeros(1, np.float32)))


def every_expert(net: Network, x: str, gates: str, places: str, experts: int) -> str:
    """All of them compute, and gates are scattered into zeros."""
    d = net.width
    w = net.weight(d, experts * d, name="experts")
    each = activation(net, net.reshape(net.op("MatMul", x, w), "B", "S", experts, d), d)
    first = net.op("Slice", each, np.array([0]), np.array([1]), np.array([3]))
    zeros = zeros_like(net, net.op("Squeeze", first, np.array([3])))
    return gated_sum(net, each, net.op("ScatterElements", zeros, places, gates, axis=-1))


def weights_of_tokens(net: Network, x: str, gates: str, places: str, experts: int) -> str:
    """Each token gathers the weights of its experts."""
    w = net.weight(experts, net.width, net.width, spread=net.width**-0.5, name="experts")
    each = net.op("MatMul", net.op("Unsqueeze", x, np.array([2, 3])), net.op("Gather", w, places, axis=0))
    return gated_sum(net, net.op("Squeeze", each, np.array([3])), gates)


def one_hot_experts(net: Network, x: str, gates: str, places: str, experts: int) -> str:
    hot = net.op("OneHot", places, np.int64(experts), np.array([0, 1], np.float32), axis=-1)
    return net.op("MatMul", gated_sum(net, hot, gates), net.weight(experts, net.width, name="experts"))


def tokens_of_experts(net: Network, x: str, gates: str, places: str, experts: int) -> str:
    """The tokens of each expert are gathered, and what it makes of them is put back."""
    flat = net.op("Reshape", x, np.array([-1, net.width]))
    gates, places = (
        net.op("Reshape", t, net.op("Concat", LAST, net.op("Shape", t, start=2), axis=0)) for t in (gates, places)
    )
    total = zeros_like(net, flat)
    for expert in range(experts):
        hit = net.op("NonZero", net.op("Equal", places, np.int64(expert)))
        rows = net.op("Split", hit, outputs=2, axis=0, num_outputs=2)[0]
        tokens = net.op("Gather", flat, net.op("Squeeze", rows, np.array([0])), axis=0)
        done = activation(net, linear(net, tokens, net.width, net.width, rank=2), net.width)
        gate = net.op("GatherND", gates, net.op("Transpose", hit, perm=[1, 0]))
        done = net.op("Mul", done, net.op("Unsqueeze", gate, np.array([1])))
        rows = net.op("Transpose", rows, perm=[1, 0])
        if net.chance(0.5):
            total = net.op("ScatterND", total, rows, done, reduction="add")
        else:
            index = net.op("Expand", rows, net.op("Shape", done))
            total = net.op("ScatterElements", total, index, done, axis=0, reduction="add")
    return net.reshape(total, "B", "S", net.width)


def recurrence(net: Network, x: str) -> str:
    d = net.width
    kind = net.one_of(["GRU", "LSTM", "RNN"])
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
    w, r = net.weight(1, gates * d, d, spread=d**-0.5), net.weight(1, gates * d, d, spread=d**-0.5)
    b = [net.weight(1, 2 * gates * d, spread=0.1, name="bias")] if net.chance(0.7) else []
    attrs = {"linear_before_reset": 1} if kind == "GRU" and net.chance(0.7) else {}
    turned = net.op("Transpose", x, perm=[1, 0, 2])
    out = net.op(kind, turned, w, r, *b, outputs=2, hidden_size=d, **attrs)[0]
    return residual(net, x, net.op("Transpose", net.op("Squeeze", out, np.array([1])), perm=[1, 0, 2]))


def mixer(net: Network, x: str) -> str:
    """A network along the sequence (MLP-Mixer), if its length is known; else a gated sum so far."""
    d = net.width
    if "S" in net.open:
        seen = net.op("CumSum", x, np.int64(1))
        return residual(net, x, net.op("Mul", net.op("Tanh", seen), net.op("Sigmoid", linear(net, x, d, d))))
    y = net.op("Transpose", norm(net, x), perm=[0, 2, 1])
    y = net.op("MatMul", activation(net, net.op("MatMul", y, net.weight(net.length, 7)), 7), net.weight(7, net.length))
    return residual(net, x, net.op("Transpose", y, perm=[0, 2, 1]))


def shift(net: Network, x: str) -> str:
    """The token before, as RWKV reads it: by Pad and Slice or by Concat."""
    if net.chance(0.5):
        y = net.op("Pad", x, np.array([0, 1, 0, 0, -1, 0]))
    else:
        zeros = net.op("Mul", net.op("Slice", x, np.array([0]), np.array([1]), np.array([1])), 0.0)
        y = net.op("Concat", zeros, net.op("Slice", x, np.array([0]), np.array([-1]), np.array([1])), axis=1)
    mix = net.op("Sigmoid", net.weight(net.width, name="mix"))
    return net.op("Add", net.op("Mul", x, mix), net.op("Mul", y, net.op("Sub", 1.0, mix)))


BLOCKS: list[Callable[[Network, str], str]] = [
    attention, attention, attention, feed_forward, feed_forward, feed_forward, new_attention, mixture, recurrence,
    mixer, shift,
]  # fmt: skip


# --- in the end --------------------------------------------------------------------------------------------


def head(net: Network, x: str) -> None:
    d = net.width
    how = net.one_of(["tokens", "tied", "pooled", "pooled", "contrastive", "own"])
    net.classes = CLASSES
    if how == "tied" and net.is_ids:
        net.classes = VOCABULARY
        y = net.op("MatMul", x, net.swap(net.table, 2))
        net.output, net.rank = y, 3
    elif how in ("tokens", "tied"):
        net.output, net.rank = linear(net, x, d, CLASSES), 3
    elif how == "pooled":
        net.output, net.rank = linear(net, pooled(net, x), d, CLASSES, rank=2), 2
    else:
        net.own_loss = True
        net.output = contrastive(net, x) if how == "contrastive" else own_loss(net, x)


def pooled(net: Network, x: str) -> str:
    how = net.one_of(["mean", "masked", "first", "last", "attention", "logsumexp", "slice"])
    one = np.array([1])
    if how == "mean":
        return net.op("ReduceMean", x, one, keepdims=0)
    if how == "masked":
        inside = net.op("Unsqueeze", net.op("Cast", padding_mask(net), to=TensorProto.FLOAT), np.array([-1]))
        inside = net.op("Expand", inside, net.op("Shape", x)) if net.chance(0.5) else inside
        total = net.op("ReduceSum", net.op("Mul", x, inside), one, keepdims=0)
        return net.op("Div", total, net.op("Clip", net.op("ReduceSum", inside, one, keepdims=0), 1e-9))
    if how == "first":
        return net.op("Gather", x, np.int64(0), axis=1)
    if how == "slice":
        return net.op("Squeeze", net.op("Slice", x, np.array([-1]), np.array([2**63 - 1]), one), one)
    if how == "last":  # of each sequence, by its length
        count = net.op("ReduceSum", net.op("Cast", padding_mask(net), to=TensorProto.INT64), one, keepdims=1)
        place = net.op("Sub", count, np.int64(1))
        return net.op("GatherND", x, place, batch_dims=1)
    if how == "attention":
        scores = net.op("Softmax", net.op("MatMul", x, net.weight(net.width, 1)), axis=1)
        return net.op("ReduceSum", net.op("Mul", x, scores), one, keepdims=0)
    return net.op("ReduceLogSumExp", x, one, keepdims=0)


def contrastive(net: Network, x: str) -> str:
    """Every sample against all others, as CLIP has it."""
    a, b = (linear(net, pooled(net, x), net.width, 6, rank=2) for _ in range(2))
    a, b = (
        net.op("Div", t, net.op("ReduceL2", t, np.array([1]), keepdims=1))
        if net.chance(0.5)
        else net.op("LpNormalization", t, axis=1)
        for t in (a, b)
    )
    scores = net.op(
        "Mul",
        net.op("MatMul", a, net.swap(b, 2)),
        net.op("Exp", net.weight(around=0.5, spread=0.1, name="temperature")),
    )
    end = net.dim("B")
    end = net.op("Squeeze", end, np.array([0])) if isinstance(end, str) else np.int64(end)
    labels = net.op("Range", np.int64(0), end, np.int64(1))
    losses = [net.op("SoftmaxCrossEntropyLoss", t, labels) for t in (scores, net.swap(scores, 2))]
    return net.op("Div", net.op("Add", *losses), 2.0)


def own_loss(net: Network, x: str) -> str:
    """The model compares with its own labels."""
    net.inputs.append(("labels", TensorProto.INT64, ["B"]))
    scores = linear(net, pooled(net, x), net.width, CLASSES, rank=2)
    how = net.one_of(["softmax", "weights", "nll", "hot", "kl", "margin"])
    if how == "softmax":
        return net.op("SoftmaxCrossEntropyLoss", scores, "labels", ignore_index=2)
    if how == "weights":
        return net.op(
            "SoftmaxCrossEntropyLoss",
            scores,
            "labels",
            net.rng.uniform(0.5, 2, CLASSES).astype(np.float32),
            reduction=net.one_of(["mean", "sum"]),
        )
    if how == "nll":
        return net.op("NegativeLogLikelihoodLoss", net.op("LogSoftmax", scores, axis=1), "labels")
    hot = net.op("OneHot", "labels", np.int64(CLASSES), np.array([0.02, 0.92], np.float32))
    if how == "hot":
        each = net.op("ReduceSum", net.op("Mul", net.op("LogSoftmax", scores), hot), np.array([1]), keepdims=0)
        return net.op("Neg", net.op("ReduceMean", each, keepdims=0))
    if how == "kl":
        each = net.op("Mul", hot, net.op("Sub", net.op("Log", hot), net.op("LogSoftmax", scores)))
        return net.op("ReduceMean", each, keepdims=0)
    picked = net.op("GatherElements", scores, net.op("Unsqueeze", "labels", np.array([1])), axis=1)
    return net.op("ReduceMean", net.op("Softplus", net.op("Sub", scores, picked)), keepdims=0)
