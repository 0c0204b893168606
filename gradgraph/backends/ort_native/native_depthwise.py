"""Depthwise convolutions by native kernels (``kernels/depthwise.cc``), in both layouts.

The kernels process a map while it is in the cache, so that neighbouring operations are free:

1. a Relu, or a Clip by known bounds, before the convolution is applied when x is read, and its gradient when dx is
   written;
2. both gradients are computed at once, and read dy once, unless windows are wide.

Measured with onnxruntime 1.31, float32: MobileNetV2's depthwise layers on an Intel Xeon (AVX512); those of MobileNetV2,
MobileNetV3, EfficientNet and ConvNeXt on an AMD EPYC (AVX2). They are not used on other processors
(``native_table.LEAST_LEVEL``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from gradgraph.backends.ort_cpu.conv.conv_table import conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_native.native_bounds import (
    FREE,
    activations,
    bound,
    bounds_of,
    is_free,
    is_gradient_of,
    is_native,
)
from gradgraph.backends.ort_native.native_forms import native_kernel, where_windows_lie
from gradgraph.backends.ort_native.native_table import FORMS, pays_here
from gradgraph.graph.builder import Builder, Var, Written
from gradgraph.machine.hardware import levels_in_use
from gradgraph.passes.normal.edit import Editor
from gradgraph.rules.registry import attributes, case, real

GRADIENTS = ("DepthwiseConvGradInput", "DepthwiseConvGradWeight")
DEPTHWISE = (
    case(real(2, 32, 4, 5), real(32, 1, 3, 3), real(32), group=32, pads=[1, 1, 1, 1]),
    case(real(3, 5, 9, 20), real(5, 1, 3, 3), group=5, strides=[2, 2], pads=[1, 1, 1, 1]),
    case(real(1, 7, 6, 19), real(7, 1, 5, 2), real(7), group=7, strides=[1, 2], dilations=[1, 3], pads=[2, 0, 3, 1]),
    case(real(70, 2, 3, 3), real(2, 1, 5, 5), group=2, pads=[2, 2, 2, 2]),
    case(real(2, 3, 8, 7), real(3, 1, 1, 2), group=3, strides=[2, 1], pads=[0, 1, 1, 3]),
    case(real(2, 3, 40, 70), real(3, 1, 4, 4), group=3, strides=[2, 2], dilations=[2, 1], pads=[0, 3, 2, 5]),
)

_WIDEST = 5  # with windows of 7 x 7, input gradients of onnxruntime's Conv took 0.2 to 0.75 of the kernel's time
# with AVX512, onnxruntime's blocked Conv takes 0.6 to 1.0 of the kernels' time for narrower images or wider windows
_LEAST_WIDTH = 7


def _serves(conv: Layer) -> bool:
    """Return whether the layer is a depthwise convolution over images with supported strides."""
    return conv.group > 1 and conv.c == conv.m == 1 and conv.seen.rank == 2 and max(conv.seen.strides) <= 2


def _is_narrow(conv: Layer) -> bool:
    return all(k and k <= _WIDEST for k in conv.seen.kernel)


def _pays(conv: Layer) -> bool:
    is_large = "avx512" not in levels_in_use() or (conv.size[1] >= _LEAST_WIDTH and _is_narrow(conv))
    return is_large and pays_here("depthwise convolution")


def _where(conv: Layer) -> dict[str, Any]:
    """Return the attributes for the windows, and ``block`` 1 for the NCHW layout."""
    return {**where_windows_lie(conv.seen), "block": 1}


def _sizes(conv: Layer) -> dict[str, Any]:
    return {"size": conv.size, "kernel": [k or 1 for k in conv.seen.kernel]}


@conv_form("Conv", DEPTHWISE, serves=_serves, when=_pays, any_batch=True, forms=FORMS)
def depthwise(op: Builder, conv: Layer, x: Var, w: Var, b: Var | None = None) -> Written | None:
    """Write a depthwise Conv as one native node; None unless float32."""
    y = ir.Value(name="y", type=x.value.type, shape=ir.Shape((conv.batch, conv.group, *conv.count)))
    return native_kernel(op, "DepthwiseConv", [x, w, b], [op.wrap(y)], **_where(conv), **FREE)


@conv_form(
    "ConvGradInput",
    DEPTHWISE,
    serves=_serves,
    when=lambda conv: _is_narrow(conv) and _pays(conv),
    any_batch=True,
    forms=FORMS,
)
def depthwise_dx(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Written | None:
    """Write ConvGradInput of a depthwise layer as one native node; None unless float32."""
    return native_kernel(op, "DepthwiseConvGradInput", [dy, w], [x], **_where(conv), **_sizes(conv), **FREE)


@conv_form("ConvGradWeight", DEPTHWISE, serves=_serves, when=_pays, any_batch=True, forms=FORMS)
def depthwise_dw(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Written | None:
    """Write ConvGradWeight of a depthwise layer as one native node; None unless float32."""
    return native_kernel(op, "DepthwiseConvGradWeight", [x, dy], [w], **_where(conv), **_sizes(conv), **FREE)


# --- neighbouring nodes ----------------------------------------------------------------------------------------------


def fold_neighbours(model: ir.Model) -> None:
    """Fuse activations into the depthwise kernels after them, and merge both gradients into one node, in place."""
    if not any(is_native(node, "DepthwiseConv", *GRADIENTS) for node in model.graph):
        return
    for node in activations(model.graph):
        found = _Activation.of(node)
        if found is not None:
            found.fold(model.graph)
    editor, merged = Editor(model), False
    for node in [n for n in model.graph if is_native(n, GRADIENTS[1])]:
        other = next(_same_cotangent(node), None)
        if other is not None:
            _merge(editor, node, other)
            merged = True
    if merged:
        model.graph.sort()


@dataclass(frozen=True)
class _Activation:
    """An activation whose output is read only by depthwise convolutions and by its own gradient.

    Attributes:
        node: the Relu or Clip.
        readers: the kernels DepthwiseConv and DepthwiseConvGradWeight that read its output.
        gradient: the gradient of the activation, if any.
        kind: the attributes that describe the activation.
    """

    node: ir.Node
    readers: list[ir.Node]
    gradient: ir.Node | None
    kind: dict[str, Any]

    @classmethod
    def of(cls, node: ir.Node) -> _Activation | None:
        x, y, kind = node.inputs[0], node.outputs[0], bounds_of(node)
        if x is None or kind is None or y.is_graph_output():
            return None
        readers, own = [], []
        for reader, i in y.uses():
            if is_native(reader, "DepthwiseConv", GRADIENTS[1]) and i == 0 and is_free(reader):
                readers.append(reader)
            elif is_gradient_of(reader, node):
                own.append(reader)
            else:
                return None
        if not readers or len(own) > 1 or not all(map(_is_alone, own)):
            return None
        return cls(node, readers, own[0] if own else None, kind)

    def fold(self, graph: ir.Graph) -> None:
        """Make the kernels read x and apply the activation themselves, which removes its output and its gradient."""
        x = self.node.inputs[0]
        for reader in self.readers:
            reader.replace_input_with(0, x)
            bound(reader, self.kind)
        if self.gradient is not None:
            below = self.gradient.inputs[0]
            maker = None if below is None else below.producer()
            assert maker is not None and below is not None
            maker.resize_inputs(3)
            maker.replace_input_with(2, x)
            bound(maker, self.kind)
            self.gradient.outputs[0].replace_all_uses_with(below, replace_graph_outputs=True)
            graph.remove(self.gradient, safe=True)
        graph.remove(self.node, safe=True)


def _is_alone(gradient: ir.Node) -> bool:
    """Return whether ``gradient`` is the only reader of the input gradient of a depthwise convolution."""
    dy = gradient.inputs[0]
    maker = None if dy is None else dy.producer()
    if dy is None or maker is None or dy.is_graph_output() or maker.graph is not gradient.graph:
        return False
    return is_native(maker, GRADIENTS[0]) and is_free(maker) and len(dy.uses()) == 1


def _same_cotangent(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the input-gradient nodes with the same windows, dy and activation as ``node``, a weight gradient."""
    x, dy = node.inputs
    for other, i in () if dy is None else dy.uses():
        beside = is_native(other, GRADIENTS[0]) and i == 0 and other.graph is node.graph
        if beside and attributes(other) == attributes(node) and list(other.inputs[2:]) in ([], [x]):
            yield other


def _merge(editor: Editor, by_weight: ir.Node, by_input: ir.Node) -> None:
    """Replace both gradients with one ``DepthwiseConvGrad``."""
    op, x = editor.op, by_weight.inputs[0]
    op.scope = by_input.name or ""
    inputs = [editor.op.wrap(v) for v in (*by_input.inputs[:2], x)]
    like = [op.wrap(by_input.outputs[0]), op.wrap(by_weight.outputs[0])]
    written = native_kernel(op, "DepthwiseConvGrad", inputs, like, **attributes(by_weight))
    assert isinstance(written, tuple)
    dx, dw = written
    editor.replace(by_input, dx)
    editor.replace(by_weight, dw)
