"""Helpers that write operators that only onnxruntime has; they set types and shapes, as no schema defines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.schemas import attributes_without_schema
from gradgraph.graph.shapes import Shape, record_shape

CONTRIB = "com.microsoft"
BLOCKED = "com.microsoft.nchwc"  # channels in blocks of b: [N, C/b, *space, b]; the kernels of onnxruntime's own Conv


def kernel(
    op: Builder, op_type: str, domain: str, inputs: Sequence[Var | None], shape: Shape | None, **attrs: Any
) -> Var:
    """Write one node whose single output has the element type of the first input."""
    return kernel_of_several(op, op_type, domain, inputs, [shape], **attrs)[0]


def kernel_of_several(
    op: Builder, op_type: str, domain: str, inputs: Sequence[Var | None], shapes: Sequence[Shape | None], **attrs: Any
) -> list[Var]:
    """Write one node with one output per shape, each with the element type of the first input."""
    first = inputs[0]
    assert first is not None
    values = [None if v is None else v.value for v in inputs]
    node = ir.Node(domain, op_type, values, attributes_without_schema(attrs), num_outputs=len(shapes))
    node.name = op.fresh_in(op.scope, op_type)
    for i, (out, shape) in enumerate(zip(node.outputs, shapes, strict=True)):
        out.name, out.type = node.name if i == 0 else op.fresh(f"{node.name}:{i}"), first.value.type
        record_shape(out, shape)
    op.nodes.append(node)
    return [op.wrap(out) for out in node.outputs]


def matmul(op: Builder, a: Var, b: Var, *, left: bool = False, right: bool = False) -> Var:
    """Compute ``a @ b`` of matrices or stacks of matrices; ``left`` and ``right`` transpose a and b without a copy."""
    (*stack, i, k), (*_, j, n) = a.shape or (None, None), b.shape or (None, None)
    shape = (*stack, k if left else i, j if right else n)
    return kernel(op, "FusedMatMul", CONTRIB, [a, b], shape, transA=int(left) or None, transB=int(right) or None)
