"""Convolutions with AMX tiles (``kernels/conv.h``), if the processor has them and they are faster.

Without tiles, weight gradients of small maps are computed with vectors (``kernels/conv_weight.h``), where the forms of
``ort_cpu/conv`` would write the im2col matrix.

These kernels read and write the plain layout. They do not support groups, more than two spatial axes, or strides above
2, for which the forms of ``ort_cpu/conv`` are used.
"""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.backends.ort_cpu.conv.conv_table import CONVOLUTIONS, conv_form
from gradgraph.backends.ort_cpu.conv.layer import Layer
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.native_bounds import ANY, activations, bounds_of, is_native
from gradgraph.backends.ort_native.native_forms import native_kernel, where_windows_lie
from gradgraph.backends.ort_native.native_table import FORMS
from gradgraph.graph.builder import Builder, Var, Written
from gradgraph.graph.nodes import read_once
from gradgraph.rules.registry import case, real

TILED = (
    case(real(3, 40, 9, 20), real(33, 40, 3, 3), real(33), pads=[1, 1, 1, 1]),
    case(real(2, 17, 6, 19), real(50, 17, 5, 1), strides=[1, 2], pads=[2, 0, 1, 0]),
    case(real(5, 70, 3, 3), real(20, 70, 1, 1)),
    case(real(1, 16, 40, 70), real(16, 16, 3, 2), strides=[2, 1], dilations=[2, 1], pads=[0, 3, 2, 0]),
)


# Layers that are computed with vectors: 16 channels on both sides fill a vector. CPU time relative to the best other
# form, one thread of a Zen 4: 64 to 256 channels at 8 to 56 px 0.76 to 0.92, 512 channels at 7 px 1.2; with strides of
# 2, 1.1 to 1.3 (Zen 3); sequences (maps of height 1) of 256 with 16 and 64 channels 1.1 to 1.5 with AVX2, 1.1 to 1.3
# with AVX512. Wider maps were not measured.
LEAST_CHANNELS = 16
LEAST_WINDOWS, MOST_WINDOWS = 64, 3136  # windows per image


def _serves(conv: Layer) -> bool:
    return conv.group == 1 and conv.seen.rank == 2 and max(conv.seen.strides) <= 2


def _pays(conv: Layer) -> bool:
    return min(conv.c, conv.m) >= 16 and conv.taps >= 4 and conv.windows >= 64 and library.here().has_tiles


@conv_form("Conv", (*CONVOLUTIONS, *TILED), serves=_serves, when=_pays, forms=FORMS)
def by_tiles(op: Builder, conv: Layer, x: Var, w: Var, b: Var | None = None) -> Written | None:
    """Write Conv as one native node without activation; None unless float32.

    ``fuse_activations`` may add an activation later.
    """
    y = ir.Value(name="y", type=x.value.type, shape=ir.Shape((conv.batch, conv.m, *conv.count)))
    bounds = {"lower": -ANY, "upper": ANY}
    return native_kernel(op, "Conv", [x, w, b], [op.wrap(y)], **where_windows_lie(conv.seen), **bounds)


@conv_form("ConvGradInput", TILED, serves=_serves, when=_pays, forms=FORMS)
def dx_by_tiles(op: Builder, conv: Layer, dy: Var, w: Var, x: Var) -> Written | None:
    """Write ConvGradInput as one native node; None unless float32."""
    return native_kernel(op, "ConvGradInput", [dy, w], [x], **where_windows_lie(conv.seen), size=conv.size)


def _pays_by_vectors(conv: Layer) -> bool:
    is_image = conv.taps > 1 and 1 not in conv.size
    fits = is_image and max(conv.seen.strides) == 1 and min(conv.c, conv.m) >= LEAST_CHANNELS
    return fits and LEAST_WINDOWS <= conv.windows <= MOST_WINDOWS and library.here().has_fast_vectors


@conv_form(
    "ConvGradWeight", TILED, serves=_serves, when=lambda conv: _pays(conv) or _pays_by_vectors(conv), forms=FORMS
)
def dw_in_one_pass(op: Builder, conv: Layer, x: Var, dy: Var, w: Var) -> Written | None:
    """Write ConvGradWeight as one native node; None unless float32.

    It is declared as a matrix, so that layout passes ignore it.
    """
    matrix = ir.Value(name="dw", type=w.value.type, shape=ir.Shape((conv.m, conv.fan_in)))
    lie = {**where_windows_lie(conv.seen), "kernel": [k or 1 for k in conv.seen.kernel]}
    dw = native_kernel(op, "ConvGradWeight", [x, dy], [op.wrap(matrix)], **lie, block=1)
    return op.Reshape(dw, w.shape) if isinstance(dw, Var) else None


def fuse_activations(model: ir.Model) -> None:
    """Fuse a Relu, or a Clip by known bounds, into a native Conv whose only reader it is, in place."""
    graph = model.graph
    for node in activations(graph):
        value = node.inputs[0]
        conv = None if value is None else value.producer()
        kind = bounds_of(node)
        if conv is None or value is None or kind is None or kind["lower"] == -ANY or not read_once(value, node):
            continue
        if is_native(conv, "Conv") and conv.attributes["lower"].as_float() == -ANY:
            conv.attributes.update({name: ir.AttrFloat32(name, kind[name]) for name in ("lower", "upper")})
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)
