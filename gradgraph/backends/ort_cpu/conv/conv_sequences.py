"""Convolutions of sequences [N, C, L] as convolutions of images [N, C, 1, L], for which blocked kernels (NCHWc) exist.

Nodes between convolutions compute images as well, so that chains stay in blocked layout: elementwise operators, sums
over L, BatchNormalization in training mode, and their gradients. Adding an axis of size 1 copies nothing.

CPU time of steps of three layers relative to convolutions of sequences, kernels of 3 to 15, strides of 1 and 2, 100 to
1000 windows, 8 to 64 sequences: 0.6 to 0.9 with 16 to 64 channels, 0.85 to 0.98 with 128, depthwise 0.16 to 0.26. With
fewer than 16 channels of x, it would be 1.0 to 1.1. One thread of a Zen 4, onnxruntime 1.31.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.conv.conv_blocks import fits_blocks
from gradgraph.backends.ort_cpu.conv.conv_images import MOST_WINDOWS_UNBLOCKED
from gradgraph.backends.ort_cpu.conv.conv_table import layer_of
from gradgraph.backends.ort_cpu.conv.conv_taps import LEAST_CHANNELS, LEAST_WINDOWS_OF_ALL, MOST_WEIGHTS
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import is_elementwise, record_shape
from gradgraph.passes.normal.edit import Editor, attributes, names_of
from gradgraph.rules.conv import input_gradient, weight_gradient
from gradgraph.rules.named_operators import DOMAIN

AXIS = 2  # the height of the images
LEAST_SEQUENCES = 8  # minimum number of sequences with more than ``MOST_WEIGHTS`` weights per tap
NORM = "BatchNormalization"
GRADIENTS = (
    "ReluGrad",
    "ClipGrad",
    "BatchNormalizationGrad",
)  # named operators whose operands broadcast like their results


def write_images(model: ir.Model) -> ir.Model:
    """Write convolutions of sequences in the main graph as convolutions of images, in place, where blocks pay."""
    editor = Editor(model, Builder(taken=names_of(model), named_operators=True))
    images = _Images(editor.op)
    with editor.replacing_many():
        for node in list(model.graph):
            editor.op.scope = node.name or ""
            written = _written(images, node)
            if written is not None:
                editor.replace(node, *written)
    return model


class _Images:
    """Sequences and the same tensors as images, with one more axis.

    Attributes:
        op: the builder.
        known: the image of each sequence that has one.
    """

    def __init__(self, op: Builder) -> None:
        self.op = op
        self.known: dict[ir.Value, Var] = {}

    def of(self, x: Var | None) -> Var | None:
        """Return the image of a sequence; other tensors get an axis before the last one, unless they have only one."""
        if x is None or x.rank < 2:
            return x
        if x.value not in self.known:
            image = self.op.Unsqueeze(x, [x.rank - 1])
            record_shape(image.value, (*(x.shape or ())[:-1], 1, *(x.shape or ())[-1:]))
            self.known[x.value] = image
        return self.known[x.value]

    def image(self, x: Var | None) -> Var:
        """Return the image of an input that is present."""
        found = self.of(x)
        assert found is not None
        return found

    def sequence(self, image: Var) -> Var:
        """Return an image as a sequence; other tensors unchanged."""
        if image.rank != AXIS + 2:
            return image
        found: Var = self.op.Squeeze(image, [AXIS])
        self.known[found.value] = image
        return found


def _written(images: _Images, node: ir.Node) -> Sequence[Var] | None:
    """Return the outputs of ``node``, written with images; None if it remains unchanged."""
    convolve = CONVOLUTIONS.get(node.op_type)
    if convolve is not None and node.domain in ("", DOMAIN):
        call = Call.of(images.op, node)
        layer = layer_of(call)
        return (
            None
            if layer is None or not _pays(layer, node.op_type != "ConvGradInput")
            else [images.sequence(convolve(images, call))]
        )
    if not any(v in images.known for v in node.inputs if v is not None):
        return None
    if is_standard(node, "ReduceSum", "ReduceMean"):
        return _over_images(images, node)
    return _on_images(images, node) if _keeps_axes(node) else None


def _pays(conv: Layer, forward: bool) -> bool:
    """Return whether the layer is one of sequences of known size, for whose images forms in NCHWc are the fastest.

    Without ``forward``, the question is for dx. With kernels of 1, products per sequence are as fast.
    """
    if conv.seen.rank != 1 or conv.taps == 1 or conv.windows <= max(MOST_WINDOWS_UNBLOCKED, conv.taps):
        return False
    many = conv.images >= LEAST_SEQUENCES or conv.m * conv.c <= MOST_WEIGHTS
    wide = min(conv.m, conv.c) >= LEAST_CHANNELS or conv.m == conv.c == 1  # or depthwise
    channels = (conv.m, conv.c) if forward else (conv.c, conv.m)
    return many and wide and conv.images * conv.windows >= LEAST_WINDOWS_OF_ALL and fits_blocks(conv.group, *channels)


# --- convolutions --------------------------------------------------------------------------------------------


def _where(call: Call) -> dict[str, Any]:
    """Return the windows of a convolution of images as attributes."""
    lone = {"kernel_shape": 1, "strides": 1, "dilations": 1}
    given = {name: [one, *call.attrs[name]] for name, one in lone.items() if call.attrs.get(name)}
    begin, end = call.attrs.get("pads") or (0, 0)
    return {**given, "pads": [0, begin, 0, end], "group": call.attrs.get("group") or 1}


def _conv(images: _Images, call: Call) -> Var:
    x, w, *b = call.inputs
    y = images.op.Conv(images.of(x), images.of(w), *b, **_where(call))
    n, m, length = shape_of(call.node.outputs[0]) or (None,) * 3
    record_shape(y.value, (n, m, 1, length))
    return y


def _input_gradient(images: _Images, call: Call) -> Var:
    dy, w, x = call.inputs
    return input_gradient(images.op, images.image(dy), images.image(w), _like(images, x), **_where(call))


def _weight_gradient(images: _Images, call: Call) -> Var:
    x, dy, w = call.inputs
    return weight_gradient(images.op, images.image(x), images.image(dy), _like(images, w), **_where(call))


def _like(images: _Images, x: Var | None) -> Var:
    """Return a tensor with the type and shape of the image of ``x``, of which only these are read."""
    assert x is not None
    n, c, length = x.shape or (None,) * 3
    return images.op.wrap(ir.Value(name="like", type=x.value.type, shape=ir.Shape([n, c, 1, length])))


CONVOLUTIONS: dict[str, Callable[[_Images, Call], Var]] = {
    "Conv": _conv,
    "ConvGradInput": _input_gradient,
    "ConvGradWeight": _weight_gradient,
}


# --- nodes between them --------------------------------------------------------------------------------------


def _keeps_axes(node: ir.Node) -> bool:
    """Return whether ``node`` computes images from images as it computes sequences from sequences."""
    known = is_elementwise(node) or is_standard(node, NORM) or (node.domain == DOMAIN and node.op_type in GRADIENTS)
    return known and len(shape_of(node.outputs[0]) or ()) == AXIS + 1


def _on_images(images: _Images, node: ir.Node) -> list[Var]:
    """Return the outputs of a copy of ``node`` with an axis more in its operands and results."""
    op = images.op
    operands = [images.of(op.wrap(v)) for v in node.inputs]
    values = [None if v is None else v.value for v in operands]
    copied = ir.Node(node.domain, node.op_type, values, node.attributes.values(), num_outputs=len(node.outputs))
    copied.name = op.fresh_in(op.scope, node.op_type)
    for out, like in zip(copied.outputs, node.outputs, strict=True):
        dims = shape_of(like) or ()
        out.name, out.type = op.fresh(f"{like.name}.image"), like.type
        record_shape(out, (*dims[:AXIS], 1, *dims[AXIS:]) if len(dims) == AXIS + 1 else dims)
    op.nodes.append(copied)
    return [images.sequence(op.wrap(out)) for out in copied.outputs]


def _over_images(images: _Images, node: ir.Node) -> list[Var] | None:
    """Return the sum or mean over the length of each sequence, computed over images; None for other axes."""
    op, (x, *axes) = images.op, node.inputs
    chosen = op.wrap(axes[0]) if axes else None
    if chosen is None or chosen.const is None or [int(a) % 3 for a in chosen.const] != [AXIS]:
        return None
    kept = bool(attributes(node)["keepdims"])
    reduced = op.emit(node.op_type, images.of(op.wrap(x)), [AXIS, AXIS + 1], keepdims=int(kept))
    return [images.sequence(reduced) if kept else reduced]
