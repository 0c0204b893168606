"""Marks say what the file format has no word for.

An initializer may be a number in a formula, made by us or by an exporter, and no parameter. An Identity may be one
through which no gradient passes; that mark is written to files, where every runtime reads a plain Identity.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

_CONSTANT = "gradgraph.constant"
_ROLE, _DETACHED = "gradgraph.role", "detached"


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
