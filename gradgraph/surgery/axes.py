"""Symbolic axes: make a model that was exported for one batch size, or one length, accept any."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import PATH, Kind, checked
from gradgraph.errors import ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.models import Source
from gradgraph.graph import shapes
from gradgraph.graph.shape_inference import infer_node, shape_of
from gradgraph.passes.normal import normalise
from gradgraph.surgery.operation import (
    Path,
    Result,
    add_weight,
    clear_away,
    closed,
    free_name,
    learn_sizes,
    numbers_of,
    opened,
    parts_of,
)
from gradgraph.surgery.verification import check_opened

_AXES = Kind(
    'a dict of axes by input, such as {"x": {0: "batch"}}',
    lambda value: (
        isinstance(value, Mapping)
        and all(
            isinstance(name, str)
            and isinstance(axes, Mapping)
            and all(isinstance(k, int) and isinstance(v, str) and v for k, v in axes.items())
            for name, axes in value.items()
        )
    ),
)


@checked(axes=_AXES, out=PATH.or_none())
def open_axes(model: Source, axes: Mapping[str, Mapping[int, str]], *, out: Path | None = None) -> Result:
    """Make these axes of the inputs symbolic: ``{"x": {0: "batch"}}``; equal names mean equal sizes.

    Three constants that exporters write are adapted: the target shape of a Reshape; a constant row in a Concat (a class
    token), which is repeated; and zero initial states of an LSTM, GRU or RNN, which are removed. The result is then run
    at the old sizes and with more samples, and its outputs must be unchanged. Anything else that depends on the old
    sizes is an error.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        axes: for each input, names of axes by index.
        out: write the result to this path.

    Raises:
        UnknownNameError: the model has no such input.
        ModelError: an axis does not exist, or the model depends on its size in a place that cannot be adapted.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    fixed = work.clone()
    sizes = {v.name: shapes.as_dims(v.shape) for n in work.graph for v in n.outputs if v.shape is not None}
    sizes |= {v.name: shapes.as_dims(v.shape) for v in work.graph.inputs if v.shape is not None}
    stood_for = _declare(work, axes)
    for value in (v for node in work.graph for v in node.outputs):
        value.shape = None
    _follow(work, {name: dims for name, dims in sizes.items() if name})
    clear_away(work)
    learn_sizes(work)
    check_opened(fixed, work, axes, stood_for)
    return closed(work, model, out)


def _declare(work: ir.Model, axes: Mapping[str, Mapping[int, str]]) -> dict[str, int | str | None]:
    """Set the inputs' axes to symbolic sizes; return the former size by symbolic name."""
    inputs = {v.name: v for v in work.graph.inputs if v.name not in work.graph.initializers}
    stood_for: dict[str, int | str | None] = {}
    for name, chosen in axes.items():
        if name not in inputs:
            raise UnknownNameError(f"the model has no input '{shown(name)}'{suggestion(name, [*map(str, inputs)])}")
        value = inputs[name]
        dims = list(shapes.recorded_shape(value) or [])
        for axis, symbol in chosen.items():
            if not -len(dims) <= axis < len(dims):
                raise ModelError(f"the input '{shown(name)}' has shape {dims}, so there is no axis {axis}")
            if stood_for.setdefault(symbol, dims[axis]) != dims[axis]:
                raise ModelError(
                    f"the axis name '{shown(symbol)}' is used for the sizes {stood_for[symbol]} and {dims[axis]}; use "
                    "a different name for each"
                )
            dims[axis] = symbol
        value.shape = ir.Shape(dims)
    return stood_for


def _follow(work: ir.Model, before: Mapping[str, shapes.Shape]) -> None:
    """Adapt nodes with a constant for the original size of an axis that has become symbolic.

    Symbolic sizes are inferred in a normal form of the model, whose nodes are adapted with it. ``before`` are the
    original shapes by value name.
    """
    normal = normalise(work)
    own = {v.name: node for node in work.graph for v in node.outputs if v.name}
    for value in (v for node in normal.graph for v in node.outputs):
        value.shape = None
    for node in list(normal.graph):
        original = own.get(node.outputs[0].name or "")
        follow = _OPENED.get(node.op_type) if not node.domain else None
        if follow is not None and original is not None and original.op_type == node.op_type:
            sizes = [None if v is None else before.get(v.name or "") for v in (original.inputs[0], original.outputs[0])]
            for model, one in ((work, original), (normal, node)):
                follow(model, one, node, sizes)
        infer_node(node)


# the model to change, its node, that node in the normal form, and the old sizes of its first input and its output
Follow = Callable[[ir.Model, ir.Node, ir.Node, Sequence[shapes.Shape | None]], None]


def _reshape(model: ir.Model, node: ir.Node, known: ir.Node, sizes: Sequence[shapes.Shape | None]) -> None:
    """Replace the sizes of symbolic axes in the target shape of a Reshape: by 0 at an unchanged position, else by −1.

    A computed target shape is not changed. The symbolic sizes of the output are recorded.
    """
    source, result = known.inputs[0], known.outputs[0]
    dims = shape_of(source)
    read, made = sizes
    if dims is None or not shapes.is_static(read) or not shapes.is_static(made):
        return
    places = {axis: _place(axis, shapes.known_sizes(read), shapes.known_sizes(made)) for axis in _open_ones(dims)}
    if places and all(numbers_of(part) is not None for part in parts_of(node.inputs[1])):
        target = shapes.known_sizes(made)
        for axis, (place, alone) in places.items():
            target[place] = 0 if alone and axis == place else -1
        if target.count(-1) > 1:
            raise ModelError(
                f"the Reshape '{shown(known.name)}' mixes symbolic axes, so no target shape fits all sizes; make fewer "
                "axes dynamic, or export the model with dynamic axes"
            )
        node.replace_input_with(1, add_weight(model, f"{result.name}.target", np.array(target, np.int64)))
        node.attributes.pop("allowzero", None)
    opened_places = {place: dims[axis] if alone else None for axis, (place, alone) in places.items()}
    shapes.record_shape(result, tuple(opened_places.get(j, size) for j, size in enumerate(made or ())))


def _open_ones(dims: shapes.Shape) -> list[int]:
    return [axis for axis, d in enumerate(dims) if not isinstance(d, int)]


def _place(axis: int, read: list[int], made: list[int]) -> tuple[int, bool]:
    """Return the output axis of a Reshape that contains the input axis ``axis``, and whether the two are equal.

    ``read`` and ``made`` are the sizes of input and output. The product of the sizes before an axis is the same in
    both.
    """
    outer, size = math.prod(read[:axis]), read[axis]
    before = [math.prod(made[:j]) for j in range(len(made))]
    alone = [j for j, q in enumerate(before) if q == outer and made[j] == size]
    if alone:
        return min(alone, key=lambda j: abs(j - axis)), True
    around = [j for j, q in enumerate(before) if q <= outer and q * made[j] >= outer * size and made[j] > 1]
    # an axis that is split was merged before: of batch and heads, the batch is the outer one
    parts = [j for j, q in enumerate(before) if q == outer and size % made[j] == 0]
    if not around + parts:
        raise ModelError(
            f"a Reshape from {read} to {made} splits the axis of size {size}, so it cannot become symbolic; export the "
            "model with dynamic axes"
        )
    return (around + parts)[0], False


def _concat(model: ir.Model, node: ir.Node, known: ir.Node, sizes: Sequence[shapes.Shape | None]) -> None:
    """Expand inputs of a Concat from size 1 to the symbolic size that other inputs have on the same axis."""
    parts = [shape_of(v) for v in known.inputs]
    along = known.attributes["axis"].as_int()
    for axis in range(len(parts[0] or ())):
        partner = next((i for i, p in enumerate(parts) if p is not None and axis in _open_ones(p)), None)
        if partner is None or axis == along % len(parts[0] or (0,)):
            continue
        for i, part in enumerate(parts):
            if part is not None and part[axis] == 1:
                _repeat(model, node, i, partner, axis, len(part))


def _repeat(model: ir.Model, node: ir.Node, position: int, partner: int, axis: int, rank: int) -> None:
    """Expand input ``position`` of ``node`` along ``axis`` to the size of input ``partner``."""
    names = f"{node.outputs[0].name}.part{position}"
    one = add_weight(model, f"{names}.ones", np.ones(rank, np.int64))
    place = add_weight(model, f"{names}.axis", np.array([axis], np.int64))
    shape = ir.Node("", "Shape", [node.inputs[partner]], name=f"{names}/Shape")
    size = ir.Node("", "Gather", [shape.outputs[0], place], name=f"{names}/Gather")
    target = ir.Node("", "ScatterElements", [one, place, size.outputs[0]], name=f"{names}/ScatterElements")
    wide = ir.Node("", "Expand", [node.inputs[position], target.outputs[0]], name=f"{names}/Expand")
    for new in (shape, size, target, wide):
        new.outputs[0].name = free_name(model, f"{names}.{new.op_type.lower()}")
    model.graph.insert_before(node, [shape, size, target, wide])
    node.replace_input_with(position, wide.outputs[0])
    for new in (shape, size, target, wide):
        infer_node(new)


def _recurrence(model: ir.Model, node: ir.Node, known: ir.Node, sizes: Sequence[shapes.Shape | None]) -> None:
    """Remove zero initial states of a recurrent node, which have a fixed size and are the default."""
    dims = shape_of(known.inputs[0])
    if dims is None or not _open_ones(dims):
        return
    for position in (5, 6):
        if position < len(node.inputs) and _is_zeros(node.inputs[position]):
            node.replace_input_with(position, None)


_COPIES = ("Cast", "Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
           "Unsqueeze")  # fmt: skip  # their results are elements of the first input (Concat: of all inputs)


def _is_zeros(value: ir.Value | None) -> bool:
    stack, seen = [value], set[ir.Value]()
    while stack:
        value = stack.pop()
        if value is None:
            return False
        if value in seen:
            continue
        seen.add(value)
        tensor, node = numbers_of(value), value.producer()
        if tensor is not None:
            if np.any(tensor.numpy()):
                return False
        elif node is not None and node.op_type == "ConstantOfShape":
            if "value" in node.attributes and np.any(node.attributes["value"].as_tensor().numpy()):
                return False
        elif node is not None and node.op_type in _COPIES and not node.domain:
            stack += node.inputs if node.op_type == "Concat" else node.inputs[:1]
        else:
            return False
    return True


_OPENED: dict[str, Follow] = {
    "Reshape": _reshape,
    "Concat": _concat,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrence),
}
