"""Gradient check of a model: the gradient of every tensor against central differences along a random direction.

The outputs y are reduced to one number by random weights w: ``s = Σ ⟨wᵢ, yᵢ⟩``. For each tensor x and a random
direction d, the derivative of s along d is computed in two ways: from the gradient model (``vjp`` with the weights as
cotangents), and as ``(s(x + εd) − s(x − εd)) / 2ε`` with a small step ε. Both run in float64 in the ReferenceEvaluator;
a model that it cannot run is checked in onnxruntime in float32, with less precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.arguments import FUNCTION, NAMES, TEXT, WHOLE, checked, instance
from gradgraph.autodiff.path import Path, carries, is_tensor
from gradgraph.autodiff.probabilities import probabilities
from gradgraph.autodiff.review import review
from gradgraph.autodiff.select import select, trainable
from gradgraph.errors import (
    DataError,
    DifferentiationError,
    Finding,
    GradgraphError,
    UnknownNameError,
    shown,
    suggestion,
)
from gradgraph.files.models import Source, load_model
from gradgraph.graph.checks import describe
from gradgraph.graph.marks import forget_detached, is_detached
from gradgraph.passes.normal import normalise
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.passes.normal.sizes.fixed import GIVEN, Sizes, fix_sizes
from gradgraph.runtime.execution.frozen_weights import proto_and_weights
from gradgraph.runtime.execution.session import Placement, create_session, explained, results
from gradgraph.transforms import vjp
from gradgraph.verify.directions import Direction
from gradgraph.verify.discarded_lanes import discarded_lanes
from gradgraph.verify.feeds import Feeds, candidates, given
from gradgraph.verify.gradcheck import STEPS, Judgement, Quotients, judged
from gradgraph.verify.reference import model_in_float64, oracle_of

Array = np.ndarray[Any, Any]


class Run(Protocol):
    """A function that runs a model; entries of feeds may also replace weights."""

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs by name."""
        ...

    def stream(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield each output with its name; the runner itself keeps no output in memory."""
        ...


# kernels of the ReferenceEvaluator that accept float64 and compute in float32 inside
SINGLE_INSIDE = frozenset({"AffineGrid", "DeformConv", "GridSample", "LinearAttention"})
ROUNDING = 10  # units in the last place that a whole model is allowed to lose
_POINTS = 2  # points near a kink, and not on another one, at which the gradient is checked
_DRAWS = 20  # directions tried while few terms cancel, which would hide a wrong gradient
_SIZES_FOR_GRADIENTS = 6  # sizes of symbolic dimensions to try
NUDGE = 16  # units in the last place by which cotangents are perturbed, to measure rounding errors


@dataclass(frozen=True)
class Precision:
    """A precision of the check: element type, tolerance and steps.

    Attributes:
        name: the element type.
        tolerance: the largest relative error that passes.
        steps: the steps of central differences, relative to the root mean square of the tensor.
        beside: the distances from a kink at which the gradient is checked instead, relative to the root mean square.
            Several are tried: a wrong gradient may show only very close to the kink, or another kink may be near.
    """

    name: str
    tolerance: float
    steps: tuple[float, ...]
    beside: tuple[float, ...]


DOUBLE = Precision("float64", 1e-4, STEPS, (1e-9, 1e-6, 1e-3))
SINGLE = Precision("float32", 2e-2, (1e-3, 1e-4, 1e-5), (3e-3, 3e-2))


@dataclass(frozen=True)
class TensorCheck:
    """The check of one tensor: its directional derivative from the gradient and from differences.

    Attributes:
        name, shape: the tensor.
        analytic: the directional derivative from the gradient.
        numeric: the directional derivative from central differences.
        error: the difference of both derivatives, relative to the absolute terms of ``analytic``; infinite if one of
            the derivatives is not finite, or the gradient's shape differs from the tensor's.
        resolved: whether the derivative is larger than the rounding errors of the difference.
        ok: whether ``error`` is within the tolerance, or the gradient is between the slopes of a kink.
        kink: whether the one-sided slopes at the point differ, so that the gradient was checked near the point; if
            there are kinks there, too, ``resolved`` is false.
    """

    name: str
    shape: tuple[int, ...]
    analytic: float
    numeric: float
    error: float
    resolved: bool
    ok: bool
    kink: bool = False


@dataclass(frozen=True)
class Report:
    """The result of ``check_gradients``.

    Attributes:
        precision: ``"float64"``, or ``"float32"`` if the reference implementation cannot run the model.
        reason: why the precision is float32; empty otherwise.
        tolerance: the largest relative error that passes.
        outputs: the outputs that were differentiated.
        tensors: one entry per tensor.
        findings: warnings about the default selection of weights, and values precomputed from them (see
            ``gradgraph.autodiff.review``), unless ``wrt`` is given; about outputs that are probabilities; and, if a
            gradient is NaN, about nodes that discard non-finite values.
    """

    precision: str
    reason: str
    tolerance: float
    outputs: tuple[str, ...]
    tensors: tuple[TensorCheck, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return all(t.ok for t in self.tensors)


class _First(NamedTuple):
    """The first feeds for which both the model and its gradient run, with the results.

    Attributes:
        ys: the outputs of the model.
        weights: the random weights of the outputs.
        values: the values of inputs and weights of the model.
        gradients: runs the gradient model.
        slopes: the derivative from the gradient, for each tensor.
    """

    feeds: Feeds
    ys: Mapping[str, Array]
    weights: Feeds
    values: _Values
    gradients: _Gradients
    slopes: dict[str, _Slope]


class _CannotRunError(Exception):
    """Raised if the model cannot be run in this precision; the message is the reason."""


@checked(wrt=NAMES.or_none(), output=TEXT.or_none(), sizes=GIVEN, seed=WHOLE, progress=FUNCTION,
         feeds=instance(Mapping, "a dict of arrays by name").or_none())  # fmt: skip
def check_gradients(
    model: Source,
    feeds: Mapping[str, Any] | None = None,
    *,
    output: str | None = None,
    wrt: str | Sequence[str] | None = None,
    sizes: Sizes | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check the gradients of ``model`` against central differences.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        feeds: an array for each input; random by default (see ``gradgraph.verify.feeds``).
        output: the floating-point output to differentiate, of any shape; by default all floating-point outputs.
        wrt: names and globs of inputs and initializers; by default every trainable initializer and floating-point
            input.
        sizes: values of symbolic sizes, such as ``{"batch": 2}``; or, by the name of an input, all its sizes. By
            default small sizes are tried first, and larger ones if the model does not run with these.
        seed: the seed of inputs, weights and directions.
        progress: called with the number of tensors done and their total.

    Raises:
        ModelError: if the model is damaged, or cannot be run.
        UnknownNameError, DifferentiationError, UnsupportedOperatorError: if the gradient does not exist.
        DataError: if ``feeds`` do not match the model's inputs, if no inputs were found at which the outputs are
            finite, or if the model draws random numbers or detaches values, so that differences do not equal gradients.
    """
    if seed < 0:
        raise DataError(f"the seed is {seed}; it must not be negative")
    if sizes:
        model = load_model(model)
        fix_sizes(model, sizes)
    normal = normalise(model, parameters=wrt)
    outputs = _outputs(normal.graph, output)
    names = _names(normal.graph, wrt, outputs)
    _check_none_detached(normal, outputs, names)
    subject = _Subject(normal, outputs, names, allow_unused=wrt is None)
    check = _Check(subject, None if feeds is None else given(normal.graph, feeds), seed, progress)
    try:
        report = check.run(DOUBLE, "")
    except _CannotRunError as reason:
        report = check.run(SINGLE, str(reason))
    targets = [v for v in normal.graph.outputs if v.name in outputs]
    report = dataclasses.replace(report, findings=(*report.findings, *_probabilities(targets)))
    if wrt is not None:
        return report
    trained = [v.name for v in trainable(normal.graph, targets) if v.name]
    return dataclasses.replace(report, findings=(*report.findings, *review(normal.graph, targets, trained)))


def _probabilities(outputs: Iterable[ir.Value]) -> Iterator[Finding]:
    """Yield a warning for each output that is a probability, because many losses expect logits."""
    for value in outputs:
        found = probabilities(value)
        if found is not None:
            name = None if found.logits is None else found.logits.name
            source = f"use the logits '{shown(name)}'" if name else "cut the model before it"
            yield Finding(f"output '{shown(value.name)}'", f"ends in a {found.kind}",
                          "a loss that expects logits would apply another one", f"{source} for such a loss",
                          "warning")  # fmt: skip


def _check_none_detached(model: ir.Model, outputs: Sequence[str], names: Sequence[str]) -> None:
    """Raise DataError if a node between ``names`` and ``outputs`` is detached, which makes gradients zero."""
    if not any(is_detached(node) for node in nodes_of(model)):
        return
    plain = model.clone()
    detached = [node for node in nodes_of(plain) if is_detached(node)]
    forget_detached(detached)
    known = {v.name: v for v in (*plain.graph.inputs, *plain.graph.initializers.values())}
    targets = [v for v in plain.graph.outputs if v.name in outputs]
    path = Path(plain.graph, targets, [known[n] for n in names if n in known])
    between = next((node for node in detached if path.is_on(node)), None)
    if between is not None:
        raise DataError(
            f"{describe(between)} is detached: differences pass through it, but gradients do not; check outputs that "
            "do not depend on it, or remove its mark from the model"
        )


def _outputs(graph: ir.Graph, output: str | None) -> list[str]:
    floating = [v.name for v in graph.outputs if carries(v) and is_tensor(v) and v.name]
    if output is None:
        if not floating:
            raise DifferentiationError("the model has no floating-point output to differentiate")
        return list(dict.fromkeys(floating))
    if output not in floating:
        raise UnknownNameError(
            f"the model has no floating-point output '{shown(output)}'{suggestion(output, floating)}"
        )
    return [output]


def _names(graph: ir.Graph, wrt: str | Sequence[str] | None, outputs: Sequence[str]) -> list[str]:
    targets = [v for v in graph.outputs if v.name in outputs]
    if wrt is not None:
        return [v.name for v in select(graph, wrt, targets, inner=False) if v.name]
    inputs = [v for v in graph.inputs if carries(v) and not v.is_initializer()]
    active = Path(graph, targets, inputs).active
    chosen = [*(v for v in inputs if v in active), *trainable(graph, targets)]
    if not chosen:
        raise DifferentiationError("the outputs depend on no floating-point input and no trainable initializer")
    return [v.name for v in chosen if v.name]


# --- the two engines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Subject:
    """The model in normal form, the outputs to differentiate, and the tensors whose gradients are checked."""

    model: ir.Model
    outputs: list[str]
    names: list[str]
    allow_unused: bool

    def engines(self, precision: Precision) -> tuple[ir.Model, Run, ir.Model, Run]:
        """Return the model and its runner, and the gradient model and its runner."""
        model = model_in_float64(self.model) if precision is DOUBLE else self.model
        gradient = vjp(model, outputs=self.outputs, wrt=self.names, allow_unused=self.allow_unused)
        assert isinstance(gradient, ir.Model)
        start = _oracle if precision is DOUBLE else _Session
        return model, start(model, self.names), gradient, start(gradient, [*self.names, *_cotangents(model, gradient)])


def _oracle(model: ir.Model, free: Sequence[str]) -> Run:
    unfit = sorted({n.op_type for n in model.graph} & SINGLE_INSIDE)
    if unfit:
        raise _CannotRunError(f"the reference implementation of {unfit[0]} computes in float32")
    return oracle_of(model, free)  # accepts weights among the feeds


class _Session:
    """A model in onnxruntime; the initializers in ``free`` become optional inputs, so that feeds can replace them."""

    def __init__(self, model: ir.Model, free: Sequence[str]) -> None:
        own, outside = proto_and_weights(model)
        inputs = {v.name for v in own.graph.input}
        weights = [t for t in own.graph.initializer if t.name in free and t.name not in inputs]
        own.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights)
        self._session = create_session(own, Placement.choose("cpu"), weights=outside)
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._known = {i.name for i in (*self._session.get_inputs(), *self._session.get_overridable_initializers())}

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        with explained("running the model failed"):
            return results(self._session, self._outputs, {n: a for n, a in feeds.items() if n in self._known})

    def stream(self, feeds: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        found = self(feeds)
        while found:
            yield found.popitem()


# --- the check -------------------------------------------------------------------------------------------


@dataclass
class _Check:
    subject: _Subject
    feeds: Feeds | None
    seed: int
    progress: Callable[[int, int], None]

    def run(self, precision: Precision, reason: str) -> Report:
        rng = np.random.default_rng(self.seed)
        try:
            model, f, gradient, g = self.subject.engines(precision)
            names = _gradient_names(gradient, self.subject.names)

            def at(feeds: Feeds, ys: Mapping[str, Array]) -> _First:
                weights = {y: np.asarray(rng.uniform(-1, 1, ys[y].shape), ys[y].dtype) for y in self.subject.outputs}
                values = _Values(model, feeds)
                gradients = _Gradients(names, g, *_weighings(model, gradient, weights, rng), self.seed)
                return _First(feeds, ys, weights, values, gradients, gradients.at(feeds, values))

            feeds, ys, weights, values, gradients, slopes = self._first_run(model, f, at, rng)
        except (GradgraphError, _CannotRunError):
            raise
        except Exception as error:  # the reference implementation's NumPy code may raise anything
            if precision is SINGLE:
                raise
            raise _CannotRunError(f"the reference evaluator raised {type(error).__name__}: {shown(error)}") from error
        found = []
        for name in self.subject.names:
            point = _Point(f, feeds, weights, name, values[name], ys)
            with np.errstate(all="ignore"):  # a gradient that is not finite is a finding, not a warning
                found.append(_checked(point, slopes[name], gradients, precision, rng))
            self.progress(len(found), len(self.subject.names))
        start = _oracle if precision is DOUBLE else _Session
        undefined = any(math.isnan(t.analytic) for t in found)
        lanes = discarded_lanes(model, feeds, lambda m: start(m, ())) if undefined else ()
        outputs = tuple(self.subject.outputs)
        return Report(precision.name, reason, precision.tolerance, outputs, tuple(found), tuple(lanes))

    def _first_run(
        self, model: ir.Model, f: Run, at: Callable[[Feeds, Mapping[str, Array]], _First], rng: np.random.Generator
    ) -> _First:
        """Return the results for the first feeds with finite outputs for which the gradient runs, too.

        ``f`` runs the model, and ``at`` the gradient.
        """
        graph, left = model.graph, _SIZES_FOR_GRADIENTS
        tries = candidates(graph, rng) if self.feeds is None else [given(graph, self.feeds)]
        failure: Exception | None = None
        for feeds in tries:
            try:
                ys = f(feeds)
            except Exception as error:  # another size may work
                failure = error
                continue
            if all(ys[y].size and np.isfinite(ys[y]).all() for y in self.subject.outputs):
                self._check_deterministic(f, feeds, ys)
                try:
                    return at(feeds, ys)
                except GradgraphError as error:  # sizes that work for the model may be too small for its gradient
                    failure, left = error, left - 1
                    if not left:
                        break
        if failure is not None:
            raise failure
        where = "random inputs; pass your own check data"
        if self.feeds is not None:
            where = "the given data; check them for NaN and infinities"
        raise DataError(f"the outputs are empty or not finite at {where}")

    def _check_deterministic(self, f: Run, feeds: Feeds, ys: Mapping[str, Array]) -> None:
        again = f(feeds)
        if any(not np.array_equal(ys[y], again[y]) for y in self.subject.outputs):
            raise DataError(
                "the model draws random numbers, so differences are meaningless; export it in evaluation mode, "
                "without random nodes"
            )


class _Values:
    """The arrays of inputs and weights by name; weights are loaded on access."""

    def __init__(self, model: ir.Model, feeds: Feeds) -> None:
        self._stored, self._feeds = model.graph.initializers, feeds

    def __contains__(self, name: str) -> bool:
        return name in self._feeds or name in self._stored

    def __getitem__(self, name: str) -> Array:
        weight = self._stored[name].const_value if name not in self._feeds else None
        return self._feeds[name] if weight is None else weight.numpy()


@dataclass(frozen=True)
class _Slope:
    """The derivative along a random direction, computed from the gradient, for comparison with differences.

    Attributes:
        shape: the shape of the gradient.
        direction: the direction; None if the gradient's shape differs from the tensor's.
        analytic: the derivative: the sum of the products of direction and gradient.
        size: the sum of the absolute values of these products.
        noise: a bound of the rounding errors of ``analytic``.
    """

    shape: tuple[int, ...]
    direction: Direction | None = None
    analytic: float = math.nan
    size: float = math.nan
    noise: float = math.nan


@dataclass(frozen=True)
class _Gradients:
    """A runner of the gradient model, which measures rounding errors by running it with perturbed cotangents, too.

    Attributes:
        names: the names of the tensors, by the name of the output that is their gradient.
        run: runs the gradient model.
        cotangents: the weights of the outputs, by the name of the cotangent input.
        nudged: the weights, slightly perturbed.
        seed: the seed of the directions.
    """

    names: Mapping[str, str]
    run: Run
    cotangents: Feeds
    nudged: Feeds
    seed: int

    def at(self, feeds: Feeds, values: Mapping[str, Array] | _Values) -> dict[str, _Slope]:
        """Return the slope of each tensor in ``values``; each gradient is freed as soon as its slope is computed."""
        found: dict[str, _Slope] = {}
        for name, gradient in self._stream(feeds, self.cotangents):
            if name not in values:
                continue
            rng = np.random.default_rng([self.seed, *name.encode()])
            found[name] = _slope(gradient, values[name], rng)
            del gradient
        for name, gradient in self._stream(feeds, self.nudged):
            slope = found.get(name)
            if slope is not None and slope.direction is not None:
                redrawn, _ = slope.direction.sums(gradient)
                found[name] = dataclasses.replace(slope, noise=ROUNDING * abs(redrawn - slope.analytic))
            del gradient
        return found

    def _stream(self, feeds: Feeds, cotangents: Feeds) -> Iterator[tuple[str, Array]]:
        for output, gradient in self.run.stream({**feeds, **cotangents}):
            if (name := self.names.get(output)) is not None:
                yield name, gradient
            del gradient


def _slope(gradient: Array, x: Array, rng: np.random.Generator) -> _Slope:
    if gradient.shape != x.shape:
        return _Slope(gradient.shape)
    direction = Direction.drawn(x, gradient, rng)
    total, size = direction.sums(gradient)
    for _ in range(_DRAWS - 1):
        if not abs(total) < size / 4:
            break
        direction = Direction.drawn(x, gradient, rng)
        total, size = direction.sums(gradient)
    return _Slope(gradient.shape, direction, total, size)


def _gradient_names(gradient: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Map gradient outputs to the names of their tensors; ``vjp`` appends gradients in the order of ``names``."""
    outputs = gradient.graph.outputs[-len(names) :]
    return {output.name or "": name for output, name in zip(outputs, names, strict=True)}


def _cotangents(model: ir.Model, gradient: ir.Model) -> list[str]:
    """Return the names of the inputs that ``vjp`` added to ``model``."""
    before = {i.name for i in model.graph.inputs}
    return [i.name or "" for i in gradient.graph.inputs if i.name not in before]


def _weighings(model: ir.Model, gradient: ir.Model, weights: Feeds, rng: np.random.Generator) -> tuple[Feeds, Feeds]:
    """Return the cotangents ``weights`` by the names of the inputs that ``vjp`` added, and a perturbed copy."""
    added = _cotangents(model, gradient)
    moved = [w * (1 + NUDGE * rounding(w.dtype) * rng.choice([-1, 1], w.shape)) for w in weights.values()]
    nudged = [np.asarray(m, w.dtype) for m, w in zip(moved, weights.values(), strict=True)]  # a scalar stays an array
    return dict(zip(added, weights.values(), strict=True)), dict(zip(added, nudged, strict=True))


def rounding(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).eps)


@dataclass(frozen=True)
class _Point:
    """A point at which ``s = Σ ⟨wᵢ, yᵢ⟩`` is differentiated with respect to the tensor ``name`` with value ``x``.

    Attributes:
        f: runs the model.
        weights: the weights w of the outputs y.
        here: the outputs y at this point.
    """

    f: Run
    feeds: Feeds
    weights: Feeds
    name: str
    x: Array
    here: Mapping[str, Array]

    def judge(self, slope: _Slope, precision: Precision, rng: np.random.Generator) -> Judgement:
        """Return the comparison of ``slope``, the derivative from the gradient, with differences around this point."""
        direction, noise = slope.direction, slope.noise
        assert direction is not None

        def elsewhere(step: float) -> Iterator[Quotients]:
            for _ in range(3):
                yield self._quotients(Direction.drawn(self.x, None, rng), noise, step)

        return judged(slope.analytic, slope.size, lambda step: self._quotients(direction, noise, step), elsewhere,
                      precision.tolerance, precision.steps)  # fmt: skip

    def beside(self, distance: float, rng: np.random.Generator) -> _Point | None:
        """Return a random point at ``distance`` from this one, or None if the outputs are not finite there."""
        x = Direction.drawn(self.x, None, rng).moved(self.x, distance)
        feeds = {**self.feeds, self.name: x}
        here = self.f(feeds)
        finite = all(np.isfinite(here[y]).all() and here[y].shape == w.shape for y, w in self.weights.items())
        return dataclasses.replace(self, feeds=feeds, x=x, here=here) if finite else None

    def _quotients(self, direction: Direction, noise: float, step: float) -> Quotients:
        up, down = (self._outputs(direction.moved(self.x, way)) for way in (step, -step))
        spread = math.sqrt(sum(float(np.sum(np.square(w * up[y]))) for y, w in self.weights.items()))
        coarsest = max(rounding(array.dtype) for array in (self.x, *self.weights.values()))  # with outputs' dtypes
        rounded = ROUNDING * coarsest * spread / (2 * step)
        # outputs are subtracted before they are summed, to lose fewer digits
        ahead = sum(float(np.sum(w * (up[y] - self.here[y]))) for y, w in self.weights.items()) / step
        behind = sum(float(np.sum(w * (self.here[y] - down[y]))) for y, w in self.weights.items()) / step
        return Quotients(ahead, behind, noise + rounded)

    def _outputs(self, moved: Array) -> dict[str, Array]:
        outputs = self.f({**self.feeds, self.name: moved})
        return {y: array.astype(np.float64) for y, array in outputs.items() if y in self.weights}


def _checked(
    point: _Point, slope: _Slope, gradients: _Gradients, precision: Precision, rng: np.random.Generator
) -> TensorCheck:
    """Return the comparison of the gradient at ``point`` with differences; at a kink, of gradients nearby."""
    name, shape = point.name, point.x.shape
    if slope.direction is None:
        return TensorCheck(name, shape, math.nan, math.nan, math.inf, resolved=True, ok=False)
    found = point.judge(slope, precision, rng)
    kink = found.verdict == "kink"
    ok = found.verdict == "right" or (kink and found.in_between)
    seen = 0
    for distance in precision.beside if kink else ():
        other = point.beside(distance, rng)
        beside = other and other.judge(gradients.at(other.feeds, {name: other.x})[name], precision, rng)
        if beside and beside.verdict != "kink":
            found, ok, seen = beside, beside.verdict == "right", seen + 1
            if not ok or seen == _POINTS:
                break
    resolved = found.resolved and found.verdict != "kink"
    return TensorCheck(name, shape, found.analytic, found.numeric, found.error, resolved, ok, kink)
