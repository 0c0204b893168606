"""Random graphs of If, Loop, Scan and SequenceMap.

Bodies read values of outer graphs at any depth. Loops have any number of iterations, which may be computed. There are
states and scan outputs, alone or together; some states change their shapes, and some branches differ in rank.

All functions are smooth where random numbers are likely to be, and all values have moderate sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.kit.drawing import Drawing

SIZE = 3  # elements of a vector
VECTOR, MATRIX = (SIZE,), (SIZE, SIZE)
DEPTH = 3
Shape = tuple[int, ...]
Output = tuple[str, int, Any]  # name, element type, dims


@dataclass
class Flow(Drawing):
    """A random graph under construction.

    Attributes:
        weights, feeds: the initializers and inputs by name.
        scopes: the names and shapes of readable values, one list per nested graph, the outermost first.
        counters: the names of iteration numbers that can be read.
        terms: the names of values that are part of the loss.
    """

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    scopes: list[list[tuple[str, Shape]]] = field(default_factory=lambda: [[]])
    counters: list[str] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = self.name("c")
        self.weights[name] = np.array(value, dtype)
        return name

    def fresh(self, shape: Shape) -> str:
        """Return the name of a new weight or input."""
        name, array = self.name("w"), self.rng.uniform(-1, 1, shape).astype(np.float32)
        (self.weights if self.flag() else self.feeds)[name] = array
        return name

    def pick(self, shape: Shape) -> str:
        """Return a random readable value of this shape, preferably of an inner graph, or a new one."""
        for scope in reversed(self.scopes):
            own = [name for name, s in scope if s == shape]
            if own and self.flag(0.6):
                return str(self.choose(own))
        every = [name for scope in self.scopes for name, s in scope if s == shape]
        if every and self.flag(0.8):
            return str(self.choose(every))
        name = self.fresh(shape)
        self.scopes[0].append((name, shape))
        return name

    def keep(self, name: str, shape: Shape) -> str:
        self.scopes[-1].append((name, shape))
        return name

    def condition(self) -> str:
        """Return a boolean scalar computed from random numbers."""
        total = self.node("ReduceSum", self.pick(VECTOR), keepdims=0)
        bound = self.constant(self.rng.uniform(-1, 1), np.float32)
        condition: str = self.node(self.choose(["Greater", "Less"]), total, bound)
        return condition

    def body(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        shown: Sequence[tuple[str, Shape]],
        write: Callable[[], list[Output]],
        counter: str = "",
    ) -> onnx.GraphProto:
        """Return a body with the outputs that ``write`` returns; ``shown`` are the inputs that its nodes can read."""
        outer, self.nodes = self.nodes, []
        self.scopes.append(list(shown))
        self.counters += [counter] if counter else []
        outputs = write()
        self.scopes.pop()
        self.counters = self.counters[: len(self.counters) - bool(counter)]
        nodes, self.nodes = self.nodes, outer
        infos = [helper.make_tensor_value_info(*output) for output in outputs]
        return helper.make_graph(nodes, self.name("body"), list(inputs), infos)

    def dims(self, shape: Shape) -> list[int | None] | None:
        """Return the declared sizes of a value in a body: the true sizes, or only the rank."""
        return list(shape) if self.flag(0.6) else [None] * len(shape)

    def info(self, name: str, shape: Shape) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, self.dims(shape))

    def model(self) -> onnx.ModelProto:
        means = [self.node("ReduceSum", self.node("Sin", y), keepdims=0) for y in self.terms]
        self.nodes.append(helper.make_node("Sum", means, ["loss"], name="loss"))
        types = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int64): TensorProto.INT64}
        graph = helper.make_graph(
            self.nodes,
            "flow",
            [helper.make_tensor_value_info(n, types[a.dtype], list(a.shape)) for n, a in self.feeds.items()],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
            [onnx.numpy_helper.from_array(a, n) for n, a in self.weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# --- statements -----------------------------------------------------------------------------------------------


def arithmetic(f: Flow) -> None:
    op_type = f.choose(["Add", "Mul", "Sub", "Tanh", "Sin", "MatMul", "Sigmoid", "Neg", "Identity"])
    if op_type == "MatMul":
        y = f.node("Tanh", f.node("MatMul", f.pick(MATRIX), f.pick(VECTOR)))
    elif op_type in ("Add", "Mul", "Sub"):
        y = f.node("Tanh", f.node(op_type, f.pick(VECTOR), f.pick(VECTOR)))
    else:
        y = f.node(op_type, f.pick(VECTOR))
    f.keep(y, VECTOR)


def product(f: Flow) -> None:
    f.keep(f.node("Tanh", f.node("MatMul", f.pick(MATRIX), f.pick(MATRIX))), MATRIX)


def gathering(f: Flow) -> None:
    """Append a Gather of a row or column of a matrix, by the iteration number inside a loop."""
    place = f.node("Mod", f.choose(f.counters), f.constant(SIZE)) if f.counters else f.constant(f.choose([0, -1]))
    f.keep(f.node("Gather", f.pick(MATRIX), place, axis=f.choose([0, 1])), VECTOR)


def slicing(f: Flow) -> None:
    joined = f.node("Concat", f.pick(VECTOR), f.pick(VECTOR), axis=0)
    f.keep(f.node("Slice", joined, f.constant([1]), f.constant([1 + SIZE])), VECTOR)


def choice(f: Flow) -> None:
    """Append an If with one or two outputs, whose condition depends on values or on the iteration number."""
    count = f.choose([1, 2])

    def write() -> list[Output]:
        block(f, f.choose([0, 1, 2]))
        ys = [f.node("Identity", f.pick(VECTOR)) for _ in range(count)]
        return [(y, TensorProto.FLOAT, f.dims(VECTOR)) for y in ys]

    condition = f.condition()
    if f.counters and f.flag():
        condition = f.node("Equal", f.node("Mod", f.choose(f.counters), f.constant(2)), f.constant(1))
    then, otherwise = f.body([], [], write), f.body([], [], write)
    results = f.node("If", condition, outputs=count, then_branch=then, else_branch=otherwise)
    for y in [results] if count == 1 else results:
        f.keep(y, VECTOR)


def choice_of_ranks(f: Flow) -> None:
    """Append an If whose branches have results of different ranks, and nodes that accept any rank or depend on it."""
    vector = f.flag()

    def write() -> list[Output]:
        nonlocal vector
        vector = not vector
        y = f.node(f.choose(["Tanh", "Identity", "Neg"]), f.pick(VECTOR if vector else MATRIX))
        return [(y, TensorProto.FLOAT, f.choose([[None] * (1 if vector else 2), None]))]

    then, otherwise = f.body([], [], write), f.body([], [], write)
    y = f.node("If", f.condition(), then_branch=then, else_branch=otherwise)
    for _ in range(f.choose([0, 1, 2, 3])):
        y = f.choose(AT_ANY_RANK)(f, y)
    rows = f.node("Reshape", y, f.constant([-1, SIZE]))
    f.keep(f.node("Tanh", f.node("ReduceSum", rows, f.constant([0]), keepdims=0)), VECTOR)


def by_its_rank(f: Flow, y: str) -> str:
    """Append an If with one branch for matrices and one for vectors, which onnxruntime runs only for these ranks.

    Weights must be inputs of the model. If a weight decides the rank, onnxruntime (1.31) folds that decision,
    infers the types of both branches again, now with a known rank, and rejects the one that never runs, such as a
    ReduceMean along axis 1 of a vector (seeds 117, 175 and 182). Without optimizations it opens these models.
    """
    matrix = f.node("Equal", f.node("Size", f.node("Shape", y)), f.constant(2))

    def write_matrix() -> list[Output]:
        return [(f.node("ReduceMean", y, f.constant([f.choose([1, -2])]), keepdims=0), TensorProto.FLOAT, [None])]

    def write_vector() -> list[Output]:
        return [(f.node("Mul", y, f.pick(VECTOR)), TensorProto.FLOAT, f.choose([[None], None]))]

    then, otherwise = f.body([], [], write_matrix), f.body([], [], write_vector)
    chosen: str = f.node("If", matrix, then_branch=then, else_branch=otherwise)
    return chosen


AT_ANY_RANK: list[Callable[[Flow, str], str]] = [
    by_its_rank,
    lambda f, y: str(f.node(f.choose(["Tanh", "Sin", "Sigmoid"]), y)),
    lambda f, y: str(f.node(f.choose(["Add", "Mul", "Sub"]), y, f.pick(VECTOR))),
    lambda f, y: str(f.node("Tanh", f.node("MatMul", y, f.pick(MATRIX)))),
    lambda f, y: str(f.node("Softmax", y, axis=-1)),
    lambda f, y: str(f.node("Transpose", y)),
    lambda f, y: str(f.node("Gather", y, f.constant([0, -1, 0]), axis=f.choose([0, -1]))),
    lambda f, y: str(f.node("Slice", f.node("Concat", y, y, axis=0), *map(f.constant, ([-SIZE], [99], [0])))),
    lambda f, y: str(f.node("Mul", y, f.node("ReduceMean", y, f.constant([-1])))),
    lambda f, y: str(f.node("LayerNormalization", f.node("Add", y, f.pick(VECTOR)), f.pick(VECTOR), epsilon=0.5)),
]


def trips(f: Flow) -> str:
    """Return the number of iterations: a constant, an input, or computed from values."""
    way = f.choose(["constant", "input", "computed"])
    if way == "constant":
        return f.constant(f.choose([0, 1, 2, 3]))
    if way == "input":
        name = f.name("n")
        f.feeds[name] = np.array(f.choose([0, 1, 3]), np.int64)
        return name
    total = f.node("ReduceSum", f.node("Abs", f.pick(VECTOR)), keepdims=0)
    counted: str = f.node("Cast", total, to=TensorProto.INT64)
    return counted


def loop(f: Flow) -> None:
    """Append a Loop with states and scan outputs, any of which may be unused; it may end early."""
    states, rows = [(1, 0), (0, 1), (2, 1), (1, 2), (3, 0)][f.rng.integers(5)]
    grows = f.flag(0.2)
    first = [f.pick(VECTOR) for _ in range(states)]
    i, go, *inner = (f.name(n) for n in ("i", "go", *["s"] * states))
    early = f.flag(0.3) and states > 0
    known = [(s, VECTOR) for s in inner]
    growing = f.name("s")
    inputs = [
        helper.make_tensor_value_info(i, TensorProto.INT64, []),
        helper.make_tensor_value_info(go, TensorProto.BOOL, []),
        *(f.info(s, VECTOR) for s in inner),
        *([helper.make_tensor_value_info(growing, TensorProto.FLOAT, [None])] if grows else []),
    ]

    def write() -> list[Output]:
        block(f, f.choose([1, 2, 3]))
        after = [f.node(f.choose(["Tanh", "Sin", "Identity"]), f.pick(VECTOR)) for _ in inner]
        if states > 1 and f.flag(0.3):
            after[:2] = [f.node("Identity", s) for s in (inner[1], inner[0])]  # swap two states
        again = f.node("And", go, f.condition()) if early else f.node("Identity", go)
        more = [f.node("Concat", growing, f.pick(VECTOR), axis=0)] if grows else []
        given = [f.node("Identity", f.pick(VECTOR)) for _ in range(rows)]
        return [
            (again, TensorProto.BOOL, []),
            *((y, TensorProto.FLOAT, f.dims(VECTOR)) for y in after),
            *((y, TensorProto.FLOAT, [None]) for y in more),
            *((y, TensorProto.FLOAT, list(VECTOR)) for y in given),
        ]

    limit = "" if early and f.flag(0.2) else trips(f)
    start = f.choose(["", f.constant(True, bool), f.condition()])
    if not limit:
        limit = f.constant(5)
    extra = [f.pick(VECTOR)] if grows else []
    body = f.body(inputs, known, write, i)
    results = f.node("Loop", limit, start, *first, *extra, outputs=states + grows + rows, body=body)
    results = [results] if isinstance(results, str) else results
    for y in results[:states]:
        f.keep(y, VECTOR)
    for y in results[states:]:
        if f.flag(0.7):  # [n, 3] or [n], with unknown n
            summed = f.node("ReduceSum", f.node("Sin", y), f.constant([0]), keepdims=0)
            f.keep(f.node("Expand", summed, f.constant([SIZE])) if grows and y == results[states] else summed, VECTOR)


def scan(f: Flow) -> None:
    states, reads, rows = [(1, 1, 1), (0, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 0)][f.rng.integers(5)]
    first = [f.pick(VECTOR) for _ in range(states)]
    inner, slices = ([f.name(n) for _ in range(k)] for n, k in (("s", states), ("x", reads)))
    in_axes = [f.choose([0, 1, -1]) for _ in slices]
    in_back, out_back = ([f.choose([0, 1]) for _ in range(k)] for k in (reads, rows))
    out_axes = [f.choose([0, 1, -1]) for _ in range(rows)]
    matrices = [f.pick(MATRIX) for _ in slices]

    def write() -> list[Output]:
        block(f, f.choose([1, 2, 3]))
        ys = [f.node(f.choose(["Tanh", "Sin", "Identity"]), f.pick(VECTOR)) for _ in range(states + rows)]
        return [(y, TensorProto.FLOAT, list(VECTOR)) for y in ys]

    shown = [(s, VECTOR) for s in (*inner, *slices)]
    body = f.body([f.info(s, VECTOR) for s in (*inner, *slices)], shown, write)
    attrs: dict[str, Any] = {"num_scan_inputs": reads, "body": body}
    if f.flag(0.8):
        attrs |= {"scan_input_axes": in_axes, "scan_input_directions": in_back}
        if rows:
            attrs |= {"scan_output_axes": out_axes, "scan_output_directions": out_back}
    results = f.node("Scan", *first, *matrices, outputs=states + rows, **attrs)
    results = [results] if isinstance(results, str) else results
    for k, y in enumerate(results):
        f.keep(y, VECTOR if k < states else MATRIX)


def mapping(f: Flow) -> None:
    """Append a SequenceMap over rows, with a tensor or a second sequence; onnxruntime cannot run it inside a body."""
    if len(f.scopes) > 1:
        return
    sequence = f.node("SplitToSequence", f.pick(MATRIX), axis=0, keepdims=0)
    x, other = f.name("x"), f.name("x")
    second = f.choose(["tensor", "sequence", ""])
    given = [f.pick(VECTOR)] if second == "tensor" else []
    if second == "sequence":
        given = [f.node("SplitToSequence", f.pick(MATRIX), axis=1, keepdims=0)]
    names = [x, other][: 1 + len(given)]

    def write() -> list[Output]:
        block(f, f.choose([0, 1]))
        return [(f.node("Tanh", f.node("Mul", f.pick(VECTOR), x)), TensorProto.FLOAT, list(VECTOR))]

    body = f.body([f.info(s, VECTOR) for s in names], [(s, VECTOR) for s in names], write)
    mapped = f.node("SequenceMap", sequence, *given, body=body)
    f.keep(f.node("ConcatFromSequence", mapped, axis=0, new_axis=1), MATRIX)


def sequence_state(f: Flow) -> None:
    """Append a Loop whose state is a growing sequence."""
    i, go, s = f.name("i"), f.name("go"), f.name("s")
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    rows: list[str] = []

    def write() -> list[Output]:
        block(f, 1)
        rows.append(f.node("SequenceInsert", s, f.node("Tanh", f.pick(VECTOR))))
        return [(f.node("Identity", go), TensorProto.BOOL, [])]

    numbers = [helper.make_tensor_value_info(n, t, []) for n, t in ((i, TensorProto.INT64), (go, TensorProto.BOOL))]
    body = f.body([*numbers, helper.make_value_info(s, kind)], [], write, i)
    body.output.append(helper.make_value_info(rows[0], kind))
    first = f.node("SequenceConstruct", f.pick(VECTOR))
    longer = f.node("Loop", f.constant(f.choose([0, 2])), "", first, body=body)
    whole = f.node("ConcatFromSequence", longer, axis=0, new_axis=1)
    f.keep(f.node("ReduceSum", whole, f.constant([0]), keepdims=0), VECTOR)


KINDS: list[tuple[Callable[[Flow], None], int]] = [
    (arithmetic, 6), (product, 1), (gathering, 1), (slicing, 1), (choice, 3), (loop, 4), (scan, 3), (mapping, 1),
    (sequence_state, 1), (choice_of_ranks, 2),
]  # fmt: skip
PLAIN = [kind for kind, share in KINDS[:4] for _ in range(share)]
ALL = [kind for kind, share in KINDS for _ in range(share)]


def block(f: Flow, statements: int) -> None:
    for _ in range(statements):
        f.choose(ALL if len(f.scopes) < DEPTH and f.flag(0.6) else PLAIN)(f)


def flow(seed: int) -> tuple[Flow, onnx.ModelProto]:
    f = Flow(np.random.default_rng(seed))
    for shape in (VECTOR, MATRIX):
        f.pick(shape)
    for _ in range(int(f.rng.integers(1, 4))):
        f.choose(ALL[len(PLAIN) :])(f)
        block(f, 1)
        f.terms.append(f.scopes[0][-1][0])
    for name, _ in f.scopes[0]:
        if f.flag(0.2) and name not in f.terms:
            f.terms.append(name)
    return f, f.model()
