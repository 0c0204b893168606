"""Pass: rename dimensions of outputs that share an input's dimension name but differ in size.

SegFormer's scores have a quarter of the image's height, and exporters call both ``height``. Names are trusted when
sizes are compared, so labels of the scores' size would be rejected. Substituting numbers for the inputs' names reveals
it. A Squeeze without axes removes the batch axis of a traced batch of one, and calls the two remaining scores
``batch``: that shows at batch size 1, and a single target would otherwise broadcast.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from gradgraph.errors import GradgraphError
from gradgraph.graph.nodes import input_at
from gradgraph.graph.shapes import as_dims
from gradgraph.passes.normal.sizes.fixed import fix_sizes
from gradgraph.passes.normal.sizes.infer import infer_shapes

_LEAST_RANK = 3  # of inputs whose sizes layers change: images, sound
_SEVERAL = 3  # the batch
_FIRST, _STEP = 192, 64  # numbers for names: layers that halve sizes divide them evenly


def rename_wrong_dims(model: ir.Model) -> bool:
    """Rename such dimensions ``<output>.<axis>``, or set their number; return True if there were any.

    It costs one inference if an output shares a dimension name that layers may change, and two if a Squeeze without
    axes changes the rank at batch size 1.
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
    changed = _rename(model, changing, sizes, first=1)
    if any(_squeezes_unit_axes(node) for node in model.graph):
        one = dict.fromkeys(symbols - changing, 1)
        changed |= _rename(model, set(one), one, others=dict.fromkeys(one, _SEVERAL))
    return changed


def _squeezes_unit_axes(node: ir.Node) -> bool:
    """Whether the rank of its output differs between one sample and two."""
    return node.op_type == "Squeeze" and input_at(node, 1) is None and node.outputs[0].shape is None


def _rename(
    model: ir.Model, names: set[str], sizes: dict[str, int], first: int = 0, others: dict[str, int] | None = None
) -> bool:
    """Rename sizes from axis ``first`` on that have one of ``names`` but another number.

    If the declared rank is wrong for ``others``, the number is the only possible one and is set. Return True if
    anything changed.
    """
    doubtful = [v for v in model.graph.outputs if v.shape is not None and names & set(as_dims(v.shape)[first:])]
    true = _with_numbers(model, sizes) if doubtful else {}
    several = _with_numbers(model, others) if others and true else {}
    changed = False
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
                changed = True
    return changed


def _with_numbers(model: ir.Model, sizes: dict[str, int]) -> dict[str, tuple[int | str | None, ...]]:
    """The shapes of outputs for these sizes of the inputs; empty if the model does not accept them."""
    copy = model.clone()
    for value in (*copy.graph.outputs, *(v for node in copy.graph for v in node.outputs)):
        value.shape = None
    try:
        fix_sizes(copy, sizes)
        infer_shapes(copy)
    except GradgraphError:
        return {}
    return {v.name or "": as_dims(v.shape) for v in copy.graph.outputs if v.shape is not None}
