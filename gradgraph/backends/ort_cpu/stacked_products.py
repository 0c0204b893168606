"""Merge products of few rows with the same weight into one product, mainly the products of values and of tangents.

With few rows, most of the time is spent reading the weight, which one product reads once. Measured with onnxruntime
1.31 on two cores of an Intel Xeon (AVX512), float32, constant weights of 512x512 and 1,024x1,024: one product takes
0.5 of the time of two separate ones for one row, 0.7 for eight, and a few microseconds for the Concat and the Split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from gradgraph.backends.stages import stages
from gradgraph.graph.builder import all_of
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.passes.normal.edit import Editor, discard
from gradgraph.rules.registry import attributes

MOST_ROWS = 8  # maximum rows per product: merging saves 30 % of the time with 8 rows, and nothing with 32 or more
LARGE_WEIGHT = 1 << 18  # minimum elements of the weight: the smallest that was measured is 512x512


def never_changes(value: ir.Value | None) -> bool:
    """Return whether ``value`` is constant, or a transposed constant, which onnxruntime prepacks once."""
    node = None if value is None else value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Transpose" else value
    return source is not None and source.is_initializer()


def stack_products(model: ir.Model) -> None:
    """Merge products of few rows with the same weight, in place, in the main graph."""
    products = {node: key for node in model.graph if (key := _stacking_key(node)) is not None}
    groups: dict[object, list[ir.Node]] = {}
    stage = stages(model.graph, lambda before, _: before in products)
    for node, key in products.items():  # products of one stage do not depend on each other
        groups.setdefault((stage[node], key), []).append(node)
    together = [group for group in groups.values() if len(group) > 1]
    editor = Editor(model)
    for group in together:
        _stack(editor, group)
    if together:
        model.graph.sort()


def _stacking_key(node: ir.Node) -> object:
    """Return a key shared by the products that can be merged into one; None for other nodes."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    x, w = node.inputs[:2]
    attrs = attributes(node)
    if x is None or w is None or attrs.get("transA") or not never_changes(w):
        return None
    rows, weight = shape_of(x), shape_of(w)
    if rows is None or weight is None or len(weight) != 2 or len(rows) < 2:
        return None
    sizes = known_sizes((*rows, *weight))
    if len(sizes) < len(rows) + 2 or not 0 < math.prod(sizes[: len(rows) - 1]) <= MOST_ROWS:
        return None
    return (w, rows, *sorted(attrs.items())) if math.prod(sizes[-2:]) >= LARGE_WEIGHT else None


def _stack(editor: Editor, group: Sequence[ir.Node]) -> None:
    """Replace the products ``xᵢ·W`` in ``group`` with parts of ``[x₁; x₂; …]·W``, plus ``β·C`` in case of a Gemm."""
    op, last = editor.op, group[-1]
    op.scope = last.name or ""
    rows = op.Concat(*(editor.op.wrap(node.inputs[0]) for node in group), axis=0)
    attrs = attributes(last)
    beta = attrs.pop("beta", 1.0)
    product = getattr(op, last.op_type)(rows, editor.op.wrap(last.inputs[1]), **attrs)
    parts = all_of(op.Split(product, axis=0, num_outputs=len(group), outputs=len(group)))
    written = []
    for node, part in zip(group, parts, strict=True):
        summand = editor.op.wrap(node.inputs[2]) if len(node.inputs) > 2 and beta != 0.0 else None
        scaled = summand if summand is None or beta == 1.0 else summand * beta
        written.append(part if scaled is None else part + scaled)
    editor.place(last)
    for node, result in zip(group, written, strict=True):
        editor.hand_over(node.outputs[0], result)
        discard(node)
