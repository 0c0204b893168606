"""Marks for facts that the file format cannot express.

An initializer may be a constant of a formula, written by gradgraph or an exporter, and not a parameter. An Identity may
stop gradients; that mark is saved in files, where runtimes see a plain Identity. A Cast may have been inserted for
mixed precision; removing these Casts restores the original model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

_CONSTANT = "gradgraph.constant"
_ROLE, _DETACHED = "gradgraph.role", "detached"
_PRECISION, _READ, _WRITTEN = "gradgraph.autocast", "read", "written"


def mark_constant(value: ir.Value, is_constant: bool = True) -> None:
    """Mark an initializer as a constant of a formula, not a parameter, or remove that mark."""
    if is_constant:
        value.meta[_CONSTANT] = True
    else:
        value.meta.pop(_CONSTANT, None)


def is_marked_constant(value: ir.Value) -> bool:
    return _CONSTANT in value.meta


def mark_detached(node: ir.Node) -> None:
    """Mark an Identity as stopping gradients."""
    node.metadata_props[_ROLE] = _DETACHED


def is_detached(node: ir.Node) -> bool:
    return node.op_type == "Identity" and node.domain == "" and node.metadata_props.get(_ROLE) == _DETACHED


def forget_detached(nodes: Iterable[ir.Node]) -> None:
    """Turn detached nodes into plain Identities, once their graph is no longer differentiated."""
    for node in nodes:
        if is_detached(node):
            del node.metadata_props[_ROLE]


def mark_precision(node: ir.Node, is_read: bool) -> None:
    """Mark a Cast of mixed precision: to low precision if ``is_read``, otherwise back to the original type."""
    node.metadata_props[_PRECISION] = _READ if is_read else _WRITTEN


def precision_role(op_type: str, metadata: Mapping[str, str]) -> str:
    """Return ``"read"`` or ``"written"`` for a Cast of mixed precision; empty for other nodes."""
    return metadata.get(_PRECISION, "") if op_type == "Cast" else ""


def is_for_precision(node: ir.Node) -> bool:
    """Whether ``node`` is a Cast of mixed precision."""
    return bool(precision_role(node.op_type, node.metadata_props)) and node.domain == ""


QUANTISED = "gradgraph.quantised"  # metadata of a model: gradients pass through its Quantize- and DequantizeLinear
COMPUTED = "gradgraph.computed"  # Model.meta key: the names of node outputs of the model as read
TEACHER = "gradgraph.teacher"  # metadata of a model: the distillation that gradgraph.surgery.teachers added
TEACHERS = "teacher."  # prefix of all names that belong to a teacher
GIVEN_NAMES = "gradgraph.given_names"  # metadata of a model: names of weights that gradgraph.surgery derived
ADAPTERS = "gradgraph.adapters"  # metadata of a model: the adapters that gradgraph.surgery.adapters added
