"""Random graphs for property tests: up to 30 operators, broadcasting, known and symbolic dimensions.

Every step appends one or a few nodes and records the same function in PyTorch. Values and slopes stay of moderate size:
the argument of a growing function is bounded first (``Exp(Tanh(x))``), so that central differences are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.printer
from hypothesis import strategies as st

from gradgraph.graph.shapes import IR_VERSION, OPSET

SIZES = (1, 2, 3, 4)
LARGEST = 200  # largest number of elements of a tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(repr=False)
class Graph:
    """A random graph under construction.

    Attributes:
        draw: Hypothesis' function that draws from a strategy.
        steps: the same graph in PyTorch, one ``(outputs, function, inputs)`` per step; functions return a tuple.
    """

    draw: Callable[[Any], Any]
    rng: np.random.Generator
    tensors: list[Tensor] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    steps: list[tuple[list[str], Callable[..., Any], list[str]]] = field(default_factory=list)

    def __repr__(self) -> str:
        graph = onnx.helper.make_graph(self.nodes, "random", self.inputs, [], self.initializers)
        return str(onnx.printer.to_text(graph))

    # --- choices ---

    def choose(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True) -> Tensor | None:
        """Return one of the tensors so far that ``fits``; Hypothesis shrinks the choice towards the latest tensor."""
        fitting = [t for t in reversed(self.tensors) if fits(t)]
        return self.choose(fitting) if fitting else None

    def axis(self, x: Tensor) -> int:
        """Return a random axis of ``x``, which may be negative."""
        return self.number(-x.rank, x.rank - 1)

    # --- what is written ---

    def input(self) -> Tensor:
        """Return a new input; each dimension is known, has a name of its own, or a name shared by equal sizes."""
        shape = tuple(self.choose(SIZES) for _ in range(self.number(0, 4)))
        name = f"x{len(self.inputs)}"
        dims = [self.choose([n, f"{name}_{axis}", f"n{n}"]) for axis, n in enumerate(shape)]
        self.inputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims))
        self.feeds[name] = self.rng.uniform(-1.5, 1.5, shape)
        return self._new(name, shape)

    def weight(self, shape: Shape) -> Tensor:
        """Return a new floating initializer, which is differentiated, too."""
        values = self.rng.uniform(-1, 1, shape).astype(np.float32)
        name = self.constant(values)
        self.weights[name] = values.astype(np.float64)
        return Tensor(name, shape)

    def constant(self, values: Any) -> str:
        """Append an initializer and return its name; Python integers are int64, Python floats float32."""
        array = np.asarray(values)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = f"c{len(self.initializers)}"
        self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attrs: Any) -> list[str]:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(onnx.helper.make_node(op_type, inputs, names, name=names[0], **attrs))
        return names

    def add(self, f: Callable[..., Any], inputs: Sequence[Tensor], outputs: Sequence[str], *shapes: Shape) -> None:
        """Record the function of the nodes just appended, ``f(*inputs)``, and the names and shapes of its results."""
        self.steps.append((list(outputs), f, [x.name for x in inputs]))
        for name, shape in zip(outputs, shapes, strict=True):
            self._new(name, shape)

    def _new(self, name: str, shape: Shape) -> Tensor:
        self.tensors.append(Tensor(name, shape))
        return self.tensors[-1]

    def model(self) -> onnx.ModelProto:
        """Return the model with one to three outputs, among them the last tensor."""
        rest = [t.name for t in self.tensors[:-1]]
        chosen = [self.tensors[-1].name, *(self.choose(rest) for _ in range(self.number(0, 2)) if rest)]
        ends = [self.node("Identity", [name])[0] for name in dict.fromkeys(chosen)]
        self.steps += [([y], lambda x: (x,), [name]) for y, name in zip(ends, dict.fromkeys(chosen), strict=True)]
        outputs = [onnx.helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, None) for y in ends]
        graph = onnx.helper.make_graph(self.nodes, "random", self.inputs, outputs, self.initializers)
        opset = onnx.helper.make_opsetid("", OPSET)
        return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)


@st.composite
def graphs(draw: Any) -> Graph:
    """Draw a graph of at most 30 operators."""
    graph = Graph(draw, np.random.default_rng(draw(st.integers(0, 2**16))))
    for _ in range(graph.number(1, 3)):
        graph.input()
    for _ in range(graph.number(1, 30)):
        if len(graph.nodes) < 27:  # a step appends at most three nodes
            graph.choose(STEPS)(graph)
    return graph


def _torch() -> Any:
    import torch

    return torch


# --- one number in, one number out ---------------------------------------------------------------------------

SMOOTH = ["Tanh", "Sigmoid", "Sin", "Cos", "Erf", "Softplus", "Softsign", "Atan", "Asinh", "Gelu", "Mish", "Elu"]
KINKED = ["Relu", "LeakyRelu", "Abs", "HardSigmoid", "HardSwish", "Selu", "Celu", "ThresholdedRelu", "Neg", "Identity"]
_FUNCTIONAL = {
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Gelu": "gelu",
    "Mish": "mish",
    "Elu": "elu",
    "HardSwish": "hardswish",
    "Selu": "selu",
    "Celu": "celu",
}


def unary(g: Graph) -> None:
    x = g.pick()
    kind = g.choose(SMOOTH + KINKED)

    def f(a: Any) -> Any:
        torch = _torch()
        special = {
            "HardSigmoid": lambda a: torch.clamp(0.2 * a + 0.5, 0, 1),
            "LeakyRelu": lambda a: torch.nn.functional.leaky_relu(a, float(np.float32(0.01))),
            "ThresholdedRelu": lambda a: torch.where(a > 1, a, 0),
            "Identity": lambda a: a,
        }
        named = getattr(torch.nn.functional, _FUNCTIONAL[kind]) if kind in _FUNCTIONAL else None
        return ((special.get(kind) or named or getattr(torch, kind.lower()))(a),)

    g.add(f, [x], g.node(kind, [x.name]), x.shape)


def damped(g: Graph) -> None:
    """Append a function that grows, or is not defined everywhere, of a bounded argument."""
    x = g.pick()
    kind = g.choose(["Exp", "Sqrt", "Log", "Reciprocal", "Pow", "Asin", "Sinh", "Tan"])
    shift = 1.5 if kind in ("Sqrt", "Log", "Reciprocal", "Pow") else 0.0
    scale = 0.9 if kind == "Asin" else 1.0
    (moderate,) = g.node("Tanh", [x.name])
    (moved,) = g.node("Mul" if kind == "Asin" else "Add", [moderate, g.constant(scale if kind == "Asin" else shift)])
    exponent = [g.constant(2.5)] if kind == "Pow" else []

    def f(a: Any) -> Any:
        torch = _torch()
        b = torch.tanh(a) * float(np.float32(scale)) + shift
        return (b**2.5 if kind == "Pow" else getattr(torch, kind.lower())(b),)

    g.add(f, [x], g.node(kind, [moved, *exponent]), x.shape)


# --- several tensors -----------------------------------------------------------------------------------------


def _partner(g: Graph, x: Tensor) -> Tensor:
    """Return a tensor that broadcasts with ``x``: an earlier one, or a new weight with fewer axes or sizes of 1."""
    other = g.pick(lambda t: _broadcast(t.shape, x.shape) is not None)
    if other is not None and g.flag():
        return other
    kept = x.shape[g.number(0, x.rank) :]
    return g.weight(tuple(n if g.flag() else 1 for n in kept))


def _broadcast(a: Shape, b: Shape) -> Shape | None:
    try:
        shape = np.broadcast_shapes(a, b)
    except ValueError:
        return None
    return shape if math.prod(shape) <= LARGEST else None


def binary(g: Graph) -> None:
    x = g.pick()
    y = _partner(g, x)
    if g.flag():
        x, y = y, x
    kind = g.choose(["Add", "Sub", "Mul", "Max", "Min", "Mean", "Sum"])

    def f(a: Any, b: Any) -> Any:
        torch = _torch()
        special = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add, "Mean": lambda a, b: (a + b) / 2}
        return ((special.get(kind) or getattr(torch, kind.lower()))(a, b),)

    shape = _broadcast(x.shape, y.shape)
    if shape is None:
        return
    g.add(f, [x, y], g.node(kind, [x.name, y.name]), shape)


def divide(g: Graph) -> None:
    """Append ``x / (1.2 + sin y)``."""
    x = g.pick()
    y = _partner(g, x)
    shape = _broadcast(x.shape, y.shape)
    if shape is None:
        return
    (sine,) = g.node("Sin", [y.name])
    (below,) = g.node("Add", [sine, g.constant(1.25)])
    g.add(lambda a, b: (a / (b.sin() + 1.25),), [x, y], g.node("Div", [x.name, below]), shape)


def where(g: Graph) -> None:
    x = g.pick()
    y = _partner(g, x)
    shape = _broadcast(x.shape, y.shape)
    if shape is None:
        return
    condition = g.rng.random(shape) < 0.5
    out = g.node("Where", [g.constant(condition), x.name, y.name])
    g.add(lambda a, b: (_torch().where(_torch().tensor(condition), a, b),), [x, y], out, shape)


def clip(g: Graph) -> None:
    x = g.pick()
    low, high = (g.weight(()) for _ in range(2))
    bounds = g.choose([[low], [low, high]])

    def f(a: Any, low: Any, high: Any = None) -> Any:
        return (_torch().clamp(a, low, high),)

    g.add(f, [x, *bounds], g.node("Clip", [x.name, *(b.name for b in bounds)]), x.shape)


def matmul(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1)
    if x is None:
        return
    inner = x.shape[-1]
    fits = g.pick(lambda t: t.rank >= 1 and t.shape[max(t.rank - 2, 0)] == inner and t is not x)
    y = fits if fits is not None and g.flag() else g.weight((inner, g.choose(SIZES))[: g.number(1, 2)])
    try:
        shape = np.shape(np.matmul(np.zeros(x.shape), np.zeros(y.shape)))
    except ValueError:
        return
    if math.prod(shape) <= LARGEST:
        g.add(lambda a, b: (a @ b,), [x, y], g.node("MatMul", [x.name, y.name]), shape)


def gemm(g: Graph) -> None:
    x = g.pick(lambda t: t.rank == 2)
    if x is None:
        return
    across, n = g.number(0, 1), g.choose(SIZES)
    k, m = x.shape if across else x.shape[::-1]
    turned = g.number(0, 1)
    w = g.weight((n, k) if turned else (k, n))
    c = g.weight(g.choose([(n,), (m, 1), (1, 1), ()]))
    out = g.node("Gemm", [x.name, w.name, c.name], alpha=0.5, beta=2.0, transA=across, transB=turned)

    def f(a: Any, b: Any, c: Any) -> Any:
        return (0.5 * ((a.T if across else a) @ (b.T if turned else b)) + 2 * c,)

    g.add(f, [x, w, c], out, (m, n))


def concat(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1 and math.prod(t.shape) <= LARGEST // 3)
    if x is None:
        return
    axis = g.axis(x)
    at = axis % x.rank
    other = list(x.shape)
    other[at] = g.choose(SIZES)
    parts = [x, g.weight(tuple(other)), *([x] if g.flag() else [])]
    shape = list(x.shape)
    shape[at] = sum(p.shape[at] for p in parts)
    out = g.node("Concat", [p.name for p in parts], axis=axis)
    g.add(lambda *a: (_torch().cat(a, axis),), parts, out, tuple(shape))


# --- reductions and normalisations ---------------------------------------------------------------------------


def reduce(g: Graph) -> None:
    x = g.pick()
    kind = g.choose(["Sum", "Mean", "Max", "Min", "LogSumExp", "SumSquare", "L1", "L2", "Prod"])
    axes = [a if g.flag() else a - x.rank for a in range(x.rank) if g.flag()]
    keep = g.number(0, 1)
    over = tuple(a % x.rank for a in axes) or tuple(range(x.rank))
    shape = [1 if i in over else n for i, n in enumerate(x.shape)]
    shape = shape if keep else [n for i, n in enumerate(x.shape) if i not in over]

    def f(a: Any) -> Any:
        torch = _torch()
        if not over:
            return ({"SumSquare": lambda: a * a, "L1": a.abs, "L2": a.abs}.get(kind, lambda: a)(),)
        if kind == "Prod":
            for axis in sorted(over, reverse=True):
                a = torch.prod(a, axis, keepdim=bool(keep))
            return (a,)
        named = {
            "Sum": torch.sum,
            "Mean": torch.mean,
            "Max": torch.amax,
            "Min": torch.amin,
            "LogSumExp": torch.logsumexp,
            "SumSquare": lambda a, over, keepdim: (a * a).sum(over, keepdim=keepdim),
            "L1": lambda a, over, keepdim: a.abs().sum(over, keepdim=keepdim),
            "L2": lambda a, over, keepdim: (a * a).sum(over, keepdim=keepdim).sqrt(),
        }
        return (named[kind](a, over, keepdim=bool(keep)),)

    names = [g.constant(np.array(axes, np.int64))] if axes or g.flag() else []
    g.add(f, [x], g.node(f"Reduce{kind}", [x.name, *names], keepdims=keep), tuple(shape))


def along(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1)
    if x is None:
        return
    axis = g.axis(x)
    kind = g.choose(["Softmax", "LogSoftmax", "CumSum"])
    if kind == "CumSum":
        back = g.number(0, 1)
        out = g.node("CumSum", [x.name, g.constant(axis)], reverse=back)
    else:
        out = g.node(kind, [x.name], axis=axis)

    def f(a: Any) -> Any:
        torch = _torch()
        if kind != "CumSum":
            return ((torch.softmax if kind == "Softmax" else torch.log_softmax)(a, axis),)
        return (a.flip(axis).cumsum(axis).flip(axis) if back else a.cumsum(axis),)

    g.add(f, [x], out, x.shape)


def layer_normalization(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1 and math.prod(t.shape[-1:]) > 1)
    if x is None:
        return
    axis = g.number(0, x.rank - 1)
    over = x.shape[axis:]
    scale, bias = g.weight(over), g.weight(over)
    out = g.node("LayerNormalization", [x.name, scale.name, bias.name], axis=axis, epsilon=0.125)
    g.add(lambda a, s, b: (_torch().nn.functional.layer_norm(a, over, s, b, 0.125),), [x, scale, bias], out, x.shape)


# --- shapes and places ---------------------------------------------------------------------------------------


def transpose(g: Graph) -> None:
    x = g.pick()
    perm = g.draw(st.permutations(range(x.rank)))
    out = g.node("Transpose", [x.name], perm=perm) if x.rank else g.node("Transpose", [x.name])
    g.add(lambda a: (a.permute(list(perm)),), [x], out, tuple(x.shape[p] for p in perm))


def reshape(g: Graph) -> None:
    """Append a Reshape to two axes, one of them -1, or one that adds or removes an axis of size 1."""
    x = g.pick()
    size = math.prod(x.shape)
    first = g.choose([n for n in range(1, size + 1) if size % n == 0])
    shape = (first, size // first)
    out = g.node("Reshape", [x.name, g.constant(np.array([first, -1]))])
    g.add(lambda a: (a.reshape(shape),), [x], out, shape)


def unsqueeze(g: Graph) -> None:
    x = g.pick(lambda t: t.rank < 5)
    if x is None:
        return
    axis = g.number(0, x.rank)
    name = g.constant(np.array([axis if g.flag() else axis - x.rank - 1]))
    shape = (*x.shape[:axis], 1, *x.shape[axis:])
    g.add(lambda a: (a.unsqueeze(axis),), [x], g.node("Unsqueeze", [x.name, name]), shape)


def squeeze(g: Graph) -> None:
    x = g.pick(lambda t: 1 in t.shape)
    if x is None:
        return
    axis = g.choose([i for i, n in enumerate(x.shape) if n == 1])
    out = g.node("Squeeze", [x.name, g.constant(np.array([axis]))])
    g.add(lambda a: (a.squeeze(axis),), [x], out, (*x.shape[:axis], *x.shape[axis + 1 :]))


def expand(g: Graph) -> None:
    x = g.pick()
    lead = tuple(g.choose(SIZES) for _ in range(g.number(0, 1)))
    shape = lead + tuple(g.choose(SIZES) if n == 1 else n for n in x.shape)
    if math.prod(shape) <= LARGEST and len(shape) < 6:
        out = g.node("Expand", [x.name, g.constant(np.array(shape, np.int64))])
        g.add(lambda a: (a.expand(shape),), [x], out, shape)


def tile(g: Graph) -> None:
    x = g.pick()
    repeats = [g.number(1, 2) for _ in x.shape]
    shape = tuple(n * r for n, r in zip(x.shape, repeats, strict=True))
    if math.prod(shape) <= LARGEST:
        out = g.node("Tile", [x.name, g.constant(np.array(repeats, np.int64))])
        g.add(lambda a: (a.repeat(*repeats) if repeats else a,), [x], out, shape)


def slice_(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1)
    if x is None:
        return
    axis = g.axis(x)
    n = x.shape[axis]
    step = g.choose([1, 2, -1, -2])
    start = g.number(-n, n - 1)
    end = g.choose([n, -n - 1, 2**31])
    places = list(range(n))[slice(start, None if end == -n - 1 and step < 0 else end, step)]
    if not places:
        return
    shape = list(x.shape)
    shape[axis] = len(places)
    names = [g.constant(np.array([v])) for v in (start, end, axis, step)]
    g.add(
        lambda a: (a.index_select(axis, _torch().tensor(places)),), [x], g.node("Slice", [x.name, *names]), tuple(shape)
    )


def split(g: Graph) -> None:
    x = g.pick(lambda t: any(n > 1 for n in t.shape))
    if x is None:
        return
    axis = g.choose([i for i, n in enumerate(x.shape) if n > 1])
    first = g.number(1, x.shape[axis] - 1)
    sizes = [first, x.shape[axis] - first]
    out = g.node("Split", [x.name, g.constant(np.array(sizes))], outputs=2, axis=axis)
    shapes = [(*x.shape[:axis], n, *x.shape[axis + 1 :]) for n in sizes]
    g.add(lambda a: a.split(sizes, axis), [x], out, *shapes)


def pad(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1 and math.prod(n + 3 for n in t.shape) <= LARGEST)
    if x is None:
        return
    mode = g.choose(["constant", "edge", "reflect", "wrap"])
    reach = [0 if mode == "reflect" and n == 1 else 1 for n in x.shape]
    low, high = ([g.number(0, r) for r in reach] for _ in range(2))
    shape = tuple(n + a + b for n, a, b in zip(x.shape, low, high, strict=True))
    place = np.pad(np.arange(math.prod(x.shape)).reshape(x.shape), list(zip(low, high, strict=True)), mode=mode)
    inside = np.pad(np.ones(x.shape), list(zip(low, high, strict=True)), mode=mode)

    def f(a: Any) -> Any:
        torch = _torch()
        return (a.reshape(-1)[torch.tensor(place)] * torch.tensor(inside),)

    g.add(f, [x], g.node("Pad", [x.name, g.constant(np.array(low + high))], mode=mode), shape)


def gather(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1)
    if x is None:
        return
    axis = g.axis(x)
    n, at = x.shape[axis], axis % x.rank
    indices = g.rng.integers(-n, n, g.choose([(), (2,), (2, 2)]))
    shape = (*x.shape[:at], *indices.shape, *x.shape[at + 1 :])

    def f(a: Any) -> Any:
        flat = a.index_select(at, _torch().tensor(indices.reshape(-1) % n))
        return (flat.reshape(shape),)

    if math.prod(shape) <= LARGEST and len(shape) < 6:
        g.add(f, [x], g.node("Gather", [x.name, g.constant(indices)], axis=axis), shape)


def scatter(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1)
    if x is None:
        return
    axis = g.axis(x)
    indices = g.rng.integers(0, x.shape[axis], x.shape)
    updates = g.weight(x.shape)
    out = g.node("ScatterElements", [x.name, g.constant(indices), updates.name], axis=axis, reduction="add")
    g.add(lambda a, u: (a.scatter_add(axis, _torch().tensor(indices), u),), [x, updates], out, x.shape)


def top_k(g: Graph) -> None:
    x = g.pick(lambda t: t.rank >= 1)
    if x is None:
        return
    axis = g.axis(x)
    k, largest = g.number(1, x.shape[axis]), g.number(0, 1)
    shape = list(x.shape)
    shape[axis] = k
    values, _ = g.node("TopK", [x.name, g.constant(np.array([k]))], outputs=2, axis=axis, largest=largest)
    g.add(lambda a: (a.topk(k, axis, bool(largest))[0],), [x], [values], tuple(shape))


def convolve(g: Graph) -> None:
    x = g.pick(lambda t: t.rank in (3, 4))
    if x is None:
        return
    spatial = x.rank - 2
    w = g.weight((g.choose(SIZES), x.shape[1], *[g.number(1, 2) for _ in range(spatial)]))
    pads, stride = g.number(0, 1), g.number(1, 2)
    sizes = [(n + 2 * pads - k) // stride + 1 for n, k in zip(x.shape[2:], w.shape[2:], strict=True)]
    if min(sizes) < 1:
        return
    out = g.node("Conv", [x.name, w.name], pads=[pads] * 2 * spatial, strides=[stride] * spatial)

    def f(a: Any, w: Any) -> Any:
        functional = _torch().nn.functional
        return ((functional.conv1d if spatial == 1 else functional.conv2d)(a, w, None, stride, pads),)

    g.add(f, [x, w], out, (x.shape[0], w.shape[0], *sizes))


STEPS = [
    unary, unary, unary, unary, damped, damped, reduce, along,  # repeated, as they draw one of many operators
    binary, binary, divide, where, clip, matmul, gemm, concat, reduce, along, layer_normalization, transpose,
    reshape, unsqueeze, squeeze, expand, tile, slice_, split, pad, gather, scatter, top_k, convolve,
]  # fmt: skip
