"""Convolutions by the tiles of AMX (``kernels/conv.h``), where the processor has them and they are faster.

Their kernels read and write plain layout; groups, more than two spatial axes and strides beyond 2 are left to the forms
of ``conv``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.conv.conv_forms import CONVOLUTIONS, gradients, layer_of
from gradgraph.backends.ort_cpu.conv.layer import Layer, layer
from gradgraph.backends.ort_native import library
from gradgraph.backends.ort_native.native_forms import native_kernel
from gradgraph.backends.ort_native.native_table import form
from gradgraph.builder import Builder, Var, Written
from gradgraph.normal.simplifying.peepholes import read_once
from gradgraph.registry import case, real
from gradgraph.shapes import constant_of

ANY = math.inf
TILED = (
    case(real(3, 40, 9, 20), real(33, 40, 3, 3), real(33), pads=[1, 1, 1, 1]),
    case(real(2, 17, 6, 19), real(50, 17, 5, 1), strides=[1, 2], pads=[2, 0, 1, 0]),
    case(real(5, 70, 3, 3), real(20, 70, 1, 1)),
    case(real(1, 16, 40, 70), real(16, 16, 3, 2), strides=[2, 1], dilations=[2, 1], pads=[0, 3, 2, 0]),
)


def _serves(it: Layer | None) -> bool:
    return it is not None and it.group == 1 and it.seen.rank == 2 and max(it.seen.strides) <= 2


def _where(it: Layer) -> dict[str, Any]:
    seen = it.seen
    return {"strides": seen.strides, "dilations": seen.dilations, "begins": seen.begins, "ends": seen.ends}


def _when(good: Callable[[Layer], bool]) -> Callable[[Call], bool]:
    def when(call: Call) -> bool:
        it = layer_of(call)
        return it is not None and _serves(it) and good(it) and library.here().has_tiles

    return when


@_when
def _pays(it: Layer) -> bool:
    return min(it.c, it.m) >= 16 and it.taps >= 4 and it.windows >= 64


@form("Conv", *CONVOLUTIONS, *TILED, domain="", when=_pays)
def by_tiles(op: Builder, x: Var, w: Var, b: Var | None = None, **attrs: Any) -> Written | None:
    it = layer(x, w, None, attrs)
    if it is None or not _serves(it):
        return None
    y = ir.Value(name="y", type=x.value.type, shape=ir.Shape((it.batch, it.m, *it.count)))
    bounds = {"lower": -ANY, "upper": ANY}
    return native_kernel(op, "Conv", [x, w, b], [op.wrap(y)], **_where(it), **bounds)


@form("ConvGradInput", *gradients(TILED, "y", "w", "x"), when=_pays)
def dx_by_tiles(op: Builder, dy: Var, w: Var, x: Var, **attrs: Any) -> Written | None:
    it = layer(x, w, dy, attrs)
    if it is None or not _serves(it):
        return None
    return native_kernel(op, "ConvGradInput", [dy, w], [x], **_where(it), size=it.size)


@form("ConvGradWeight", *gradients(TILED, "x", "y", "w"), when=_pays)
def dw_by_tiles(op: Builder, x: Var, dy: Var, w: Var, **attrs: Any) -> Written | None:
    it = layer(x, w, dy, attrs)
    if it is None or not _serves(it):
        return None
    return native_kernel(op, "ConvGradWeight", [x, dy], [w], **_where(it), kernel=[k or 1 for k in it.seen.kernel])


def fuse_activations(model: ir.Model) -> None:
    """Relu, or Clip by known bounds, of what such a Conv alone gives becomes part of it: a pass less."""
    graph = model.graph
    for node in [n for n in graph if n.domain == "" and n.op_type in ("Relu", "Clip")]:
        value = node.inputs[0]
        conv = None if value is None else value.producer()
        bounds = _bounds(node)
        if conv is None or value is None or bounds is None or not read_once(value, node):
            continue
        if (conv.domain, conv.op_type) == (library.DOMAIN, "Conv") and conv.attributes["lower"].as_float() == -ANY:
            conv.attributes.update(
                {name: ir.AttrFloat32(name, b) for name, b in zip(("lower", "upper"), bounds, strict=True)}
            )
            node.outputs[0].replace_all_uses_with(value)
            graph.remove(node, safe=True)


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    if node.op_type == "Relu":
        return 0.0, ANY
    given = [None if v is None else constant_of(v) for v in node.inputs[1:]]
    known = [float(b.item()) for b in given if b is not None]
    return (known[0], known[1]) if len(known) == 2 and known[0] > -ANY else None
