"""Convert a lowered graph to a program: each node becomes views or an operation (see ``program``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import BuildError, Finding, shown
from gradgraph.export.c import operators
from gradgraph.export.c.operators import literal
from gradgraph.export.c.program import (
    C_TYPES,
    PACKED,
    Argument,
    Assemble,
    Call,
    Map,
    Operation,
    Program,
    Reduce,
    Rows,
    Shape,
    Tensor,
    View,
)
from gradgraph.graph.checks import describe
from gradgraph.graph.nodes import input_at
from gradgraph.graph.operator_table import OperatorTable
from gradgraph.passes.normal.edit import attributes

LARGEST = 2**31 - 1  # bytes per tensor: kernels index with int
REMEDY = "write that part of the model with other operators, or train it with onnxruntime"


def refusal(subject: str, why: str, remedy: str = REMEDY) -> BuildError:
    finding = Finding(subject, f"cannot be exported as C code: {why}")
    return BuildError(f"{subject} cannot be exported as C code: {why}", [finding], remedy=remedy)


class Reader:
    """A converter of a graph to ``program``.

    Attributes:
        views: the view of each value of the graph that has been read.
        dequantized: the operations that convert constant integers to floats, by their results.
    """

    def __init__(self, views: dict[ir.Value, View] | None = None) -> None:
        self.program = Program()
        self.views: dict[ir.Value, View] = dict(views or {})
        self.constants: dict[ir.Value, np.ndarray] = {}
        self.node: ir.Node | None = None
        self._copies: dict[View, Tensor] = {}
        self._maps: dict[tuple[str, tuple[View, ...], Shape, str], Tensor] = {}
        self.dequantized: dict[Tensor, Map] = {}

    def inner(self) -> Reader:
        """Return a reader of the body of the current node."""
        found = Reader(self.views)
        found.dequantized = self.dequantized
        return found

    # --- values -------------------------------------------------------------------------------------------

    def tensor(self, value: ir.Value, role: str = "temporary") -> Tensor:
        """Return a new tensor with the type and the shape of ``value``."""
        shape, dtype = self.shape_of(value), self.dtype_of(value)
        if dtype in PACKED:
            raise refusal(self.subject(value), f"it computes {dtype}, which is supported for constants only")
        made = Tensor(shape, dtype, value.name or "", role)
        if made.nbytes > LARGEST:
            raise refusal(self.subject(value), "it has more than 2 GB", "use a smaller batch")
        return made

    def shape_of(self, value: ir.Value) -> Shape:
        if value.shape is None or not all(isinstance(d, int) for d in value.shape):
            raise refusal(self.subject(value), "its size is unknown", "fix the sizes of the model's inputs")
        return tuple(int(d) for d in value.shape)  # type: ignore[arg-type]

    def dtype_of(self, value: ir.Value) -> str:
        name = "" if value.dtype is None else str(value.dtype.name).lower()
        name = {"float": "float32", "double": "float64"}.get(name, name)
        if name not in C_TYPES:
            raise refusal(self.subject(value), f"it has the type {name or 'unknown'}")
        return name

    def subject(self, value: ir.Value) -> str:
        maker = value.producer()
        return f"tensor '{shown(value.name)}'" if maker is None else describe(maker)

    def view(self, value: ir.Value) -> View:
        return self.views[value]

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Return the elements of a constant, or None if ``value`` is computed at run time."""
        if value is None:
            return None
        if value not in self.constants and value.const_value is not None:
            self.constants[value] = value.const_value.numpy()
        return self.constants.get(value)

    def add_constant(self, value: ir.Value) -> None:
        array = self.constant(value)
        assert array is not None
        self.constants[value] = array
        shape = tuple(int(n) for n in array.shape)
        dtype = str(array.dtype)
        if dtype not in C_TYPES:
            self.dtype_of(value)  # raises an error, unless NumPy names the type differently
        if dtype in PACKED:
            array = array.astype(PACKED[dtype])
        if array.size and (array == array.ravel()[0]).all():
            one = Tensor((), dtype, value.name or "", "constant", array.ravel()[:1].reshape(()))
            self.views[value] = one.whole().expanded(shape)
        else:
            self.views[value] = Tensor(shape, dtype, value.name or "", "constant", array).whole()

    def whole(self, view: View) -> Tensor:
        """Return a contiguous tensor with the elements of ``view``: the viewed tensor itself, or a copy."""
        if view.dtype in PACKED:
            raise self.unsupported(f"it reads {view.dtype}, which is supported for weights of products only")
        if view.is_whole and not (view.tensor.role == "constant" and view.tensor.size == 1 and view.size != 1):
            return view.tensor
        if view not in self._copies:
            self._copies[view] = self.map(view.shape, view.dtype, "{0}", [view], f"{view.tensor.name}")
        return self._copies[view]

    def of_shape(self, view: View, shape: Shape) -> View:
        found = view.reshaped(shape)
        return self.whole(view).whole().reshaped(shape) if found is None else found  # type: ignore[return-value]

    # --- operations ---------------------------------------------------------------------------------------

    def add(self, operation: Operation) -> None:
        operation.node = "" if self.node is None else _comment(self.node)
        self.program.operations.append(operation)

    def map(self, shape: Shape, dtype: str, template: str, operands: Sequence[View], name: str = "") -> Tensor:
        """Add an elementwise operation and return its output; an identical operation is reused."""
        if dtype in PACKED:
            raise self.unsupported(f"it computes {dtype}, which is supported for constants only")
        read = [v.expanded(shape) for v in operands]
        key = (template, tuple(read), shape, dtype)
        if key not in self._maps:
            self._maps[key] = Tensor(shape, dtype, name)
            self.add(Map(self._maps[key], template, read))
        return self._maps[key]

    def rows(self, out: Tensor, function: str, *arguments: Argument) -> View:
        self.add(Rows(out, function, list(arguments)))
        return out.whole()

    def call(self, out: Tensor, function: str, *arguments: Argument, in_place: Tensor | None = None) -> View:
        self.add(Call([out], function, [out, *arguments], in_place))
        return out.whole()

    def unsupported(self, what: str) -> BuildError:
        assert self.node is not None
        return refusal(describe(self.node), what)

    # --- the graph ----------------------------------------------------------------------------------------

    def read(self, graph: ir.Graph) -> Program:
        """Convert the nodes of ``graph``, whose inputs must already be in ``views``."""
        for value in graph.initializers.values():
            self.add_constant(value)
        for node in graph:
            self.node = node
            self._read_node(node)
        self.node = None
        return self.program

    def _read_node(self, node: ir.Node) -> None:
        if node.op_type == "Constant":
            value = node.outputs[0]
            found = node.attributes.get("value")
            if found is None:
                raise self.unsupported("this form of Constant")
            self.constants[value] = found.value.numpy()
            self.add_constant(value)
            return
        other = next((v for v in node.inputs if v is not None and v not in self.views), None)
        if other is not None:
            raise self.unsupported(f"its input '{shown(other.name)}' is not a tensor")
        attrs = attributes(node)
        key = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
        if key in READERS:
            READERS[key](self, node, attrs)
        elif key in operators.ELEMENTWISE:
            _elementwise(self, node, attrs)
        elif key in operators.REDUCTIONS:
            _reduce(self, node, attrs)
        else:
            raise self.unsupported("the operator is not supported")

    def set(self, value: ir.Value, view: View | Tensor) -> None:
        """Record the view of an output. Raise BuildError if its shape or type differs from the graph's."""
        view = view.whole() if isinstance(view, Tensor) else view
        if view.shape != self.shape_of(value) or view.dtype != self.dtype_of(value):
            raise self.unsupported(f"its output has the shape {list(view.shape)}, not {list(self.shape_of(value))}")
        view.tensor.name = view.tensor.name or value.name or ""
        self.views[value] = view

    def wanted(self, node: ir.Node, i: int) -> Tensor | None:
        """Return a new tensor for output ``i``, or None if nothing reads it."""
        if i >= len(node.outputs) or not node.outputs[i].name:
            return None
        value = node.outputs[i]
        if not value.uses() and not value.is_graph_output():
            return None
        made = self.tensor(value)
        self.views[value] = made.whole()
        return made


def _comment(node: ir.Node) -> str:
    """Return the operator and the name of a node for a C comment; other characters are replaced."""
    name = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "_" for c in (node.name or "")[-60:])
    return f"{node.op_type} {name}".strip()


Read = Callable[[Reader, ir.Node, dict[str, Any]], None]
READERS = OperatorTable[Read]()

# --- elementwise operators and reductions -----------------------------------------------------------------


def _elementwise(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    out = node.outputs[0]
    shape, dtype = r.shape_of(out), r.dtype_of(out)
    operands = [r.view(v) for v in node.inputs if v is not None]
    whole_numbers = node.op_type == "Div" and np.dtype(dtype).kind in "iu"
    if (whole_numbers or node.op_type in ("Mod", "BitShift")) and not _divides(
        r.constant(node.inputs[1]), node.op_type
    ):
        raise r.unsupported("its second input must be a positive constant")
    if node.op_type == "Clip":
        made = _clip(r, node, operands[0])
    elif node.op_type in operators.FOLDED:
        made = operands[0]
        for other in operands[1:]:
            between = tuple(np.broadcast_shapes(made.shape, other.shape))
            made = _mapped(r, operators.FOLDED[node.op_type], attrs, [made, other], between, dtype)
        if node.op_type == "Mean":
            count = Tensor((), dtype, "", "constant", np.array(len(operands), dtype)).whole()
            made = _mapped(r, "Div", {}, [made, count], shape, dtype)
    else:
        made = _mapped(r, node.op_type, attrs, operands, shape, dtype)
    r.set(out, made)


def _divides(array: np.ndarray | None, op_type: str) -> bool:
    if array is None or not array.size:
        return False
    return bool((array > 0).all() if op_type != "BitShift" else ((array >= 0) & (array < 8 * array.itemsize)).all())


def _mapped(r: Reader, op_type: str, attrs: dict[str, Any], operands: list[View], shape: Shape, dtype: str) -> View:
    types = [v.dtype for v in operands]
    template = operators.expression(op_type, attrs, types, dtype)
    if template is None:
        raise r.unsupported(f"{op_type} of {types[0]}")
    if len(operands) == 1 and template == "{0}":
        return operands[0]
    return r.map(shape, dtype, template, operands).whole()


def _clip(r: Reader, node: ir.Node, x: View) -> View:
    if np.dtype(x.dtype).kind == "b":
        raise r.unsupported("Clip of bool")
    bounds = [None if i >= len(node.inputs) or node.inputs[i] is None else r.view(node.inputs[i]) for i in (1, 2)]  # type: ignore[arg-type]
    if np.dtype(x.dtype).kind == "u" and r.constant(input_at(node, 1)) == 0:
        bounds[0] = None  # C compilers warn of such a comparison
    for bound, sign in zip(bounds, "<>", strict=True):
        if bound is not None:
            x = r.map(x.shape, x.dtype, "({0} " + sign + " {1} ? {1} : {0})", [x, bound]).whole()
    return x


def axes_of(r: Reader, node: ir.Node, attrs: dict[str, Any], rank: int) -> tuple[int, ...]:
    """Return the axes of a reduction, from the attribute or the input."""
    given: Any = attrs.get("axes")
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        given = r.constant(node.inputs[1])
        if given is None:
            raise r.unsupported("its axes must be constant")
    axes = [int(a) % rank for a in given] if given is not None else []
    if not axes and not attrs.get("noop_with_empty_axes", 0):
        axes = list(range(rank))
    return tuple(sorted(set(axes)))


def _reduce(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, out = r.view(node.inputs[0]), node.outputs[0]  # type: ignore[arg-type]
    if node.op_type in ("ArgMax", "ArgMin"):
        axes: tuple[int, ...] = (int(attrs.get("axis", 0)) % len(x.shape),)
    else:
        axes = axes_of(r, node, attrs, len(x.shape))
    how = operators.reduction(node.op_type, attrs, x.dtype)
    if how is None:
        raise r.unsupported(f"{node.op_type} of {x.dtype}")
    if math.prod(x.shape[a] for a in axes) == 0 and not node.op_type.startswith("ReduceSum"):
        raise r.unsupported("the reduced axes are empty")
    made = r.tensor(out)
    r.add(Reduce(made, how, x, axes))
    r.views[out] = made.whole()


@READERS("ConstantOfShape")
def _filled(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    value = attrs.get("value")
    array = np.zeros(1, np.float32) if value is None else value.numpy()
    made = Tensor((), str(array.dtype), "", "constant", array.ravel()[:1].reshape(()))
    r.set(node.outputs[0], made.whole().expanded(r.shape_of(node.outputs[0])))


# --- movement: views --------------------------------------------------------------------------------------


@READERS("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, out = r.view(node.inputs[0]), node.outputs[0]  # type: ignore[arg-type]
    r.set(out, r.of_shape(x, r.shape_of(out)))


@READERS("gradgraph:After", "Dropout")
def _same(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    if node.op_type == "Dropout" and (len([o for o in node.outputs if o.name]) > 1 or len(node.inputs) > 2):
        raise r.unsupported("Dropout in training mode")
    r.set(node.outputs[0], r.view(node.inputs[0]))  # type: ignore[arg-type]


@READERS("Transpose")
def _transpose(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x = r.view(node.inputs[0])  # type: ignore[arg-type]
    r.set(node.outputs[0], x.permuted(attrs.get("perm") or range(len(x.shape))[::-1]))


@READERS("Expand")
def _expand(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    r.set(node.outputs[0], r.view(node.inputs[0]).expanded(r.shape_of(node.outputs[0])))  # type: ignore[arg-type]


@READERS("Slice")
def _slice(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x = r.view(node.inputs[0])  # type: ignore[arg-type]
    given = [r.constant(v) for v in node.inputs[1:]]
    if any(g is None and v is not None for g, v in zip(given, node.inputs[1:], strict=True)):
        raise r.unsupported("its bounds must be constant")
    starts, ends, axes, steps = (*given, None, None)[:4]
    assert starts is not None and ends is not None
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        axis = i if axes is None else int(axes[i]) % len(x.shape)
        step = 1 if steps is None else int(steps[i])
        taken = range(*slice(start, end, step).indices(x.shape[axis])) if end >= 0 or step > 0 else None
        if taken is None:  # ONNX clamps a negative end below the first element, Python does not
            lower = end + x.shape[axis]
            taken = range(*slice(start, lower if lower >= 0 else None, step).indices(x.shape[axis]))
        x = x.sliced(axis, taken.start, len(taken), step)
    r.set(node.outputs[0], x)


@READERS("Split")
def _split(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x = r.view(node.inputs[0])  # type: ignore[arg-type]
    axis = int(attrs.get("axis", 0)) % len(x.shape)
    start = 0
    for out in node.outputs:
        size = r.shape_of(out)[axis]
        r.set(out, x.sliced(axis, start, size))
        start += size


@READERS("Concat")
def _concat(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    out = r.tensor(node.outputs[0])
    axis = int(attrs["axis"]) % len(out.shape)
    parts, start = [], 0
    for source in [r.view(value) for value in node.inputs if value is not None]:
        size = source.shape[axis]
        if source.size:
            parts.append((source, out.whole().sliced(axis, start, size)))
        start += size
    r.add(Assemble(out, parts))
    r.views[node.outputs[0]] = out.whole()


@READERS("Pad")
def _pad(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, pads = r.view(node.inputs[0]), r.constant(node.inputs[1])  # type: ignore[arg-type]
    given = [*node.inputs, None, None]
    fill = np.zeros((), x.dtype) if given[2] is None else r.constant(given[2])
    if attrs.get("mode", "constant") != "constant" or pads is None or fill is None or given[3] is not None:
        raise r.unsupported("it must pad all axes with a constant, by constant numbers")
    out = r.tensor(node.outputs[0])
    target, rank = out.whole(), len(x.shape)
    for axis, (before, after) in enumerate(zip(pads[:rank].tolist(), pads[rank:].tolist(), strict=True)):
        cut_before, cut_after = max(-before, 0), max(-after, 0)
        kept = x.shape[axis] - cut_before - cut_after
        x = x.sliced(axis, cut_before, kept)
        target = target.sliced(axis, max(before, 0), kept)
    r.add(Assemble(out, [(x, target)] if x.size else [], literal(fill.ravel()[0], x.dtype)))
    r.views[node.outputs[0]] = out.whole()


@READERS("Tile")
def _tile(r: Reader, node: ir.Node, attrs: dict[str, Any]) -> None:
    x, counts = r.view(node.inputs[0]), r.constant(node.inputs[1])  # type: ignore[arg-type]
    if counts is None:
        raise r.unsupported("its repeats must be constant")
    pairs = tuple(int(n) for pair in zip(counts, x.shape, strict=True) for n in pair)
    spaced = r.of_shape(x, tuple(n for size in x.shape for n in (1, size)))
    r.set(node.outputs[0], r.of_shape(spaced.expanded(pairs), r.shape_of(node.outputs[0])))


# --- helpers ---------------------------------------------------------------------------------------------


def only_float(r: Reader, *views: View) -> None:
    other = next((v.dtype for v in views if v.dtype != "float32"), None)
    if other is not None:
        raise r.unsupported(f"it is supported for float32 only, not {other}")


def result(r: Reader, view: View, taken: set[Tensor]) -> Tensor:
    """Return the tensor for a result of the program: a copy of ``view`` if its tensor is an input or in ``taken``."""
    made = {t for o in r.program.operations for t in o.outputs}
    if view.is_whole and view.tensor in made and view.tensor not in taken:
        found = view.tensor
    else:
        found = Tensor(view.shape, view.dtype, view.tensor.name)
        r.program.operations.append(Map(found, "{0}", [view], node="Identity"))
    taken.add(found)
    return found
