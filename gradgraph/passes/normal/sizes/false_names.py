"""Pass: sizes of outputs that a file gives the name of an input's, though they are others, get their own.

SegFormer's scores are a quarter as high as its pictures, and exporters call both ``height``. Names are believed
wherever sizes are compared, so labels of the scores' size would be refused. What is true shows once the inputs have
numbers. A Squeeze without axes takes away the axis of the sample that an exporter traced, and calls the two scores
that are left ``batch``: that shows at one sample, and a target of one number would else stand for both.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from gradgraph.errors import GradgraphError
from gradgraph.graph.nodes import input_at
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal.sizes.fixed import fix_sizes
from gradgraph.passes.normal.sizes.infer import infer_shapes

_LEAST_RANK = 3  # of inputs whose sizes layers change: pictures, sound
_SEVERAL = 3  # samples
_FIRST, _STEP = 192, 64  # numbers for names: layers that halve sizes do so evenly


def forget_false_names(model: ir.Model) -> bool:
    """Call sizes of outputs that have the name of another ``<output>.<axis>``, or by their number; True if any had.

    It costs one inference, where an output has the name of a size that layers may change, and two where a Squeeze
    without axes gives another rank for one sample.
    """
    symbols = {d for v in model.graph.inputs if v.shape is not None for d in as_dims(v.shape) if isinstance(d, str)}
    changing = {
        d
        for v in model.graph.inputs
        if v.shape is not None and len(v.shape) >= _LEAST_RANK and v.dtype is not None and v.dtype.is_floating_point()
        for d in as_dims(v.shape)[1:]
        if isinstance(d, str)
    }
    sizes = dict(zip(sorted(symbols), itertools.count(_FIRST, _STEP), strict=False))
    told = _told(model, changing, sizes, first=1)
    if any(_squeezes_what_is_one(node) for node in model.graph):
        one = dict.fromkeys(symbols - changing, 1)
        told |= _told(model, set(one), one, others=dict.fromkeys(one, _SEVERAL))
    return told


def _squeezes_what_is_one(node: ir.Node) -> bool:
    """Is the rank of what it gives another for one sample than for two?"""
    return node.op_type == "Squeeze" and input_at(node, 1) is None and node.outputs[0].shape is None


def _told(
    model: ir.Model, names: set[str], sizes: dict[str, int], first: int = 0, others: dict[str, int] | None = None
) -> bool:
    """Give sizes from axis ``first`` on that have one of ``names``, but another number, a name of their own.

    Where the declared rank is false for ``others``, the number is the only one, and is given instead. True if any was.
    """
    doubtful = [v for v in model.graph.outputs if v.shape is not None and names & set(as_dims(v.shape)[first:])]
    true = _with_numbers(model, sizes) if doubtful else {}
    several = _with_numbers(model, others) if others and true else {}
    told = False
    for value in doubtful:
        found = true.get(value.name or "")
        assert value.shape is not None
        if found is None or len(found) != len(value.shape):
            continue
        is_only = others is not None and len(several.get(value.name or "", ())) != len(found)
        for axis, (said, size) in enumerate(zip(as_dims(value.shape), found, strict=True)):
            if said in names and isinstance(size, int) and size != sizes[str(said)]:
                own = size if is_only else f"{value.name}.{axis}"
                value.shape = ir.Shape([*value.shape[:axis], own, *value.shape[axis + 1 :]])
                told = True
    return told


def _with_numbers(model: ir.Model, sizes: dict[str, int]) -> dict[str, tuple[int | str | None, ...]]:
    """The shapes of outputs for these sizes of the inputs; empty if the model cannot have them."""
    copy = model.clone()
    for value in (*copy.graph.outputs, *(v for node in copy.graph for v in node.outputs)):
        value.shape = None
    try:
        fix_sizes(copy, sizes)
        infer_shapes(copy)
    except GradgraphError:
        return {}
    return {v.name or "": as_dims(v.shape) for v in copy.graph.outputs if v.shape is not None}
