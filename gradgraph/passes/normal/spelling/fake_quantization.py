"""Pass, on request: rewrite each QuantizeLinear followed by a DequantizeLinear as float arithmetic.

Pairs that compute the same in each step, in frozen layers, may stay as they are: no gradient passes through them, and
runtimes compute what is between them in integers.

The pair with scale s and zero point z becomes ``y = (clip(round(x / s) + z, lowest, highest) - z) · s``. This is equal
bit for bit to the result of the pair, but has no integers, so that gradients can pass through it: with a
straight-through Round (``gradgraph.extend.straight_through``), or, in a model marked as QUANTISED, with the rounding
added as a detached difference.

In a marked model the scale is detached, too, unless it is trained. A trained scale is ``s = first·exp(r)`` with the
parameter r. Its gradient is that of LSQ (Esser et al. 2020, arXiv:1902.08153, section 2): ``round(x/s) - x/s`` for x
within the range, and the bound beyond it, summed over the numbers that share s, and scaled by ``1/√(n·Q)``. Here n is
the number of elements that share s, in a weight or in one sample of data, and Q is the largest integer. The gradient
of r is that of s divided by s, so that a step in r moves s like a step in s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from gradgraph.files.model_metadata import learned_ranges
from gradgraph.graph.builder import Builder, Var
from gradgraph.graph.checks import subgraphs
from gradgraph.graph.marks import QUANTISED, is_marked_constant
from gradgraph.graph.nodes import made_by, source_of
from gradgraph.graph.quantisers import INTEGER_RANGES
from gradgraph.graph.shapes import constant_of
from gradgraph.passes.normal.edit import Editor, attributes, calls_of

_wanted = False


def want_arithmetic(wanted: bool) -> None:
    """Switch the pass on or off, for all models normalised from now on."""
    global _wanted
    _wanted = wanted


def write_fake_quantization(model: ir.Model, trained: Collection[str] | None = None) -> bool:
    """Rewrite each DequantizeLinear that undoes a QuantizeLinear; return True if there were any.

    ``trained`` are the names of the trained weights: pairs of the main graph that depend on none of them stay. By
    default, no pair stays.

    1. Both nodes must have the same scale, zero point, axis and blocks.
    2. The integers have 4, 8 or 16 bits and may be clipped; a pair through float8 stays.
    3. Scales may be per tensor, per axis or blocked.
    4. In a marked model, a bias that is rounded to an int32 multiple of a scale is rewritten, too.
    """
    straight = QUANTISED in model.metadata_props
    if not _wanted and not straight:
        return False
    learned = _computed_from([model.graph.initializers.get(name) for name in learned_ranges(model.metadata_props)])
    moving = None if trained is None else _depending(model.graph, trained)
    editor, changed = Editor(model), False
    for node in calls_of(model, "DequantizeLinear"):
        if moving is not None and node.graph is model.graph and moving.isdisjoint(node.inputs):
            continue
        clip = made_by(node.inputs[0], "Clip")
        whole = node.inputs[0] if clip is None else clip.inputs[0]
        before = None if whole is None else whole.producer()
        x: ir.Value | None = None
        limits: tuple[int, int] | None = None
        if before is not None and before.op_type == "QuantizeLinear" and _undoes(node, before):
            bounds = _bounds(before.outputs[0].dtype or ir.DataType.UINT8, clip)
            x, limits = (None, None) if bounds is None else (before.inputs[0], bounds)
        elif straight and before is not None:
            x = _rounded_bias(node, before)
        if x is None or node.inputs[1] is None:
            continue
        number, scale, zero = (editor.op.wrap(v) for v in (x, *[*node.inputs, None][1:3]))
        assert number is not None and scale is not None
        if straight:
            weighed = limits if node.inputs[1] in learned else None
            scale = _with_weighed_slope(editor.op, scale, number, weighed) if weighed else editor.op.detached(scale)
        editor.replace(node, _arithmetic(editor.op, number, scale, zero, limits, straight, **_blocks(node)))
        changed = True
    return changed


def _depending(graph: ir.Graph, names: Collection[str]) -> set[ir.Value]:
    """Return the values of ``graph``, without those in bodies, that depend on the initializers ``names``."""
    found = {v for name, v in graph.initializers.items() if name in names}
    for node in graph:
        inner = (v for body in subgraphs(node) for n in body.all_nodes() for v in n.inputs)
        captured = (v for body in subgraphs(node) for v in body.outputs)
        if any(v in found for v in (*node.inputs, *inner, *captured)):
            found.update(node.outputs)
    return found


def _bounds(kind: ir.DataType, clip: ir.Node | None) -> tuple[int, int] | None:
    """Return the bounds of an integer type, narrowed by a Clip; None if the bounds of the Clip are not constant."""
    if clip is None:
        return INTEGER_RANGES[kind]
    low, high = (None if v is None else constant_of(v) for v in [*clip.inputs, None, None][1:3])
    return None if low is None or high is None else (int(low), int(high))


def _computed_from(values: Iterable[ir.Value | None]) -> set[ir.Value]:
    """Return ``values``, the parameters of trained scales, and all that Exp, Mul and Identity compute from them."""
    waiting, found = [v for v in values if v is not None], set[ir.Value]()
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            readers = (use.node for use in value.uses() if use.node.op_type in ("Exp", "Mul", "Identity"))
            waiting += [y for node in readers for y in node.outputs]
    return found


def _rounded_bias(node: ir.Node, before: ir.Node) -> ir.Value | None:
    """Return b if ``before`` is ``Cast(Round(b / s), to=int32)`` and ``node`` multiplies by the same s, else None."""
    if before.op_type != "Cast" or before.outputs[0].dtype != ir.DataType.INT32:
        return None
    part = made_by(source_of(before.inputs[0], "Round"), "Div")
    return part.inputs[0] if part is not None and _are_equal(part.inputs[1], node.inputs[1]) else None


def _with_weighed_slope(op: Builder, scale: Var, x: Var, limits: tuple[int, int]) -> Var:
    """Return ``scale``, s = first·exp(r), with its gradient multiplied by 1/(√(n·Q)·s²).

    One 1/s cancels ds/dr = s, the other divides the gradient by s (see the module's docstring).
    """
    of_weight = x.value.is_initializer() or x.rank == 0
    count = op.cast(op.Size(x), scale.dtype) / op.cast(op.Size(scale), scale.dtype)
    if not of_weight:
        count = count / op.cast(op.Squeeze(op.dim(x, 0)), scale.dtype)
    kept = op.detached(scale)
    return kept + (scale - kept) * op.detached(1.0 / (op.Sqrt(count * float(limits[1])) * kept * kept))


def _undoes(node: ir.Node, before: ir.Node) -> bool:
    pairs = zip([*node.inputs, None][1:3], [*before.inputs, None][1:3], strict=True)
    return (
        before.outputs[0].dtype in INTEGER_RANGES
        and _blocks(node) == _blocks(before)
        and all(_are_equal(a, b) for a, b in pairs)
    )


def _blocks(node: ir.Node) -> dict[str, int]:
    given = attributes(node)
    return {"axis": int(given.get("axis", 1)), "block": int(given.get("block_size", 0))}


def _are_equal(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether ``a`` and ``b`` are one value, or equal constants. Equal parameters may diverge in training."""
    if a is b or a is None or b is None:
        return a is b
    x, y = constant_of(a), constant_of(b)
    changes = (v for v in (a, b) if v.dtype is None or v.dtype.is_floating_point())
    fixed = all(map(is_marked_constant, changes))
    return fixed and x is not None and y is not None and np.array_equal(x, y)


def _arithmetic(
    op: Builder,
    x: Var,
    scale: Var,
    zero: Var | None,
    limits: tuple[int, int] | None,
    straight: bool,
    axis: int,
    block: int,
) -> Var:
    step = _broadcastable(op, scale, x, axis, block)
    part = x / step
    whole = op.Round(part)
    if straight:  # the difference of a number and its rounding is representable, so this is exact
        whole = part + op.detached(whole - part)
    if limits is None:
        return whole * step
    if zero is None:
        return op.Clip(whole, *map(float, limits)) * step
    z = _broadcastable(op, op.cast(zero, x.dtype), x, axis, block)
    return (op.Clip(whole + z, *map(float, limits)) - z) * step


def _broadcastable(op: Builder, v: Var, x: Var, axis: int, block: int) -> Var:
    if v.rank == 0:
        return v
    axis %= x.rank
    if not block:
        return op.Reshape(v, [-1 if a == axis else 1 for a in range(x.rank)])
    repeats = [block if a == axis + 1 else 1 for a in range(x.rank + 1)]
    sizes = [op.dim(v, a) if a != axis else op.Mul(op.dim(v, a), block) for a in range(x.rank)]
    repeated = op.Reshape(op.Tile(op.Unsqueeze(v, [axis + 1]), repeats), op.Concat(*sizes, axis=0))
    return op.Slice(repeated, [0], op.dim(x, axis), [axis])
