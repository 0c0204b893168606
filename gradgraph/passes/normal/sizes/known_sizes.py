"""Pass: recover known sizes that ONNX shape inference loses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from gradgraph.graph import shapes
from gradgraph.graph.builder import Builder
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import Dim
from gradgraph.graph.size_context import better, is_generated


def settle_reshape(node: ir.Node, target: Sequence[Dim], op: Builder) -> bool:
    """Record the output shape of a Reshape to ``target``, and make the target a constant if possible.

    1. An entry 0 is the input's size on that axis (without allowzero).
    2. An entry -1 is the product of the input's sizes divided by the sizes of the other axes; symbolic sizes cancel by
       name.
    3. A target with one unknown entry and otherwise positive numbers becomes a constant with -1 for the unknown entry.
    """
    dims, output = shape_of(node.inputs[0]), node.outputs[0]
    zero_copies = not node.attributes.get_int("allowzero", 0)
    if 0 in target and (not zero_copies or dims is None):
        return False
    wanted = [dims[i] if d == 0 and dims is not None else d for i, d in enumerate(target)]
    if -1 in wanted and dims is not None:
        at = wanted.index(-1)
        rest = _quotient(dims, [*wanted[:at], *wanted[at + 1 :]])
        changed = record_better(output, [*wanted[:at], rest, *wanted[at + 1 :]])
    else:
        changed = record_better(output, [None if d == -1 else d for d in wanted])
    return _make_constant(node, target, op) or changed


def _quotient(dims: Sequence[Dim], others: Sequence[Dim]) -> Dim:
    """Return the product of ``dims`` divided by that of ``others``: a number, one symbol, or None if it is neither."""
    symbols = Counter(d for d in dims if not isinstance(d, int))
    symbols.subtract(d for d in others if not isinstance(d, int))
    left = [d for d, count in symbols.items() for _ in range(count)]
    if None in symbols or any(count < 0 for count in symbols.values()):
        return None
    above, below = (math.prod(shapes.known_sizes(side)) for side in (dims, others))
    if below == 0 or above % below:
        return None
    return above // below if not left else (left[0] if len(left) == 1 and above == below else None)


def _make_constant(node: ir.Node, target: Sequence[Dim], op: Builder) -> bool:
    known = shapes.known_sizes(target)
    if len(known) != len(target) - 1 or any(d <= 0 for d in known):
        return False
    node.replace_input_with(1, op.const(np.array(shapes.sizes_or(target, -1), np.int64)).value)
    return True


def record_better(value: ir.Value, dims: Sequence[Dim]) -> bool:
    """Record each size in ``dims`` that ``better`` prefers to the recorded size; return True if there were any."""
    old = shape_of(value) or (None,) * len(dims)
    if len(old) != len(dims):
        return False
    dims = [None if is_generated(d) else d for d in dims]  # the next inference would drop generated names
    new = tuple(better(a, b) for a, b in zip(old, dims, strict=True))
    if new == old:
        return False
    value.shape = ir.Shape(new)
    return True
