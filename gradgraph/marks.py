"""A mark says that an initializer is a number in a formula, made by us or by an exporter, and no parameter."""

from __future__ import annotations

import onnx_ir as ir

_CONSTANT = "gradgraph.constant"


def mark_constant(value: ir.Value, is_constant: bool = True) -> None:
    """Say that this initializer is a number in a formula, not a parameter of the model; or that it is one after all."""
    if is_constant:
        value.meta[_CONSTANT] = True
    else:
        value.meta.pop(_CONSTANT, None)


def is_marked_constant(value: ir.Value) -> bool:
    return _CONSTANT in value.meta
