"""Recording of a forward pass as ONNX nodes.

While ``export`` runs a module's ``forward``, the current ``Trace`` is the graph under construction. ``op.Relu(x)``
appends a node to it and returns a ``Tensor``; this is the interface of ``gradgraph.graph.builder``, for traced tensors.
Parameters become initializers of the graph at their first use. The trace also names sizes that are known only at run
time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError, listed, shown
from gradgraph.frontend.dims import QUOTIENTS, Dim, Extent
from gradgraph.graph.builder import Builder, Var, all_of
from gradgraph.graph.shapes import is_static, record_shape

if TYPE_CHECKING:
    from gradgraph.frontend.tensor import Tensor

TensorLike: TypeAlias = "Value | Dim | bool | int | float | np.ndarray | Sequence[Any]"


class Value:
    """Base class of the tensors of a traced function: ``Tensor``, ``Parameter`` and ``Buffer``."""

    @property
    def traced(self) -> Var:
        """The value in the graph under construction."""
        raise NotImplementedError


def mark_role(value: ir.Value, role: str) -> None:
    """Mark an initializer as "parameter", "buffer" (not trained) or "frozen"."""
    if value.const_value is not None:
        value.const_value.metadata_props["gradgraph.role"] = role


class Trace:
    """A graph under construction.

    Args:
        stored: the names of the network's parameters and buffers by ``id``; using others raises ModelError.
        taken: names that new values must not get.
        builder: the builder of the graph to extend; by default that of a new graph.
        before: the nodes of the graph to extend.
    """

    def __init__(
        self,
        stored: dict[int, str],
        taken: Sequence[str] = (),
        builder: Builder | None = None,
        before: Iterable[ir.Node] = (),
    ) -> None:
        self.builder = builder or Builder(taken=[*stored.values(), *taken])
        self.before = before
        self.modules: dict[int, str] = {}
        self.initializers: dict[int, ir.Value] = {}
        self.cache: dict[Any, Tensor] = {}
        self._stored = stored
        self._formulas: dict[str, Dim] = {}
        self._sources: dict[str, tuple[Var, int] | Var] = {}

    # --- parameters and scopes ---

    def stored(self, owner: Value, array: np.ndarray, role: str) -> Var:
        """Return the initializer of the parameter or buffer ``owner``, created at its first use."""
        value = self.initializers.get(id(owner))
        if value is None:
            name = self._stored.get(id(owner))
            if name is None:
                raise ModelError(
                    f"forward uses a {role} of shape {array.shape} that belongs to no module; assign it to an "
                    "attribute "
                    "of a module, or append it to a ParameterList"
                )
            held = ir.Tensor(array, name=name)
            value = ir.Value(name=name, type=ir.TensorType(held.dtype), shape=ir.Shape(array.shape), const_value=held)
            mark_role(value, role)
            self.initializers[id(owner)] = value
        return Var(self.builder, value)

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes written inside this context with ``name``, the path of a module."""
        outer, self.builder.scope = self.builder.scope, name
        try:
            yield
        finally:
            self.builder.scope = outer

    # --- sizes ---

    def shape(self, var: Var) -> tuple[Extent, ...]:
        """Return the shape of ``var`` as integers and ``Dim`` objects; an unknown size gets a new name."""
        known = var.shape
        if known is None:
            raise ModelError(f"the rank of '{var.value.name}' is unknown; reshape it to a fixed number of dimensions")
        if None in known:
            known = tuple(self.builder.fresh(f"{var.value.name}.{i}") if d is None else d for i, d in enumerate(known))
            record_shape(var.value, known)
        for axis, dim in enumerate(known):
            if isinstance(dim, str) and dim not in self._formulas:
                self._formulas[dim] = Dim.named(dim)
                self._sources.setdefault(dim, (var, axis))
        return tuple(d if isinstance(d, int) else self._formulas[d or ""] for d in known)

    def record(self, var: Var, dims: Sequence[Extent]) -> None:
        """Declare the shape of ``var``; a size name that is new is defined as the size of that axis of ``var``."""
        for axis, dim in enumerate(dims):
            if isinstance(dim, Dim):
                self._formulas.setdefault(str(dim), dim)
                if dim.name is not None:
                    self._sources.setdefault(dim.name, (var, axis))
        record_shape(var.value, tuple(d if isinstance(d, int) else str(d) for d in dims))

    def size(self, dim: Extent) -> Var:
        """Return a size as an int64 vector of length 1 in the graph; for an integer, a constant."""
        if isinstance(dim, int):
            return self.builder.const(np.array([dim], np.int64))
        terms = []
        for names, coefficient in dim.terms.items():
            factors = [self._named_size(name) for name in names]
            if coefficient != 1 or not factors:
                factors.append(self.builder.const(np.array([coefficient], np.int64)))
            terms.append(functools.reduce(lambda a, b: a * b, factors))
        return functools.reduce(lambda a, b: a + b, terms)

    def _named_size(self, name: str) -> Var:
        source = self._sources.get(name)
        if isinstance(source, tuple):
            source = self.builder.dim(*source)
        elif source is None:  # as ONNX rounds integer division towards zero, the remainder is subtracted first
            dividend, divisor = (self.size(part) for part in QUOTIENTS[name])
            source = (dividend - self.builder.Mod(dividend, divisor)) / divisor
        self._sources[name] = source
        return source

    def sizes(self, dims: Sequence[Extent]) -> Var:
        """Return several sizes as one int64 vector in the graph."""
        if is_static(dims):
            return self.builder.const(np.array(dims, np.int64))
        parts = [self.size(d) for d in dims]
        return parts[0] if len(parts) == 1 else self.builder.Concat(*parts, axis=0)


_CURRENT: ContextVar[Trace | None] = ContextVar("gradgraph_trace", default=None)


def current() -> Trace:
    """Return the graph under construction; raise ``ModelError`` outside ``export``."""
    trace = _CURRENT.get()
    if trace is None:
        raise ModelError(
            "tensor functions and modules record a graph, and work only inside gradgraph.frontend.export(net, inputs); "
            "to compute numbers, export the network and run the file"
        )
    return trace


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)


# --- nodes ---------------------------------------------------------------------------------------


def wrap(var: Var) -> Tensor:
    from gradgraph.frontend.tensor import Tensor  # Tensor's module imports this one

    return Tensor(var)


class _Emitter:
    """The namespace of operators: ``op.Name(x, ..., attribute=...)`` appends one node to the current trace."""

    def __getattr__(self, op_type: str) -> Callable[..., Tensor]:
        return functools.partial(self.emit, op_type)

    def emit(self, op_type: str, *inputs: Any, shape: Sequence[Extent] | None = None, **attributes: Any) -> Tensor:
        """Append a node, and return its only output; pass ``shape`` if ONNX's shape inference cannot find it."""
        trace = current()
        result = wrap(trace.builder.emit(op_type, *[_operand(trace, x) for x in inputs], outputs=1, **attributes))
        return result if shape is None else shaped(result, shape)

    def several(self, op_type: str, *inputs: Any, outputs: int, **attributes: Any) -> tuple[Tensor, ...]:
        trace = current()
        operands = [_operand(trace, x) for x in inputs]
        return tuple(map(wrap, all_of(trace.builder.emit(op_type, *operands, outputs=outputs, **attributes))))


def shaped(x: Tensor, dims: Sequence[Extent]) -> Tensor:
    """Declare the shape of ``x`` without writing a node, and return ``x``."""
    if x.traced.const is None:
        current().record(x.traced, dims)
    return x


op = _Emitter()


def _operand(trace: Trace, x: Any) -> Any:
    if isinstance(x, Value):
        return x.traced
    return trace.size(x) if isinstance(x, Dim) else x


# --- tensors from anything -----------------------------------------------------------------------


def tensor(x: TensorLike, dtype: ir.DataType | None = None) -> Tensor:
    """Return ``x`` as a traced tensor, cast to ``dtype`` if set; numbers and arrays become constants.

    By default, constants in float64 become float32.
    """
    trace = current()
    if isinstance(x, Value):
        value = wrap(x.traced)
    elif isinstance(x, Dim):
        value = op.Squeeze(wrap(trace.size(x)), [0], shape=())
    else:
        value = wrap(trace.builder.const(_literal(x) if dtype is None else np.asarray(x), dtype))
    return value if dtype is None or value.traced.dtype == dtype else op.Cast(value, to=int(dtype))


def _literal(x: Any) -> np.ndarray:
    if isinstance(x, Mapping):
        raise ModelError(
            f"a traced computation got a dict of tensors ({listed(x)}), but requires a single tensor; select one of "
            f"them, such as out['{shown(next(iter(x), '...'))}']"
        )
    array = np.asarray(x)
    if array.dtype.kind not in "biuf":
        raise ModelError(f"a traced computation got {type(x).__name__}; use a number, an array or a tensor")
    wide = {np.dtype(np.float64): np.float32, np.dtype(np.int32): np.int64}
    return array.astype(wide[array.dtype]) if array.dtype in wide else array


def tensors(*xs: TensorLike) -> list[Tensor]:
    """Return the operands of an operation, cast to their common element type by PyTorch's type promotion.

    Only tensors determine the width of the type; numbers, arrays and sizes only its kind (bool < integer < floating).
    """
    dtype = common_dtype(*xs)
    return [tensor(x, dtype) for x in xs]


def common_dtype(*xs: TensorLike) -> ir.DataType:
    kinds = [_kind(x) for x in xs]
    highest = max(kinds)
    deciding = [x.traced.dtype for x, kind in zip(xs, kinds, strict=True) if isinstance(x, Value) and kind == highest]
    if not deciding:
        return (ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.FLOAT)[highest]
    return functools.reduce(_wider, deciding)


def _kind(x: TensorLike) -> int:
    if isinstance(x, Value):
        dtype = x.traced.dtype
        return 2 if dtype.is_floating_point() else 0 if dtype == ir.DataType.BOOL else 1
    if isinstance(x, Dim):
        return 1
    return {"b": 0, "i": 1, "u": 1, "f": 2}[_literal(x).dtype.kind]


def _wider(a: ir.DataType, b: ir.DataType) -> ir.DataType:
    if a == b:
        return a
    if ir.DataType.BFLOAT16 in (a, b):
        other = b if a == ir.DataType.BFLOAT16 else a
        return ir.DataType.FLOAT if other == ir.DataType.FLOAT16 else other
    return ir.DataType.from_numpy(np.promote_types(a.numpy(), b.numpy()))


# --- names of types ------------------------------------------------------------------------------

_SHORT = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32"}


def as_dtype(dtype: Any) -> ir.DataType:
    """Convert ``"float32"``, ``np.float32``, ``"long"`` or ``torch.float32`` to an ``onnx_ir.DataType``."""
    if isinstance(dtype, ir.DataType):
        return dtype
    text = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else np.dtype(dtype).name
    text = _SHORT.get(text, text)
    if text == "bfloat16":
        return ir.DataType.BFLOAT16
    try:
        return ir.DataType.from_numpy(np.dtype(text))
    except TypeError:
        raise ModelError(f"{dtype!r} is not an element type; use a name such as 'float32' or 'int64'") from None
