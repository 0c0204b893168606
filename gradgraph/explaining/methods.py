"""The methods of ``gg.explain``: attributions of a score to inputs, as compositions of calls, gradients and averages.

Each method is a function of a ``Subject`` and its options. It returns named results, attributions first.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, TEXT, WHOLE, Table, described, number, one_of, whole
from gradgraph.autodiff.attention_weights import probabilities_of
from gradgraph.autodiff.calls import Call, Points, looped
from gradgraph.autodiff.reverse import Override
from gradgraph.autodiff.site_values import Baseline, check_entries
from gradgraph.building.pgd import KINDS
from gradgraph.errors import BuildError, shown, suggestion
from gradgraph.explaining.points import RULES, Around, Between, Line, quadrature, reduced
from gradgraph.explaining.subject import Named, Subject
from gradgraph.graph.builder import Var
from gradgraph.graph.shapes import as_dims
from gradgraph.rivals import entries
from gradgraph.rules.registry import rule_of

Results = list[Named]
_KINDS = {
    **KINDS, **dict.fromkeys(("absolute", "exact", "relu", "targeted"), FLAG),
    "layer": TEXT.or_none(), "overshoot": number(0), "position": WHOLE, "resize": FLAG.or_none(),
    "rule": one_of(RULES), "seed": whole(0),
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A method of ``explain``.

    Attributes:
        name: the name.
        paper: the paper that defines it.
        write: writes its nodes: ``write(subject, **options)`` returns the results.
        chunks: whether it averages over points, so that ``chunk`` applies.
        smooth: whether it uses gradients.
    """

    name: str
    paper: str
    write: Callable[..., Results]
    chunks: bool = False
    smooth: bool = True

    @property
    def options(self) -> list[str]:
        """The names of its options."""
        return list(inspect.signature(self.write).parameters)[1:]

    def check(self, given: Mapping[str, Any], chunk: int) -> None:
        """Raise an error for an option that the method does not have, or whose value is of the wrong kind."""
        for name, value in given.items():
            if name not in self.options:
                known = suggestion(name, self.options) or "; it has none"
                raise BuildError(f"the method {self.name} has no option '{shown(name)}'{known}")
            if name in _KINDS:
                _KINDS[name].check(name, value)
        for name in given:
            if given.get("exact") and name in ("n", "seed"):
                raise BuildError(f"exact Shapley values use all orders, so {name} has no effect; remove it")
        if "random_start" in self.options and given.get("seed") and not given.get("random_start"):
            raise BuildError("seed selects the random start; pass random_start=True, or remove seed")
        if chunk > 1 and not self.chunks:
            raise BuildError(f"the method {self.name} does not average over points, so chunk has no effect; remove it")


METHODS: Table[Method] = Table("method", entries.EXPLANATIONS)


def method(name: str, paper: str, **facts: bool) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Return a decorator that registers a method."""

    def register(write: Callable[..., Results]) -> Callable[..., Results]:
        METHODS.add(name, Method(name, paper, write, **facts))
        return write

    return register


# --- gradients ------------------------------------------------------------------------------------------------


@method("gradient", "Simonyan et al. 2013, arXiv:1312.6034")
def gradient(s: Subject, absolute: bool = False) -> Results:
    """The gradient ∂S/∂x; with ``absolute``, its magnitude."""
    found = s.gradients(s.first)
    return s.attributions({x: s.op.Abs(g) if absolute else g for x, g in found.items()})


@method("input-x-gradient", "Shrikumar et al. 2016, arXiv:1605.01713")
def input_x_gradient(s: Subject) -> Results:
    """The gradient times the input: x · ∂S/∂x."""
    return s.attributions({x: s.x[x] * g for x, g in s.gradients(s.first).items()})


@method("integrated-gradients", "Sundararajan et al. 2017, arXiv:1703.01365", chunks=True)
def integrated_gradients(s: Subject, n: int = 50, baseline: Baseline = 0.0, rule: str = "gausslegendre") -> Results:
    """The difference (x − b) times the mean of ∂S/∂x on the line from b to x.

    Also returns the error of completeness, Σ attributions − (S(x) − S(b)).
    """
    base = s.baselines(baseline)
    at, weights = quadrature(rule, n)
    slopes = s.averaged(Line(s.net, base, at), weights)
    found = {x: (s.x[x] - b) * slopes[x] for x, b in base.items()}
    return [*s.attributions(found), _completeness(s, found, base)]


@method("expected-gradients", "Erion et al. 2021, arXiv:1906.10670 (GradientSHAP)", chunks=True)
def expected_gradients(s: Subject, baselines: Any = None, n: int = 50, seed: int = 0) -> Results:
    """The mean of (x − b) · ∂S/∂x at random positions between x and random rows b of ``baselines`` [m, …]."""
    if baselines is None:
        raise BuildError("expected-gradients needs baselines=: an array of samples, or 'input' for an input of them")
    if isinstance(baselines, Mapping):
        inputs = [x.name or "" for x in s.net.graph.inputs]
        check_entries(baselines, list(s.names.values()), "argument baselines", inputs)
    points = Between(s.net, {x: _background(s, baselines, x, name) for x, name in s.names.items()}, seed, n)
    return s.attributions(s.averaged(points, np.full(n, 1 / n), points.differences))


@method("smoothgrad", "Smilkov et al. 2017, arXiv:1706.03825", chunks=True)
def smoothgrad(s: Subject, n: int = 50, noise: Baseline | None = None, seed: int = 0) -> Results:
    """The mean of ∂S/∂x under normal noise; by default with a standard deviation of 15 % of each sample's range."""
    if noise is None:
        scale = {x: _range(s, v) * 0.15 for x, v in s.x.items()}
    else:
        scale = s.baselines(noise, "noise")
    return s.attributions(s.averaged(Around(s.net, scale, seed, n), np.full(n, 1 / n)))


@method("guided-backpropagation", "Springenberg et al. 2014, arXiv:1412.6806")
def guided_backpropagation(s: Subject) -> Results:
    """The gradient ∂S/∂x, where each Relu only passes positive gradients back."""
    relus = [node for node in s.nodes() if node.op_type == "Relu"]
    if not relus:
        raise BuildError("guided-backpropagation needs Relu layers, and the model has none; use method='gradient'")

    def overrides(call: Call) -> Mapping[ir.Node, Override]:
        return {_copy(call, node): _bound(_guided, s, call, node) for node in relus}

    return s.attributions(s.gradients(s.first, overrides=overrides))


def _guided(s: Subject, call: Call, node: ir.Node, dys: Sequence[Var | None]) -> Sequence[Var | None]:
    return _by_rule(s, _copy(call, node), [None if dy is None else s.op.Relu(dy) for dy in dys])


@method("deeplift", "Shrikumar et al. 2017, arXiv:1704.02685 (rescale rule)")
def deeplift(s: Subject, baseline: Baseline = 0.0) -> Results:
    """(x − b) times ∂S/∂x, with slopes Δy/Δx in place of the derivatives of activations and MaxPool."""
    base = s.baselines(baseline)
    other = s.net.call(base)
    inner = [node for node in s.nodes() if node.op_type in (*_ACTIVATIONS, "MaxPool") and not node.domain]

    def overrides(call: Call) -> Mapping[ir.Node, Override]:
        rules = {}
        for node in inner:
            rule = _pool_slopes if node.op_type == "MaxPool" else _slopes
            rules[_copy(call, node)] = _bound(rule, s, call, other, node)
        return rules

    found = {x: (s.x[x] - base[x]) * g for x, g in s.gradients(s.first, overrides=overrides).items()}
    return [*s.attributions(found), _completeness(s, found, base)]


_ACTIVATIONS = frozenset(("Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu",
                          "Selu", "Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu"))  # fmt: skip
_TINY = 1e-10  # inputs nearer to their reference than this get the gradient instead of a quotient, as in captum
_TINY_HALF = 1e-4  # the same in float16, whose smallest number is 6e-8


def _slopes(s: Subject, call: Call, other: Call, node: ir.Node, dys: Sequence[Var | None]) -> list[Var | None]:
    x, y, dy = node.inputs[0], node.outputs[0], dys[0]
    assert x is not None and dy is not None
    din, dout = call[x] - other[x], call[y] - other[y]
    near = _is_near(s, din)
    plain = _by_rule(s, _copy(call, node), dys)[0]
    return [s.op.Where(near, plain, dy * dout / s.op.Where(near, 1.0, din))]


def _is_near(s: Subject, difference: Var) -> Var:
    return s.op.Abs(difference) < (_TINY_HALF if difference.dtype == ir.DataType.FLOAT16 else _TINY)


def _pool_slopes(s: Subject, call: Call, other: Call, node: ir.Node, dys: Sequence[Var | None]) -> list[Var | None]:
    x, y, dy = node.inputs[0], node.outputs[0], dys[0]
    assert x is not None and dy is not None
    din, top = call[x] - other[x], s.op.Max(call[y], other[y])
    here = _by_rule(s, _copy(call, node), [dy * (top - other[y])])[0]
    there = _by_rule(s, _copy(other, node), [dy * (call[y] - top)])[0]
    assert here is not None and there is not None
    near = _is_near(s, din)
    return [s.op.Where(near, _by_rule(s, _copy(call, node), dys)[0], (here + there) / s.op.Where(near, 1.0, din))]


# --- layers ---------------------------------------------------------------------------------------------------


@method("grad-cam", "Selvaraju et al. 2017, arXiv:1610.02391")
def grad_cam(s: Subject, layer: str | None = None, relu: bool = True, resize: bool | None = None) -> Results:
    """The sum over the channels of a layer, each weighted by its mean gradient: a map [batch, 1, …].

    By default, it is resized to the input if the input has the same axes, as in pictures.
    """
    found, a, g = _feature_map(s, layer, "grad-cam")
    weights = s.op.ReduceMean(g, np.arange(2, g.rank), keepdims=1) if g.rank > 2 else g
    return _map(s, found, weights * a, relu, resize)


@method("grad-cam-plus-plus", "Chattopadhay et al. 2018, arXiv:1710.11063")
def grad_cam_plus_plus(s: Subject, layer: str | None = None, relu: bool = True, resize: bool | None = None) -> Results:
    """As grad-cam, where each position of a channel has its own weight α = g² / (2g² + g³ Σ a)."""
    op = s.op
    found, a, g = _feature_map(s, layer, "grad-cam-plus-plus")
    space, square = np.arange(2, g.rank), g * g
    below = square * 2.0 + op.ReduceSum(a, space, keepdims=1) * square * g
    alpha = op.Where(op.Equal(below, 0.0), 0.0, square / op.Where(op.Equal(below, 0.0), 1.0, below))
    return _map(s, found, op.ReduceSum(alpha * op.Relu(g), space, keepdims=1) * a, relu, resize)


def _feature_map(s: Subject, layer: str | None, name: str) -> tuple[ir.Value, Var, Var]:
    found = s.layer(layer, name)
    value = s.first[found]
    if value.rank < 3:
        raise BuildError(
            f"{name} needs a layer with channels and spatial axes, but '{shown(found.name)}' has shape "
            f"{list(value.shape or ())}; choose another layer"
        )
    return found, value, s.gradients(s.first, wrt=[found])[found]


def _map(s: Subject, layer: ir.Value, weighted: Var, relu: bool, resize: bool | None) -> Results:
    op = s.op
    found = op.ReduceSum(weighted, [1], keepdims=1)
    found = op.Relu(found) if relu else found
    x = next((x for x in s.x if layer in s.maps([x])), None)
    if x is None and resize:
        raise BuildError(f"no input has the axes of '{shown(layer.name)}', so its map has another size; remove resize")
    if x is not None and resize is not False:
        sizes = op.Concat(op.dims(found, 0, 2), op.dims(s.x[x], 2), axis=0)
        found = op.Resize(found, None, None, sizes, mode="linear", coordinate_transformation_mode="half_pixel")
    return [(f"{s.names[x or next(iter(s.x))]}.attribution", found)]


@method("layer-conductance", "Dhamdhere et al. 2018, arXiv:1805.12233")
def layer_conductance(
    s: Subject, layer: str | None = None, n: int = 50, baseline: Baseline = 0.0, rule: str = "riemann_trapezoid"
) -> Results:
    """The sum of ∂S/∂h · Δh on the line from b to x, for a layer h; its output is called ``<layer>.attribution``.

    The rule places n + 1 points; the gradient is that at the start of each interval, as in captum.
    """
    op, base = s.op, s.baselines(baseline)
    h = s.layer(layer, "layer-conductance")
    points = Line(s.net, base, quadrature(rule, n + 1)[0])

    def evaluate(where: Points, rows: int) -> list[Var]:
        call = s.net.call(where, rows)
        return [call[h], s.gradients(call, rows, wrt=[h])[h]]

    values, slopes = reduced(s.net, points, evaluate, None, [None, None], s.unroll)
    changes = op.Slice(values, [1], [n + 1], [0]) - op.Slice(values, [0], [n], [0])
    return [(f"{h.name}.attribution", op.ReduceSum(op.Slice(slopes, [0], [n], [0]) * changes, [0], keepdims=0))]


@method("attention-rollout", "Abnar and Zuidema 2020, arXiv:2005.00928", smooth=False)
def attention_rollout(s: Subject, position: int = 0) -> Results:
    """The product over layers of (A + I) / 2, with A the mean over heads: how position ``position`` reads each token.

    Position 0 is the class token of BERT and ViT, position -1 the last token of a decoder.
    """
    op = s.op
    found = [y for y in probabilities_of(list(s.nodes())) if len(op.wrap(y).shape or ()) == 4]
    if not found:
        raise BuildError("attention-rollout needs attention with probabilities [batch, heads, tokens, tokens], and the "
                         "model has none; use method='integrated-gradients'")  # fmt: skip
    total: Var | None = None
    for y in found:
        a = op.ReduceMean(s.first[y], [1], keepdims=0)
        places = op.Range(0, op.Squeeze(op.dim(a, 2), [0]), 1)
        same = op.cast(op.Equal(op.Unsqueeze(places, [1]), places), a.dtype)
        step = (a + same) * 0.5
        step = step / op.ReduceSum(step, [-1], keepdims=1)
        total = step if total is None else op.MatMul(step, total)
    assert total is not None
    name = next(iter(s.names.values()))
    return [(f"{name}.attribution", op.Gather(total, op.const(np.int64(position)), axis=1))]


# --- without gradients ------------------------------------------------------------------------------------------


@method("occlusion", "Zeiler and Fergus 2014, arXiv:1311.2901", smooth=False)
def occlusion(s: Subject, window: Any = None, stride: Any = None, baseline: Baseline = 0.0) -> Results:
    """The change of S when a window of x is replaced by the baseline, averaged over the windows of each element.

    ``window`` and ``stride`` have one size for each axis after the first. By default, a window covers all channels and
    an eighth of each spatial axis (for vectors, one element), and windows do not overlap.
    """
    base = s.baselines(baseline)
    return s.attributions({x: _occluded(s, x, base[x], window, stride) for x in s.x})


def _occluded(s: Subject, x: ir.Value, base: Var, window: Any, stride: Any) -> Var:
    op, here, whole = s.op, s.x[x], s.score(s.first)
    sizes = _fixed_sizes(s, x, "occlusion")
    if not sizes:
        raise BuildError(
            f"occlusion needs windows, but '{shown(s.names[x])}' is one number per sample; choose other inputs"
        )
    extents = _per_axis(window, _default_window(x, sizes), "window")
    strides = _per_axis(stride, extents, "stride")
    if any(step > extent for step, extent in zip(strides, extents, strict=True)):
        raise BuildError(f"stride {strides} is larger than window {extents}, so some elements would be skipped")
    counts = [math.ceil(max(d - w, 0) / t) + 1 for d, w, t in zip(sizes, extents, strides, strict=True)]
    starts = np.array(list(itertools.product(*map(range, counts)))) * np.array(strides)

    def body(rows: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
        mask = _window(s, rows[0], sizes, extents)
        change = whole - s.score(s.net.call({**s.x, x: op.Where(mask, base, here)}))
        weight = op.cast(mask, here.dtype)
        spread = op.Reshape(change, [-1, *[1] * len(sizes)]) * weight
        return [op.like(states[0] + spread, here), states[1] + weight], []

    begin = [op.zeros_like(here), op.const(np.zeros(sizes, here.dtype.numpy()))]
    (total, weights), _ = looped(op, [starts], begin, body, s.unroll)
    return total / weights


@method("shapley", "Castro et al. 2009, doi:10.1016/j.cor.2008.04.004", smooth=False)
def shapley(s: Subject, features: Any = None, n: int = 25, baseline: Baseline = 0.0, seed: int = 0,
            exact: bool = False) -> Results:  # fmt: skip
    """The mean change of S when a feature is added to random sets of others, over ``n`` random orders of all features.

    ``features`` numbers the features of one sample, in its shape; elements with the same number are one feature. With
    ``exact``, all orders are used.
    """
    op = s.op
    if len(s.x) > 1:
        raise BuildError(f"shapley needs one input, and the model has {len(s.x)}; choose one with inputs=")
    ((x, here),), base = s.x.items(), s.baselines(baseline)
    sizes = _fixed_sizes(s, x, "shapley")
    groups = _groups(features, sizes)
    count = int(groups.max()) + 1
    if exact and count > 8:
        raise BuildError(
            f"exact Shapley values of {count} features need {count}! orders; use exact=False, or at most 8 features"
        )
    generator = np.random.default_rng(seed)
    orders = list(itertools.permutations(range(count))) if exact else [generator.permutation(count) for _ in range(n)]
    flat = np.array(orders, np.int64).reshape(-1)
    fresh = np.tile(np.arange(count) == 0, len(orders))
    numbers, empty = op.const(groups), s.score(s.net.call(base))

    def body(rows: list[Var], states: list[Var]) -> tuple[list[Var], list[Var]]:
        (feature, restarts), (point, before, total) = rows, states
        mask = op.Equal(numbers, feature)
        point = op.Where(mask, here, op.Where(restarts, base[x], point))
        now = s.score(s.net.call({x: point}))
        change = op.Reshape(now - op.Where(restarts, empty, before), [-1, *[1] * len(sizes)])
        return [op.like(point, here), now, op.like(total + change * op.cast(mask, here.dtype), here)], []

    (_, _, total), _ = looped(op, [flat, fresh], [base[x], empty, op.zeros_like(here)], body, s.unroll)
    return s.attributions({x: total / float(len(orders))})


# --- parts ----------------------------------------------------------------------------------------------------


def _bound(rule: Callable[..., Sequence[Var | None]], *given: Any) -> Override:
    return lambda dys: rule(*given, dys)


def _copy(call: Call, node: ir.Node) -> ir.Node:
    made = call[node.outputs[0]].value.producer()
    assert made is not None
    return made


def _by_rule(s: Subject, node: ir.Node, dys: Sequence[Var | None]) -> Sequence[Var | None]:
    rule = rule_of(node)
    assert rule is not None
    return rule(s.op, node, dys, None)


def _completeness(s: Subject, found: Mapping[ir.Value, Var], base: Points) -> Named:
    return "completeness.error", s.sum_of_rows(found) - (s.score(s.first) - s.score(s.net.call(base)))


def _range(s: Subject, x: Var) -> Var:
    axes = np.arange(1, x.rank)
    if not len(axes):
        raise BuildError("smoothgrad needs noise= for an input of one number per sample, which has no range")
    return s.op.ReduceMax(x, axes, keepdims=1) - s.op.ReduceMin(x, axes, keepdims=1)


def _background(s: Subject, given: Any, x: ir.Value, name: str) -> Var:
    given = given.get(name) if isinstance(given, Mapping) else given
    shape = None if x.shape is None else as_dims(x.shape)[1:]
    if isinstance(given, str) and given == "input":
        dims = None if shape is None else ir.Shape(["baselines", *shape])
        value = ir.Value(name=s.op.fresh(f"{name}.baselines"), type=x.type, shape=dims)
        s.net.graph.inputs.append(value)
        return s.op.wrap(value)
    try:
        array = np.asarray(given, s.op.wrap(x).dtype.numpy())
    except (TypeError, ValueError):
        raise BuildError(f"baselines is {described(given)}; pass an array of samples, or 'input'") from None
    if shape is not None and (array.ndim != len(shape) + 1 or any(
            isinstance(d, int) and d != e for d, e in zip(shape, array.shape[1:], strict=True))):  # fmt: skip
        raise BuildError(
            f"the baselines of '{shown(name)}' have shape {list(array.shape)}; pass rows of shape {list(shape)}"
        )
    if not len(array):
        raise BuildError(f"the baselines of '{shown(name)}' have no rows; pass at least one")
    return s.op.const(array)


def _fixed_sizes(s: Subject, x: ir.Value, name: str) -> list[int]:
    shape = s.op.wrap(x).shape
    if shape is None or any(not isinstance(d, int) for d in shape[1:]):
        raise BuildError(f"{name} needs fixed sizes after the first axis, but '{shown(s.names[x])}' has shape "
                         f"{None if shape is None else list(shape)}; export the model with fixed sizes")  # fmt: skip
    return [d for d in shape[1:] if isinstance(d, int)]


def _default_window(x: ir.Value, sizes: Sequence[int]) -> list[int]:
    if x.producer() is not None:  # rows of an embedding
        return [*[1] * (len(sizes) - 1), sizes[-1]]
    return [1] if len(sizes) == 1 else [sizes[0], *(max(1, d // 8) for d in sizes[1:])]


def _per_axis(given: Any, default: Sequence[int], word: str) -> list[int]:
    if given is None:
        return list(default)
    found: list[Any] = (
        list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * len(default)
    )
    if len(found) != len(default) or any(not isinstance(d, int) or d < 1 for d in found):
        raise BuildError(
            f"{word} is {described(given)}; pass a size above zero for each of the {len(default)} axes after the first"
        )
    return found


def _window(s: Subject, start: Var, sizes: Sequence[int], extents: Sequence[int]) -> Var:
    """Return a mask of shape ``sizes`` that is true in the window at ``start``."""
    op, mask = s.op, None
    for axis, (size, extent) in enumerate(zip(sizes, extents, strict=True)):
        places = op.const(np.arange(size).reshape(-1, *[1] * (len(sizes) - axis - 1)))
        begin = op.Gather(start, op.const(np.int64(axis)))
        inside = (places >= begin) & (places < begin + extent)
        mask = inside if mask is None else mask & inside
    assert mask is not None
    return mask


def _groups(features: Any, sizes: Sequence[int]) -> np.ndarray:
    if features is None:
        return np.arange(math.prod(sizes)).reshape(sizes)
    groups = np.asarray(features)
    if groups.shape != tuple(sizes) or groups.dtype.kind not in "iu" or groups.min() < 0:
        raise BuildError(
            f"features is {described(features)}; pass whole numbers from 0 in the shape of a sample, {list(sizes)}"
        )
    return groups.astype(np.int64)
