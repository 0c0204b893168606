"""Find stored tensors that are constants, by how they are used, in files that do not mark parameters.

1. Input normalisation: a model input, possibly reshaped, minus, divided by, times or plus a constant, before a layer.
   Added or multiplied constants count if they vary along one axis and only feed layers, which can learn the same
   effect.
2. Priors of a detector and scales of a target: after the last layer, constants that outputs are multiplied by and added
   to. The first vector that is added after a layer without a bias is its bias.
3. Masks, by their values: zeros and ones as a factor, or zeros and one large negative number as a summand.
4. Bin indices 0, 1, 2 and so on, used to compute the expectation of a Softmax.

A scale of ones and a shift of zeros change nothing: they are weights that have not been trained yet.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.graph.checks import describe, has_bodies
from gradgraph.graph.nodes import input_at, inputs_of, is_standard
from gradgraph.graph.shapes import FOLDS, as_dims, is_single
from gradgraph.passes.normal.edit import attributes, nodes_of
from gradgraph.passes.normal.weights.roles import ARITHMETIC, MOVES

Array: TypeAlias = np.ndarray[Any, Any]
Reading: TypeAlias = tuple[ir.Node, int]  # a node and the index of an input
Dims: TypeAlias = Sequence[object] | None

_FACTORS = frozenset({"Div", "Mul"})
_CARRIERS = MOVES | {"AveragePool", "Clip", "Concat", "MaxPool", "Resize", "Upsample", "Where"}
_KEEP_SIZES = frozenset({"Abs", "Cast", "CastLike", "Clip", "Dropout", "Identity", "Where"})
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_LAYERS = _LINEAR | {"BatchNormalization", "Einsum", "GRU", "LSTM", "RNN"}
_RANGES = frozenset({"Clip", "Exp", "Pow", "Sigmoid", "Softplus", "Tanh"})  # functions that outputs of detectors have
_BEHIND_LAYERS = (  # operators after the last layer: decoding and selection of results
    ARITHMETIC
    | _RANGES
    | MOVES
    | {"And", "ArgMax", "Concat", "ConstantOfShape", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
    | {"LogSoftmax", "Max", "Min", "NonMaxSuppression", "NonZero", "Not", "Or", "ReduceMax", "Relu", "ScatterND"}
    | {"Shape", "Size", "Softmax", "TopK", "Where"}
)
_LARGEST = 1 << 20  # maximum elements of a tensor to read; larger ones are neither a mean nor a prior
_LARGEST_MASK = 1 << 24  # maximum elements of a mask to read
_NEGLIGIBLE = -100.0  # maximum of the negative number in an additive mask, such as Swin's
_BINS = 4  # minimum number of bins
_SAME_SIZE = ("Abs", "Cast", "Concat", "Expand", "Identity", "Neg", "Reshape", "Slice", "Squeeze", "Transpose",
              "Unsqueeze")  # fmt: skip
_FLOAT_FOLDS: dict[str, Callable[..., Any]] = {
    **{name: FOLDS[name] for name in (*_SAME_SIZE, "Add", "Gather", "Mul", "Sub")},
    "Div": np.divide,
    "Exp": np.exp,
    "Reciprocal": np.reciprocal,
    "Sqrt": np.sqrt,
}


def find_fixed(model: ir.Model) -> dict[ir.Value, str]:
    """Return the initializers of more than one element that are constants, each with the reason in words."""
    stored = _Stored(model)
    fed, before = _before_layers(model.graph, stored)
    after = _behind_layers(model.graph, stored, fed, before)
    found = {}
    for value in model.graph.initializers.values():
        if value.const_value is None or value.const_value.size <= 1 or not value.const_value.dtype.is_floating_point():
            continue
        readings = stored.readings[value]
        if words := _mask(value) or _bins(value):
            found[value] = words
        elif readings and value not in stored.outputs and all(r in before or r in after for r in readings):
            node, _ = first = readings[0]
            place = (
                "it normalises an input" if first in before else "it scales or shifts an output after the last layer"
            )
            found[value] = f"{place}, as an operand of {describe(node)}"
    return found


class _Stored:
    """The values computed from stored tensors only, and the nodes that combine them with other values.

    Attributes:
        readings: for each stored tensor, the (node, input index) pairs where it, or a value computed from it, meets
            values that are not stored.
        outputs: the stored tensors from which outputs of the model are computed directly.
    """

    def __init__(self, model: ir.Model) -> None:
        self._sources: dict[ir.Value, frozenset[ir.Value]] = {
            v: frozenset((v,)) for v in model.graph.initializers.values()
        }
        self.readings: dict[ir.Value, list[Reading]] = defaultdict(list)
        for node in nodes_of(model):
            read = inputs_of(node)
            if not has_bodies(node) and (read or node.op_type == "Constant") and all(v in self._sources for v in read):
                every = frozenset(s for v in read for s in self._sources[v])
                self._sources.update(dict.fromkeys(node.outputs, every))
                continue
            for i, value in enumerate(node.inputs):
                for source in self.sources_of(value):
                    self.readings[source].append((node, i))
        self.outputs = {s for v in model.graph.outputs for s in self.sources_of(v)}
        self._arrays: dict[ir.Value, Array | None] = {}

    def __contains__(self, value: object) -> bool:
        return value in self._sources

    def sources_of(self, value: ir.Value | None) -> frozenset[ir.Value]:
        return frozenset() if value is None else self._sources.get(value, frozenset())

    def array(self, value: ir.Value) -> Array | None:
        """Return the array of a stored value; None if it is large or expensive to compute."""
        if value not in self._arrays:
            self._arrays[value] = self._computed(value)
        return self._arrays[value]

    def _computed(self, value: ir.Value) -> Array | None:
        node, tensor = value.producer(), ir.convenience.get_const_tensor(value)
        if tensor is not None:
            is_number = tensor.dtype != ir.DataType.STRING and tensor.size <= _LARGEST
            return tensor.numpy() if is_number else None
        how = None if node is None or node.domain else _FLOAT_FOLDS.get(node.op_type)
        arrays = [] if node is None else [self.array(v) for v in inputs_of(node)]
        if node is None or how is None or any(a is None for a in arrays):
            return None
        sizes = [a.shape for a in arrays if a is not None]
        if node.op_type in ARITHMETIC | {"Gather"} and math.prod(max(math.prod(d), 1) for d in sizes) > _LARGEST:
            joined = [max(column) for column in itertools.zip_longest(*[d[::-1] for d in sizes], fillvalue=1)]
            if node.op_type == "Gather" or math.prod(joined) > _LARGEST:
                return None
        try:
            with np.errstate(all="ignore"):
                result = how(*arrays, **attributes(node))
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
            return None
        return None if result is None or np.size(result) > _LARGEST else np.asarray(result)


@dataclass(eq=False)
class _Group:
    """Constants applied to one input, or to outputs that are concatenated."""

    uses: list[_Constant] = field(default_factory=list)
    into: _Group | None = None  # the group that this one has merged into
    has_residual: bool = False  # an input is added to the output, so the last layer cannot learn the same

    def whole(self) -> _Group:
        group = self
        while group.into is not None:
            group = group.into
        return group

    def changes_something(self) -> bool:
        return not all((c.array == (c.node.op_type in _FACTORS)).all() for c in self.uses)


@dataclass(frozen=True, eq=False)
class _Constant:
    """A stored operand of arithmetic with a computed value."""

    node: ir.Node
    at: int
    array: Array

    @property
    def axes(self) -> int:
        """The number of axes whose size is above 1."""
        return sum(d > 1 for d in self.array.shape)

    @property
    def is_scale(self) -> bool:
        """Whether the constant is a factor, divisor or minuend, and therefore not a bias."""
        return self.node.op_type in _FACTORS or self.is_minuend

    @property
    def is_minuend(self) -> bool:
        return self.node.op_type == "Sub" and self.at == 0

    @property
    def is_possible(self) -> bool:
        """Whether the constant may normalise an input: a factor must be all positive, like deviations and widths."""
        return self.node.op_type not in _FACTORS or bool((self.array > 0).all())


def _constant(node: ir.Node, stored: _Stored) -> _Constant | None:
    """Return the only stored operand of the binary operator ``node``; None for a dividend or unknown values."""
    at = [i for i, v in enumerate(node.inputs) if v in stored]
    if len(node.inputs) != 2 or len(at) != 1 or (node.op_type == "Div" and at == [0]):
        return None
    value = node.inputs[at[0]]
    array = None if value is None else stored.array(value)
    return None if array is None else _Constant(node, at[0], array)


# --- before the layers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fed:
    """A value derived from a model input before any layer: its known sizes, and the constants applied so far."""

    dims: Dims
    group: _Group | None = None


def _before_layers(graph: ir.Graph, stored: _Stored) -> tuple[Collection[ir.Value], set[Reading]]:
    """Return the values derived from inputs before any layer, and the uses of constants that normalise an input."""
    fed = {
        v: _Fed(None if v.shape is None else as_dims(v.shape))
        for v in graph.inputs
        if v not in stored and v.dtype is not None and v.dtype != ir.DataType.STRING
    }
    for node in graph:
        if node.domain or not node.outputs or not any(v in fed for v in node.inputs):
            continue
        if node.op_type in ARITHMETIC:
            after = _normalised(node, fed, stored)
        elif node.op_type in _CARRIERS:
            after = _carried(node, fed, stored)
        else:
            continue
        if after is not None:
            fed.update(dict.fromkeys(node.outputs, after))
    some, every = _reach(fed, stored)
    groups = {id(f.group): f.group for f in fed.values() if f.group is not None}
    return fed, {(c.node, c.at) for group in groups.values() for c in _normalising(group, some, every)}


def _normalised(node: ir.Node, fed: dict[ir.Value, _Fed], stored: _Stored) -> _Fed | None:
    constant = _constant(node, stored)
    source = None if constant is None else node.inputs[1 - constant.at]
    if constant is None or source is None or source not in fed or (constant.is_minuend and constant.array.size > 1):
        return None
    before = fed[source]
    if constant.array.size == 1:
        return before
    if not constant.is_possible or not _fits(constant, before.dims):
        return None
    group = before.group or _Group()
    group.uses.append(constant)
    return _Fed(before.dims, group)


def _fits(constant: _Constant, dims: Dims) -> bool:
    """Whether ``constant`` broadcasts to ``dims`` without changing them; otherwise it may contain cluster centres."""
    if dims is None:
        return constant.axes <= 1
    sizes = constant.array.shape
    return len(sizes) <= len(dims) and all(a in (1, b) for a, b in zip(reversed(sizes), reversed(dims), strict=False))


def _carried(node: ir.Node, fed: dict[ir.Value, _Fed], stored: _Stored) -> _Fed | None:
    first = 1 if node.op_type == "Where" else 0
    data = inputs_of(node)[first:] if node.op_type in ("Concat", "Where") else inputs_of(node)[:1]
    before = [fed[v] for v in data if v in fed]
    if not before or not all(v in fed or v in stored for v in data):
        return None
    group = next((f.group for f in before if f.group is not None), None)
    return _Fed(_moved(node, before[0].dims, stored), group)


def _moved(node: ir.Node, dims: Dims, stored: _Stored) -> Dims:
    if dims is None or node.op_type in _KEEP_SIZES:
        return dims
    if node.op_type == "Transpose":
        order = attributes(node).get("perm", range(len(dims))[::-1])
        return [dims[i] for i in order] if sorted(order) == [*range(len(dims))] else None
    if node.op_type == "Unsqueeze":
        second = input_at(node, 1)
        axes = attributes(node).get("axes") if second is None else stored.array(second) if second in stored else None
        flat = [] if axes is None else np.ravel(axes).tolist()
        rank = len(dims) + len(flat)
        places = {int(a) % rank for a in flat}
        left = iter(dims)
        return [1 if i in places else next(left) for i in range(rank)] if flat and len(places) == len(flat) else None
    return None


def _reach(fed: dict[ir.Value, _Fed], stored: _Stored) -> tuple[set[ir.Value], set[ir.Value]]:
    """Return two subsets of ``fed``: the values from which some path, and from which every path, leads to a layer."""
    some: set[ir.Value] = set()
    every: set[ir.Value] = set()
    for value in reversed(fed):
        readers = [n for n in value.consumers() if n.op_type not in ("IsNaN", "Shape", "Size")]
        layers = {n for n in readers if n.op_type in _LAYERS and any(v in stored for v in n.inputs)}
        if any(n in layers or not some.isdisjoint(n.outputs) for n in readers):
            some.add(value)
        if (
            readers
            and not value.is_graph_output()
            and all(n in layers or not every.isdisjoint(n.outputs) for n in readers)
        ):
            every.add(value)
    return some, every


def _normalising(group: _Group, some: set[ir.Value], every: set[ir.Value]) -> Iterator[_Constant]:
    """Yield the constants of a group that normalise an input.

    These are operands of differences and quotients, and constants that vary along at most one axis; others may be
    weights.
    """
    is_plain = any(c.node.op_type in ("Div", "Sub") for c in group.uses)
    if not group.changes_something():
        return
    for constant in group.uses:
        after, op_type = constant.node.outputs[0], constant.node.op_type
        says_so = op_type in ("Div", "Sub") or constant.axes <= 1
        if says_so and (after in every or (is_plain and after in some)):
            yield constant


# --- after the layers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """A value computed by a layer: whether the layer's bias is added already, and the group of its constants."""

    has_bias: bool
    group: _Group


def _behind_layers(graph: ir.Graph, stored: _Stored, fed: Collection[ir.Value], before: set[Reading]) -> set[Reading]:
    """Return the uses of constants, as (node, input index), that scale and shift an output after the last layer.

    An output must be both scaled and shifted, unless the constant undoes the normalisation of an input: it is then
    computed from tensors that are also read at the uses ``before`` the layers.
    """
    normalising = {s for node, i in before for s in stored.sources_of(node.inputs[i])}
    last = _last_nodes(graph)
    made: dict[ir.Value, _Made] = {}
    for node in graph:
        if not node.domain and node.outputs and (after := _made(node, made, stored, fed, last)) is not None:
            made.update(dict.fromkeys(node.outputs, after))
    groups = {id(g): g for m in made.values() for g in (m.group.whole(),)}
    return {
        (c.node, c.at)
        for group in groups.values()
        for c in group.uses
        if _decodes(group) or stored.sources_of(c.node.inputs[c.at]) <= normalising
    }


def _decodes(group: _Group) -> bool:
    if group.has_residual:
        return False
    is_scaled = any(c.is_scale for c in group.uses)
    is_shifted = any(c.node.op_type not in _FACTORS for c in group.uses)
    return is_scaled and is_shifted and len(group.uses) > 1 and group.changes_something()


def _last_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes after the last layer, from which no path leads to a layer."""
    found: set[ir.Node] = set()
    for node in reversed(graph):
        if (
            node.op_type in _BEHIND_LAYERS
            and not node.domain
            and all(n in found for v in node.outputs for n in v.consumers())
        ):
            found.add(node)
    return found


def _made(
    node: ir.Node,
    made: dict[ir.Value, _Made],
    stored: _Stored,
    fed: Collection[ir.Value],
    last: set[ir.Node],
) -> _Made | None:
    if node.op_type in _LINEAR and any(v in stored for v in node.inputs):
        bias = input_at(node, 2)
        array = None if bias is None or bias not in stored else stored.array(bias)
        return _Made(array is not None and bool(array.any()), _Group())  # exporters write zeros for a missing one
    data = inputs_of(node) if node.op_type in ARITHMETIC | {"Concat"} else inputs_of(node)[:1]
    before = [made[v] for v in data if v in made]
    inputs = [v for v in data if v in fed]
    if not before or not all(v in made or v in stored for v in data if v not in inputs):
        return None
    if node.op_type in ARITHMETIC and len(before) == 1 and not inputs:
        return _scaled(node, before[0], stored, last)
    if node.op_type not in ARITHMETIC | _RANGES | MOVES | {"Concat"}:
        return None
    group = _joined([m.group for m in before])
    group.has_residual |= bool(inputs)
    return _Made(node.op_type in _RANGES or all(m.has_bias for m in before), group)


def _scaled(node: ir.Node, before: _Made, stored: _Stored, last: set[ir.Node]) -> _Made | None:
    constant = _constant(node, stored)
    if constant is None or not constant.is_possible:
        return None
    if constant.array.size == 1:
        return before
    if not before.has_bias and constant.axes <= 1 and not constant.is_minuend:
        return _Made(bool(constant.array.any()), before.group) if node.op_type == "Add" else None
    if node in last:
        before.group.whole().uses.append(constant)
    return _Made(True, before.group)


def _joined(groups: Sequence[_Group]) -> _Group:
    first = groups[0].whole()
    for group in groups[1:]:
        other = group.whole()
        if other is not first:
            first.uses += other.uses
            first.has_residual |= other.has_residual
            other.into = first
    return first


# --- by their values -----------------------------------------------------------------------------------


def _mask(value: ir.Value) -> str:
    """Return the reason why ``value`` is a mask; empty if it is not."""
    tensor = value.const_value
    readers = list(_behind_moves(value))
    if tensor is None or tensor.size > _LARGEST_MASK or not readers:
        return ""
    if all(_multiplies(node, i) for node, i in readers):
        array = tensor.numpy()
        is_mask = bool(((array == 0) | (array == 1)).all() and array.any() and not array.all())
        return "it contains only zeros and ones, like a mask" if is_mask else ""
    if all(is_standard(node, "Add", "Where") or (i == 3 and node.op_type == "Attention") for node, i in readers):
        array = tensor.numpy()
        least = array.min()
        is_mask = bool(least <= _NEGLIGIBLE and ((array == 0) | (array == least)).all() and (array == 0).any())
        return "it contains only zeros and one large negative number, like a mask" if is_mask else ""
    return ""


def _multiplies(node: ir.Node, i: int) -> bool:
    """Whether input ``i`` of ``node`` is a factor, or is subtracted from 1 to become one."""
    first = node.inputs[0]
    is_complement = is_standard(node, "Sub") and i == 1 and first is not None and is_single(first)
    return is_complement or is_standard(node, "Mul", "Where")


def _bins(value: ir.Value) -> str:
    tensor = value.const_value
    if tensor is None or not _BINS <= tensor.size <= _LARGEST:
        return ""
    for node, i in _behind_moves(value):
        data = input_at(node, 1 - i) if i < 2 else None
        if not is_standard(node, *_LINEAR) or data is None or not _is_softmax(data):
            return ""
    array = tensor.numpy().ravel()
    is_count = bool((array == np.arange(array.size)).all())
    return "it contains bin indices, with which the expectation of a Softmax is computed" if is_count else ""


def _is_softmax(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and not node.domain and node.op_type in MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and is_standard(node, "Softmax")


def _behind_moves(value: ir.Value) -> Iterator[Reading]:
    """Yield the readers of ``value``, as (node, input index), looking through nodes that only move its elements."""
    for node, i in value.uses():
        if i == 0 and node.op_type in MOVES and not node.domain:
            for moved in node.outputs:
                yield from _behind_moves(moved)
        else:
            yield node, i
