"""Conversion of a gradient rule's test cases to one-operator models, and checks of these by central differences."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser

from gradgraph.graph.shapes import IR_VERSION, OPSET, emitted
from gradgraph.rules.composites.table import COMPOSITES
from gradgraph.rules.registry import Case, Draw, Point, Rule
from gradgraph.transforms import vjp
from gradgraph.verify.gradcheck import Finding, directional, inner
from gradgraph.verify.reference import Oracle

TOLERANCE = 1e-6
Unknown = bool | Literal["even", "odd"]  # which axes of inputs are symbolic: all (True), none (False), or every other


@dataclass(frozen=True)
class Trial:
    """A one-operator model with its feeds, and the gradients to check.

    Attributes:
        model: the model.
        feeds: its inputs by name.
        wrt: the inputs whose gradients are computed.
        read: the outputs that are differentiated.
    """

    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    wrt: list[str]
    read: list[str]


def draw(spec: Draw, rng: np.random.Generator) -> np.ndarray:
    size = int(np.prod(spec.shape))
    if spec.kind == "real":
        return np.asarray(rng.uniform(spec.low, spec.high, spec.shape) * rng.choice([-1.0, 1.0], spec.shape))
    if spec.kind == "uniform":
        return rng.uniform(spec.low, spec.high, spec.shape)
    if spec.kind == "distinct":
        return (rng.permutation(size) - size / 2 + rng.uniform(0.1, 0.9, size) * 0.5).reshape(spec.shape) * 0.1
    if spec.kind == "integers":
        return rng.integers(int(spec.low), int(spec.high), spec.shape, dtype=np.int64)
    return rng.integers(0, 2, spec.shape).astype(bool)


def trial(
    rule: Rule,
    case: Case,
    *,
    unknown: Unknown = False,
    fed: bool = False,
    dtype: type[np.floating[Any]] = np.float64,
    seed: int = 0,
) -> Trial:
    """Return the one-operator model and the random feeds of one case.

    Args:
        unknown: make all axes of the inputs symbolic, or only those whose index plus the index of the input is
            ``"even"`` or ``"odd"``. Ranks are known.
        fed: make literals run-time inputs instead of initializers.
        dtype: the element type of every floating-point tensor.
        seed: the seed of the random numbers.
    """
    rng = np.random.default_rng([seed, zlib.crc32(rule.op_type.encode())])
    feeds, initializers, inputs, names, wrt = {}, [], [], [], []
    for i, spec in enumerate(case.inputs):
        if spec is None:
            names.append("")
            continue
        name = f"x{i}"
        names.append(name)
        random = isinstance(spec, Draw)
        # inputs that ONNX allows in float32 only stay float32, such as Resize's scales; but not Celu's only input
        single = i > 0 and _type_of(rule, i) == "tensor(float)"
        array = np.asarray(draw(spec, rng) if isinstance(spec, Draw) else spec)
        if not random and array.size == 0 and "int" in _type_of(rule, i):  # an empty list has no type
            array = array.astype(np.int64)
        elif array.dtype.kind == "f":
            array = array.astype(np.float32 if single else dtype)
        if random or fed:
            feeds[name] = array
            shape = [
                f"{name}_{a}" if unknown is True or (unknown and (i + a) % 2 == (unknown == "odd")) else size
                for a, size in enumerate(array.shape)
            ]
            inputs.append(
                onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), shape)
            )
        else:
            initializers.append(onnx.numpy_helper.from_array(array, name))
        if isinstance(spec, Draw) and spec.differentiable:
            wrt.append(name)
    ys = [f"y{i}" for i in range(case.outputs)]
    nodes = (
        _parsed(case.graph, dtype)
        if case.graph
        else [onnx.helper.make_node(rule.op_type, names, ys, domain=rule.domain, name="node", **case.attrs)]
    )
    outputs = [onnx.ValueInfoProto(name=y) for y in ys]
    graph = onnx.helper.make_graph(nodes, rule.op_type, inputs, outputs, initializers)
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    if rule.domain:
        opsets.append(onnx.helper.make_opsetid(rule.domain, 1))
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    results = Oracle(model)(feeds)
    for value in model.graph.output:
        kind = onnx.helper.np_dtype_to_tensor_dtype(results[value.name].dtype)
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, None))
    floating = [y for i, y in enumerate(ys) if results[y].dtype.kind == "f" and (case.read is None or i in case.read)]
    return Trial(model, feeds, wrt, floating)


def _type_of(rule: Rule, i: int) -> str:
    """Return the type of input ``i`` in the operator's schema; "" for a composite."""
    return "" if rule.op_type in COMPOSITES else emitted(rule.op_type, rule.domain).input_type(i)


def _parsed(text: str, dtype: type[np.floating[Any]]) -> Sequence[onnx.NodeProto]:
    """Return the nodes of a case in ONNX's text form, with the floating-point type ``dtype`` for ``real``."""
    name = {np.float64: "double", np.float32: "float", np.float16: "float16"}[dtype]
    if dtype is np.float16:  # the text form writes float16 numbers as bits
        text = re.sub(r"real(\[1\])? \{([^}]+)\}", lambda m: f"real{m[1] or ''} {{{_bits(float(m[2]))}}}", text)
    typed = re.sub(r"\breal\b", name, text)
    nodes: Sequence[onnx.NodeProto] = onnx.parser.parse_graph(f"g () => () {{ {typed} }}").node
    return nodes


def _bits(number: float) -> int:
    """Return the bits of ``number`` as float16; numbers out of range, such as -1e30 in masks, are clipped."""
    limits = np.finfo(np.float16)
    return int(np.float16(np.clip(number, limits.min, limits.max)).view(np.uint16))


def check_first_order(t: Trial, seed: int = 0) -> list[Finding]:
    """Return, for each differentiable input, the comparison of its gradient with central differences.

    With random cotangents c and a random direction u, ⟨u, Jᵀc⟩ is compared with the central difference of ⟨c, f⟩.
    """
    rng = np.random.default_rng(seed)
    f, g = Oracle(t.model), Oracle(_vjp(t.model, t.read, t.wrt))
    cotangents = _cotangents(t, rng)
    results = g({**t.feeds, **cotangents})
    # the last outputs, in order: at second order the names "x0.grad" are taken
    gradients = dict(zip(t.wrt, list(results.values())[-len(t.wrt) :], strict=True))

    def value(feeds: Any) -> float:
        ys = f(feeds)
        return inner(list(cotangents.values()), [ys[y] for y in t.read])

    return directional(value, t.feeds, gradients, rng)


def second_order(t: Trial, seed: int = 0) -> Trial:
    """Return a trial of the gradient of ``t``: its model maps inputs and cotangents to gradients."""
    rng = np.random.default_rng(seed)
    cotangents = _cotangents(t, rng)
    model = _vjp(t.model, t.read, t.wrt)
    return Trial(model, {**t.feeds, **cotangents}, [*t.wrt, *cotangents], [f"{x}.grad" for x in t.wrt])


def _cotangents(t: Trial, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a random cotangent for each output in ``t.read``, by the name of the input that ``vjp`` adds for it."""
    ys = Oracle(t.model)(t.feeds)
    return {f"{y}.cotangent": np.asarray(rng.uniform(-1, 1, ys[y].shape), ys[y].dtype) for y in t.read}


def _vjp(model: onnx.ModelProto, outputs: list[str], wrt: list[str]) -> onnx.ModelProto:
    result = vjp(model, outputs=outputs, wrt=wrt, allow_unused=True)
    assert isinstance(result, onnx.ModelProto)
    return result


def run_gradient(
    t: Trial, run: Callable[[onnx.ModelProto, dict[str, np.ndarray]], Sequence[Any]], seed: int = 0
) -> list[np.ndarray]:
    """Return the gradients computed by ``run(model, feeds)`` for one random cotangent, in the order of ``t.wrt``."""
    cotangents = _cotangents(t, np.random.default_rng(seed))
    return [np.asarray(g) for g in run(_vjp(t.model, t.read, t.wrt), {**t.feeds, **cotangents})[-len(t.wrt) :]]


def check_point(rule: Rule, p: Point) -> list[str]:
    """Return one sentence per difference between the computed and the expected gradients of a point.

    Shapes are known, then unknown.
    """
    return [w for unknown in (False, True) for w in _check_point(trial(rule, p.case, fed=True, unknown=unknown), p)]


def _check_point(t: Trial, p: Point) -> list[str]:
    wrt = [f"x{i}" for i, expected in enumerate(p.gives) if expected is not None]
    ys = Oracle(t.model)(t.feeds)
    g = Oracle(_vjp(t.model, t.read, wrt))
    results = g({**t.feeds, **{f"{y}.cotangent": np.ones_like(ys[y]) for y in t.read}})
    wrong = []
    for i, expected in enumerate(p.gives):
        if expected is None:
            continue
        got = results[f"x{i}.grad"]
        if not np.allclose(got, np.asarray(expected, float), rtol=1e-9, atol=1e-12, equal_nan=True):
            wrong.append(f"input {i}: {got}; expected {expected}")
    return wrong
