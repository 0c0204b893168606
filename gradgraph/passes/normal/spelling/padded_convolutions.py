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
        around = None if pad is None else zeros_around(pad)
        pads = None if around is None or any(map(any, around[:2])) else _together(conv, around[2:])
        if pad is not None and pads is not None and _only_convolutions_read(pad):
            conv.replace_input_with(0, pad.inputs[0])
            conv.attributes["pads"] = ir.AttrInt64s("pads", pads)
            changed = True
    return changed


def pads_zeros(pad: ir.Node) -> bool:
    """Whether a Pad fills with a constant that is known to be 0."""
    fill = input_at(pad, 2)
    number = shapes.constant_of(fill)
    is_constant = pad.attributes.get_string("mode", "constant") == "constant"
    return is_constant and (fill is None or (number is not None and not number.any()))


def zeros_around(pad: ir.Node) -> list[tuple[int, int]] | None:
    """Return the zeros before and after each axis; None if they are unknown or negative, or the Pad does more."""
    dims, pads, given = shape_of(pad.inputs[0]), shapes.constant_of(input_at(pad, 1)), input_at(pad, 3)
    axes = range(len(dims or ())) if given is None else shapes.constant_of(given)
    if dims is None or pads is None or axes is None or (pads < 0).any() or not pads_zeros(pad):
        return None
    found = [(0, 0)] * len(dims)
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        found[int(axis)] = int(before), int(after)
    return found


def _together(conv: ir.Node, around: list[tuple[int, int]]) -> list[int] | None:
    """Return the pads of ``conv``, enlarged by ``around``; None if a window could lie in the padding."""
    if conv.attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or "kernel_shape" not in conv.attributes:
        return None
    reach, more = shapes.windows_of(conv)[0], [count for side in zip(*around, strict=True) for count in side]
    pads = [a + b for a, b in zip(conv.attributes.get_ints("pads", [0] * len(more)), more, strict=True)]
    return pads if all(p < r for p, r in zip(pads, [*reach, *reach], strict=True)) else None


def _only_convolutions_read(pad: ir.Node) -> bool:
    value = pad.outputs[0]
    same = all(i == 0 and is_standard(user, "Conv") and user.graph is pad.graph for user, i in value.uses())
    return same and not value.is_graph_output()
