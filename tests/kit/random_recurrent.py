"""Random recurrent networks as ONNX models: layers with every attribute, tokens, attention, bodies.

The output of a network is a scalar: the sum of the means of a smooth function of each value in ``terms``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.kit.drawing import Drawing

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
# activations, each with its parameters a (alpha) and b (beta); none has a kink that random numbers are likely to hit
OTHERS = {"Sigmoid": "", "Tanh": "", "Softsign": "", "Affine": "ab", "ScaledTanh": "ab", "Softplus": "", "Elu": "a"}
OTHERS |= {"HardSigmoid": "ab", "LeakyRelu": "a"}
UNITS = [1, 2, 3, 5, 8, 16, 16, 17, 32, 48]


@dataclass(frozen=True)
class Sequences:
    """A value of shape [T, N, F]: steps, sequences, features."""

    name: str
    features: int


@dataclass
class Graph(Drawing):
    """A random network under construction.

    Attributes:
        steps, sequences: the sizes T and N, or their names if they are symbolic.
        units: the hidden sizes from which layers choose.
        rows: the number of rows of the embedding table.
        terms: the names of values that are part of the loss.
        layers: the weights of layers so far, by kind and sizes, for layers that share them.
    """

    steps: int | str
    sequences: int | str
    units: Sequence[int] = tuple(UNITS)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, tuple[int, list[int | str]]] = field(default_factory=dict)
    terms: list[str] = field(default_factory=list)
    layers: dict[tuple[Any, ...], tuple[str, ...]] = field(default_factory=dict)
    rows: int = 0

    def weight(self, *shape: int, scale: float | None = None) -> str:
        name = self.name("w")
        scale = 1 / np.sqrt(max((1, *shape[-1:]))) if scale is None else scale
        self.weights[name] = (self.rng.uniform(-1, 1, shape) * scale).astype(np.float32)
        return name

    def constant(self, *values: int) -> str:
        name = self.name("c")
        self.weights[name] = np.array(values, np.int64)
        return name

    def model(self) -> onnx.ModelProto:
        means = [self.node("ReduceMean", self.node("Sin", y), keepdims=0) for y in self.terms]
        self.nodes.append(helper.make_node("Sum", means, ["loss"], name="loss"))
        graph = helper.make_graph(
            self.nodes,
            "recurrent",
            [helper.make_tensor_value_info(name, *kind) for name, kind in self.inputs.items()],
            [helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [])],
            [onnx.numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def within(self, write: Callable[[], Any]) -> tuple[list[onnx.NodeProto], Any]:
        """Return the nodes that ``write`` appends, for a body, and its result."""
        outer, self.nodes = self.nodes, []
        results = write()
        inner, self.nodes = self.nodes, outer
        return inner, results


# --- inputs -----------------------------------------------------------------------------------------------------


def numbers(g: Graph) -> Sequences:
    features = int(g.choose([1, 2, 3, 8, 16, 20]))
    g.inputs["x"] = (onnx.TensorProto.FLOAT, [g.steps, g.sequences, features])
    return Sequences("x", features)


def tokens(g: Graph) -> Sequences:
    """Append an embedding: rows of a small or large table by token; table and rows may be read elsewhere, too."""
    g.rows, features = int(g.choose([2, 3, 7, 40])), int(g.choose([1, 4, 8, 16, 32]))
    turned, kind = g.flag(), g.choose([onnx.TensorProto.INT64, onnx.TensorProto.INT32])
    g.inputs["ids"] = (kind, [g.sequences, g.steps] if turned else [g.steps, g.sequences])
    read = table = g.weight(g.rows, features, scale=1.0)
    if g.flag(0.15):
        read = g.node("Mul", table, table)  # a computed table
    x = g.node("Gather", read, "ids", **({"axis": 0} if g.flag() else {}))
    if turned:
        x = g.node("Transpose", x, perm=[1, 0, 2])
    if g.flag(0.25):
        g.terms.append(g.node("MatMul", x, g.node("Transpose", table, perm=[1, 0])))
    if g.flag(0.15):
        g.terms.append(g.node("Gather", table, g.constant(0, 1, 1)))
    if g.flag(0.2):
        x = g.node("Tanh", x)
    return Sequences(x, features)


# --- layers -----------------------------------------------------------------------------------------------------


def layer(g: Graph, x: Sequences, plain: float = 0.5, units: int = 0, inner: bool = False) -> Sequences:
    """Append an RNN, GRU or LSTM.

    Args:
        g: the network.
        x: the input.
        plain: the share of layers in a form that has a named operator.
        units: the hidden size; 0 for a random one.
        inner: whether the layer is in a body, and so cannot add terms to the loss.
    """
    kind = g.choose(list(GATES))
    direction = g.choose(["forward", "forward", "reverse", "bidirectional"]) if not units else "forward"
    D = 2 if direction == "bidirectional" else 1
    H, F, gates = units or int(g.choose(g.units)), x.features, GATES[kind]
    is_plain = g.flag(plain)
    attrs: dict[str, Any] = {"direction": direction, "hidden_size": H}
    key = (kind, D, H, F)
    if key not in g.layers or g.flag(0.3):
        W, R = g.weight(D, gates * H, F), g.weight(D, gates * H, H, scale=0.8 / np.sqrt(H))
        g.layers[key] = (W, R, g.weight(D, 2 * gates * H, scale=0.5))
    W, R, B = g.layers[key]
    B = B if is_plain or g.flag() else ""
    if kind == "GRU" and g.flag():
        attrs["linear_before_reset"] = 1
    first = [initial(g, x, D, H) for _ in range(2 if kind == "LSTM" else 1)]
    if kind == "RNN" and g.flag(0.2):
        attrs["activations"] = ["Relu"] * D
    lens = P = ""
    if not is_plain:
        if g.flag(0.4):
            attrs |= functions(g, kind, D)
        if g.flag(0.3):
            attrs["clip"] = float(g.rng.uniform(0.2, 1.5))
        if g.flag(0.4) and not inner:
            lens = lengths(g)
        if kind == "LSTM" and g.flag(0.4):
            P = g.weight(D, 3 * H, scale=0.8)
        if kind == "LSTM" and g.flag(0.3):
            attrs["input_forget"] = 1
    batch_first = g.flag(0.25)
    X = x.name
    if batch_first:
        attrs["layout"] = 1
        X, *first = [v and g.node("Transpose", v, perm=[1, 0, 2]) for v in (X, *first)]
    names = [X, W, R, B, lens, *first, *([P] if kind == "LSTM" else [])]
    while not names[-1]:
        names.pop()
    wanted = [True, *(g.flag(0.3) and not inner for _ in range(2 if kind == "LSTM" else 1))]
    if not inner and g.flag(0.15):
        wanted = [False, True, *wanted[2:]]
    ys = [g.name("y") if w else "" for w in wanted]
    while not ys[-1]:
        ys.pop()
    g.nodes.append(helper.make_node(kind, names, ys, name=g.name(kind), **attrs))
    Y, *last = ys
    g.terms += [y for y in last if y]
    if not Y:
        return x
    if batch_first:
        Y = g.node("Transpose", Y, perm=[1, 2, 0, 3])
    if D == 1 and g.flag():
        return Sequences(g.node("Squeeze", Y, g.constant(1)), H)
    beside = g.node("Transpose", Y, perm=[0, 2, 1, 3])
    return Sequences(g.node("Reshape", beside, g.constant(0, 0, D * H)), D * H)


def functions(g: Graph, kind: str, D: int) -> dict[str, Any]:
    """Return the attributes of random activations, with their parameters."""
    names = [g.choose(list(OTHERS)) for _ in range(D * len(FUNCTIONS[kind]))]
    taken = "".join(OTHERS[n] for n in names)
    shown = [n if g.flag(0.8) else n.upper() for n in names]
    attrs: dict[str, Any] = {"activations": shown}
    if "a" in taken:
        attrs["activation_alpha"] = g.rng.uniform(0.2, 0.6, taken.count("a")).tolist()
    if "b" in taken:
        attrs["activation_beta"] = g.rng.uniform(0.2, 0.6, taken.count("b")).tolist()
    return attrs


def initial(g: Graph, x: Sequences, D: int, H: int) -> str:
    """Return an initial state [D, N, H]: "" for none, a weight, one shared by all sequences, or a computed one."""
    way = g.choose(["", "", "weight", "shared", "computed"])
    if way == "weight" and isinstance(g.sequences, int):
        return g.weight(D, g.sequences, H, scale=0.5)
    if way == "shared":
        N = g.node("Slice", g.node("Shape", x.name), g.constant(1), g.constant(2))
        sizes = g.node("Concat", g.constant(D), N, g.constant(H), axis=0)
        shared: str = g.node("Expand", g.weight(D, 1, H, scale=0.5), sizes)
        return shared
    if way == "computed":
        step = g.node("Slice", x.name, g.constant(0), g.constant(1), g.constant(0))
        computed: str = g.node("Tanh", g.node("MatMul", step, g.weight(D, x.features, H)))
        return computed
    return ""


def lengths(g: Graph) -> str:
    g.inputs["lens"] = (onnx.TensorProto.INT32, [g.sequences])
    return "lens"


def linear(g: Graph, x: Sequences) -> Sequences:
    features = int(g.choose([2, 5, 16]))
    product = g.node("MatMul", x.name, g.weight(x.features, features))
    return Sequences(g.node("Tanh", g.node("Add", product, g.weight(features))), features)


def residual(g: Graph, x: Sequences) -> Sequences:
    y = layer(g, x, units=x.features) if x.features in UNITS else linear(g, x)
    return Sequences(g.node("Add", x.name, y.name), x.features) if y.features == x.features else y


def concatenation(g: Graph, x: Sequences) -> Sequences:
    """Append two layers and concatenate their outputs."""
    a, b = layer(g, x), layer(g, x)
    return Sequences(g.node("Concat", a.name, b.name, axis=-1), a.features + b.features)


def attention(g: Graph, x: Sequences) -> Sequences:
    """Append self-attention over the steps of each sequence."""
    rows = g.node("Transpose", x.name, perm=[1, 0, 2])
    q, k = (g.node("MatMul", rows, g.weight(x.features, 4)) for _ in range(2))
    scores = g.node("Softmax", g.node("MatMul", q, g.node("Transpose", k, perm=[0, 2, 1])), axis=-1)
    return Sequences(g.node("Transpose", g.node("MatMul", scores, rows), perm=[1, 0, 2]), x.features)


def value(name: str, kind: int = onnx.TensorProto.FLOAT, dims: Sequence[Any] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def branches(g: Graph, x: Sequences) -> Sequences:
    """Append an If with a recurrent layer in one branch and a product in the other."""
    units = int(g.choose([2, 3, 16]))
    ahead = g.node("Squeeze", g.node("Greater", g.node("ReduceSum", x.name, keepdims=0), g.weight()))
    ways: list[Callable[[], str]] = [
        lambda: layer(g, x, units=units, inner=True).name,
        lambda: g.node("MatMul", x.name, g.weight(x.features, units)),
    ]
    bodies = []
    for way in ways:
        nodes, y = g.within(way)
        bodies.append(helper.make_graph(nodes, g.name("branch"), [], [value(y, dims=[None, None, units])]))
    if g.flag():
        bodies.reverse()
    return Sequences(g.node("If", ahead, then_branch=bodies[0], else_branch=bodies[1]), units)


def repeated(g: Graph, x: Sequences) -> Sequences:
    """Append a Loop that applies the same layer repeatedly."""
    if x.features > 32:
        return linear(g, x)
    state, i, go = g.name("state"), g.name("i"), g.name("go")

    def write() -> list[str]:
        y = layer(g, Sequences(state, x.features), units=x.features, inner=True)
        more = g.node("Add", g.node("Tanh", y.name), state)
        return [g.node("Identity", go), more, g.node("ReduceMean", y.name, keepdims=0)]

    nodes, (again, y, scan) = g.within(write)
    shape = [None, None, x.features]
    body = helper.make_graph(
        nodes,
        g.name("body"),
        [value(i, onnx.TensorProto.INT64, []), value(go, onnx.TensorProto.BOOL, []), value(state, dims=shape)],
        [value(again, onnx.TensorProto.BOOL, []), value(y, dims=shape), value(scan, dims=[])],
    )
    trips = g.name("trips")
    g.weights[trips] = np.array(g.choose([1, 2, 3]), np.int64)
    last, scans = g.node("Loop", trips, "", x.name, outputs=2, body=body)
    if g.flag(0.3):
        g.terms.append(scans)
    return Sequences(last, x.features)


def cell(g: Graph, x: Sequences) -> Sequences:
    """Append a recurrent layer written as a Scan; its cell may itself be a layer with one step."""
    H = int(g.choose([1, 3, 8, 16]))
    h, s = g.name("h"), g.name("s")
    own = g.flag(0.3)
    W, R, b = g.weight(x.features, H), g.weight(H, H), g.weight(H)

    def write() -> list[str]:
        if own:
            step = Sequences(g.node("Unsqueeze", s, g.constant(0)), x.features)
            y = g.node("Squeeze", layer(g, step, units=H, inner=True).name, g.constant(0))
            new = g.node("Tanh", g.node("Add", y, h))
        else:
            gate = g.node("Sigmoid", g.node("Add", g.node("MatMul", s, W), g.node("MatMul", h, R)))
            new = g.node("Add", g.node("Mul", gate, h), g.node("Tanh", g.node("Add", g.node("MatMul", s, W), b)))
        return [new, g.node("Identity", new)]

    nodes, (new, y) = g.within(write)
    state, features = [None, H], [None, x.features]
    given, results = [value(h, dims=state), value(s, dims=features)], [value(new, dims=state), value(y, dims=state)]
    body = helper.make_graph(nodes, g.name("body"), given, results)
    N = g.node("Slice", g.node("Shape", x.name), g.constant(1), g.constant(2))
    first = g.node("Expand", g.weight(1, H), g.node("Concat", N, g.constant(H), axis=0))
    back = [int(g.flag())]
    along = {"scan_input_directions": back, "scan_output_directions": back}
    last, ys = g.node("Scan", first, x.name, outputs=2, body=body, num_scan_inputs=1, **along)
    if g.flag(0.3):
        g.terms.append(last)
    return Sequences(ys, H)


KINDS: dict[str, Callable[[Graph, Sequences], Sequences]] = {
    f"{kind.__name__} {i}": kind
    for kind, share in [
        (layer, 8), (linear, 1), (residual, 2), (concatenation, 1), (attention, 1), (branches, 1), (repeated, 1),
        (cell, 1),
    ]
    for i in range(share)
}  # fmt: skip


def network(g: Graph, parts: int) -> onnx.ModelProto:
    x = tokens(g) if g.flag() else numbers(g)
    for kind in [g.choose(list(KINDS)) for _ in range(parts)]:
        x = KINDS[kind](g, x)
        if g.flag(0.2):
            g.terms.append(x.name)
    g.terms.append(x.name)
    return g.model()


def batch(g: Graph, model: onnx.ModelProto, steps: int, sequences: int) -> dict[str, np.ndarray]:
    sizes = {"T": steps, "N": sequences}
    feeds: dict[str, np.ndarray] = {}
    for info in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in info.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        if info.name == "ids":
            feeds["ids"] = g.rng.integers(-g.rows, g.rows, shape).astype(dtype)
        elif info.name == "lens":
            feeds["lens"] = g.rng.integers(0, steps + 1, shape).astype(dtype)
        else:
            feeds[info.name] = g.rng.uniform(-1, 1, shape).astype(dtype)
    return feeds
