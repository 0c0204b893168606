"""One node test: ``gg.vjp`` and ``gg.jvp`` against central differences, and in onnxruntime against themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import gradgraph as gg
from gradgraph.errors import UnsupportedOperatorError
from gradgraph.passes.normal import normalise
from gradgraph.verify.reference import Oracle, in_float64
from tests.conformance.exceptions import IN_NORMAL_FORM, NOT_IN_ONNXRUNTIME, listed
from tests.conformance.node_cases import Array, NodeCase, Value, each, is_floating

TOLERANCE = 1e-6
STEP = 3e-6
NUDGES = (1e-3, 3e-2)
BEND = 1e-2  # curvature times step that a smooth function stays below; at a kink it is the jump of the slope

Feeds = Mapping[str, Value]


# --- central differences -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slope:
    """The derivative of ``Σ ⟨cotangent, output⟩`` along ``direction`` from one input."""

    name: str
    direction: list[Array]
    numeric: float


class NotCleanError(Exception):
    """Central differences do not tell the derivative; the message says what they show."""


@dataclass(frozen=True)
class Truth:
    """A case and what central differences say about it.

    Attributes:
        cotangents: of the floating outputs.
        slopes: one per differentiable input.
    """

    case: NodeCase
    cotangents: dict[str, Value]
    slopes: list[Slope]


def truth(case: NodeCase) -> Truth:
    """Central differences at the data of the case, or, where these lie on a kink, beside them.

    Raises:
        NotCleanError: no derivative can be measured there.
    """
    reasons = []
    for place in (case, *map(case.nudged, NUDGES)):
        try:
            return measured(place)
        except NotCleanError as reason:
            reasons.append(str(reason))
    raise NotCleanError("; beside its data: ".join(reasons))


def measured(case: NodeCase, as_given: bool = False) -> Truth:
    """Central differences at the data of the case, in the model ``as_given`` even if the reference falls short."""
    rng = np.random.default_rng(0)
    read = [o.name for o in case.model.graph.output if is_floating(o)]
    try:
        f = Oracle(in_float64(case.model if as_given else _forward(case)))
        ys, again = f(case.feeds), f(case.feeds)  # type: ignore[arg-type]
    except Exception as error:
        raise NotCleanError(f"the reference evaluator: {type(error).__name__}: {error}") from error
    cotangents = {y: each(lambda a: rng.uniform(-1, 1, np.shape(a)), _value(ys[y])) for y in read}
    for y in read:
        if not all(np.isfinite(a).all() for a in leaves(_value(ys[y]))):
            raise NotCleanError("the output is not finite")
        if not all(np.array_equal(a, b) for a, b in zip(leaves(ys[y]), leaves(again[y]), strict=True)):
            raise NotCleanError("the output is random")
    if not any(a.size for y in read for a in leaves(ys[y])):
        raise NotCleanError("the output is empty")

    def total(feeds: Feeds) -> list[float]:
        results = f(feeds)  # type: ignore[arg-type]
        return [inner(cotangents[y], results[y]) for y in read]

    return Truth(case, cotangents, [_slope(total, case.feeds, name, rng) for name in case.wrt])


def _forward(case: NodeCase) -> onnx.ModelProto:
    """The case itself, or its normal form, whose values other tests check, where the reference falls short."""
    if not listed(IN_NORMAL_FORM, case.name, case.operator):
        return case.model
    normal: onnx.ModelProto = ir.to_proto(normalise(ir.from_proto(case.model)))
    return normal


def _slope(total: Any, feeds: Feeds, name: str, rng: np.random.Generator) -> Slope:
    x = leaves(feeds[name])
    direction = [rng.uniform(0.5, 1.5, a.shape) * rng.choice([-1.0, 1.0], a.shape) for a in x]

    def at(distance: float) -> np.ndarray:
        moved = [a + distance * u for a, u in zip(x, direction, strict=True)]
        value = moved if isinstance(feeds[name], list) else moved[0]
        try:
            return np.array(total({**feeds, name: value}))
        except Exception as error:  # shapes that differ: the input decides how many elements there are
            raise NotCleanError(f"beside the data of '{name}': {error}") from error

    here, up, down, far_up, far_down = (at(k * STEP) for k in (0, 1, -1, 2, -2))
    near = float((up - down).sum()) / (2 * STEP)
    far = float((far_up - far_down).sum()) / (4 * STEP)
    scale = 1 + abs(near)
    if not abs(near - far) < TOLERANCE * scale:
        raise NotCleanError(f"central differences by '{name}' disagree: {near:.9g}, {far:.9g}")
    bend = float((up - 2 * here + down).sum()) / STEP
    if not abs(bend) < BEND * scale:
        raise NotCleanError(f"one-sided differences by '{name}' differ by {bend:.3g}: a kink")
    return Slope(name, direction, (4 * near - far) / 3)


# --- the gradient --------------------------------------------------------------------------------------------


def gradient_of(case: NodeCase, outputs: Sequence[str], unknown: bool) -> onnx.ModelProto:
    """``gg.vjp`` of the case, shapes being known or ``unknown``; ranks are known."""
    result = gg.vjp(_described(case, unknown), outputs=list(outputs), wrt=list(case.wrt), allow_unused=True)
    assert isinstance(result, onnx.ModelProto)
    return result


def _described(case: NodeCase, unknown: bool) -> onnx.ModelProto:
    """The model with the shapes of its data, or, if ``unknown``, a symbolic dimension for every axis."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for info in model.graph.input:
        _describe(info.type, case.feeds[info.name], info.name if unknown and info.name not in case.known else "")
    for info in model.graph.output:
        _forget_shape(info.type)
    return model


def _describe(kind: onnx.TypeProto, value: Value, name: str) -> None:
    """Give a tensor the shape of ``value``, or, with a ``name``, one symbolic dimension per axis."""
    if not isinstance(value, np.ndarray) or kind.WhichOneof("value") != "tensor_type":
        _forget_shape(kind)
        return
    dims = [f"{name}_{axis}" for axis in range(value.ndim)] if name else value.shape
    info = onnx.helper.make_tensor_type_proto(kind.tensor_type.elem_type, dims)
    kind.CopyFrom(info)


def _forget_shape(kind: onnx.TypeProto) -> None:
    """Of a tensor, or of those in a sequence or optional."""
    while (held := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, held).elem_type
    kind.tensor_type.ClearField("shape")


def feeds_of(gradient: onnx.ModelProto, t: Truth) -> dict[str, Value]:
    """The feeds of the case, and the cotangents under the names of the inputs that ``vjp`` has added."""
    before = {i.name for i in t.case.model.graph.input}
    added = [i.name for i in gradient.graph.input if i.name not in before]
    return {**t.case.feeds, **dict(zip(added, t.cotangents.values(), strict=True))}


def disagreements(t: Truth) -> list[str]:
    """What the gradients of a case get wrong, one sentence each.

    Raises:
        UnsupportedOperatorError: an operator has no rule yet.
    """
    found = []
    for way, unknown in (("shapes known", False), ("shapes unknown", True)):
        gradient = gradient_of(t.case, list(t.cotangents), unknown)
        feeds = feeds_of(gradient, t)
        results = Oracle(in_float64(gradient))(feeds)  # type: ignore[arg-type]
        expected = dict(zip(t.case.wrt, list(results.values())[-len(t.case.wrt) :], strict=True))
        found += [f"{way}: {sentence}" for sentence in against_differences(t, expected)]
        there = in_onnxruntime(gradient, feeds, expected)
        if listed(NOT_IN_ONNXRUNTIME, t.case.name, t.case.operator):
            there = [] if there else ["it is listed as impossible there, but agrees"]
        found += [f"{way}, onnxruntime: {sentence}" for sentence in there]
    return found + _forward_mode(t)


def _forward_mode(t: Truth) -> list[str]:
    """Does ``gg.jvp`` agree, shapes being unknown, all inputs being moved along their directions at once?"""
    outputs = list(t.cotangents)
    model = _described(t.case, unknown=True)
    pushed = gg.jvp(model, wrt=list(t.case.wrt), outputs=outputs, allow_unused=True)
    assert isinstance(pushed, onnx.ModelProto)
    added = [i.name for i in pushed.graph.input][len(model.graph.input) :]
    moves = [s.direction if isinstance(t.case.feeds[s.name], list) else s.direction[0] for s in t.slopes]
    results = Oracle(in_float64(pushed))({**t.case.feeds, **dict(zip(added, moves, strict=True))})
    tangents = list(results.values())[-len(outputs) :]
    terms = [inner(c, dy) for c, dy in zip(t.cotangents.values(), tangents, strict=True)]
    numeric = [s.numeric for s in t.slopes]
    scale = len(numeric) + sum(map(abs, terms)) + sum(map(abs, numeric))
    if abs(sum(terms) - sum(numeric)) < TOLERANCE * scale:
        return []
    return [f"forward mode gives {sum(terms):.9g} instead of {sum(numeric):.9g}"]


def against_differences(t: Truth, gradients: Mapping[str, Any]) -> list[str]:
    found = []
    for slope in t.slopes:
        g, x = leaves(gradients[slope.name]), leaves(t.case.feeds[slope.name])
        if [a.shape for a in g] != [a.shape for a in x]:
            found.append(f"{slope.name}.grad has shape {[a.shape for a in g]}, not {[a.shape for a in x]}")
            continue
        terms = [u * a for u, a in zip(slope.direction, g, strict=True)]
        analytic = float(sum(a.sum() for a in terms))
        scale = 1 + float(sum(np.abs(a).sum() for a in terms)) + abs(slope.numeric)
        if not abs(analytic - slope.numeric) < TOLERANCE * scale:
            found.append(f"{slope.name}.grad gives {analytic:.9g} instead of {slope.numeric:.9g}")
    return found


def in_onnxruntime(gradient: onnx.ModelProto, feeds: Feeds, expected: Mapping[str, Any]) -> list[str]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        model = _with_narrow_constants(gradient, feeds)
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        single = {k: each(_single, v) for k, v in feeds.items()}
        results = session.run(None, {i.name: single[i.name] for i in session.get_inputs()})[-len(expected) :]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]
    pairs = zip(expected.items(), results, strict=True)
    return [f"{name}.grad is {g}, not {e}" for (name, e), g in pairs if not _close(g, e)]


def _with_narrow_constants(model: onnx.ModelProto, feeds: Feeds) -> onnx.ModelProto:
    """The model with its inputs of 2, 4 and 8 bits that NumPy does not have as initializers: they cannot be fed."""
    narrow = {k: v for k, v in feeds.items() if isinstance(v, np.ndarray) and v.dtype.isbuiltin != 1}
    own = onnx.ModelProto()
    own.CopyFrom(model)
    del own.graph.input[:]
    own.graph.input.extend(i for i in model.graph.input if i.name not in narrow)
    own.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in narrow.items())
    return own


def _single(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _close(got: Any, expected: Any) -> bool:
    a, b = leaves(got), leaves(expected)
    return len(a) == len(b) and all(
        x.shape == y.shape
        and x.dtype == np.float32
        and np.allclose(x, y, rtol=2e-4, atol=2e-5 * max(1.0, float(np.abs(y).max(initial=0))))
        for x, y in zip(a, b, strict=True)
    )


# --- tensors, sequences and optionals --------------------------------------------------------------------


def _value(result: Any) -> Value:
    return [np.asarray(a) for a in result] if isinstance(result, list) else np.asarray(result)


def leaves(value: Any) -> list[Array]:
    """The tensors of a value."""
    if value is None:
        return []
    return [np.asarray(a) for a in value] if isinstance(value, list) else [np.asarray(value)]


def inner(a: Value, b: Any) -> float:
    pairs = zip(leaves(a), leaves(b), strict=True)
    total = 0.0
    for x, y in pairs:
        if x.shape != y.shape:
            raise ValueError(f"an output of shape {y.shape} instead of {x.shape}")
        total += float(np.sum(x * y))
    return total


def missing_rule(error: UnsupportedOperatorError) -> bool:
    return str(error).startswith("no gradient rule for")
