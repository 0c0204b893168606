"""Helpers for rules with comparisons, so that all operands are rounded alike.

A runtime without a float16 kernel for an operator computes it in float32 and rounds the result. onnxruntime removes the
rounding between two such operators, so one reader of a tensor may see float32 numbers, and another the numbers rounded
to float16. As a result, ``Equal(x, y)`` may be false everywhere although y was selected from x, and ``Where(Equal(y,
0), 1, y)`` may contain a 0. Rules therefore follow two principles:

- masks are computed from inputs and bounds; an output is compared only if it is recomputed from copies of these;
- a number and the comparison that guards it are computed from the same copy.

``wide`` makes such a copy: a Cast to float32 is one tensor, whether rounded or not, and everything computed from it is
float32. For float32 and float64 it returns the tensor itself, and recomputed nodes merge with those of the forward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import Gradients

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def wide(op: Builder, x: Var) -> Var:
    """Return ``x``, cast to float32 if it has lower precision."""
    return op.like(op.cast(x, ir.DataType.FLOAT), x) if x.dtype in HALF else x


def all_wide(op: Builder, *xs: Var | None) -> list[Any]:
    """Return each tensor, cast to float32 if it has lower precision; None stays None."""
    return [x if x is None else wide(op, x) for x in xs]


def back(op: Builder, gradients: Gradients, inputs: Sequence[Var | None]) -> Gradients:
    """Return each gradient cast to the element type of its input."""
    return [d if d is None or x is None else op.cast(d, x.dtype) for d, x in zip(gradients, inputs, strict=True)]
