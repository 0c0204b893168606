"""Fuse Relu, and Clip by known bounds, into neighbouring native kernels (``kernels/bounds.h``)."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from gradgraph.backends.ort_cpu.conv.conv_fusions import clip_bounds
from gradgraph.backends.ort_native import library
from gradgraph.graph.schemas import attributes_without_schema

ANY = math.inf
# values of the attribute ``activation``: no activation; Clip, with gradients at its bounds; Relu, without one at 0
NONE, CLOSED, OPEN = 0, 1, 2
FREE = {"lower": -ANY, "upper": ANY, "activation": NONE}


def activations(graph: ir.Graph) -> list[ir.Node]:
    """Return the Relu and Clip nodes of ``graph`` that kernels may apply, in graph order."""
    return [n for n in graph if n.domain == "" and n.op_type in ("Clip", "Relu")]


def is_native(node: ir.Node, *op_types: str) -> bool:
    return node.domain == library.DOMAIN and node.op_type in op_types


def is_free(node: ir.Node) -> bool:
    """Return whether the kernel ``node`` does not include an activation yet."""
    return node.attributes["activation"].as_int() == NONE


def bounds_of(node: ir.Node) -> dict[str, Any] | None:
    """Return the attributes with which a kernel applies the Clip or Relu ``node``; None if its bounds are not known."""
    if node.op_type == "Relu":
        return {"lower": 0.0, "upper": ANY, "activation": OPEN}
    known = clip_bounds(node)
    if known is None or not known[0] <= known[1]:
        return None
    return {"lower": known[0], "upper": known[1], "activation": CLOSED}


def is_gradient_of(node: ir.Node, activation: ir.Node) -> bool:
    """Return whether ``node`` is the native gradient of ``activation``, a Relu or Clip."""
    x, y = activation.inputs[0], activation.outputs[0]
    program, given = {"Clip": ("ClipGrad 0 1 2", [x, y]), "Relu": ("ReluGrad 0 1", [y])}[activation.op_type]
    is_this = is_native(node, "Elementwise") and node.attributes["program"].as_string() == program
    return is_this and list(node.inputs[1:]) == given


def bound(node: ir.Node, kind: dict[str, Any]) -> None:
    """Make the kernel ``node`` apply the activation with the attributes ``kind``."""
    node.attributes.update({a.name: a for a in attributes_without_schema(kind)})
