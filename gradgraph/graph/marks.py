"""Marks say what the file format has no word for.

An initializer may be a number in a formula, made by us or by an exporter, and no parameter. An Identity may be one
through which no gradient passes; that mark is written to files, where every runtime reads a plain Identity. So is that
of a Cast which stands there for mixed precision only, and without which the model is the one that it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

_CONSTANT = "gradgraph.constant"
_ROLE, _DETACHED = "gradgraph.role", "detached"
_PRECISION, _READ, _WRITTEN = "gradgraph.autocast", "read", "written"


def mark_constant(value: ir.Value, is_constant: bool = True) -> None:
    """Say that this initializer is a number in a formula, not a parameter of the model; or that it is one after all."""
    if is_constant:
        value.meta[_CONSTANT] = True
    else:
        value.meta.pop(_CONSTANT, None)


def is_marked_constant(value: ir.Value) -> bool:
    return _CONSTANT in value.meta


def mark_detached(node: ir.Node) -> None:
    """Say that no gradient passes through this Identity."""
    node.metadata_props[_ROLE] = _DETACHED


def is_detached(node: ir.Node) -> bool:
    return node.op_type == "Identity" and node.domain == "" and node.metadata_props.get(_ROLE) == _DETACHED


def forget_detached(nodes: Iterable[ir.Node]) -> None:
    """Let detached nodes be plain ones: of what they are in, nobody will ask for a gradient any more."""
    for node in nodes:
        if is_detached(node):
            del node.metadata_props[_ROLE]


def mark_precision(node: ir.Node, is_read: bool) -> None:
    """Say that this Cast gives a float32 tensor to who reads it in a low precision, or what that computes back."""
    node.metadata_props[_PRECISION] = _READ if is_read else _WRITTEN


def precision_role(op_type: str, metadata: Mapping[str, str]) -> str:
    """``"read"`` or ``"written"`` for a Cast of mixed precision; empty for other nodes."""
    return metadata.get(_PRECISION, "") if op_type == "Cast" else ""


def is_for_precision(node: ir.Node) -> bool:
    """Is it a Cast of mixed precision?"""
    return bool(precision_role(node.op_type, node.metadata_props)) and node.domain == ""


QUANTISED = "gradgraph.quantised"  # metadata of a model: gradients pass its pairs of Quantize- and DequantizeLinear
COMPUTED = "gradgraph.computed"  # Model.meta key: the names of what the nodes of a model gave as it was read
TEACHER = "gradgraph.teacher"  # metadata of a model: what gradgraph.surgery.teachers has put beside it
TEACHERS = "teacher."  # what the names of all that is a teacher's begin with
ADAPTERS = "gradgraph.adapters"  # metadata of a model: what gradgraph.surgery.adapters has put in
