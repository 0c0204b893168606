"""Pass: convert auto_pad and output_shape to explicit pads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.errors import ModelError
from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import describe
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import Editor, attributes, calls_of, is_wanted
from gradgraph.passes.normal.spelling.defaults import spatial_rank, write_defaults

_OPERATORS = frozenset(["Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"])


def write_pads(model: ir.Model) -> bool:
    """Set ``pads`` on convolutions and pools instead of auto_pad and output_shape; return True if there were any.

    1. NOTSET becomes the given pads, or zeros; VALID becomes zeros.
    2. SAME_UPPER and SAME_LOWER with strides of 1 or known sizes become the pads for ceil(size / stride) outputs.
    3. SAME with unknown sizes becomes a Pad node, whose pads are computed at run time, before the operator with zero
       pads. (An AveragePool without count_include_pad is then divided by the fraction of each window that is inside.)
       So does a MaxPool whose dilated windows need larger pads than runtimes accept.
    4. ConvTranspose with output_shape or SAME gets the pads and output_padding that lead to this shape.

    Raises:
        ModelError: the kernel's shape is unknown, or the pads of that operator cannot be computed at run time.
    """
    editor: Editor | None = None
    for node in calls_of(model, *_OPERATORS):
        if {"auto_pad", "output_shape"} & set(node.attributes):
            editor = editor or Editor(model)
            _resolve(editor, node)
    return editor is not None


def _resolve(editor: Editor, node: ir.Node) -> None:
    mode = node.attributes.get_string("auto_pad", "NOTSET")
    if node.op_type == "ConvTranspose":
        _resolve_transposed(node, mode)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        _resolve_same(editor, node, upper=mode == "SAME_UPPER")
    elif mode == "VALID":
        _set_pads(node, [0] * 2 * _rank(node))
    else:
        node.attributes.pop("auto_pad", None)
        write_defaults([node])


def _rank(node: ir.Node) -> int:
    kernel = node.attributes.get_ints("kernel_shape")
    rank = spatial_rank(node) if kernel is None else len(kernel)
    if rank is None:
        raise ModelError(
            f"{describe(node)} has auto_pad, but the rank of its input is unknown; give the model's inputs shapes"
        )
    return rank


def _set_pads(node: ir.Node, pads: Sequence[int], **others: list[int] | int) -> None:
    node.attributes.pop("auto_pad", None)
    node.attributes.pop("output_shape", None)
    node.attributes["pads"] = ir.AttrInt64s("pads", list(pads))
    for name, value in others.items():
        node.attributes[name] = ir.AttrInt64s(name, value) if isinstance(value, list) else ir.AttrInt64(name, value)


def _window(node: ir.Node) -> tuple[list[int], list[int]]:
    if "kernel_shape" not in node.attributes:
        raise ModelError(
            f"{describe(node)} has auto_pad, but its kernel's shape is unknown; set kernel_shape on the node"
        )
    return shapes.windows_of(node)[:2]


def _spatial_sizes(node: ir.Node) -> list[shapes.Dim]:
    shape = shape_of(node.inputs[0])
    return list(shape[2:]) if shape is not None else [None] * _rank(node)


def _halves(totals: Sequence[int], upper: bool) -> list[int]:
    """Split each total into begin and end padding; an odd element goes to the end if ``upper``, else to the start."""
    less = [t // 2 for t in totals]
    more = [t - h for t, h in zip(totals, less, strict=True)]
    return [*less, *more] if upper else [*more, *less]


# --- SAME ---------------------------------------------------------------------------------------------------


def _resolve_same(editor: Editor, node: ir.Node, upper: bool) -> None:
    reach, strides = _window(node)
    totals = [_total_of_pads(n, r, s) for n, r, s in zip(_spatial_sizes(node), reach, strides, strict=True)]
    pads = _halves([t for t in totals if t is not None], upper)
    if None in totals or _too_large(node, pads):
        _pad_before(editor, node, reach, strides, upper)
        return
    # with these pads, rounding down yields ceil(size / stride) outputs; ceil_mode might add a window
    extra: dict[str, list[int] | int] = {"ceil_mode": 0} if "ceil_mode" in node.attributes else {}
    _set_pads(node, pads, **extra)


def _too_large(node: ir.Node, pads: list[int]) -> bool:
    """Whether onnxruntime rejects ``pads``: pads of a pool must be smaller than the undilated kernel.

    Raises ModelError for a pool other than MaxPool, before which no Pad can be written.
    """
    kernel = attributes(node)["kernel_shape"]
    found = "Pool" in node.op_type and any(p >= k for p, k in zip(pads, kernel * 2, strict=True))
    if found and node.op_type != "MaxPool":  # onnxruntime would fuse a Pad node with zeros into the pool again
        raise ModelError(
            f"{describe(node)} has auto_pad and dilations that need pads as large as its kernel, which "
            "runtimes reject; export the model with a Pad node of its own, or without dilations"
        )
    return found


def _total_of_pads(size: shapes.Dim, reach: int, stride: int) -> int | None:
    """Return the total padding of an axis for SAME: (ceil(size / stride) - 1) · stride + reach - size, at least 0.

    ``reach`` is the extent of the window. Returns None if the size is unknown, unless the stride is 1.
    """
    if stride == 1:
        return reach - 1
    return max((-(-size // stride) - 1) * stride + reach - size, 0) if isinstance(size, int) else None


def _pad_before(editor: Editor, node: ir.Node, reach: list[int], strides: list[int], upper: bool) -> None:
    attrs = attributes(node)
    if node.op_type not in _PADDED or any(is_wanted(v) for v in node.outputs[1:]):
        raise ModelError(
            f"{describe(node)} has auto_pad with sizes that are unknown until run time, which cannot be made "
            "explicit here; export the model with fixed sizes or with explicit pads"
        )
    op = editor.op
    x, *rest = (editor.op.wrap(v) for v in node.inputs)
    assert x is not None
    known = tuple(_spatial_sizes(node))
    size = op.const(np.array(known, np.int64)) if shapes.is_static(known) else op.Shape(x, start=2)
    outputs = op.Div(op.Add(size, [s - 1 for s in strides]), strides)
    totals = op.Max(op.Sub(op.Add(op.Mul(op.Sub(outputs, [1]), strides), reach), size), [0])
    half = op.Div(totals, [2])
    ends = [half, op.Sub(totals, half)] if upper else [op.Sub(totals, half), half]
    pads = op.Concat([0, 0], ends[0], [0, 0], ends[1], axis=0)
    attrs = {k: v for k, v in attrs.items() if k not in ("auto_pad", "ceil_mode")} | {"pads": [0] * 2 * len(reach)}
    editor.replace(node, _PADDED[node.op_type](op, x, pads, rest, attrs))


def _padded_with_zeros(op_type: str) -> Callable[..., Any]:
    def padded(op: Builder, x: Var, pads: Var, rest: list[Any], attrs: dict[str, Any]) -> Any:
        return op.emit(op_type, op.Pad(x, pads, 0), *rest, **attrs)

    return padded


def _max_pool(op: Builder, x: Var, pads: Var, rest: list[Any], attrs: dict[str, Any]) -> Any:
    lowest = -np.inf if x.is_float else np.iinfo(x.dtype.numpy()).min
    return op.MaxPool(op.Pad(x, pads, lowest), **attrs)


def _average_pool(op: Builder, x: Var, pads: Var, rest: list[Any], attrs: dict[str, Any]) -> Any:
    included = {**attrs, "count_include_pad": 1}
    y = op.AveragePool(op.Pad(x, pads, 0), **included)
    if attrs.get("count_include_pad"):
        return y
    share = op.AveragePool(op.Pad(op.ones_like(x), pads, 0), **included)
    return y / share


_PADDED: dict[str, Callable[..., Any]] = {
    "Conv": _padded_with_zeros("Conv"),
    "LpPool": _padded_with_zeros("LpPool"),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
}


# --- ConvTranspose ------------------------------------------------------------------------------------------


def _resolve_transposed(node: ir.Node, mode: str) -> None:
    attrs = attributes(node)
    if mode == "NOTSET" and "output_shape" not in attrs:
        node.attributes.pop("auto_pad", None)
        write_defaults([node])
        return
    reach, strides = _window(node)
    extra = attrs.get("output_padding") or [0] * len(reach)
    if mode == "VALID" and "output_shape" not in attrs:
        _set_pads(node, [0] * 2 * len(reach), output_padding=extra)
        return
    totals = _transposed_totals(node, reach, strides, extra, attrs.get("output_shape"))
    if mode.startswith("SAME") and "output_shape" not in attrs and any(t < 0 for t in totals):
        raise ModelError(
            f"{describe(node)} has auto_pad={mode} with strides larger than its kernel, for which runtimes disagree on "
            "the output's shape; set explicit pads on the node"
        )
    extra = [e + max(-t, 0) for e, t in zip(extra, totals, strict=True)]
    _set_pads(node, _halves([max(t, 0) for t in totals], upper=mode == "SAME_UPPER"), output_padding=extra)


def _transposed_totals(
    node: ir.Node, reach: list[int], strides: list[int], extra: list[int], output_shape: list[int] | None
) -> list[int]:
    """Return the total padding of each axis of a ConvTranspose whose windows span ``reach`` elements.

    The total is stride · (size - 1) + output_padding + reach - output size, with output size = size · stride for SAME.
    """
    if output_shape is None:
        return [e + r - s for e, r, s in zip(extra, reach, strides, strict=True)]
    sizes = shapes.known_sizes(_spatial_sizes(node))
    wanted = output_shape[-len(reach) :]
    if len(sizes) < len(reach):
        raise ModelError(
            f"{describe(node)} has output_shape, but its input's size is unknown; export it with pads, or a fixed size"
        )
    return [s * (n - 1) + e + r - o for s, n, e, r, o in zip(strides, sizes, extra, reach, wanted, strict=True)]
