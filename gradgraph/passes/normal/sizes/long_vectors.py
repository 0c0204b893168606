"""Upper bounds on the lengths of computed vectors, to keep ONNX's data propagation from exhausting memory.

Data propagation records every element of each vector that it reads, even if the elements are unknown: a file of six
nodes that multiplies two sizes exhausts memory, and protobuf then frees uninitialised memory. It does not record
vectors of unknown length, so these count 0 here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx

from gradgraph.files.external import is_external

LONG = 2**22  # the most elements of a vector that ONNX's data propagation may record
_READ = 64  # the most elements of a constant whose values are read


class Bound(NamedTuple):
    """Upper bounds for a value that data propagation may record; 0 for an unknown bound.

    Attributes:
        length: the number of elements, if the value is a vector.
        number: the magnitude of the value's elements.
        size: the size of its largest axis.
        elements: the number of elements at any rank.
    """

    length: float = 0.0
    number: float = 0.0
    size: float = 0.0
    elements: float = 0.0


_UNKNOWN = Bound()
_WHOLE = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
_MOST = 1e30  # larger values are clipped to this


def has_long_vectors(graph: onnx.GraphProto, outside: _Scope | None = None) -> bool:
    """Whether data propagation may record a vector of ``graph`` that is longer than ``LONG``.

    Types in ``graph`` are inferred without data propagation; ``outside`` has the bounds of outer graphs' values.
    """
    nodes = [node for node in graph.node if node.op_type in _FOLLOWED]
    asked = {node.output[0] for node in nodes if node.op_type in _LENGTHS}
    asked.difference_update(v.name for v in (*graph.value_info, *graph.output) if v.name in asked and _is_settled(v))
    if not asked and not any(_bodies(node) for node in nodes):
        return False
    scope = _Scope(graph, outside)
    for node in nodes:
        if any(has_long_vectors(body, scope) for body in _bodies(node)):
            return True
        if node.output[0] not in asked and not scope.is_whole(node.output[0]):
            continue
        given = [scope[name] for name in node.input]
        length = min(_LENGTHS.get(node.op_type, _longest)(given), _MOST)
        if length > LONG and node.output[0] in asked:
            return True
        number = min(_NUMBERS.get(node.op_type, _largest)(given), _MOST)
        for name in node.output:
            before = scope[name]
            scope.bounds[name] = before._replace(length=before.length or length, number=before.number or number)
    return False


def _is_settled(info: onnx.ValueInfoProto) -> bool:
    """Whether the value is known not to be a vector, or to be a vector of known length."""
    kind = info.type.tensor_type
    return kind.HasField("shape") and (len(kind.shape.dim) != 1 or kind.shape.dim[0].HasField("dim_value"))


class _Scope:
    """The bounds of the values of a graph, computed on demand."""

    def __init__(self, graph: onnx.GraphProto, outside: _Scope | None) -> None:
        self._infos = {v.name: v for values in (graph.input, graph.value_info, graph.output) for v in values}
        self._constants: dict[str, onnx.TensorProto | onnx.NodeProto] = {t.name: t for t in graph.initializer}
        self._constants |= {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
        self._outside = outside
        self.bounds: dict[str, Bound] = {}

    def __getitem__(self, name: str) -> Bound:
        if name not in self.bounds:
            self.bounds[name] = self._looked_up(name)
        return self.bounds[name]

    def _looked_up(self, name: str) -> Bound:
        if name in self._constants:
            return _of_constant(self._constants[name])
        if name in self._infos:
            return _of_shape(self._infos[name].type.tensor_type)
        return _UNKNOWN if self._outside is None else self._outside[name]

    def is_whole(self, name: str) -> bool:
        """Whether the value may be a list of sizes: an integer scalar or vector."""
        info = self._infos.get(name)
        if info is None:
            return True
        kind = info.type.tensor_type
        return kind.elem_type in _WHOLE and (not kind.HasField("shape") or len(kind.shape.dim) <= 1)


def _of_shape(kind: onnx.TypeProto.Tensor) -> Bound:
    sizes = [float(d.dim_value) for d in kind.shape.dim]
    known = [size for size in sizes if size]
    return Bound(sizes[0] if len(sizes) == 1 else 0.0, 0.0, max(known, default=0.0), min(math.prod(known), _MOST))


def _of_constant(constant: onnx.TensorProto | onnx.NodeProto) -> Bound:
    """Return the bound of a constant. Floats count as 0, because data propagation ignores them."""
    if isinstance(constant, onnx.TensorProto):
        return _of_tensor(constant)
    (a,) = constant.attribute[:1] or [onnx.AttributeProto()]
    return _of_tensor(a.t) if a.name == "value" else _of_numbers(a.ints or [a.i])


def _of_tensor(tensor: onnx.TensorProto) -> Bound:
    if not 0 < math.prod(tensor.dims) <= _READ or is_external(tensor):
        return _of_shape(onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type)
    numbers = onnx.numpy_helper.to_array(tensor)
    return _of_numbers(numbers.ravel().tolist() if numbers.dtype.kind in "iu" else [0.0] * numbers.size)


def _of_numbers(numbers: Sequence[float]) -> Bound:
    return Bound(len(numbers), max(map(abs, numbers), default=0.0), len(numbers), len(numbers))


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


# --- bounds by operator ---------------------------------------------------------------------------------------


def _at(given: Sequence[Bound], i: int) -> Bound:
    return given[i] if i < len(given) else _UNKNOWN


def _longest(given: Sequence[Bound]) -> float:
    return max((one.length for one in given), default=0.0)


def _largest(given: Sequence[Bound]) -> float:
    return max((one.number for one in given), default=0.0)


_Rule = Callable[[Sequence[Bound]], float]


def _power(number: float, times: float) -> float:
    return 10.0 ** min(math.log10(max(number, 1.0)) * max(times, 1.0), 30.0) if number else 0.0


def _single(at: int) -> _Rule:
    """Return a rule for operators whose number of output elements or axes may be the value of scalar input ``at``."""
    return lambda given: _at(given, at).number if _at(given, at).length <= 1 else 0.0


# by operator: the length of the resulting vector, if it depends on the values of inputs (for Concat, on their lengths)
_LENGTHS: dict[str, _Rule] = {
    **dict.fromkeys(("ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow"), _single(0)),
    **dict.fromkeys(("Reshape", "Expand", "OneHot", "TopK"), _single(1)),
    "Concat": lambda g: sum(one.length for one in g),
    "Pad": lambda g: _at(g, 0).length + 2 * _at(g, 1).number if _at(g, 0).length else 0.0,
    "Range": lambda g: _at(g, 0).number + _at(g, 1).number,
    "Resize": lambda g: max(_single(3)(g), _at(g, 0).length * _at(g, 2).number),
    "Tile": lambda g: _at(g, 0).length * _at(g, 1).number,
    "Upsample": lambda g: _at(g, 0).length * _at(g, 1).number,
}

# operators that return values of their first input; the other inputs select or repeat these
_FIRST = (
    "Cast Expand Flatten Gather GatherElements GatherND Identity Reshape Slice Split Squeeze Tile TopK Transpose "
    "Unsqueeze"
)

# by operator: a bound of the values that it returns, if these are not just values of any input
_NUMBERS: dict[str, _Rule] = {
    **dict.fromkeys(_FIRST.split(), lambda g: _at(g, 0).number),
    **dict.fromkeys(("Where", "Div", "Mod"), lambda g: max(_at(g, i).number for i in ((1, 2) if len(g) > 2 else (0,)))),
    **dict.fromkeys(("Add", "Sub", "Sum", "Range"), lambda g: sum(one.number for one in g)),
    "CumSum": lambda g: _at(g, 0).number * max(_at(g, 0).length, 1.0),
    "Mul": lambda g: _at(g, 0).number * _at(g, 1).number,
    "Pow": lambda g: _power(_at(g, 0).number, _at(g, 1).number),
    "ReduceProd": lambda g: _power(_at(g, 0).number, _at(g, 0).length),
    "ReduceSum": lambda g: _at(g, 0).number * max(_at(g, 0).length, 1.0),
    "Shape": lambda g: max(_at(g, 0).size, _at(g, 0).length),
    "Size": lambda g: max(_at(g, 0).elements, _at(g, 0).length),
}

_FOLLOWED = {*_LENGTHS, *_NUMBERS, "If", "Loop", "Scan", "SequenceMap", "Max", "Min", "Abs", "Neg", "NonZero"}
