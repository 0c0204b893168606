"""Numbers that are compared with each other are rounded alike: words for every rule that chooses by a comparison.

A runtime that lacks an operator in float16 computes it in float32 and rounds what it gives. onnxruntime leaves such a
rounding out between two of them, so of one tensor one reader sees float32 numbers and another the float16 they round
to: ``Equal(x, y)`` is false everywhere although y was chosen from x, and ``Where(Equal(y, 0), 1, y)`` may hold a 0.
So in the rules

- masks come from inputs and bounds: what the operator gives is compared only as computed anew from copies of these;
- a number and the comparison that guards it are read from one copy.

``wide`` makes such copies: a Cast to float32 is one tensor, rounded or not, and whatever follows is float32 for all.
In float32 and float64 it is the tensor itself; what is computed anew is then the forward pass's own node, since equal
nodes merge. (The sign of an output needs no copy: rounding keeps it, but for numbers below 3e-8, which are 0 in
float16, so that Relu has there the slope that belongs to 0.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.rules.registry import Gradients

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def wide(op: Builder, x: Var) -> Var:
    """``x`` in at least float32."""
    return op.like(op.cast(x, ir.DataType.FLOAT), x) if x.dtype in HALF else x


def all_wide(op: Builder, *xs: Var | None) -> list[Any]:
    """Every tensor in at least float32; None stays None."""
    return [x if x is None else wide(op, x) for x in xs]


def back(op: Builder, gradients: Gradients, inputs: Sequence[Var | None]) -> Gradients:
    """Each gradient in the element type of its input."""
    return [d if d is None or x is None else op.cast(d, x.dtype) for d, x in zip(gradients, inputs, strict=True)]
