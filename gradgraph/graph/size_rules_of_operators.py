"""Type and shape rules for operators for which those of onnx-shape-inference are unsound or incomplete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import registry

from gradgraph.graph import shapes
from gradgraph.graph.nodes import input_at
from gradgraph.graph.ranks import MOST_AXES, axes_of
from gradgraph.graph.size_context import MOST_DATA, Context

Rule = Callable[[Context, ir.Node], None]
_FAR = 2**31 - 1  # as the end of a slice: the end of the axis


def _by_package(rules: Context, node: ir.Node) -> None:
    rule = registry.get("", node.op_type, node.version or rules.opset)
    if rule is not None:
        rule(rules, node)


def enter(rules: Context, node: ir.Node) -> None:
    """Record what is known about the inputs of a body: for a Loop, the types of states; for a Scan, also the shapes."""
    body = node.attributes["body"].as_graph()
    if node.op_type == "Loop":
        for outer, inner in zip(node.inputs[2:], body.inputs[2:], strict=False):
            inner.type = inner.type or (outer.type if outer is not None else None)
        for inner, kind in zip(body.inputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=False):
            inner.type = inner.type or ir.TensorType(kind)
            rules.record(inner, ())
        return
    count = len(body.inputs) - node.attributes["num_scan_inputs"].as_int()
    axes = node.attributes.get_ints("scan_input_axes", [0] * len(node.inputs))
    for i, (outer, inner) in enumerate(zip(node.inputs, body.inputs, strict=False)):
        if outer is None:
            continue
        inner.type = inner.type or outer.type
        dims = shapes.recorded_shape(outer)
        if i >= count and dims:
            at = axes[i - count] % len(dims)
            dims = (*dims[:at], *dims[at + 1 :])
        if dims is not None:
            rules.set_shape(inner, rules.name_anonymous_dims_in_shape(ir.Shape(dims)))


def _if(rules: Context, node: ir.Node) -> None:
    bodies = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for out, *results in zip(node.outputs, *(body.outputs for body in bodies), strict=False):
        kinds = [r.type for r in results if r.type is not None]
        out.type = out.type or (kinds[0] if kinds else None)
        shape = shapes.common(*map(shapes.recorded_shape, results))
        if shape is not None:
            rules.record(out, shape)


def _loop(rules: Context, node: ir.Node) -> None:
    body, states = node.attributes["body"].as_graph(), len(node.inputs) - 2
    for i, (out, result) in enumerate(zip(node.outputs, body.outputs[1:], strict=False)):
        out.type = out.type or result.type
        dims = shapes.recorded_shape(result)
        if i >= states and dims is not None:
            rules.record(out, [None, *dims])


def scaled_size(size: shapes.Dim, scale: float) -> shapes.Dim:
    """Return ``size * scale`` as runtimes compute it, in float32; None if it is unknown."""
    return int(np.float32(size) * np.float32(scale)) if isinstance(size, int) else size if scale == 1 else None


def place_of_scales(op_type: str, inputs: Sequence[Any], opset: int) -> Any:
    """Return the item of ``inputs`` with the scales of a Resize or Upsample at ``opset``, or None."""
    i = 2 if op_type == "Resize" and opset >= 11 else 1
    return inputs[i] if i < len(inputs) else None


def _resize(rules: Context, node: ir.Node) -> None:
    """Infer Resize or Upsample with float32 products, as runtimes compute them.

    onnx-shape-inference multiplies exactly, and rounds down where one scale is chosen for all axes.
    """
    dims = shapes.recorded_shape(node.inputs[0])
    if dims is None:
        return
    scales = shapes.small_constant(place_of_scales(node.op_type, node.inputs, node.version or rules.opset))
    if "scales" in node.attributes:
        scales = np.array(node.attributes["scales"].as_floats())
    axes = [a % len(dims) for a in node.attributes.get_ints("axes") or range(len(dims))]
    resized, sizes = [dims[a] for a in axes], _numbers(rules, node, 3) if node.op_type == "Resize" else []
    crops = node.attributes.get_string("coordinate_transformation_mode") == "tf_crop_and_resize"
    if sizes and node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        sizes = _proportional(node, resized, sizes)
    elif not sizes and scales is not None and scales.size == len(axes) and not crops:
        sizes = [scaled_size(d, s) for d, s in zip(resized, scales.ravel(), strict=True)]
    found = dict(enumerate(dims)) | dict(zip(axes, sizes or [None] * len(axes), strict=True))
    rules.record(node.outputs[0], found.values())


def _proportional(node: ir.Node, dims: Sequence[shapes.Dim], sizes: Sequence[Any]) -> list[shapes.Dim]:
    """Return the sizes of the resized axes, with the common scale that ``keep_aspect_ratio_policy`` selects."""
    known, wanted = shapes.all_sizes(dims), shapes.all_sizes(sizes)
    if known is None or wanted is None or 0 in known:
        return [None] * len(dims)
    choose = min if node.attributes.get_string("keep_aspect_ratio_policy") == "not_larger" else max
    scale = choose(float(size) / n for size, n in zip(wanted, known, strict=True))
    return [int(np.floor(scale * n + 0.5)) for n in known]


def _squeeze(rules: Context, node: ir.Node) -> None:
    """Infer Squeeze if its axes, or all sizes of its input, are known.

    Without axes, an axis of unknown size is removed if it happens to be 1, so that even the rank is unknown.
    """
    axes = _numbers(rules, node, 1, "axes")
    if axes or (axes == [] and shapes.is_static(shapes.recorded_shape(node.inputs[0]))):
        _by_package(rules, node)


def _concat(rules: Context, node: ir.Node) -> None:
    """Infer Concat, without the package for long vectors, as it creates a name for each element."""
    dims = [shapes.recorded_shape(v) for v in node.inputs]
    if any(length > MOST_DATA for d in dims if d and len(d) == 1 for length in shapes.known_sizes(d)):
        rules.record(
            node.outputs[0],
            [sum(sum(shapes.known_sizes(d)) for d in dims) if all(map(shapes.is_static, dims)) else None],
        )
    else:
        _by_package(rules, node)


def _split(rules: Context, node: ir.Node) -> None:
    """Infer Split, without the package for sizes computed at run time, as it assumes equal parts."""
    dims, parts = shapes.recorded_shape(node.inputs[0]), _numbers(rules, node, 1, "split")
    if parts == [] or shapes.small_constant(input_at(node, 1)) is not None:
        _by_package(rules, node)
    elif dims is not None:
        axis = node.attributes.get_int("axis", 0) % len(dims)
        for out, part in zip(node.outputs, parts or [None] * len(node.outputs), strict=False):
            rules.record(out, [*dims[:axis], part, *dims[axis + 1 :]])


def _slice(rules: Context, node: ir.Node) -> None:
    """Infer Slice.

    onnx-shape-inference assumes default values for axes and steps that are computed at run time, and that a symbolic
    end reaches the end of the axis.
    """
    x, out = node.inputs[0], node.outputs[0]
    dims = None if x is None else shapes.recorded_shape(x)
    if x is None or dims is None:
        return
    starts, ends, axes, steps = (_numbers(rules, node, *place) for place in enumerate(_SLICED, 1))
    if starts is None and not axes:
        rules.record(out, [None] * len(dims))
        return
    count = len(starts or axes or ())
    axes = list(range(count)) if axes == [] else axes
    if axes is None:
        rules.record(out, [None] * len(dims))
        return
    found, unknown = list(dims), [None] * count
    for axis, *bounds in zip(
        axes, starts or unknown, ends or unknown, steps or ([1] * count if steps == [] else unknown), strict=True
    ):
        found[axis] = _sliced(dims[axis], *bounds)
    rules.record(out, found)
    data = rules.get_symbolic_value(x)
    if data is not None and len(dims) == 1 and count == 1 and starts and ends and steps is not None:
        bounds = [starts[0], ends[0], *(steps or [1])]
        if all(isinstance(n, int) for n in bounds):
            rules.set_symbolic_value(out, data[slice(*bounds)])


_SLICED = ("starts", "ends", "axes", "steps")


def _numbers(rules: Context, node: ir.Node, i: int, name: str = "") -> list[Any] | None:
    """Return the numbers in an attribute or at input ``i``: [] if both are absent; None if computed at run time."""
    value = input_at(node, i)
    given = node.attributes.get_ints(name) if name else None
    return list(given or ()) if value is None else rules.get_symbolic_value(value)


def _sliced(size: shapes.Dim, start: Any, end: Any, step: Any) -> shapes.Dim:
    if all(isinstance(n, int) for n in (size, start, end, step)):
        return len(range(*slice(start, end, step).indices(size)))  # type: ignore[arg-type]
    to_end = end.value == size if isinstance(end, ir.SymbolicDim) and size else isinstance(end, int) and end >= _FAR
    reversed_whole = step == -1 and (start == -1 or start >= _FAR) and isinstance(end, int) and end <= -_FAR
    return size if (start == 0 and step == 1 and to_end) or reversed_whole else None


def _reshape(rules: Context, node: ir.Node) -> None:
    """Infer Reshape without sympy, for speed; the package also loses the type if the length of the sizes is unknown."""
    x, out = node.inputs[0], node.outputs[0]
    dims, sizes = shapes.recorded_shape(x), shapes.recorded_shape(input_at(node, 1))
    target = _numbers(rules, node, 1, "shape")
    if not target and sizes != (0,):
        rules.record(out, [None] * sizes[0] if sizes and isinstance(sizes[0], int) else None)
        return
    wanted = [n if isinstance(n, int) else n.value for n in target or ()]
    if not node.attributes.get_int("allowzero", 0):
        copied = (*(dims or ()), *[None] * len(wanted))
        wanted = [copied[i] if n == 0 else n for i, n in enumerate(wanted)]
    if -1 in wanted:
        at = wanted.index(-1)
        wanted[at] = None if dims is None else rules.quotient(dims, wanted[:at] + wanted[at + 1 :])
    rules.record(out, wanted)
    if x is not None and (data := rules.get_symbolic_value(x)) is not None:
        rules.set_symbolic_value(out, data)


def _flatten(rules: Context, node: ir.Node) -> None:
    dims = shapes.recorded_shape(node.inputs[0])
    if dims is not None:
        axis = node.attributes.get_int("axis", 1)
        sides = dims[:axis], dims[len(dims[:axis]) :]
        rules.record(node.outputs[0], [rules.quotient(side, ()) for side in sides])


def _sequence(rules: Context, node: ir.Node) -> None:
    """Infer a sequence operator, and record the sizes that all elements share, which the package does not infer."""
    _by_package(rules, node)
    given, out = [shapes.recorded_shape(v) for v in node.inputs], node.outputs[0]
    if node.op_type == "ConcatFromSequence":
        new, axis = node.attributes.get_int("new_axis", 0), node.attributes["axis"].as_int()
        if (dims := given[0]) is not None:
            at = axis % (len(dims) + new)
            rules.record(out, [*dims[:at], None, *dims[at + 1 - new :]])
    elif (shared := _of_elements(node, given)) is not None and out.shape is None:
        out.shape = ir.Shape(shared)


def _of_elements(node: ir.Node, given: Sequence[shapes.Shape | None]) -> shapes.Shape | None:
    """Return the sizes that all elements of the output sequence share, or None if the rank is unknown or not shared."""
    if node.op_type == "SequenceConstruct":
        return functools.reduce(shapes.common, given)
    return shapes.common(given[0], given[1]) if node.op_type == "SequenceInsert" else given[0]


def _unique(rules: Context, node: ir.Node) -> None:
    """Infer Unique; the package drops the sizes of the other axes."""
    dims, axis = shapes.recorded_shape(node.inputs[0]), node.attributes.get_int("axis", None)
    counted = None if axis is None or dims is None else axis % len(dims)
    first = [None] if axis is None else [None if a == counted else d for a, d in enumerate(dims or ())]
    rules.record(node.outputs[0], first if axis is None or dims is not None else None)
    for out in node.outputs[1:]:
        rules.record(out, [None])


def record_rank(node: ir.Node) -> None:
    """Record the ranks of outputs whose sizes no rule infers, such as those of a pool whose input is unknown."""
    first = node.outputs[0]
    if first.shape is None:
        given = [*map(shapes.recorded_shape, node.inputs)]
        if node.op_type == "STFT" and given[0]:  # for one signal per row: frames, frequencies, and a complex number
            shapes.record_shape(first, (given[0][0], None, None, 2))
        elif (rank := _rank(node, given)) is not None:
            for out in node.outputs if node.op_type == "Split" else [first]:
                shapes.record_shape(out, (None,) * rank)
    for out, axes in zip(node.outputs, axes_of(node.op_type)[1], strict=False):
        if out.shape is None and axes.least == axes.most:
            shapes.record_shape(out, (None,) * axes.least)


def _rank(node: ir.Node, known: Sequence[shapes.Shape | None]) -> int | None:
    if node.op_type in shapes.POOLS and (kernel := node.attributes.get_ints("kernel_shape")) is not None:
        return 2 + len(kernel)
    if node.op_type in ("Conv", "ConvTranspose"):  # images and kernels have equal rank
        return next((len(s) for s in known[:2] if s is not None), None)
    reduces = node.op_type.startswith("Reduce") and node.attributes.get_int("keepdims", 1) == 1
    if node.op_type == "Split" or reduces:
        return None if not known or known[0] is None else len(known[0])
    place = {"ConstantOfShape": 0, "Expand": 1}.get(node.op_type)
    sizes = None if place is None else known[place]
    length = sizes[0] if sizes is not None and len(sizes) == 1 else None
    if not isinstance(length, int) or length > MOST_AXES:
        return None
    if node.op_type == "Expand":  # the target may have fewer axes than the expanded tensor
        return None if known[0] is None else max(length, len(known[0]))
    return length


_ON_SEQUENCES = ("SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert")
OWN: dict[str, Rule] = {
    **dict.fromkeys(("ConcatFromSequence", *_ON_SEQUENCES), _sequence),
    "Slice": _slice,
    "Split": _split,
    "Unique": _unique,
    "Concat": _concat,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "If": _if,
    "Loop": _loop,
    "Resize": _resize,
    "Upsample": _resize,
}
