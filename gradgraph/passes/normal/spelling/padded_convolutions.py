"""Pass: a Pad with zeros before a convolution becomes part of its pads."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.nodes import input_at, is_standard, made_by
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import calls_of


def merge_pads(model: ir.Model) -> bool:
    """Let each Conv read the input of the Pad before it, with larger ``pads``, in place; return True on any change.

    Gradients then need neither the padded copy of the input nor a Slice. Requires a Pad of the spatial axes by known
    numbers of zeros that only convolutions read. Pads that would be as large as a window remain: the input gradient
    would have to be cropped.
    """
    changed = False
    for conv in calls_of(model, "Conv"):
        pad = made_by(conv.inputs[0], "Pad")
        more = None if pad is None else _zeros_around(pad)
        pads = None if more is None else _together(conv, more)
        if pad is not None and pads is not None and _only_convolutions_read(pad):
            conv.replace_input_with(0, pad.inputs[0])
            conv.attributes["pads"] = ir.AttrInt64s("pads", pads)
            changed = True
    return changed


def _zeros_around(pad: ir.Node) -> list[int] | None:
    """Return the begin and end pads of the spatial axes; None if they are unknown, negative, or not zeros only."""
    mode = pad.attributes.get_string("mode", "constant")
    fill, dims, pads = input_at(pad, 2), shape_of(pad.inputs[0]), shapes.constant_of(input_at(pad, 1))
    value = None if fill is None else shapes.constant_of(fill)
    if mode != "constant" or dims is None or pads is None or (fill is not None and (value is None or value.any())):
        return None
    given = input_at(pad, 3)
    axes = range(len(dims)) if given is None else shapes.constant_of(given)
    if axes is None or (pads < 0).any():
        return None
    spread = [[0] * len(dims), [0] * len(dims)]
    for i, axis in enumerate(axes):
        spread[0][int(axis)], spread[1][int(axis)] = int(pads[i]), int(pads[len(axes) + i])
    begins, ends = spread
    return None if any(begins[:2] + ends[:2]) else begins[2:] + ends[2:]


def _together(conv: ir.Node, more: list[int]) -> list[int] | None:
    """Return the pads of ``conv``, enlarged by ``more``; None if a window could lie in the padding."""
    if conv.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or "kernel_shape" not in conv.attributes:
        return None
    reach = shapes.windows_of(conv)[0]
    pads = [a + b for a, b in zip(conv.attributes.get_ints("pads", [0] * len(more)), more, strict=True)]
    return pads if all(p < r for p, r in zip(pads, [*reach, *reach], strict=True)) else None


def _only_convolutions_read(pad: ir.Node) -> bool:
    value = pad.outputs[0]
    same = all(i == 0 and is_standard(user, "Conv") and user.graph is pad.graph for user, i in value.uses())
    return same and not value.is_graph_output()
