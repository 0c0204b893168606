"""Explanations of models that others ship, beside plain loops over onnxruntime.

The file itself gives the score of the most active element of an output, and ``gradgraph.vjp`` its gradient, which is
held against differences of the score. All else is NumPy: quadrature, noise, windows, orders of features, maps, steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import gradgraph as gg
from gradgraph.autodiff.attention_weights import probabilities_of
from gradgraph.autodiff.probabilities import probabilities
from gradgraph.errors import GradgraphError
from gradgraph.graph.shape_inference import shape_of

Array = np.ndarray[Any, Any]
Found = dict[str, Any]
POINTS, STEPS, EPSILON = 4, 3, 0.01
NEAR = 2e-4  # of the largest attribution: what float32 leaves of sums of other order in deep networks
LENGTHS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4)  # moves along the gradient, as parts of the input
CLEAR = 30  # units in the last place of the score that a difference must have
STEADY = 0.1  # by which slopes of neighbouring lengths may differ, and from the gradient
FLIPPED = 0.02  # of the elements that an attack may move otherwise: their gradient is next to zero


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    """A session that fuses nothing: where sums are rounded otherwise, Relu and MaxPool may choose other elements."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class NothingToExplainError(Exception):
    """The model has no input, or no output, that the references here can treat."""


class Plain:
    """A model in onnxruntime, with the score of one element of an output as a function of one input."""

    def __init__(self, path: Path, feeds: Mapping[str, Array], model: ir.Model) -> None:
        self._proto, self._feeds, self.largest = onnx.load(path), dict(feeds), 0.0
        inputs = {v.name or "": v for v in model.graph.inputs}
        floats = [n for n in feeds if n in inputs and feeds[n].dtype.kind == "f" and feeds[n].ndim > 1]
        if not floats:
            raise NothingToExplainError("it reads no floating-point tensor")
        self.input = floats[0]
        self.x: Array = feeds[self.input]
        self._session = session_of(self._proto)
        rows = len(self.x)
        every = zip([v.name for v in self._session.get_outputs()], self._session.run(None, dict(feeds)), strict=True)
        likely = [(n, y) for n, y in every if y.dtype.kind == "f" and y.ndim and len(y) == rows]
        if not likely:
            raise NothingToExplainError("no output has a row for each sample")
        self.output, y = likely[0]
        self.value = next(v for v in model.graph.outputs if v.name == self.output)
        self.place = tuple(int(i) for i in np.unravel_index(y[0].argmax(), y.shape[1:]))
        self.target: Any = self.place if y.ndim > 2 else None if y.size == rows else self.place[0]

    def outputs(self, x: Array, names: Sequence[str] = ()) -> dict[str, Array]:
        """Outputs and inner values at ``x``."""
        session = self._with(tuple(names)) if names else self._session
        asked = [*names] or [self.output]
        return dict(zip(asked, session.run(asked, {**self._feeds, self.input: x}), strict=True))

    def score(self, x: Array) -> Array:
        found: Array = self.outputs(x)[self.output][(slice(None), *self.place)].astype(np.float64)
        self.largest = max(self.largest, float(np.abs(found).max()))
        return found

    def gradient(self, x: Array, of: str = "", cotangent: Callable[[Array], Array] | None = None) -> Array:
        """The gradient of the score with respect to the input, or to an inner value."""
        session = self._slopes(of or self.input)
        y = self.outputs(x)[self.output]
        seed = np.zeros_like(y)
        seed[(slice(None), *self.place)] = 1
        feeds = {**self._feeds, self.input: x, f"{self.output}.cotangent": seed if cotangent is None else cotangent(y)}
        names = [v.name for v in session.get_inputs()]
        return session.run([f"{of or self.input}.grad"], {n: feeds[n] for n in names})[0]

    def _slopes(self, wrt: str) -> ort.InferenceSession:
        if wrt not in self._made:
            made = gg.vjp(self._proto, outputs=self.output, wrt=[wrt])
            self._made[wrt] = session_of(made)
        return self._made[wrt]

    @cached_property
    def _made(self) -> dict[Any, ort.InferenceSession]:
        return {}

    def _with(self, names: tuple[str, ...]) -> ort.InferenceSession:
        if names not in self._made:
            more = onnx.ModelProto()
            more.CopyFrom(self._proto)
            known = {v.name for v in more.graph.output}
            more.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in known)
            self._made[names] = session_of(more)
        return self._made[names]

    @cached_property
    def maps(self) -> str | None:
        """The last value with channels and two spatial axes that a convolution computes, if an input has them, too."""
        convolved = [n.output[0] for n in self._proto.graph.node if n.op_type == "Conv"]
        for name in reversed(convolved if self.x.ndim == 4 else ()):
            if min(self.outputs(self.x, [name])[name].shape[2:], default=0) > 1 and self._leads(name):
                return name
        return None

    def _leads(self, name: str) -> bool:
        try:
            return bool(np.abs(self.gradient(self.x, name)).max() > 1e-12)  # squares of less are 0 in float32
        except GradgraphError:
            return False

    def from_steepest(self) -> str:
        """Compare the gradient with the slope of the score along it; empty if they agree or nothing can be told."""
        g = self.gradient(self.x).astype(np.float64)
        length = float(np.linalg.norm(g))
        if not length:
            return ""
        along, slopes = g / length, list[float]()
        for part in LENGTHS:
            h = part * float(np.linalg.norm(self.x) or 1.0)
            ends = [self.score((self.x + s * h * along).astype(self.x.dtype)).sum() for s in (1, -1)]
            if abs(ends[0] - ends[1]) > CLEAR * np.finfo(np.float32).eps * self.largest:
                slopes.append((ends[0] - ends[1]) / (2 * h) / length)
        steady = [(a + b) / 2 for a, b in itertools.pairwise(slopes) if abs(a - b) <= STEADY * max(abs(a), abs(b))]
        return "" if not steady or min(abs(s - 1) for s in steady) <= STEADY else f"slopes are {steady} of the gradient"


# --- the methods, in NumPy --------------------------------------------------------------------------------------


def _on_line(p: Plain, value: Callable[[Array], Array], n: int = POINTS) -> Array:
    at, weights = np.polynomial.legendre.leggauss(n)
    places = ((at + 1) / 2).astype(p.x.dtype)  # the same points, to the bit: behind kinks, gradients differ
    return np.sum([w / 2 * value(place * p.x) for place, w in zip(places, weights, strict=True)], 0)


def _noisy(p: Plain) -> Array:
    """The mean gradient at the points that ``gradgraph.along`` draws, which a model of one Identity shows."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(p.x.dtype)
    ends = [onnx.helper.make_tensor_value_info(name, kind, p.x.shape) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "same", ends[:1], ends[1:])
    same = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    drawn = gg.along(same, POINTS, wrt="x", noise=0.1, reduce="stack")
    points = session_of(drawn).run(["y.stack"], {"x": p.x})[0]
    return np.mean([p.gradient(point) for point in points], 0)


def _windows(p: Plain) -> tuple[int, ...]:
    """An eighth of each axis of a picture, a quarter of the last axis of others."""
    sizes = p.x.shape[1:]
    return (
        (sizes[0], *(max(1, d // 8) for d in sizes[1:])) if len(sizes) == 3 else (*sizes[:-1], max(1, sizes[-1] // 4))
    )


def _occluded(p: Plain) -> Array:
    window, whole = _windows(p), p.score(p.x)
    total, count = np.zeros(p.x.shape), np.zeros(p.x.shape[1:])
    starts = [range(0, max(d - w, 0) + w, w) if d > w else (0,) for d, w in zip(p.x.shape[1:], window, strict=True)]
    for start in itertools.product(*starts):
        place = tuple(slice(s, s + w) for s, w in zip(start, window, strict=True))
        if not np.zeros(p.x.shape[1:])[place].size:
            continue
        x = p.x.copy()
        x[(slice(None), *place)] = 0
        change = (whole - p.score(x)).reshape(-1, *[1] * len(window))
        total[(slice(None), *place)] += change
        count[place] += 1
    return total / count


def _features(p: Plain) -> Array:
    return (np.arange(p.x[0].size) * 5 // p.x[0].size).reshape(p.x.shape[1:])


def _ordered(p: Plain) -> Array:
    groups, generator = _features(p), np.random.default_rng(0)
    total = np.zeros(p.x.shape)
    for order in [generator.permutation(int(groups.max()) + 1) for _ in range(2)]:
        x, before = np.zeros_like(p.x), p.score(np.zeros_like(p.x))
        for feature in order:
            x = np.where(groups == feature, p.x, x)
            now = p.score(x)
            total += (now - before).reshape(-1, *[1] * groups.ndim) * (groups == feature)
            before = now
    return total / 2


def _map(p: Plain, plus: bool) -> Array:
    assert p.maps
    a, g = p.outputs(p.x, [p.maps])[p.maps].astype(np.float64), p.gradient(p.x, p.maps).astype(np.float64)
    weights = g.mean((2, 3), keepdims=True)
    if plus:
        below = 2 * g**2 + g**3 * a.sum((2, 3), keepdims=True)
        alpha = np.divide(g**2, below, out=np.zeros_like(below), where=below != 0)
        weights = (alpha * np.maximum(g, 0)).sum((2, 3), keepdims=True)
    return np.maximum((weights * a).sum(1, keepdims=True), 0)


def _conducted(p: Plain) -> Array:
    assert p.maps
    points = [(t * p.x).astype(p.x.dtype) for t in np.linspace(0, 1, POINTS + 1)]
    values = [p.outputs(x, [p.maps])[p.maps].astype(np.float64) for x in points]
    slopes = [p.gradient(x, p.maps) for x in points]
    return np.sum([s * (b - a) for s, a, b in zip(slopes, values, values[1:], strict=False)], 0)


def _moved(p: Plain) -> Array:
    """The inputs after steps that decrease the score; of logits, their cross-entropy."""
    at = (slice(None), *p.place)
    found = probabilities(p.value)

    def cotangent(y: Array) -> Array:
        seed = np.zeros_like(y)
        seed[at] = -1
        if y.ndim == 2 and y.shape[1] > 1 and found is None:
            seed += np.exp(y - y.max(1, keepdims=True)) / np.exp(y - y.max(1, keepdims=True)).sum(1, keepdims=True)
        return seed

    x = p.x
    for _ in range(STEPS):
        x = x + np.float32(2.5 * EPSILON / STEPS) * np.sign(p.gradient(x, cotangent=cotangent))
        x = p.x + np.clip(x - p.x, -EPSILON, EPSILON)
    return x


# method: its options, its reference
METHODS: dict[str, tuple[Callable[[Plain], dict[str, Any]], Callable[[Plain], Array] | None]] = {
    "gradient": (lambda p: {}, lambda p: p.gradient(p.x)),
    "input-x-gradient": (lambda p: {}, lambda p: p.x * p.gradient(p.x)),
    "integrated-gradients": (lambda p: {"n": POINTS}, lambda p: p.x * _on_line(p, p.gradient)),
    "smoothgrad": (lambda p: {"n": POINTS, "noise": 0.1}, _noisy),
    "occlusion": (lambda p: {"window": _windows(p)}, _occluded),
    "shapley": (lambda p: {"n": 2, "features": _features(p)}, _ordered),
    "grad-cam": (lambda p: {"layer": p.maps, "resize": False}, lambda p: _map(p, False)),
    "grad-cam-plus-plus": (lambda p: {"layer": p.maps, "resize": False}, lambda p: _map(p, True)),
    "layer-conductance": (lambda p: {"layer": p.maps, "n": POINTS}, _conducted),
    "pgd": (lambda p: {"n": STEPS, "epsilon": EPSILON}, _moved),
    "expected-gradients": (lambda p: {"n": POINTS, "baselines": "input"}, None),
    "guided-backpropagation": (lambda p: {}, None),
    "deeplift": (lambda p: {}, None),
    "attention-rollout": (lambda p: {}, None),
}
OF_MAPS = ("grad-cam", "grad-cam-plus-plus", "layer-conductance")


def explained(path: Path, feeds: Mapping[str, Array], model: ir.Model) -> Found:
    """For each method that applies, its distance from the reference, or None if it merely ran."""
    plain, errors, wrong = Plain(path, feeds, model), dict[str, float | None](), list[str]()
    if said := plain.from_steepest():
        wrong.append(f"gradient: {said}")
    for name, (options, reference) in METHODS.items():
        if not _applies(name, plain, model):
            continue
        try:
            made = gg.explain(
                path, name, target=plain.target, inputs=plain.input, output=plain.output, **options(plain)
            )
            session = session_of(made)
            fed = {**feeds, f"{plain.input}.baselines": np.zeros_like(plain.x[:1])}
            result = session.run(None, {v.name: fed[v.name] for v in session.get_inputs()})[1]
        except Exception as error:  # of gradgraph, or of onnxruntime about its file
            wrong.append(f"{name}: {error}")
            continue
        if not np.isfinite(result).all():
            wrong.append(f"{name}: not finite")
        found = None if reference is None else _distance(name, result, reference(plain), plain)
        errors[name] = found
        if found is not None and found > (FLIPPED if name == "pgd" else NEAR):
            wrong.append(f"{name}: {found:.1e} of the largest attribution from the reference")
    return {"output": plain.output, "target": list(plain.place), "errors": errors, "wrong": wrong}


def _applies(name: str, plain: Plain, model: ir.Model) -> bool:
    if name in ("occlusion", "shapley"):  # which number the elements of a sample when the model is written
        sizes = next(v.shape for v in model.graph.inputs if v.name == plain.input)
        return sizes is not None and all(isinstance(d, int) for d in list(sizes)[1:])
    if name == "guided-backpropagation":
        return any(node.op_type == "Relu" for node in model.graph)
    if name == "attention-rollout":
        return any(len(shape_of(y) or ()) == 4 for y in probabilities_of(list(model.graph)))
    return name not in OF_MAPS or plain.maps is not None


def _distance(name: str, result: Array, expected: Array, plain: Plain) -> float:
    """The largest difference, as a part of the largest attribution; for attacks, the share of differing elements.

    Differences of scores are not more exact than the largest of these.
    """
    if result.shape != expected.shape:
        return float("inf")
    apart = np.abs(result - expected)
    if name == "pgd":
        return float((apart > 1e-3 * EPSILON).mean())
    if name in ("occlusion", "shapley"):
        apart = np.maximum(apart - 8 * np.finfo(np.float32).eps * plain.largest, 0)
    return float(apart.max() / max(float(np.abs(expected).max()), 1e-30))
