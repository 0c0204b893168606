"""Random graphs over the whole operator table: their gradients in three element types against central differences.

A graph consists of a few random test cases of rules. The result t of one case moves an input x of a later one a little,
``x + width · tanh(t)``, so that every input stays in the domain of its case, and away from kinks and ties. Gradients
are compared with central differences of the *forward* graph in float64, along one random direction per tensor. Forward
values in onnxruntime are compared, too, to find wrong kernels of the reference. If rounding the point changes a
gradient, onnxruntime's gradient may differ by as much.

    python -m tests.kit.operator_graphs --count 20000 --jobs 2         # prints disagreements with their seeds
    python -m tests.kit.operator_graphs --seed 4711 --show             # one graph: the model, and its disagreements
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

import gradgraph as gg
import gradgraph.rules.families
from gradgraph.graph.shapes import IR_VERSION, OPSET
from gradgraph.rules.composites.table import rules_with_cases
from gradgraph.rules.registry import Case, Draw, Rule
from gradgraph.verify import cases, gradcheck
from gradgraph.verify.gradcheck import Judgement, Quotients, directional, inner
from gradgraph.verify.reference import Oracle, in_float64

Feeds = dict[str, np.ndarray]
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16}
DOMAINS = ("", "ai.onnx.ml")
MOST_NODES = 7
# operators whose forward pass in onnxruntime is inexact, which is not an error of the gradient
INEXACT = {"GroupNormalization": "onnxruntime takes variances as E[x²] - E[x]² in float32"}
# For a symbolic size of an Einsum, onnxruntime reads the size of a label from one operand, even if that is a broadcast
# 1, and plans too little memory for the result. This depends on the rest of the graph, and also affects forward graphs.
PLANNED = "Shape mismatch attempting to re-use buffer"
REFUSALS = {"Einsum": PLANNED}
LARGEST = 2e4  # largest entry of a result, as float16 ends at 65,504
MARGINS = {"float32": 2e-4, "float64": 1e-7, "float16": 6e-2}  # accepted rounding error, relative to the largest entry
DIFFERENCES = {"float32": 1e-6, "float64": 1e-6, "float16": 5e-3}  # tolerances: constants of rules are rounded, too
MOVED = 50  # accepted error as a multiple of the change caused by rounding the point


@functools.cache
def trials() -> list[tuple[Rule, list[Case]]]:
    """Return the rules with their cases that onnxruntime can run, in an order that does not depend on imports."""
    rules = sorted((r for r in rules_with_cases() if r.domain in DOMAINS), key=lambda r: (r.domain, r.op_type))
    able = [(r, [c for c in r.cases if not c.onnxruntime and _movable(c)]) for r in rules]
    return [(r, c) for r, c in able if c]


def _movable(case: Case) -> bool:
    return any(isinstance(x, Draw) and x.differentiable for x in case.inputs)


# --- drawing a graph ---------------------------------------------------------------------------------------


@dataclass
class Drawn:
    """A random graph under construction, in one element type.

    Attributes:
        dtype: the element type.
        feeds: the point, in float64 (with numbers that ``dtype`` can represent).
        values: the floating results so far by name, in float64.
        outputs: the results to differentiate, with their element types.
        operators: the drawn operators, for the report.
    """

    dtype: type[np.floating]
    feeds: Feeds = field(default_factory=dict)
    wrt: list[str] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    values: Feeds = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    operators: list[str] = field(default_factory=list)

    def constant(self, name: str, value: np.ndarray) -> str:
        self.initializers.append(onnx.numpy_helper.from_array(value, name))
        return name

    def model(self) -> onnx.ModelProto:
        outputs = [helper.make_tensor_value_info(y, kind, None) for y, kind in self.outputs.items()]
        graph = helper.make_graph(self.nodes, "random", self.inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def drawn(seed: int, dtype: type[np.floating]) -> Drawn:
    """Return the graph of a seed, with equal nodes and an equal point in every element type."""
    rng = np.random.default_rng(seed)
    graph = Drawn(dtype)
    for place in range(int(rng.integers(2, MOST_NODES + 1))):
        rule, able = trials()[int(rng.integers(len(trials())))]
        _append(graph, f"n{place}/", rule, able[int(rng.integers(len(able)))], rng)
    return graph


def _append(graph: Drawn, prefix: str, rule: Rule, case: Case, rng: np.random.Generator) -> None:
    unknown = bool(rng.random() < 0.4) and not case.known_shapes
    t = cases.trial(rule, case, unknown=unknown, dtype=graph.dtype, seed=int(rng.integers(2**31)))
    part = _typed_outputs(t.model).graph
    specs = {f"x{i}": spec for i, spec in enumerate(case.inputs)}
    point = {prefix + k: _rounded(v) for k, v in t.feeds.items()}
    graph.feeds.update(point)
    graph.wrt += [prefix + x for x in t.wrt]
    moved: dict[str, str] = {}
    for x in t.wrt:
        if rng.random() < 0.8:
            known = None if unknown else point[prefix + x].shape
            moved[prefix + x] = _moved(graph, prefix + x, specs[x], known, point[prefix + x].size, rng)
    _prefix(part, prefix, moved)
    graph.inputs += part.input
    graph.initializers += part.initializer
    graph.nodes += part.node
    graph.operators.append(rule.op_type)
    _evaluate(graph, part, [prefix + y for y in t.read])


def _typed_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Set the types of outputs to those that ONNX infers, as the reference evaluator returns others for norms."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for output in bare.graph.output:
        output.ClearField("type")
    for output, inferred in zip(model.graph.output, onnx.shape_inference.infer_shapes(bare).graph.output, strict=True):
        if inferred.type.HasField("tensor_type"):
            output.type.tensor_type.elem_type = inferred.type.tensor_type.elem_type
    return model


def _prefix(graph: onnx.GraphProto, prefix: str, moved: dict[str, str]) -> None:
    """Prefix names of values, nodes and symbolic sizes, also in bodies; replace inputs by their ``moved`` values."""
    for value in (*graph.input, *graph.output):
        value.name = prefix + value.name
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = prefix + dim.dim_param
    for tensor in graph.initializer:
        tensor.name = prefix + tensor.name
    for node in graph.node:
        node.name = prefix + node.name if node.name else ""
        node.input[:] = [moved.get(prefix + x, prefix + x) if x else "" for x in node.input]
        node.output[:] = [prefix + y if y else "" for y in node.output]
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _prefix(body, prefix, moved)


def _rounded(value: np.ndarray) -> np.ndarray:
    """Return ``value`` rounded to float16, as float64, so that the point is the same in every element type."""
    return value.astype(np.float16).astype(np.float64) if value.dtype.kind == "f" else value


def _moved(
    graph: Drawn, name: str, spec: Draw, shape: tuple[int, ...] | None, size: int, rng: np.random.Generator
) -> str:
    """Append ``name + width · tanh(t)``, with ``size`` random elements t of an earlier result; return its name."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(graph.dtype))
    able = [y for y, value in graph.values.items() if value.size and graph.outputs[y] == element]
    if not size or not able:
        return name
    source = able[int(rng.integers(len(able)))]
    width = {"distinct": 0.005, "real": 0.1}.get(spec.kind, 0.04 * (spec.high - spec.low))
    places = graph.constant(f"{name}/places", rng.integers(0, graph.values[source].size, size))
    scale = graph.constant(f"{name}/width", np.array(width, graph.dtype))
    flat = graph.constant(f"{name}/flat", np.array([-1]))
    made = [f"{name}/{step}" for step in ("row", "picked", "bounded", "offset", "shaped", "moved")]
    row, picked, bounded, offset, shaped, moved = made
    if shape is None:
        target = f"{name}/shape"
        graph.nodes.append(helper.make_node("Shape", [name], [target], name=target))
    else:
        target = graph.constant(f"{name}/shape", np.array(shape, np.int64))
    steps = [("Reshape", [source, flat], row), ("Gather", [row, places], picked), ("Tanh", [picked], bounded)]
    steps += [("Mul", [bounded, scale], offset), ("Reshape", [offset, target], shaped), ("Add", [name, shaped], moved)]
    graph.nodes += [helper.make_node(op, inputs, [y], name=y) for op, inputs, y in steps]
    return moved


def _evaluate(graph: Drawn, part: onnx.GraphProto, found: Sequence[str]) -> None:
    """Compute the new results, and differentiate those that are not empty and within the range of float16.

    Empty results have other shapes in the reference evaluator than in onnxruntime; rules have cases for these.
    """
    kinds = {y.name: y.type.tensor_type.elem_type for y in part.output}
    before, graph.outputs = graph.outputs, {name: kinds[name] for name in found}
    results = Oracle(in_float64(graph.model()))(_typed(graph.feeds, np.float64))
    fine = [n for n in found if isinstance(results[n], np.ndarray) and results[n].size and _moderate(results[n])]
    graph.values.update({name: results[name] for name in fine})
    graph.outputs = {**before, **{name: kinds[name] for name in fine}}


def _moderate(value: np.ndarray) -> bool:
    return bool(np.isfinite(value).all() and np.abs(value).max(initial=0) < LARGEST)


def _typed(feeds: Feeds, dtype: type[np.floating]) -> Feeds:
    return {k: v.astype(dtype) if v.dtype == np.float64 else v for k, v in feeds.items()}


# --- judging it --------------------------------------------------------------------------------------------


def disagreements(seed: int, name: str) -> tuple[str, list[str]]:
    """Check the gradients of the graph of ``seed`` in an element type.

    Returns:
        A verdict, and sentences if it is "wrong": "right"; "wrong"; "not run: …" if onnxruntime cannot run the forward
        graph in this type, or there is no result to check; "not compared: …" if central differences agree, but the
        forward pass in onnxruntime is known to be inexact.
    """
    try:
        graph = drawn(seed, DTYPES[name])
    except TypeError as error:  # NumPy has no float16 in its linear algebra
        return f"not run: {error.__cause__ or error}"[:60], []
    if not graph.values:
        return "not run: no finite result", []
    model = graph.model()
    forward = _values(model, _fed(model, graph.feeds))
    if isinstance(forward, str) and name != "float64":
        return "not run: onnxruntime refuses the forward graph", []
    f, point, rng = Oracle(in_float64(model)), _typed(graph.feeds, np.float64), np.random.default_rng(seed)
    near = [{k: _nudged(v, DTYPES[name], seed, sign) for k, v in point.items()} for sign in (1, -1)]
    ys = f(point)
    cotangents = {y: rng.integers(-8, 9, ys[y].shape) / 8 for y in ys}
    gradient = gg.vjp(model, outputs=list(ys), wrt=graph.wrt, allow_unused=True)
    added = {f"{y}.cotangent": c for y, c in cotangents.items()}
    exact = Oracle(in_float64(gradient))
    wanted = exact({**point, **added})

    def total(feeds: Feeds) -> float:
        results = f(feeds)
        return inner(list(cotangents.values()), [results[y] for y in cotangents])

    wrong = [
        f"gradient of {d.name}: {d.analytic:.9g}, by differences {d.numeric:.9g}"
        for d in directional(total, point, {x: wanted[f"{x}.grad"] for x in graph.wrt}, rng)
        if not d.error < DIFFERENCES[name]
        and _judged_at(total, point, d.name, wanted[f"{d.name}.grad"], rng, DIFFERENCES[name]).verdict == "wrong"
    ]
    if not isinstance(forward, str):
        apart = _apart(forward, ys, map(f, near), MARGINS[name])
        known = next((why for op, why in INEXACT.items() if op in graph.operators), "")
        if apart and known and not wrong:
            return f"not compared: {known}", []
        wrong += apart
        fed = _fed(gradient, {**graph.feeds, **added})
        got = _values(gradient, fed)
        if not isinstance(got, str):
            wrong += _apart(got, wanted, (exact({**p, **added}) for p in near), MARGINS[name])
        elif any(op in graph.operators and why in got for op, why in REFUSALS.items()) and not wrong:
            return "not compared: onnxruntime plans too little memory for an Einsum", []
        elif name != "float64" or "NOT_IMPLEMENTED" not in got:  # onnxruntime lacks kernels in float64, as of MaxUnpool
            wrong.append(f"the gradient does not run: {got}")
    operators = " ".join(graph.operators)
    return ("wrong", [f"({operators}) {w}" for w in wrong]) if wrong else ("right", [])


def _judged_at(
    f: Callable[[Feeds], float], feeds: Feeds, name: str, g: np.ndarray, rng: np.random.Generator, tolerance: float
) -> Judgement:
    """Return the comparison of ``g``, the gradient of ``f`` at ``name``, with differences along a random direction.

    Other arguments are as for ``directional`` and ``judged``.
    """
    x, here = feeds[name], f(feeds)
    ways = [rng.uniform(0.5, 1.5, x.shape) * rng.choice([-1.0, 1.0], x.shape) for _ in range(4)]

    def quotients(u: np.ndarray, step: float) -> Quotients:
        up, down = (f({**feeds, name: x + sign * step * u}) for sign in (1.0, -1.0))
        return Quotients((up - here) / step, (here - down) / step, 1e-15 * (1 + abs(here)) / step)

    terms = ways[0] * g
    return gradcheck.judged(
        float(terms.sum()),
        1.0 + float(np.abs(terms).sum()),
        lambda step: quotients(ways[0], step),
        lambda step: (quotients(u, step) for u in ways[1:]),
        tolerance,
    )


def _nudged(value: np.ndarray, dtype: type[np.floating], seed: int, sign: int) -> np.ndarray:
    """Return ``value`` changed by a rounding error of at least float32 in random directions, or in the opposite."""
    if value.dtype.kind != "f":
        return value
    ways = np.random.default_rng(seed).choice([-1.0, 1.0], value.shape)
    return value * (1 + sign * max(np.finfo(dtype).eps, np.finfo(np.float32).eps) * ways)


def _apart(got: Feeds, wanted: Feeds, near: Iterable[Feeds], margin: float) -> list[str]:
    """Return one sentence for each array in ``got`` that differs from ``wanted`` by more than the allowed rounding
    errors: ``margin``, and the change of the results in one item of ``near``, which are at rounded points.
    """
    wrong: list[str] = []
    for moved in near:
        wrong = _beyond(got, wanted, moved, margin)
        if not wrong:
            return []
    return wrong


def _beyond(got: Feeds, wanted: Feeds, near: Feeds, margin: float) -> list[str]:
    wrong = []
    for name, value in got.items():
        if value.shape != wanted[name].shape:
            wrong.append(f"{name} in onnxruntime has shape {value.shape}, not {wanted[name].shape}")
            continue
        largest, gap, moved = (
            float(np.abs(np.asarray(x, np.float64)).max(initial=0))
            for x in (wanted[name], value - wanted[name], near[name] - wanted[name])
        )
        if not gap <= margin * max(1.0, largest) + MOVED * moved:
            wrong.append(f"{name} in onnxruntime is off by {gap:.3g} of {largest:.3g}, {moved:.1g} by rounding")
    return wrong


def _fed(model: onnx.ModelProto, feeds: Feeds) -> Feeds:
    """Return ``feeds`` cast to the element types of the model's inputs."""
    kinds = {i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type) for i in model.graph.input}
    return {name: np.asarray(feeds[name]).astype(kind) for name, kind in kinds.items()}


def _values(model: onnx.ModelProto, feeds: Feeds) -> Feeds | str:
    """Return the outputs in onnxruntime, or its error message."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    except Exception as error:  # onnxruntime's own classes, which it does not export
        return f"{type(error).__name__}: {str(error)[-700:]}"


# --- the command -------------------------------------------------------------------------------------------


def in_turn(seed: int) -> str:
    return list(DTYPES)[seed % len(DTYPES)]


def judged(job: tuple[int, str]) -> tuple[int, str, str, list[str]]:
    seed, name = job
    try:
        verdict, sentences = disagreements(seed, name)
    except Exception as error:  # any exception is a finding, reported with its seed
        verdict, sentences = "wrong", [f"{type(error).__name__}: {str(error)[:500]}"]
    return seed, name, verdict, sentences


def main() -> int:
    parser = argparse.ArgumentParser(description="Gradients of random graphs over the whole operator table.")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--show", action="store_true", help="print the first graph")
    parser.add_argument("--dtype", choices=list(DTYPES), help="the element type; by default each in turn")
    options = parser.parse_args()
    if options.show:
        print(onnx.printer.to_text(drawn(options.seed, np.float32).model()))
    work = [(seed, options.dtype or in_turn(seed)) for seed in range(options.seed, options.seed + options.count)]
    counts: Counter[tuple[str, str]] = Counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for seed, name, verdict, sentences in pool.imap(judged, work, chunksize=8):
            counts[name, verdict] += 1
            for sentence in sentences:
                print(f"seed {seed}, {name}: {sentence}", flush=True)
    for (name, verdict), count in sorted(counts.items()):
        print(f"{name:8} {count:6} {verdict}")
    return 1 if any(verdict == "wrong" for _, verdict in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
