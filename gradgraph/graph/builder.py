"""Write ONNX nodes so that code reads like formulas.

``Builder`` appends nodes: ``op.Exp(x)``, ``op.Concat(a, b, axis=1)``, ``op.TopK(x, k, outputs=2)`` (inputs in the order
of the ONNX specification, attributes by keyword, always of opset 21). ``Var`` is a value with overloaded operators. The
element type of a Python number follows from the operator's schema: in ``op.Where(c, 1.0, y)``, the ``1.0`` has the type
of ``y``, because both have the type variable ``T`` in the schema of Where.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError, shown
from gradgraph.graph import shapes
from gradgraph.graph.checks import describe
from gradgraph.graph.marks import mark_constant, mark_detached
from gradgraph.graph.schemas import FIXED_TYPES, Signature
from gradgraph.graph.scoped_names import scoped
from gradgraph.graph.shape_inference import shape_of, source_of_open_rank
from gradgraph.graph.shapes import OPSET, Shape, emitted

if TYPE_CHECKING:
    from gradgraph.graph.typed_operators import OperatorCalls
else:
    OperatorCalls = object

Number = bool | int | float
Array = Number | Sequence[Any] | np.ndarray

FAN_OUT = 256  # maximum uses of a shared constant before it is copied: session creation is quadratic in them


@dataclass(frozen=True, eq=False, slots=True)
class Var:
    """A value of the graph under construction, with arithmetic operators.

    Comparisons ``< <= > >=`` return boolean Vars. ``==`` compares identity; use ``op.Equal`` for elements.
    """

    op: Builder
    value: ir.Value
    __array_ufunc__ = None  # `ndarray * var` calls __rmul__ here, instead of NumPy's elementwise loop

    @property
    def dtype(self) -> ir.DataType:
        """The element type."""
        if self.value.dtype is None:
            raise ModelError(
                f"the element type of '{self.value.name}' is unknown; run ONNX shape inference on the model"
            )
        return self.value.dtype

    @property
    def shape(self) -> Shape | None:
        """The size of each axis: int if known, str if symbolic, None if unknown; None if the rank is unknown."""
        return shape_of(self.value)

    @property
    def rank(self) -> int:
        """The number of axes; raises ModelError if it is unknown."""
        shape = self.shape
        if shape is None:
            raise _open_rank(self.value)
        return len(shape)

    def dim(self, axis: int) -> shapes.Dim:
        """Return the size of one axis: a number, a name, or None if unknown."""
        shape = self.shape
        return None if shape is None else shape[axis]

    @property
    def const(self) -> np.ndarray | None:
        """The array of a constant of the graph; None for other values."""
        return shapes.constant_of(self.value)

    @property
    def is_float(self) -> bool:
        """Whether the element type is floating-point."""
        return self.value.dtype is not None and self.value.dtype.is_floating_point()

    def __repr__(self) -> str:
        return f"Var({self.value.name}: {self.value.dtype}{list(self.shape) if self.shape is not None else '?'})"

    def __add__(self, other: Any) -> Var:
        return self.op.Add(self, other)

    def __radd__(self, other: Any) -> Var:
        return self.op.Add(other, self)

    def __sub__(self, other: Any) -> Var:
        return self.op.Sub(self, other)

    def __rsub__(self, other: Any) -> Var:
        return self.op.Sub(other, self)

    def __mul__(self, other: Any) -> Var:
        return self.op.Mul(self, other)

    def __rmul__(self, other: Any) -> Var:
        return self.op.Mul(other, self)

    def __truediv__(self, other: Any) -> Var:
        return self.op.Div(self, other)

    def __rtruediv__(self, other: Any) -> Var:
        return self.op.Div(other, self)

    def __pow__(self, other: Any) -> Var:
        return self.op.Pow(self, other)

    def __rpow__(self, other: Any) -> Var:
        return self.op.Pow(self.op.const(other, self.dtype), self)

    def __matmul__(self, other: Any) -> Var:
        return self.op.MatMul(self, other)

    def __neg__(self) -> Var:
        return self.op.Neg(self)

    def __lt__(self, other: Any) -> Var:
        return self.op.Less(self, other)

    def __le__(self, other: Any) -> Var:
        return self.op.LessOrEqual(self, other)

    def __gt__(self, other: Any) -> Var:
        return self.op.Greater(self, other)

    def __ge__(self, other: Any) -> Var:
        return self.op.GreaterOrEqual(self, other)

    def __and__(self, other: Any) -> Var:
        return self.op.And(self, other)

    def __or__(self, other: Any) -> Var:
        return self.op.Or(self, other)

    def __invert__(self) -> Var:
        return self.op.Not(self)


Written = Var | tuple[Var, ...]  # one output of a node, or several


def all_of(results: Var | Iterable[Var]) -> list[Var]:
    """Return the result of ``emit`` as a list, for one output or several."""
    return [results] if isinstance(results, Var) else list(results)


class Builder(OperatorCalls):
    """A writer of nodes and constants; ``finish(graph)`` moves them into a graph.

    Args:
        taken: the names already used in the graph. It is iterated only when the first new name is needed, as many
            passes write no nodes.
        scope: the prefix of new names, which shows the origin of a node.
        named_operators: keep named operators as single nodes of the domain ``gradgraph`` (see ``operators.py``).
    """

    def __init__(self, taken: Iterable[str] = (), scope: str = "", named_operators: bool = False) -> None:
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []
        self.scope = scope
        self.named_operators = named_operators
        self._taken = taken
        self._counts: dict[str, int] = {}
        self._pool: dict[Any, ir.Value] = {}

    if not TYPE_CHECKING:  # type checkers read typed_operators.pyi

        def __getattr__(self, op_type: str) -> Callable[..., Any]:
            if op_type.startswith("_"):
                raise AttributeError(op_type)
            return functools.partial(self.emit, op_type)

    @contextlib.contextmanager
    def naming_operators(self, named: bool = True) -> Iterator[None]:
        """Return a context in which named operators stay single nodes or, without ``named``, become standard nodes."""
        before, self.named_operators = self.named_operators, named
        try:
            yield
        finally:
            self.named_operators = before

    # --- nodes ---

    @overload
    def emit(
        self, op_type: str, *inputs: Any, outputs: Literal[1] = 1, domain: str = "", name: str = "", **attrs: Any
    ) -> Var: ...
    @overload
    def emit(
        self, op_type: str, *inputs: Any, outputs: int, domain: str = "", name: str = "", **attrs: Any
    ) -> Written: ...

    def emit(
        self, op_type: str, *inputs: Any, outputs: int = 1, domain: str = "", name: str = "", **attrs: Any
    ) -> Written:
        """Append one node; return its output, or a tuple of Vars if ``outputs`` > 1.

        Pass ``None`` for an absent optional input; an attribute that is ``None`` is omitted. ``name`` is the name of
        the (first) output.
        """
        sig = emitted(op_type, domain)
        operands = self._operands(sig, inputs)
        attrs = {k: v for k, v in attrs.items() if v is not None} if attrs else attrs
        if outputs == 1 and domain == "" and not name and op_type in shapes.FOLDS:
            folded = _folded(op_type, operands, attrs)
            if folded is not None:
                return self.const(folded)
        # onnxruntime's Split counts its inputs, including absent ones; Loop always has two
        while len(operands) > sig.least and operands[-1] is None:
            operands.pop()
        values = [None if v is None else v.value for v in operands]
        node = ir.Node(
            domain,
            op_type,
            values,
            [sig.attribute(k, v) for k, v in attrs.items()],
            num_outputs=outputs,
            name=self.fresh(name) if name else self.fresh_in(self.scope, op_type),
        )
        dtypes = sig.output_dtypes(values, attrs, outputs)
        for i, (out, dtype) in enumerate(zip(node.outputs, dtypes, strict=True)):
            out.name = node.name if i == 0 else self.fresh(f"{node.name}:{i}")
            if dtype is not None:
                out.type = ir.TensorType(dtype)
        self.nodes.append(node)
        return Var(self, node.outputs[0]) if outputs == 1 else tuple(Var(self, out) for out in node.outputs)

    def output(self, y: Var, i: int, dtype: ir.DataType | None = None) -> Var:
        """Return output ``i`` of the node that computes ``y``, adding it if the node omits this optional output.

        Rules use it to reuse results of the forward node, such as Dropout's mask or LayerNormalization's mean.
        ``dtype`` is the element type of the output, for operators whose schema does not determine it.
        """
        node = y.value.producer()
        if node is None:
            raise ModelError(f"'{y.value.name}' is not computed by a node, so it has no further outputs")
        if i >= len(node.outputs):
            node.resize_outputs(i + 1)
        out = node.outputs[i]
        if not out.name:
            attrs = {a.name: a for a in node.attributes.values()}
            dtype = dtype or emitted(node.op_type, node.domain).output_dtypes(node.inputs, attrs, i + 1)[i]
            out.name = self.fresh(f"{y.value.name}:{i}")
            out.type = None if dtype is None else ir.TensorType(dtype)
        return Var(self, out)

    @overload
    def wrap(self, value: ir.Value) -> Var: ...
    @overload
    def wrap(self, value: ir.Value | None) -> Var | None: ...

    def wrap(self, value: ir.Value | None) -> Var | None:
        """Return a value of the graph as a ``Var``, or None for None."""
        return None if value is None else Var(self, value)

    def graph(self, inputs: Sequence[ir.Value], write: Callable[..., Sequence[Var]], name: str = "body") -> ir.Graph:
        """Build a body graph for If, Loop or Scan.

        The body captures values that it reads from outside; its constants become initializers of the main graph.

        Args:
            inputs: the inputs of the body: new values with type and shape, which get unused names.
            write: called with one Var per input; emits the nodes of the body with this builder and returns its outputs.
        """
        outside, self.nodes = self.nodes, []
        for value in inputs:
            value.name = self.fresh_in(self.scope, value.name or "x")
        found = list(write(*map(self.wrap, inputs)))
        written, results = set(self.nodes), dict[ir.Value, None]()
        for result in found:
            own = result.value.producer() in written and result.value not in results
            kept = result if own else self.emit("Identity", result, name=scoped(result.value.name or "", "out"))
            kept.value.type, kept.value.shape = result.value.type, result.value.shape  # it may be a sequence
            results[kept.value] = None
        body = ir.Graph(list(inputs), list(results), nodes=self.nodes, name=name)
        self.nodes = outside
        return body

    def finish(self, graph: ir.Graph, before: ir.Node | None = None) -> None:
        """Move all nodes written so far to the end of ``graph``, or before the node ``before``; constants move, too."""
        for value in self.constants:
            graph.register_initializer(value)
        if before is None:
            graph.extend(self.nodes)
        else:
            graph.insert_before(before, self.nodes)
        for domain in {node.domain for node in self.nodes}:
            graph.opset_imports.setdefault(domain, OPSET if domain == "" else 1)
        self.nodes, self.constants = [], []

    def fresh(self, name: str) -> str:
        """Return an unused name, and reserve it: ``name``, or the first unused one of ``name_1``, ``name_2``, …."""
        if name in self._names:
            count = self._counts.get(name, 0) + 1
            while f"{name}_{count}" in self._names:
                count += 1
            self._counts[name] = count
            name = f"{name}_{count}"
        self._names.add(name)
        return name

    def reserve(self, name: str) -> None:
        """Prevent new values from getting this name."""
        self._names.add(name)

    def release(self, name: str) -> None:
        """Allow new values to get this name again."""
        self._names.discard(name)

    def fresh_in(self, scope: str, name: str) -> str:
        """Return an unused name for ``name`` in ``scope``, the name of a node or of a part of the model."""
        return self.fresh(scoped(scope, name))

    @functools.cached_property
    def _names(self) -> set[str]:
        return set(self._taken)

    # --- constants ---

    def const(self, value: Any, dtype: ir.DataType | None = None) -> Var:
        """Return a constant of the graph; without ``dtype``, Python ints become int64 and floats float32."""
        if isinstance(value, Var):
            return value
        array = _as_array(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes()) if array.size <= 64 else None
        shared = self._pool.get(key) if key is not None else None
        if shared is None or len(shared.uses()) >= FAN_OUT:
            shared = self._constant(array)
            if key is not None:
                self._pool[key] = shared
        return Var(self, shared)

    def weight(self, name: str, array: np.ndarray) -> Var:
        """Add an initializer that is trainable, unlike a constant, and return it."""
        return Var(self, self._initializer(name, array))

    def _constant(self, array: np.ndarray) -> ir.Value:
        value = self._initializer(f"const/{_label(array)}", array)
        mark_constant(value)
        return value

    def _initializer(self, label: str, array: np.ndarray) -> ir.Value:
        tensor = ir.Tensor(array)
        value = ir.Value(
            name=self.fresh(label), type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
        )
        tensor.name = value.name
        self.constants.append(value)
        return value

    def _operands(self, sig: Signature, inputs: Sequence[Any]) -> list[Var | None]:
        if all(x is None or isinstance(x, Var) for x in inputs):
            return list(inputs)
        known: dict[str, ir.DataType] = {}
        for i, x in enumerate(inputs):
            if isinstance(x, Var) and x.value.dtype is not None:
                known.setdefault(sig.input_type(i), x.value.dtype)
        floats = (x.value.dtype for x in inputs if isinstance(x, Var) and x.is_float)
        default = next(floats, None)
        return [
            x if x is None or isinstance(x, Var) else self._literal(x, sig.input_type(i), known, default)
            for i, x in enumerate(inputs)
        ]

    def _literal(self, x: Any, type_str: str, known: dict[str, ir.DataType], default: ir.DataType | None) -> Var:
        dtype = known.get(type_str) or FIXED_TYPES.get(type_str)
        if dtype is None and not isinstance(x, np.ndarray) and np.asarray(x).dtype.kind == "f":
            dtype = default
        return self.const(x, dtype)

    # --- helpers for rules ---

    def cast(self, x: Var, dtype: ir.DataType) -> Var:
        """Return ``x`` cast to the element type ``dtype``, or ``x`` itself if it already has this type."""
        return x if x.value.dtype == dtype else self.Cast(x, to=int(dtype))

    def shape(self, x: Var) -> Var:
        """Return the shape of ``x`` as an int64 vector: a constant where it is known."""
        known = x.shape
        return self.const(np.array(known, np.int64)) if shapes.is_static(known) else self.Shape(x)

    def dim(self, x: Var, axis: int) -> Var:
        """Return the size of one axis as an int64 vector of length 1."""
        known = x.shape
        if isinstance(size := x.dim(axis), int):
            return self.const(np.array([size], np.int64))
        axis = axis if axis >= 0 or known is None else axis + len(known)
        return self.Shape(x, start=axis, end=axis + 1 if axis != -1 else None)

    def dims(self, x: Var, start: int, stop: int | None = None) -> Var:
        """Return the sizes of axes ``start:stop`` (nonnegative) as an int64 vector: a constant if all are known."""
        known = x.shape[start:stop] if x.shape is not None else None
        if shapes.is_static(known):
            return self.const(np.array(known, np.int64))
        return self.Shape(x, start=start, end=stop)

    def arange(self, length: Var) -> Var:
        """Return the int64 vector 0, 1, …, ``length`` − 1; ``length`` is an int64 vector of length 1."""
        return self.Range(0, self.Squeeze(length, [0]), 1)

    def detached(self, x: Var) -> Var:
        """Return a copy of ``x`` through which no gradient passes."""
        copy = self.Identity(x)
        node = copy.value.producer()
        assert node is not None
        mark_detached(node)
        return copy

    def full(self, shape: Var, value: Number, dtype: ir.DataType) -> Var:
        """Return a tensor filled with ``value``; ``shape`` is an int64 vector, possibly computed at run time."""
        return self.ConstantOfShape(shape, value=ir.Tensor(np.array([value], dtype.numpy())))

    def zeros_like(self, x: Var) -> Var:
        """Return zeros of the shape and element type of ``x``."""
        return self._filled_like(x, 0)

    def ones_like(self, x: Var) -> Var:
        """Return ones of the shape and element type of ``x``."""
        return self._filled_like(x, 1)

    def _filled_like(self, x: Var, number: int) -> Var:
        filled = self.full(self.shape(x), number, x.dtype)
        shapes.record_shape(filled.value, x.shape)
        return filled

    def like(self, x: Var, model: Var) -> Var:
        """Return ``x``; if its shape is unknown, give it the shape of ``model``. No node is emitted."""
        if x.value.shape is None:
            shapes.record_shape(x.value, model.shape)
        return x

    def sum_of(self, terms: Sequence[Var]) -> Var:
        """Return the sum of ``terms``; a single term is returned without a node."""
        if len(terms) == 1:
            return terms[0]
        return self.Add(*terms) if len(terms) == 2 else self.Sum(*terms)


def _folded(op_type: str, operands: Sequence[Var | None], attrs: dict[str, Any]) -> np.ndarray | None:
    """Return the value of a node if all its inputs are small constants, else None."""
    known: list[np.ndarray | None] = []
    for x in operands:
        known.append(None if x is None else shapes.small_constant(x.value))
        if known[-1] is None:
            return None
    return shapes.fold(op_type, known, attrs)


# --- constants ---


def _open_rank(value: ir.Value) -> ModelError:
    """Return the error for a value of unknown rank, which names the input or node where the rank is lost."""
    source = source_of_open_rank(value)
    node, what = source.producer(), f"the rank of '{shown(source.name)}' is unknown"
    if node is None:
        return ModelError(f"{what}, as it has no shape in the file; add its shape")
    return ModelError(
        f"{what}, as {describe(node)} determines it at run time; if it is always the same, add the shape to value_info"
    )


def _too_large(value: Any) -> ModelError:
    return ModelError(f"sizes of {shown(value)} do not fit into 64 bits, so the model is damaged; export it again")


def _as_array(value: Any, dtype: ir.DataType | None) -> np.ndarray:
    if dtype is not None:
        try:
            return np.asarray(value, dtype.numpy())
        except OverflowError:
            raise _too_large(value) from None
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    array = np.asarray(value)
    if array.dtype.kind in "uO":  # NumPy's type for integers of more than 63 bits
        raise _too_large(value)
    return array.astype({"f": np.float32, "i": np.int64, "b": np.bool_}.get(array.dtype.kind, array.dtype))


def _label(array: np.ndarray) -> str:
    """Return a short readable name: ``2.0``, ``[1,-1]``, ``int64[3,4]``."""
    if array.ndim == 0:
        return str(array.item())
    if array.ndim == 1 and array.size <= 4:
        return "[" + ",".join(str(x) for x in array.tolist()) + "]"
    return f"{array.dtype}{list(array.shape)}".replace(" ", "")
