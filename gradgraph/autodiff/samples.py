"""Check whether an output mixes the samples of a batch, in one pass over the graph with a rule per operator.

For each value that depends on the batch, the pass records either its sample axis (possibly merged with other axes), or
that the value is a sum or a mean over the samples. Sums and means may only be added and scaled: then the value of the
batch is the sum or mean of the values of single samples, up to the weights of a mean.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from gradgraph.arguments import as_names, matching
from gradgraph.autodiff.path import Path, is_tensor, reads
from gradgraph.autodiff.select import Names
from gradgraph.errors import DifferentiationError, Remedies, UnknownNameError, shown, suggestion
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.prune import needed
from gradgraph.graph.shapes import Dim, Shape, as_dims, constant_of, is_elementwise
from gradgraph.graph.size_context import is_generated
from gradgraph.passes.normal.sizes.infer import infer_shapes

_SAMPLES = "samples"  # name of the batch dimension if the model has none
_END = 2**31 - 1  # an end of Slice from here on means the end of the axis
TOTAL = -1  # in place of a sample axis: the value is a sum or a mean over samples
Axes = Sequence[int | None]  # the sample axis of each output of a node; None if the output does not depend on samples
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class _Size:
    """A product of numeric and symbolic sizes."""

    number: int = 1
    names: tuple[str, ...] = ()  # sorted

    def __mul__(self, other: _Size) -> _Size:
        return _Size(self.number * other.number, tuple(sorted((*self.names, *other.names))))

    def over(self, other: _Size) -> _Size | None:
        """Return this size divided by ``other`` if that is an integer for any values of the symbols, else None."""
        rest = Counter(self.names)
        rest.subtract(other.names)
        if self.number % other.number or min(rest.values(), default=0) < 0:
            return None
        return _Size(self.number // other.number, tuple(sorted(rest.elements())))


def _product(dims: Sequence[Dim]) -> _Size | None:
    """Return the product of sizes (numbers, names or products such as ``2*N``); None if one is unknown."""
    total = _Size()
    for dim in dims:
        for factor in str(dim).split("*"):
            if factor.isdigit() and int(factor):
                total *= _Size(int(factor))
            elif dim is not None and _SYMBOL.fullmatch(factor) and not is_generated(factor):
                total *= _Size(1, (factor,))
            else:
                return None
    return total


@dataclass(frozen=True)
class Place:
    """The position of samples in a tensor.

    Attributes:
        axis: the axis of the samples, or ``TOTAL``.
        outer: how often the samples repeat along this axis, because earlier axes were merged with it.
        inner: the number of consecutive rows per sample along this axis, because later axes were merged with it.
    """

    axis: int
    outer: _Size = _Size()
    inner: _Size = _Size()


class Mixed(Exception):  # noqa: N818  (a reason, caught by callers)
    """An error whose message, a verb phrase with the node as subject, explains why samples are not independent."""


_UNSEEN = "may mix samples"


def batched_inputs(graph: ir.Graph, names: Names = None) -> list[ir.Value]:
    """Return the inputs with one sample per row: those that match ``names``.

    By default, return the inputs with the same symbolic first size as the first input that has one.
    """
    given = [x for x in graph.inputs if x.name not in graph.initializers]
    if names is not None:
        known = {x.name: x for x in given if x.name}
        found = {known[n]: None for p in as_names(names) for n in matching(p, list(known))}
        missing = [p for p in as_names(names) if not matching(p, list(known))]
        if missing:
            raise UnknownNameError(f"no input matches '{shown(missing[0])}'{suggestion(missing[0], list(known))}")
        return [_with_open_batch(x) for x in found]
    sizes = {x: _rows(x) for x in given if is_tensor(x)}
    first = next((size for size in sizes.values() if size is not None), None)
    found = {x: None for x, size in sizes.items() if size is not None and size == first}
    if not found:
        raise DifferentiationError(
            "no input of the model has a dynamic first axis (the batch axis)",
            remedy="export it with a dynamic batch axis, or name the inputs that hold samples in `inputs`",
            shell="export it with a dynamic batch axis",
        )
    return list(found)


def _rows(x: ir.Value) -> Dim:
    """Return the name of the first size of ``x``, ``_SAMPLES`` if it is unknown; None if it is a number."""
    size = as_dims(x.shape)[0] if x.shape is not None and len(x.shape) else 1
    return None if isinstance(size, int) else size or _SAMPLES


def _with_open_batch(x: ir.Value) -> ir.Value:
    if _rows(x) is None:
        shape = list(as_dims(x.shape)) if x.shape is not None else "unknown"
        raise DifferentiationError(
            f"input '{shown(x.name)}' has the shape {shape}, whose first axis is not symbolic; export the "
            "model with a dynamic batch axis"
        )
    return x


def name_batch(work: ir.Model, names: Names = None) -> str:
    """Use one name for the batch dimension throughout the graph, and return the name."""
    batched = batched_inputs(work.graph, names)
    rows = {_rows(x) for x in batched}
    size = next((r for r in rows if isinstance(r, str)), _SAMPLES)
    if len(rows) > 1 or any(as_dims(x.shape)[0] is None for x in batched if x.shape is not None):
        for x in batched:
            assert x.shape is not None
            x.shape = ir.Shape([size, *as_dims(x.shape)[1:]])
        infer_shapes(work)
    return size


# --- independence ---------------------------------------------------------------------------------------


def check_independent(
    graph: ir.Graph, batched: Sequence[ir.Value], target: ir.Value, path: Path, remedies: Remedies
) -> int | None:
    """Check that ``target`` has a value per sample, or is a sum or a mean over samples, without mixing samples.

    Args:
        graph: the model in normal form.
        batched: the inputs with one sample per row.
        path: the path from the differentiation variables to ``target``.
        remedies: advice of the calling transform for the error.

    Returns:
        The sample axis of ``target``, if it has one row per sample along it, else None.

    Raises:
        DifferentiationError: a node mixes samples, or may mix them; the message names the first one.
    """
    places: dict[ir.Value, Place] = dict.fromkeys(batched, Place(0))
    samples = next((str(as_dims(x.shape)[0]) for x in batched if x.shape is not None), _SAMPLES)
    nodes, _ = needed(graph, [target], lambda node: node.outputs, reads)
    for node in nodes:
        if node.op_type in ("Shape", "Size") or not any(x in places for x in reads(node)):
            continue
        try:
            found = _Node(node, places, path.reached, samples).places()
        except Mixed as reason:
            raise DifferentiationError(
                f"{describe(node)} {reason}, so the gradient of one sample may differ from its share of the batch's",
                **remedies,
            ) from None
        places.update((y, place) for y, place in zip(node.outputs, found, strict=False) if place is not None)
    end = places.get(target)
    return end.axis if end is not None and end.axis != TOTAL and end == Place(end.axis) else None


def places_of(node: ir.Node, places: Mapping[ir.Value, Place], samples: str) -> list[Place | None]:
    """Return the place of the samples in each output of ``node``, given their places in its inputs.

    Args:
        places: where the values that ``node`` reads have samples; none of them is a total.
        samples: the name of the batch dimension.

    Raises:
        Mixed: the node mixes samples, or may mix them.
    """
    found = _Node(node, places, frozenset(), samples).places()
    if any(place is not None and place.axis == TOTAL for place in found):
        raise Mixed("sums over samples")
    return found


class _Node:
    """A node that reads samples; its methods return the sample axis of its outputs, or raise ``Mixed``.

    ``reached`` are the values on the path from the differentiation variables.
    """

    def __init__(
        self, node: ir.Node, places: Mapping[ir.Value, Place], reached: Collection[ir.Value], samples: str
    ) -> None:
        self.node, self.reached, self.samples = node, reached, samples
        given = [None if x is None else places.get(x) for x in node.inputs]
        self.axes = [None if p is None else p.axis for p in given]
        merged = {(p.outer, p.inner) for p in given if p is not None and p.axis != TOTAL}
        if node.domain or any(x in places and x not in node.inputs for x in reads(node)):
            raise Mixed(_UNSEEN)
        if len(merged) > 1:
            raise Mixed("combines different samples")
        self.outer, self.inner = merged.pop() if merged else (_Size(), _Size())

    def places(self) -> list[Place | None]:
        rows = self.node.op_type == "Flatten" and self.axes[0] == 0 and self.number("axis", 1) == 1
        if self.node.op_type in ("Reshape", "Flatten") and TOTAL not in self.axes and not rows:
            return [self._reshaped()]
        return [None if axis is None else Place(axis, self.outer, self.inner) for axis in self._along()]

    def _along(self) -> Axes:
        if TOTAL in self.axes:
            return self._of_total()
        if is_elementwise(self.node) or self.node.op_type in _BY_ELEMENT:
            return [self.broadcast(range(len(self.axes)))]
        rule = _RULES.get(self.node.op_type)
        if rule is None:
            raise Mixed(_UNSEEN)
        return rule(self)

    def _reshaped(self) -> Place:
        before, after = self.shape(0), self.result
        lead, tail = _product(before[: self.only]), _product(before[self.only + 1 :])
        for axis, size in enumerate(after):
            outer, inner = _product(after[:axis]), _product(after[axis + 1 :])
            if size == 1 or lead is None or tail is None or outer is None or inner is None:
                continue
            left, right = (self.outer * lead).over(outer), (self.inner * tail).over(inner)
            if left is not None and right is not None:
                return Place(axis, left, right)
        raise Mixed("interleaves samples, or moves them to an unknown axis")

    def _of_total(self) -> Axes:
        name, node = self.node.op_type, self.node
        others = [a for a in self.axes if a not in (None, TOTAL)]
        divided = name == "Div" and self.axes[1] == TOTAL and node.inputs[1] in self.reached
        product = name == "Mul" and self.axes == [TOTAL, TOTAL]
        inverse = name == "Div" and self.axes[0] is None
        if others or divided or product or inverse or (name not in _LINEAR and not self._guards()):
            raise Mixed("is applied to a sum or a mean over the samples")
        return [TOTAL]

    def _guards(self) -> bool:
        """Whether the node only keeps the divisor of a mean away from zero."""
        uses = [(u.node.op_type, u.idx) for u in self.node.outputs[0].uses()]
        below = uses and all(name in _GUARDS or (name, i) == ("Div", 1) for name, i in uses)
        free = not any(x in self.reached for x in reads(self.node))
        return bool(self.node.op_type in _GUARDS and below and free and not self.node.outputs[0].is_graph_output())

    # --- helpers of rules ---

    def shape(self, i: int) -> Shape:
        x = self.node.inputs[i]
        shape = None if x is None else Var(Builder(), x).shape
        if shape is None:
            raise Mixed(_UNSEEN)
        return shape

    def rank(self, i: int) -> int:
        return len(self.shape(i))

    @property
    def result(self) -> Shape:
        shape = Var(Builder(), self.node.outputs[0]).shape
        if shape is None:
            raise Mixed(_UNSEEN)
        return shape

    def number(self, name: str, default: int) -> int:
        found = self.node.attributes.get(name)
        return default if found is None else found.as_int()

    def constant(self, i: int) -> list[int] | None:
        """Return the integers in the constant input ``i``, or None without such an input."""
        x = self.node.inputs[i] if i < len(self.node.inputs) else None
        if x is None:
            return None
        known = constant_of(x)
        if known is None:
            raise Mixed(_UNSEEN)
        return [int(n) for n in known.ravel()]

    @property
    def only(self) -> int:
        """The sample axis of the first input; raises ``Mixed`` if another input has samples."""
        if self.axes[0] is None or any(a is not None for a in self.axes[1:]):
            raise Mixed(_UNSEEN)
        return self.axes[0]

    def beside(self, axis: int, rank: int) -> int:
        """Return the sample axis ``only``; raise ``Mixed`` if it is ``axis``, along which the node operates."""
        if axis % rank == self.only:
            raise Mixed("operates along the sample axis")
        return self.only

    def broadcast(self, places: Sequence[int], beyond: int = 0) -> int | None:
        """Return the sample axis of the inputs at ``places`` broadcast together.

        Raises ``Mixed`` if it is one of the last ``beyond`` axes, or if inputs have different sample axes.
        """
        rank = max(self.rank(i) for i in places if self.node.inputs[i] is not None)
        found = {rank - self.rank(i) + a for i in places if (a := self.axes[i]) is not None}
        if len(found) != 1 or max(found) >= rank - beyond:
            raise Mixed("combines different samples")
        axis = found.pop()
        for i in places:
            x, at = self.node.inputs[i], axis - rank + (0 if self.node.inputs[i] is None else self.rank(i))
            if x is not None and self.axes[i] is None and at >= 0 and not self._spreads(self.shape(i)[at]):
                raise Mixed(f"combines samples with '{shown(x.name)}', whose size along the sample axis is not 1,")
        return axis

    def _spreads(self, size: Dim) -> bool:
        """Whether a tensor without samples may have ``size`` along the sample axis: 1 or the batch size."""
        return size in (1, None) or (isinstance(size, str) and (self.samples in size or is_generated(size)))


# --- operators -------------------------------------------------------------------------------------------

_LINEAR = frozenset(("Add", "Cast", "CastLike", "Div", "Flatten", "Identity", "Mean", "Mul", "Neg", "ReduceMean",
                     "ReduceSum", "Reshape", "Squeeze", "Sub", "Sum", "Transpose", "Unsqueeze"))  # fmt: skip
_GUARDS = frozenset(("Equal", "Where"))  # they set the divisor of a mean to 1 if the number of elements is 0
_BY_ELEMENT = frozenset(("Bernoulli", "Dropout", "RandomNormalLike", "RandomUniformLike"))


def _first(it: _Node) -> Axes:
    if it.only != 0:
        raise Mixed("operates along the sample axis")
    return [0, *(None for _ in it.node.outputs[1:])]


def _resized(it: _Node) -> Axes:
    if it.shape(0)[0] is None or it.shape(0)[0] != it.result[0]:
        raise Mixed(_UNSEEN)
    return _first(it)


def _normalized(it: _Node) -> Axes:
    if it.number("training_mode", 0):
        raise Mixed("computes statistics of the whole batch")
    return _first(it)


def _both_first(it: _Node) -> Axes:
    if any(a not in (0, None) for a in it.axes):
        raise Mixed("combines different samples")
    return [0]


def _along(default: int) -> Callable[[_Node], Axes]:
    return lambda it: [it.beside(it.number("axis", default), it.rank(0)) for _ in it.node.outputs]


def _along_input(it: _Node) -> Axes:
    axis = it.constant(1)
    return [it.beside((axis or [0])[0], it.rank(0))]


def _from_axis(it: _Node) -> Axes:
    if it.only >= it.number("axis", -1) % it.rank(0):
        raise Mixed("computes statistics over samples")
    return [it.only for _ in it.node.outputs]


def _arg(it: _Node) -> Axes:
    axis = it.number("axis", 0) % it.rank(0)
    kept = it.beside(axis, it.rank(0))
    return [kept - (axis < kept and not it.number("keepdims", 1))]


def _reduced(it: _Node) -> Axes:
    rank, axes = it.rank(0), it.constant(1)
    if not axes:
        axes = [] if it.number("noop_with_empty_axes", 0) else list(range(rank))
    gone = {a % rank for a in axes}
    if it.only in gone:
        if it.node.op_type not in ("ReduceSum", "ReduceMean"):
            raise Mixed("reduces over samples to neither a sum nor a mean")
        return [TOTAL]
    return [it.only if it.number("keepdims", 1) else it.only - sum(a < it.only for a in gone)]


def _loss(it: _Node) -> Axes:
    if any(a not in (0, None) for a in it.axes[:2]) or any(a is not None for a in it.axes[2:]):
        raise Mixed(_UNSEEN)
    reduction = it.node.attributes.get("reduction")
    return [0 if reduction is not None and reduction.as_string() == "none" else TOTAL, 0]


def _matmul(it: _Node) -> Axes:
    (a, b), ranks = it.axes, (it.rank(0), it.rank(1))
    if min(ranks) < 2:
        raise Mixed(_UNSEEN)
    if b is None and a == ranks[0] - 2:
        return [max(ranks) - 2]
    if a is None and b == ranks[1] - 1:
        return [max(ranks) - 1]
    return [it.broadcast((0, 1), beyond=2)]


def _gemm(it: _Node) -> Axes:
    rows, columns = it.number("transA", 0), 1 - it.number("transB", 0)
    if it.axes[0] == rows and it.axes[1] is None:
        return [_agreed(it, 0)]
    if it.axes[1] == columns and it.axes[0] is None:
        return [_agreed(it, 1)]
    raise Mixed("sums over samples")


def _agreed(it: _Node, axis: int) -> int:
    if len(it.axes) > 2 and it.axes[2] not in (None, axis - 2 + it.rank(2)):
        raise Mixed("combines different samples")
    return axis


def _einsum(it: _Node) -> Axes:
    equation = it.node.attributes["equation"].as_string().replace(" ", "")
    terms, _, result = equation.partition("->")
    letters = {t[a] for t, a in zip(terms.split(","), it.axes, strict=True) if a is not None and "." not in equation}
    others = "".join(t for t, a in zip(terms.split(","), it.axes, strict=True) if a is None)
    known = set(string.ascii_letters) & set(result) - set(others)
    if len(letters) != 1 or not letters <= known:
        raise Mixed("combines different samples, or sums over them")
    return [result.index(letters.pop())]


def _transposed(it: _Node) -> Axes:
    order = it.node.attributes.get_ints("perm", range(it.rank(0))[::-1])
    return [list(order).index(it.only)]


def _squeezed(it: _Node) -> Axes:
    rank, axes = it.rank(0), it.constant(1)
    if axes is None:
        raise Mixed(_UNSEEN)
    gone = [a % rank for a in axes]
    if it.only in gone:
        raise Mixed("removes the sample axis")
    return [it.only - sum(a < it.only for a in gone)]


def _unsqueezed(it: _Node) -> Axes:
    axes = it.constant(1) or []
    rank = it.rank(0) + len(axes)
    kept = [k for k in range(rank) if k not in {a % rank for a in axes}]
    return [kept[it.only]]


def _concatenated(it: _Node) -> Axes:
    ranks, found = it.rank(0), {a for a in it.axes if a is not None}
    if len(found) != 1 or it.number("axis", 0) % ranks in found:
        raise Mixed("combines different samples")
    axis = found.pop()
    for x, own in zip(it.node.inputs, it.axes, strict=True):
        if own is None and x is not None and not _has_equal_rows(x, axis):
            raise Mixed(f"combines samples with '{shown(x.name)}', whose rows differ,")
    return [axis]


def _has_equal_rows(x: ir.Value, axis: int) -> bool:
    """Whether a tensor without samples has equal rows along ``axis``, as far as its elements are known."""
    data = constant_of(x)
    return data is None or bool((data == data.take([0], axis)).all())


def _sliced(it: _Node) -> Axes:
    starts, ends, axes, steps = (it.constant(i) for i in range(1, 5))
    count = len(starts or ())
    cuts = zip(axes or range(count), starts or (), ends or (), steps or [1] * count, strict=True)
    if it.only in {axis % it.rank(0) for axis, *cut in cuts if not (cut[0] == 0 and cut[1] >= _END and cut[2] == 1)}:
        raise Mixed("chooses samples")
    return [it.only]


def _gathered(it: _Node) -> Axes:
    axis = it.number("axis", 0) % it.rank(0)
    data, places = it.axes[:2]
    if data is None and places is not None:
        return [axis + places]
    if places is None and data is not None and data != axis:
        return [data if data < axis else data + it.rank(1) - 1]
    raise Mixed("chooses samples")


def _gathered_elements(it: _Node) -> Axes:
    data, places = it.axes[:2]
    if it.number("axis", 0) % it.rank(0) in (data, places) or data != places:
        raise Mixed("chooses samples")
    return [data]


def _repeated(it: _Node) -> Axes:
    if (it.constant(1) or [2])[it.only : it.only + 1] != [1]:
        raise Mixed("repeats samples")
    return [it.only]


def _padded(it: _Node) -> Axes:
    pads, axes = it.constant(1) or [], it.constant(3)
    used = list(range(it.rank(0))) if axes is None else [a % it.rank(0) for a in axes]
    at = used.index(it.only) if it.only in used else None
    if at is not None and (pads[at] or pads[at + len(used)]):
        raise Mixed("pads the sample axis")
    return [it.only]


def _one_hot(it: _Node) -> Axes:
    axis = it.number("axis", -1) % len(it.result)
    return [it.only + (axis <= it.only)]


def _recurrent(it: _Node) -> Axes:
    if it.number("layout", 0) or it.axes[0] != 1 or any(a is not None for a in it.axes[1:4]):
        raise Mixed(_UNSEEN)
    if any(a not in (None, axis) for a, axis in zip(it.axes[4:7], (0, 1, 1), strict=False)):
        raise Mixed(_UNSEEN)
    return [2, 1, 1]


_ALONG = {"Softmax": -1, "LogSoftmax": -1, "Hardmax": -1, "LpNormalization": -1, "TopK": -1, "Split": 0}

_RULES: Mapping[str, Callable[[_Node], Axes]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"), _first),
    **dict.fromkeys(("GlobalLpPool", "LRN", "InstanceNormalization", "GroupNormalization"), _first),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _first),
    **{name: _along(axis) for name, axis in _ALONG.items()},
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _from_axis),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1"), _reduced),
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"), _reduced),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), _loss),
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
    **dict.fromkeys(("CumSum", "CumProd"), _along_input),
    "BatchNormalization": _normalized,
    "Concat": _concatenated,
    "Einsum": _einsum,
    "Expand": lambda it: [len(it.result) - it.rank(0) + it.only],
    "Flatten": _first,
    "Gather": _gathered,
    "GatherElements": _gathered_elements,
    "Gemm": _gemm,
    "GridSample": _both_first,
    "MatMul": _matmul,
    "MaxPool": lambda it: [_first(it)[0] for _ in it.node.outputs],
    "OneHot": _one_hot,
    "Pad": _padded,
    "Resize": _resized,
    "Slice": _sliced,
    "Squeeze": _squeezed,
    "Tile": _repeated,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}  # fmt: skip
