"""Pass: sizes of outputs that a file gives the name of an input's, though they are others, get their own.

SegFormer's scores are a quarter as high as its pictures, and exporters call both ``height``. Names are believed
wherever sizes are compared, so labels of the scores' size would be refused. What is true shows once the inputs have
numbers.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from gradgraph.errors import GradgraphError
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal.sizes.fixed import fix_sizes
from gradgraph.passes.normal.sizes.infer import infer_shapes

_LEAST_RANK = 3  # of inputs whose sizes layers change: pictures, sound
_FIRST, _STEP = 192, 64  # numbers for names: layers that halve sizes do so evenly


def forget_false_names(model: ir.Model) -> bool:
    """Call sizes of outputs that have the name of another size ``<output>.<axis>``; True if there was one.

    It costs one inference, where an output has the name of a size that layers may change.
    """
    symbols = {d for v in model.graph.inputs if v.shape is not None for d in as_dims(v.shape) if isinstance(d, str)}
    changing = {
        d
        for v in model.graph.inputs
        if v.shape is not None and len(v.shape) >= _LEAST_RANK and v.dtype is not None and v.dtype.is_floating_point()
        for d in as_dims(v.shape)[1:]
        if isinstance(d, str)
    }
    doubtful = [v for v in model.graph.outputs if v.shape is not None and changing & set(as_dims(v.shape)[1:])]
    if not doubtful:
        return False
    sizes = dict(zip(sorted(symbols), itertools.count(_FIRST, _STEP), strict=False))
    true = _with_numbers(model, sizes)
    told = False
    for value in doubtful:
        found = true.get(value.name or "")
        assert value.shape is not None
        if found is None or len(found) != len(value.shape):
            continue
        for axis, (said, size) in enumerate(zip(as_dims(value.shape), found, strict=True)):
            if said in changing and isinstance(size, int) and size != sizes[str(said)]:
                value.shape = ir.Shape([*value.shape[:axis], f"{value.name}.{axis}", *value.shape[axis + 1 :]])
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
