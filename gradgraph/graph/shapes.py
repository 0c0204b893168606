"""Shapes of graph values, inferred on demand.

A shape is a tuple with one entry per axis: an ``int`` (known), a ``str`` (a symbolic dimension, the same size wherever
the name occurs in a model) or ``None`` (unknown). ``None`` instead of the tuple means an unknown rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph.schemas import Signature, schema_of, signature

OPSET = 21  # the opset of the normal form: the newest for which stock onnxruntime has all of its CPU kernels
IR_VERSION = 10

Dim = int | str | None
Shape = tuple[Dim, ...]
Unknown = TypeVar("Unknown", int, None)


def emitted(op_type: str, domain: str = "") -> Signature:
    """Return the signature of an operator at OPSET.

    Raises:
        ModelError: if the operator is not in the schemas.
    """
    found = signature(op_type, OPSET, domain)
    if found is None:
        raise ModelError(f"ONNX opset {OPSET} has no operator {domain + '.' if domain else ''}{op_type}")
    return found


def recorded_shape(value: ir.Value | None) -> Shape | None:
    """Return the recorded shape of ``value``, without inference; None if there is none."""
    return None if value is None or value.shape is None else as_dims(value.shape)


def shape_of_type(kind: onnx.TypeProto | None) -> Shape | None:
    """Return the shape in a protobuf type (for a sequence or optional, that of its elements); None if it has none."""
    held = None if kind is None else kind.WhichOneof("value")
    if kind is None or held not in ("tensor_type", "sparse_tensor_type", "sequence_type", "optional_type"):
        return None
    tensor = getattr(kind, held)
    if held in ("sequence_type", "optional_type"):
        return shape_of_type(tensor.elem_type)
    if not tensor.HasField("shape"):
        return None
    return tuple([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim])


def as_dims(shape: ir.Shape) -> Shape:
    dims = shape.dims
    for d in dims:
        if not isinstance(d, int):
            return tuple([d if isinstance(d, int) else d.value for d in dims])
    return dims  # type: ignore[return-value]  # mostly all are numbers


def record_shape(value: ir.Value, shape: Shape | None) -> None:
    if shape is not None:
        value.shape = ir.Shape(shape)


def is_static(shape: Iterable[object] | None) -> bool:
    return shape is not None and all(isinstance(d, int) for d in shape)


def known_sizes(shape: Iterable[object] | None) -> list[int]:
    """Return the numeric sizes of ``shape``."""
    return [d for d in shape or () if isinstance(d, int)]


def all_sizes(shape: Iterable[object] | None) -> list[int] | None:
    """Return the sizes of ``shape`` if all are numbers, else None."""
    return known_sizes(shape) if is_static(shape) else None


def sizes_or(shape: Iterable[object] | None, unknown: Unknown) -> list[int | Unknown]:
    """Return the sizes of ``shape``, with ``unknown`` for each that is not a number."""
    return [d if isinstance(d, int) else unknown for d in shape or ()]


def size_factors(name: str) -> list[str]:
    """Return the factors of a composite size name such as ``11*batch``."""
    return [part.strip() for part in name.split("*")]


def size_of_name(name: str, sizes: Mapping[str, int], otherwise: int) -> int:
    """Return the size of ``name``, or the product of its factors; names not in ``sizes`` count as ``otherwise``."""
    if name in sizes:
        return sizes[name]
    return math.prod(int(part) if part.isdecimal() else sizes.get(part, otherwise) for part in size_factors(name))


def differ(a: Dim, b: Dim) -> bool:
    """Whether ``a`` and ``b`` are two different numbers. An unknown size may be any number."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def clash(a: Iterable[Dim], b: Iterable[Dim]) -> bool:
    """Whether ``a`` and ``b`` have different known sizes on any axis; ranks are not compared."""
    return any(map(differ, a, b))


def is_number(shape: Shape | None, rank: int) -> bool:
    """Whether a tensor of this shape has exactly one element, and at most ``rank`` axes."""
    return shape is not None and len(shape) <= rank and all(d == 1 for d in shape)


def broadcast(*shapes: Shape | None) -> Shape | None:
    """Return the NumPy broadcast of ``shapes``, with ``None`` where unknown dimensions leave it open."""
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    rank = max(map(len, known))
    columns = zip(*[(1,) * (rank - len(s)) + s for s in known], strict=True)
    return tuple(_broadcast_dim(column) for column in columns)


def _broadcast_dim(dims: Sequence[Dim]) -> Dim:
    rest = [d for d in dims if d != 1]
    numbers = known_sizes(rest)
    if numbers:
        return numbers[0]
    # "N" against "N" stays "N"; "N" against "M" may be either, as one of them may be 1
    return rest[0] if rest and all(d == rest[0] for d in rest) else (1 if not rest else None)


# --- inference, one node at a time ---------------------------------------------------------------


FAILURES = (  # raised by ONNX shape inference if it cannot infer a shape, or rejects the node
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
    IndexError,
)


def types_by_schema(
    node: ir.Node,
    given: Sequence[Shape | None],
    opset: int,
    data: Callable[[ir.Node], dict[str, onnx.TensorProto]],
) -> dict[str, onnx.TypeProto]:
    """Return the types that ONNX's rules for ``opset`` infer for the outputs of ``node``, by name.

    ``given`` are the shapes of its inputs; ``data`` returns its constant inputs that may determine shapes, by name.

    Raises:
        FAILURES: if ONNX's rules raise one of these.
    """
    schema = schema_of(node.op_type, opset, node.domain)
    vectors = [s[0] for s in given if s is not None and len(s) == 1]
    if schema is None or any(size > 2**24 for size in known_sizes(vectors)):  # as sizes, they take ONNX forever
        return {}
    read = [(v, s) for v, s in zip(node.inputs, given, strict=True) if v is not None and v.name]
    found: dict[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
        schema,
        ir.serde.serialize_node(node),
        {v.name or "": _type_proto(v, s) for v, s in read},
        data(node),
        opset_imports=[onnx.helper.make_opsetid("", opset)],
        ir_version=IR_VERSION,
    )
    return found


def objects(node: ir.Node, given: Sequence[Shape | None], opset: int) -> bool:
    """Whether ONNX's rules reject ``node`` for the input shapes ``given``, so that runtimes do not load it."""
    if any(v is not None and not isinstance(v.type, ir.TensorType) for v in node.inputs):
        return False
    try:
        types_by_schema(node, given, opset, _known_data)
    except FAILURES:
        return True
    return False


POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})


def window_count(size: int, reach: int, stride: int, begin: int, end: int) -> int:
    """Return the number of windows of ``reach`` elements of a pool with ``ceil_mode=1`` along an axis of ``size``.

    A last window that would start beyond the end is dropped, which ONNX's rules miss before opset 22.
    """
    last = -((reach - size - begin - end) // stride)
    return last if last * stride >= size + begin else last + 1


def windows_of(node: ir.Node) -> tuple[list[int], list[int], list[int]]:
    """Return the window extents, strides and pads along each axis, for a node with the attribute ``kernel_shape``."""
    attributes, kernel = node.attributes, node.attributes["kernel_shape"].as_ints()
    rank = len(kernel)
    strides, dilations = (attributes.get_ints(name) or [1] * rank for name in ("strides", "dilations"))
    reaches = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=False)]
    return reaches, list(strides), list(attributes.get_ints("pads") or [0] * (2 * rank))


def common(a: Shape | None, b: Shape | None) -> Shape | None:
    """Return the sizes equal in ``a`` and ``b``, None for other axes; None if the ranks are unknown or differ."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(m if m == n else None for m, n in zip(a, b, strict=True))


_NAMES = (
    "Abs Add And Ceil Cast Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish "
    "Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or Pow Reciprocal Relu "
    "Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where Xor BitwiseAnd "
    "BitwiseOr BitwiseXor BitwiseNot BitShift"
)
_ELEMENTWISE = frozenset(_NAMES.split())


def is_elementwise(node: ir.Node) -> bool:
    """Whether the operator of ``node`` is elementwise, with broadcasting."""
    return node.domain == "" and node.op_type in _ELEMENTWISE


def operands(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs of an elementwise node that broadcast together; of a Clip only the first, not the bounds."""
    return node.inputs[:1] if node.op_type == "Clip" else node.inputs


def _type_proto(value: ir.Value, shape: Shape | None) -> onnx.TypeProto:
    assert value.dtype is not None
    if isinstance(value.type, ir.TensorType):
        return onnx.helper.make_tensor_type_proto(int(value.dtype), shape)
    kind: onnx.TypeProto = ir.to_proto(value).type
    return kind


def _known_data(node: ir.Node) -> dict[str, onnx.TensorProto]:
    """Return the constant inputs that may determine shapes (axes, sizes, repeats) by name: up to 64 elements each."""
    steering = [(v.name, _steering(v)) for v in node.inputs if v is not None and v.name]
    return {name: onnx.numpy_helper.from_array(data, name) for name, data in steering if data is not None}


def _steering(value: ir.Value | None) -> np.ndarray | None:
    data = small_constant(value)
    return None if data is None or data.size > 64 else data


# --- constants -----------------------------------------------------------------------------------


def stored_sizes(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of the tensor of an initializer."""
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def is_single(value: ir.Value) -> bool:
    """Whether ``value`` is an initializer with one element, regardless of its rank."""
    return value.const_value is not None and value.const_value.size == 1


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initializer that is not also a graph input, or of a Constant node; otherwise None."""
    if value is None or value.is_graph_input():
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    node = value.producer()
    if node is not None and node.op_type == "Constant" and node.domain == "":
        tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()
    return None


FOLD_LIMIT = 1024  # maximum elements: shape arithmetic is folded as it is written, weights never are


def small_constant(value: ir.Value | None) -> np.ndarray | None:
    """Return ``constant_of(value)`` if it has at most FOLD_LIMIT elements; otherwise None, without reading the data."""
    if value is None:
        return None
    if (tensor := value.const_value) is None:
        return None if (node := value.producer()) is None or node.op_type != "Constant" else constant_of(value)
    return None if tensor.size > FOLD_LIMIT else constant_of(value)


def fold(op_type: str, inputs: Sequence[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray | None:
    """Return the value of a small integer or boolean node with constant inputs, or ``None``."""
    how = FOLDS.get(op_type)
    if how is None or any(a is None or a.size > FOLD_LIMIT or a.dtype.kind not in "iub" for a in inputs):
        return None
    if outgrows(op_type, inputs):
        return None
    try:
        with np.errstate(over="ignore"):  # unsigned arithmetic wraps around by design
            result = how(*inputs, **attrs)
    except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
        return None
    return None if result is None or np.size(result) > FOLD_LIMIT else np.asarray(result)


def outgrows(op_type: str, inputs: Sequence[np.ndarray | None]) -> bool:
    """Whether an elementwise operator would broadcast ``inputs`` to more than FOLD_LIMIT elements."""
    if op_type not in _ELEMENTWISE:
        return False
    columns = itertools.zip_longest(*[a.shape[::-1] for a in inputs if a is not None], fillvalue=1)
    return bool(math.prod(map(max, columns)) > FOLD_LIMIT)


def _truncated_division(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    return None if (b == 0).any() else (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


def _reduce(how: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: np.ndarray, axes: np.ndarray | None = None, keepdims: int = 1, **_: Any) -> np.ndarray:
        return np.asarray(how(x, axis=None if axes is None else tuple(axes), keepdims=bool(keepdims)), x.dtype)

    return reduce


def _reshaped(a: np.ndarray, shape: np.ndarray, allowzero: int = 0) -> np.ndarray:
    sizes = [a.shape[i] if d == 0 and not allowzero else int(d) for i, d in enumerate(shape)]
    return a.reshape(sizes)


def _sliced(
    a: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: np.ndarray | None = None
) -> np.ndarray:
    index = [slice(None)] * a.ndim
    along = range(len(starts)) if axes is None else axes
    for axis, start, end, step in zip(along, starts, ends, [1] * len(starts) if steps is None else steps, strict=True):
        index[int(axis)] = slice(int(start), int(end), int(step))
    return a[tuple(index)]


def _cast(a: np.ndarray, to: int, **_: Any) -> np.ndarray | None:
    target = ir.DataType(to)
    return None if target == ir.DataType.STRING else a.astype(target.numpy())


def _filled(shape: np.ndarray, value: ir.TensorProtocol | None = None) -> np.ndarray | None:
    if value is None or value.numpy().dtype.kind not in "iub" or np.prod(shape, dtype=float) > FOLD_LIMIT:
        return None
    return np.full(tuple(shape), value.numpy().item(), value.numpy().dtype)


def _expanded(a: np.ndarray, shape: np.ndarray) -> np.ndarray | None:
    target = np.broadcast_shapes(a.shape, tuple(int(d) for d in shape))
    return np.broadcast_to(a, target).copy() if np.prod(target, dtype=float) <= FOLD_LIMIT else None


FOLDS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _truncated_division,
    "Neg": np.negative,
    "Abs": np.abs,
    "Max": lambda *a: functools.reduce(np.maximum, a),
    "Min": lambda *a: functools.reduce(np.minimum, a),
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Not": np.logical_not,
    "Where": np.where,
    "Identity": lambda a: a,
    "Concat": lambda *a, axis: np.concatenate(a, axis),
    "Gather": lambda a, i, axis=0: np.take(a, i, axis),
    "Squeeze": lambda a, axes=None: np.squeeze(a, None if axes is None else tuple(axes)),
    "Unsqueeze": lambda a, axes: np.expand_dims(a, tuple(int(i) for i in axes)),
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Transpose": lambda a, perm=None: np.transpose(a, perm),
    "Expand": _expanded,
    "Cast": _cast,
    "ConstantOfShape": _filled,
    "Sum": lambda *a: functools.reduce(np.add, a),
    "Sign": np.sign,
    "Mod": lambda a, b, fmod=0: None if (b == 0).any() else (np.fmod if fmod else np.mod)(a, b),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "Range": lambda start, stop, step: np.arange(start, stop, step) if abs(stop - start) <= FOLD_LIMIT else None,
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
}
