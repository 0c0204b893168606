"""Two passes: constant folding, and removal of nodes and initializers that nothing reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.marks import is_marked_constant
from gradgraph.graph.prune import prune_graph
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import FOLD_LIMIT
from gradgraph.passes.normal.edit import Editor, attributes, is_wanted, nodes_of
from gradgraph.passes.normal.spelling.constants import become_constant

# operators that only move entries; they are also evaluated for symbolic entries
_MOVES = frozenset(["Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Identity"])

_FLOATS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Pow": lambda a, b: np.power(a, b).astype(a.dtype),
}


def fold_constants(model: ir.Model) -> bool:
    """Replace small nodes whose inputs are constant with their results; return True if anything changed.

    1. Integers and booleans are computed from initializers (``gradgraph.graph.shapes.fold``).
    2. Shape and Size are computed where dimensions are known, and so are operators that move their entries (Gather,
       Slice, Concat, …), so that the known part of a partly symbolic shape is found.
    3. Floats are computed if they depend only on marked constants, never on a parameter (an initializer without the
       mark).
    4. CastLike becomes Cast if its type is known.
    5. The target of a Reshape with one unknown entry, and otherwise positive numbers, becomes a constant with -1 there.
    """
    partly: dict[ir.Value, np.ndarray] = {}
    editor = Editor(model)
    changed = False
    for node in list(nodes_of(model)):
        if node.domain or len(node.outputs) != 1:
            continue
        if node.op_type == "CastLike":
            changed |= _cast_like(node)
        array = _computed(node, partly)
        if array is None:
            changed |= _settled(editor, node, partly)
            continue
        value = node.outputs[0]
        if array.dtype == object:
            partly[value] = array
        elif array.size <= FOLD_LIMIT and value.dtype in (None, ir.DataType.from_numpy(array.dtype)):
            changed |= become_constant(node, ir.Tensor(array, name=value.name), model.graph)
    return changed


def _settled(editor: Editor, node: ir.Node, partly: dict[ir.Value, np.ndarray]) -> bool:
    target = partly.get(node.inputs[1]) if node.op_type == "Reshape" and node.inputs[1] is not None else None
    entries = [] if target is None else [int(d) if isinstance(d, np.integer) else d for d in target]
    known = shapes.known_sizes(entries)
    if len(known) != len(entries) - 1 or any(d <= 0 for d in known):
        return False
    node.replace_input_with(1, editor.op.const(np.array(shapes.sizes_or(entries, -1), np.int64)).value)
    editor.place(node)
    return True


def _cast_like(node: ir.Node) -> bool:
    like = node.inputs[1]
    if like is None or like.dtype is None:
        return False
    saturate = node.attributes.get("saturate", ir.AttrInt64("saturate", 1))
    node.op_type = "Cast"
    node.resize_inputs(1)
    node.attributes.clear()
    node.attributes.update({"to": ir.AttrInt64("to", int(like.dtype)), "saturate": saturate})
    return True


def _computed(node: ir.Node, partly: dict[ir.Value, np.ndarray]) -> np.ndarray | None:
    """Return the value of ``node`` as a numeric array, or None if it cannot be computed.

    If entries are symbols or unknown, it is an object array.
    """
    if node.op_type in ("Shape", "Size"):
        return _known_sizes(node)
    attrs = attributes(node)
    inputs = [None if v is None else _small(v) for v in node.inputs]
    exact = all(a is None or a.dtype.kind in "iub" for a in inputs)
    if node.inputs and all(a is not None or v is None for a, v in zip(inputs, node.inputs, strict=True)):
        return shapes.fold(node.op_type, inputs, attrs) if exact else _float_fold(node, inputs, attrs)
    if node.op_type in _MOVES and any(v in partly for v in node.inputs if v is not None):
        return _moved(node, inputs, attrs, partly)
    return None


def _small(value: ir.Value) -> np.ndarray | None:
    tensor = value.const_value
    return None if tensor is None or tensor.dtype == ir.DataType.STRING else shapes.small_constant(value)


def _float_fold(node: ir.Node, inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray | None:
    if any(
        v is not None and v.dtype is not None and v.dtype.is_floating_point() and not is_marked_constant(v)
        for v in node.inputs
    ):
        return None
    how = _FLOATS.get(node.op_type) or (shapes.FOLDS.get(node.op_type) if node.op_type in (*_MOVES, "Cast") else None)
    if how is None or shapes.outgrows(node.op_type, inputs):
        return None
    try:
        with np.errstate(all="ignore"):
            return np.asarray(how(*inputs, **attrs))
    except (ValueError, IndexError, TypeError):
        return None


def _known_sizes(node: ir.Node) -> np.ndarray | None:
    dims = shape_of(node.inputs[0])
    if dims is None:
        return None
    if node.op_type == "Size":
        sizes = shapes.all_sizes(dims)
        return None if sizes is None else np.array(np.prod(sizes, dtype=np.int64))
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end")
    return _tidy(np.array([*dims, None], object)[:-1][start:end])


def _moved(
    node: ir.Node, inputs: list[np.ndarray | None], attrs: dict[str, Any], partly: dict[ir.Value, np.ndarray]
) -> np.ndarray | None:
    operands = [a if v is None else partly.get(v, a) for v, a in zip(node.inputs, inputs, strict=True)]
    if node.op_type == "Concat":  # an unknown input of known length has unknown entries
        operands = [_unknown(v) if a is None else a for v, a in zip(node.inputs, operands, strict=True)]
    if any(a is None and v is not None for a, v in zip(operands, node.inputs, strict=True)):
        return None
    try:
        return _tidy(np.asarray(shapes.FOLDS[node.op_type](*operands, **attrs), object))
    except (ValueError, IndexError, TypeError):
        return None


def _unknown(value: ir.Value | None) -> np.ndarray | None:
    shape = shape_of(value)
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] > FOLD_LIMIT:
        return None
    return np.full(shape[0], None, object)


def _tidy(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int64) if all(isinstance(d, int | np.integer) for d in array.flat) else array


# --- unread nodes --------------------------------------------------------------------------------


def remove_unused(model: ir.Model) -> None:
    """Remove nodes and initializers that nothing reads.

    1. Nodes are removed if none of their outputs is read.
    2. Unread initializers are removed if they are integers, booleans or marked constants. An unread floating-point one
       stays, because the caller may select it by name.
    """
    prune_graph(model.graph, shorten=False)
    for name, value in list(model.graph.initializers.items()):
        parameter = value.dtype is not None and value.dtype.is_floating_point() and not is_marked_constant(value)
        if not is_wanted(value) and not value.is_graph_input() and not parameter:
            del model.graph.initializers[name]
